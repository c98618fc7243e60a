"""Write a head, or store its splits and merge their states, for ``hopper_decode``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tiles.hopper.names import barrier
from ...tiles.triton.online_softmax import finite
from .triton_work import find_split, slot_of, store_split, store_split_info, write_rows

_BY_LANE = gl.constexpr("""{
    .reg .b32 lane;
    mov.u32 lane, %laneid; mad.lo.s32 $0, lane, $2, $1;
}""")


@gluon.jit
def _per_lane(row, zero):
    """Return ``row`` in a way that ptxas cannot prove uniform over the lanes.

    Otherwise it loads by uniform registers, one element after another, and waits for each.
    """
    return gl.inline_asm_elementwise(
        _BY_LANE, "=r,r,r", [row, zero + 0 * row], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _load_splits(
    split_accs, split_sums, first, start, members, stride, seq_head, first_cta, max_splits,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, COUNT: gl.constexpr,
    LANES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Load the states of ``COUNT * LANES`` members from ``start`` on; empty ones past the last.

    The states of members ``start + LANES * i + lane`` are in rows ``lane * ROWS`` and following.
    """
    pairs: gl.constexpr = gl.SliceLayout(2, layout)
    place = gl.arange(0, LANES * ROWS, layout=gl.SliceLayout(0, pairs))
    member = LANES * gl.arange(0, COUNT, layout=gl.SliceLayout(1, pairs))
    member = start + member[:, None] + (place // ROWS)[None, :]
    row = place % ROWS
    column = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    is_member = member < members
    slots = slot_of(first + member * stride, seq_head, first_cta, max_splits, SPLITS_FIXED)
    sums = split_sums + slots * 2 * ROWS + _per_lane(row, members >> 30)[None, :]
    at = split_accs + (slots * ROWS * V + (row * V)[None, :])[:, :, None]
    at += gl.expand_dims(gl.expand_dims(column, 0), 1)
    # .cg: load from L2, where other CTAs' stores are; L1 may be stale.
    m = gl.load(sums, mask=is_member, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + ROWS, mask=is_member, other=0.0, cache_modifier=".cg")
    acc = gl.load(at, mask=is_member[:, :, None], other=0.0, cache_modifier=".cg")
    return m, l, acc


@gluon.jit
def _merge_splits(
    split_accs, split_sums, first, members, stride, seq_head, first_cta, max_splits,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, AT_ONCE: gl.constexpr,
    LANES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Merge ``members`` splits of a head: ``first`` and every ``stride``-th one after it.

    With few rows threads would be idle, so ``LANES`` groups of threads each merge every
    ``LANES``-th state, and the groups' states are merged at the end.
    """
    merged: gl.constexpr = gl.SliceLayout(0, layout)
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    m = gl.full([LANES * ROWS], float("-inf"), gl.float32, by_row)
    l = gl.full([LANES * ROWS], 0.0, gl.float32, by_row)
    acc = gl.full([LANES * ROWS, V], 0.0, gl.float32, merged)
    # Load one half while the other half is merged.
    HALF: gl.constexpr = max(1, AT_ONCE // 2)
    next_m, next_l, next_acc = _load_splits(
        split_accs, split_sums, first, 0, members, stride, seq_head, first_cta, max_splits,
        SPLITS_FIXED, ROWS, V, HALF, LANES, layout,
    )  # fmt: skip
    for start in range(0, members, HALF * LANES):
        split_m, split_l, split_acc = next_m, next_l, next_acc
        next_m, next_l, next_acc = _load_splits(
            split_accs, split_sums, first, start + HALF * LANES, members, stride, seq_head,
            first_cta, max_splits, SPLITS_FIXED, ROWS, V, HALF, LANES, layout,
        )  # fmt: skip
        new_m = gl.maximum(m, gl.max(split_m, 0))
        pivot = finite(new_m)
        decay = gl.exp2(m - pivot)
        weight = gl.exp2(split_m - pivot[None, :])
        l = l * decay + gl.sum(split_l * weight, 0)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, merged))
        acc = acc * decay[:, None] + gl.sum(split_acc * weight[:, :, None], 0)
        m = new_m
    m = gl.convert_layout(m, gl.SliceLayout(1, merged))
    l = gl.convert_layout(l, gl.SliceLayout(1, merged))
    if LANES > 1:
        lane_m = m.reshape([LANES, ROWS])
        m = gl.max(lane_m, 0)
        weight = gl.exp2(lane_m - finite(m)[None, :])
        l = gl.sum(l.reshape([LANES, ROWS]) * weight, 0)
        acc = acc.reshape([LANES, ROWS, V])
        weight = gl.convert_layout(weight, gl.SliceLayout(2, acc.type.layout))
        acc = gl.convert_layout(gl.sum(acc * weight[:, :, None], 0), merged)
        m = gl.convert_layout(m, gl.SliceLayout(1, merged))
        l = gl.convert_layout(l, gl.SliceLayout(1, merged))
    return m, l, acc


@gluon.jit
def _merge_if_last(
    out, lse, split_accs, split_sums, arrivals, split, num_splits, seq_head, first_cta,
    num_seqs, max_splits, sinks, factor, first_token, head, query_len, num_kv_heads,
    out_token, out_head, GROUP: gl.constexpr, V_SIZE: gl.constexpr, HAS_SINKS: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, AT_ONCE: gl.constexpr,
    LANES: gl.constexpr, MOST_MERGED: gl.constexpr, MERGE_GROUP: gl.constexpr,
):  # fmt: skip
    """Count a stored split; the last CTA of a head to arrive merges its splits and writes ``out``.

    More than ``MOST_MERGED`` splits are merged in two rounds: the last CTA of each group of
    neighbours merges the group into the slot of its first split, and the last group's CTA merges
    the groups. No CTA waits for another. ``arrivals`` holds a counter for each head, then one for
    each group.
    """
    V_LANES: gl.constexpr = min(32, V // 4)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 32 // V_LANES, V_LANES], [1, gl.num_warps(), 1], [2, 1, 0]
    )
    merged: gl.constexpr = gl.SliceLayout(0, layout)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, merged))
    column = gl.arange(0, V, layout=gl.SliceLayout(0, merged))
    per_group = gl.where(num_splits > MOST_MERGED, MERGE_GROUP, num_splits)
    first = split // per_group * per_group
    members = gl.minimum(per_group, num_splits - first)
    stride = 1
    while members > 0:
        barrier()  # all threads have stored before one of them counts
        is_top = members * stride >= num_splits
        slot = slot_of(first, seq_head, first_cta, max_splits, SPLITS_FIXED)
        counter = arrivals + gl.where(is_top, seq_head, num_seqs * num_kv_heads + slot)
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        is_last = arrived == members - 1
        if is_last:
            gl.store(counter, 0)
            m, l, acc = _merge_splits(
                split_accs, split_sums, first, members, stride, seq_head, first_cta, max_splits,
                SPLITS_FIXED, ROWS, V, AT_ONCE, LANES, layout,
            )  # fmt: skip
            if is_top:
                write_rows(
                    out, lse, m, l, acc, row, column, sinks, factor, first_token, head, query_len,
                    num_kv_heads, out_token, out_head, GROUP, V_SIZE, HAS_SINKS,
                )  # fmt: skip
            else:
                barrier()  # all threads have loaded the state that is overwritten
                gl.store(split_sums + slot * 2 * ROWS + row, m)
                gl.store(split_sums + slot * 2 * ROWS + ROWS + row, l)
                place = split_accs + slot * ROWS * V + (row * V)[:, None] + column[None, :]
                gl.store(place, acc)
        members = gl.where(is_last & (is_top == 0), (num_splits + per_group - 1) // per_group, 0)
        stride = per_group
        first = 0 * first


@gluon.jit
def finish_head(
    out, lse, split_accs, split_sums, split_info, arrivals, m, l, acc, row, column, sinks, factor,
    seq_head, head, head_start, per_head, first, count, program, programs, total, num_seqs,
    max_splits, first_token, query_len, num_kv_heads, out_token, out_head,
    GROUP: gl.constexpr, V_SIZE: gl.constexpr, HAS_SINKS: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr, LANES: gl.constexpr,
    MOST_MERGED: gl.constexpr, MERGE_GROUP: gl.constexpr, MERGE_ROWS: gl.constexpr,
):  # fmt: skip
    """Write a head with all of its keys; otherwise store the split, which is merged later.

    The last CTA to arrive merges the splits, or ``merge_kernel`` if ``MERGE_ROWS``.
    """
    V: gl.constexpr = acc.shape[1]
    if count == per_head:
        write_rows(
            out, lse, m, l, acc, row, column, sinks, factor, first_token, head, query_len,
            num_kv_heads, out_token, out_head, GROUP, V_SIZE, HAS_SINKS,
        )  # fmt: skip
        if MERGE_ROWS > 0:
            store_split_info(split_info, seq_head, 0, 1)
    else:
        split, num_splits, first_cta = find_split(
            head_start, per_head, first, program, programs, total, SPLITS_FIXED
        )
        slot = slot_of(split, seq_head, first_cta, max_splits, SPLITS_FIXED)
        is_kept = row < (query_len * GROUP if MERGE_ROWS > 0 else ROWS)
        store_split(split_accs, split_sums, slot, row, column, m, l, acc, is_kept, ROWS)
        if MERGE_ROWS > 0:
            if first == 0:
                store_split_info(split_info, seq_head, first_cta, num_splits)
        else:
            _merge_if_last(
                out, lse, split_accs, split_sums, arrivals, split, num_splits, seq_head,
                first_cta, num_seqs, max_splits, sinks, factor, first_token, head, query_len,
                num_kv_heads, out_token, out_head, GROUP, V_SIZE, HAS_SINKS, SPLITS_FIXED, ROWS,
                V, AT_ONCE, LANES, MOST_MERGED, MERGE_GROUP,
            )  # fmt: skip
