"""The computing warps of ``hopper_decode``: attention over the tiles that arrive in the ring.

8-bit keys and values arrive as int16 pairs, because transposed reads of shared memory take units of
16 bits, and are converted to float16 in registers. Of a key's columns 4i to 4i + 3 the first pair
goes to ``k_lower``, the second to ``k_upper``; of a value's pair the first column goes to
``v_even``, the second to ``v_odd``. Each half has a product of its own::

    s = q_lower · k_lower + q_upper · k_upper        acc_even += p · v_even,  acc_odd += p · v_odd

A tile may hold the rows of several neighbouring KV heads (``HEADS``). All rows are multiplied with
each head's keys or values, and only the head's own rows of the result are kept.

With up to 16 rows (``mma``) warps split the keys of the first product and the columns of the
second, so they synchronise twice a tile: for the row maxima, and to exchange the weights. With up
to 64 rows (``TILE_M`` 64, ``wgmma``) each warp has 16 rows, and ``triton_decode.merge_kernel``
merges the states of splits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.hopper.packed import split_packed, widen_packed
from ...tiles.triton.online_softmax import LOG2_E, ROOM, SMALLEST, exp2_of, finite, tanh
from ...tiles.triton.visible_blocks import compact_position, logical_keys
from .hopper_merge import merge_splits
from .triton_work import (
    find_bounds,
    find_range,
    find_split,
    list_of,
    slot_of,
    store_split,
    store_split_info,
    write_rows,
)


@gluon.jit
def _fit_queries(lower, upper, layout: gl.constexpr):
    """Like ``tiles.triton.online_softmax.fit_queries``, for two halves of the columns."""
    unit = 1.0
    if lower.dtype == gl.bfloat16:
        lower, upper = lower.to(gl.float32), upper.to(gl.float32)
        peak = gl.max(gl.maximum(gl.abs(lower), gl.abs(upper)), 1)
        exponent = (peak.to(gl.int32, bitcast=True) >> 23) - 127
        exponent = gl.minimum(gl.maximum(exponent, -126), 126)
        inverse = exp2_of(-exponent)[:, None]
        lower, upper = lower * inverse, upper * inverse
        unit = gl.convert_layout(exp2_of(exponent), layout)[:, None]
    return lower.to(gl.float16), upper.to(gl.float16), unit


@gluon.jit
def _load_queries(
    q, first_token, head, query_len, q_token, q_head, GROUP: gl.constexpr, FIRST: gl.constexpr,
    PAIRED: gl.constexpr, WIDTH: gl.constexpr, TILE_M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Load a KV head's rows of ``q``; if PAIRED, columns FIRST and FIRST + 1 of every four."""
    LANES: gl.constexpr = min(32, D // 8)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    row = gl.arange(0, TILE_M, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    at = (first_token + row // GROUP).to(gl.int64) * q_token
    at += (head * GROUP + row % GROUP) * q_head
    place = FIRST + 4 * (column // 2) + column % 2 if PAIRED else column
    return gl.load(
        q + at[:, None] + place[None, :],
        mask=(row < query_len * GROUP)[:, None] & (column < WIDTH)[None, :],
        other=0.0,
    )


@gluon.jit
def _max_of_rows(s):
    """Like ``gl.max(s, 1)``, with a single exchange between the four warps."""
    ROWS: gl.constexpr = s.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    here: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [16, 4],
    )
    parts = s.reshape([ROWS, s.shape[1] // (8 * WARPS), WARPS, 8])
    parts = gl.max(gl.max(parts, 1), 2)
    highest = gl.max(gl.convert_layout(parts, here), 1)
    return gl.convert_layout(highest, gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def _exponent_of(scale_bits):
    """The exponent of the largest of some scales, of any sign, given as bits of float32."""
    return (gl.max(scale_bits & 0x7FFFFFFF, 0) >> 23) - 127


@gluon.jit
def _as_operand(x, memory, layout: gl.constexpr):
    """Convert the layout through shared memory."""
    memory.store(x)
    return memory.load(layout)


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
            m, l, acc = merge_splits(
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
def _find_common_bounds(
    blocks, listed, seq_len, query_len, window, CAUSAL: gl.constexpr, VISIBLE: gl.constexpr
):
    """The first key that every row sees, and the one after the last; compact if VISIBLE."""
    first = seq_len - window
    end = seq_len - query_len + 1 if CAUSAL else seq_len
    if VISIBLE:
        first = compact_position(blocks, first, listed[5], listed[1], listed[2])
        end = compact_position(blocks, end, listed[5], listed[1], listed[2])
    return first, end


@gluon.jit
def _place_queries(
    q, queries, first_token, head, query_len, q_token, q_head, by_row: gl.constexpr,
    left: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr, WIDTH: gl.constexpr,
    TILE_M: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Load a KV head's rows of ``q`` as an operand; of ``wgmma`` it lies in ``queries``.

    Returns:
        The rows, or their lower pairs; their upper pairs; the unit of both.
    """
    q_tile = _load_queries(
        q, first_token, head, query_len, q_token, q_head, GROUP, 0, PAIRED, WIDTH, TILE_M, D
    )
    unit = 1.0
    q_upper = q_tile
    if PAIRED:
        q_upper = _load_queries(
            q, first_token, head, query_len, q_token, q_head, GROUP, 2, PAIRED, WIDTH, TILE_M, D
        )
        q_tile, q_upper, unit = _fit_queries(q_tile, q_upper, by_row)
        q_upper = _as_operand(q_upper, queries, left)
    if TILE_M == 64:
        queries.store(q_tile)
        fence_async_shared()
        barrier()
    else:
        q_tile = _as_operand(q_tile, queries, left)
    return q_tile, q_upper, unit


@gluon.jit
def _multiply_keys(
    k_ring, ks_ring, stage, q_tile, q_upper, nothing, row_head, by_key: gl.constexpr,
    right: gl.constexpr, PACKED: gl.constexpr, SCALES: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Products of the queries and a tile's keys by ``mma``: each row's with its own head's."""
    s = nothing
    for other in gl.static_range(HEADS):
        k_tile = k_ring.index(stage * HEADS + other).permute((1, 0)).load(right)
        if PACKED != "none":
            # Two sums, since each product waits for the one before it.
            k_tile, k_upper = widen_packed(k_tile, PACKED)
            products = mma_v2(q_upper, k_upper, nothing)
            products += mma_v2(q_tile, k_tile, nothing)
        else:
            products = mma_v2(q_tile, k_tile, nothing)
        if SCALES == "token" and HEADS > 1:
            products *= ks_ring.index(stage * HEADS + other).load(by_key)[None, :]
        s = products if HEADS == 1 else gl.where(row_head == other, products, s)
    return s


@gluon.jit
def _find_value_scales(
    vs_ring, stage, first_in_tile, first_key, end_key, unit, head_of_row, nothing,
    by_key: gl.constexpr, in_each_warp: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Scales of a tile's values for the rows of joined heads.

    Returns:
        The scales ``[TILE_M, TILE_N]``, and of each row the exponent of its head's largest one.
    """
    TILE_N: gl.constexpr = nothing.shape[1]
    key = first_in_tile + gl.arange(0, TILE_N, layout=by_key)
    used = (key >= first_key) & (key < end_key)
    in_warp = first_in_tile + gl.arange(0, TILE_N, layout=in_each_warp)
    used_in_warp = (in_warp >= first_key) & (in_warp < end_key)
    scales, exponent = nothing, unit
    for other in gl.static_range(HEADS):
        of_head = vs_ring.index(stage * HEADS + other)
        own_scales = gl.where(used, of_head.load(by_key), 0.0)
        scales = gl.where(head_of_row[:, None] == other, own_scales[None, :], scales)
        bits = of_head.load(in_each_warp).to(gl.int32, bitcast=True)
        largest = _exponent_of(gl.where(used_in_warp, bits, 0))
        exponent = gl.where(head_of_row == other, largest, exponent)
    return scales, exponent


@gluon.jit
def _add_values(
    acc, acc_odd, p, v_tile, v_ring, stage, row_head, right: gl.constexpr, PACKED: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Add products of the weights and a tile's values by ``mma``: of each row, its own head's.

    ``v_tile`` has the values if the tile has one head.
    """
    for other in gl.static_range(HEADS):
        if HEADS > 1:
            v_tile = v_ring.index(stage * HEADS + other).load(right)
        if PACKED != "none":
            v_tile, v_odd = split_packed(v_tile, PACKED)
            more = mma_v2(p, v_odd, acc_odd)
            acc_odd = more if HEADS == 1 else gl.where(row_head == other, more, acc_odd)
        more = mma_v2(p, v_tile, acc)
        acc = more if HEADS == 1 else gl.where(row_head == other, more, acc)
    return acc, acc_odd


@gluon.jit
def _finish_head(
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


@gluon.jit
def attend_role(
    rings, bars, queries, weights, out, lse, split_accs, split_sums, split_info, arrivals, q,
    seq_lens, cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale,
    entry, before, work, end_work, whole, program, programs, total,
    num_seqs, num_kv_heads, max_splits, softmax_scale, soft_cap, window, listed,
    out_token, out_head, q_token, q_head, ks_head, vs_head,
    GROUP: gl.constexpr, WIDTH: gl.constexpr, V_SIZE: gl.constexpr, PACKED: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, SPLIT_SHIFT: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, TILE_M: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
    LANES: gl.constexpr, MOST_MERGED: gl.constexpr, MERGE_GROUP: gl.constexpr,
    MERGE_ROWS: gl.constexpr, VISIBLE: gl.constexpr, EARLY: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """The computing warps: attention over the range's tiles; write heads, or store splits."""
    k_ring, v_ring, ks_ring, vs_ring = rings
    full, empty = bars
    STAGES: gl.constexpr = k_ring.shape[0] // HEADS
    TILE_N: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    V: gl.constexpr = v_ring.shape[2]
    PAIRED: gl.constexpr = PACKED != "none"
    V_ALL: gl.constexpr = 2 * V if PAIRED else V
    DOT: gl.constexpr = gl.float16 if PAIRED else k_ring.dtype
    WARPS: gl.constexpr = gl.num_warps()
    GROUPED: gl.constexpr = TILE_M == 64  # whether products are wgmma
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    mma: gl.constexpr = product_layout(TILE_N) if GROUPED else small
    sums_mma: gl.constexpr = product_layout(V) if GROUPED else small
    left: gl.constexpr = gl.DotOperandLayout(0, sums_mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, small, 2)
    by_key: gl.constexpr = gl.SliceLayout(0, mma)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    sums_by_row: gl.constexpr = gl.SliceLayout(1, sums_mma)
    in_each_warp: gl.constexpr = gl.BlockedLayout([TILE_N // 32], [32], [WARPS], [0])

    row = gl.arange(0, TILE_M, layout=by_row)
    sums_row = gl.arange(0, TILE_M, layout=sums_by_row)
    keys = gl.arange(0, TILE_N, layout=by_key)
    v_column = gl.arange(0, V_ALL, layout=gl.SliceLayout(0, sums_mma))
    nothing = gl.full([TILE_M, TILE_N], 0.0, gl.float32, mma)
    head_of_row = row % GROUP // (GROUP // HEADS)
    row_head = head_of_row[:, None]
    step = 0
    while work < end_work:
        (
            seq, head, seq_len, first_token, query_len, head_start, per_head, first, count, low,
            high, first_key, end_key,
        ) = find_range(
            seq_lens, cu_seqlens_q, entry, before, work, end_work, num_kv_heads, window, listed,
            whole, ROWS // GROUP, TILE_N, SPLIT_SHIFT, SPLITS_FIXED, VISIBLE,
        )  # fmt: skip
        blocks = list_of(listed, seq, head) if VISIBLE else seq_lens
        position, row_first, row_end = find_bounds(
            row, blocks, listed, seq_len, query_len, window, GROUP, CAUSAL, VISIBLE
        )
        common_first, common_end = _find_common_bounds(
            blocks, listed, seq_len, query_len, window, CAUSAL, VISIBLE
        )
        if EARLY:
            gdc_wait()  # for the queries; later waits return at once
        if HAS_ALIBI:
            slopes = LOG2_E * gl.load(
                alibi_slopes + head * GROUP + row % GROUP,
                mask=row < query_len * GROUP, other=0.0,
            )  # fmt: skip
        q_tile, q_upper, scale = _place_queries(
            q, queries, first_token, head, query_len, q_token, q_head, by_row, left, GROUP, PAIRED,
            WIDTH, TILE_M, D,
        )  # fmt: skip
        scale *= softmax_scale / soft_cap if HAS_CAP else softmax_scale * LOG2_E
        factor = 1.0
        if SCALES == "head" and HEADS == 1:
            scale *= gl.load(k_scale + head * ks_head)
            factor = gl.load(v_scale + head * vs_head)
        elif SCALES == "head":
            scale *= gl.load(k_scale + (head * HEADS + head_of_row) * ks_head)[:, None]
        m = gl.full([TILE_M], float("-inf"), gl.float32, by_row)
        sums = gl.full([TILE_M], 0.0, gl.float32, by_row) if GROUPED else nothing
        acc = gl.full([TILE_M, V], 0.0, gl.float32, sums_mma)
        acc_odd = gl.full([TILE_M, V], 0.0, gl.float32, mma) if PAIRED else 0.0
        unit = SMALLEST if HEADS == 1 else gl.full([TILE_M], SMALLEST, gl.int32, by_row)
        for tile in range(low, high):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            if GROUPED:
                fence_async_shared()  # cp.async writes by the generic proxy
                k_tile = k_ring.index(stage).permute((1, 0))
                s = warpgroup_mma(queries, k_tile, nothing, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,)) * scale
            else:
                s = _multiply_keys(
                    k_ring, ks_ring, stage, q_tile, q_upper, nothing, row_head, by_key, right,
                    PACKED, SCALES, HEADS,
                )  # fmt: skip
                s *= scale
                v_tile = v_ring.index(stage).load(right) if HEADS == 1 else nothing
                if SCALES == "token" and HEADS == 1:
                    s *= ks_ring.index(stage).load(by_key)[None, :]
                    v_scales = vs_ring.index(stage).load(by_key)
                    scale_bits = vs_ring.index(stage).load(in_each_warp).to(gl.int32, bitcast=True)
                if HEADS == 1:
                    barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
            key = tile * TILE_N + keys
            if HAS_CAP:
                s = tanh(s) * (soft_cap * LOG2_E)
            if HAS_ALIBI:
                place = key
                if VISIBLE:
                    place = logical_keys(blocks, key, first_key, end_key, listed[5])
                s += slopes[:, None] * (place[None, :] - position[:, None]).to(gl.float32)
            if tile * TILE_N < common_first or (tile + 1) * TILE_N > common_end:
                seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_end[:, None])
                s = gl.where(seen, s, float("-inf"))
                if SCALES == "token" and HEADS == 1:  # slots without a token have any scales
                    v_scales = gl.where((key >= first_key) & (key < end_key), v_scales, 0.0)
                    scaled = tile * TILE_N + gl.arange(0, TILE_N, layout=in_each_warp)
                    is_scaled = (scaled >= first_key) & (scaled < end_key)
                    scale_bits = gl.where(is_scaled, scale_bits, 0)
            new_m = gl.maximum(m, gl.max(s, 1) if GROUPED else _max_of_rows(s))
            pivot = finite(new_m)
            p = gl.exp2(s - pivot[:, None])
            decay = gl.exp2(m - pivot)
            sums = sums * decay + gl.sum(p, 1) if GROUPED else sums * decay[:, None] + p
            m = new_m
            if SCALES == "token" and HEADS > 1:
                value_scales, tile_unit = _find_value_scales(
                    vs_ring, stage, tile * TILE_N, first_key, end_key, unit, head_of_row, nothing,
                    by_key, in_each_warp, HEADS,
                )  # fmt: skip
                new_unit = gl.maximum(unit, tile_unit)
                p *= value_scales * exp2_of(ROOM - new_unit)[:, None]
            elif SCALES == "token":
                new_unit = gl.maximum(unit, _exponent_of(scale_bits))
                p *= (v_scales * exp2_of(ROOM - new_unit))[None, :]
            if SCALES == "token":  # see tiles.triton.online_softmax.scale_weights
                decay *= exp2_of(gl.maximum(unit - new_unit, -127))
                unit = new_unit
            if GROUPED:
                p = gl.convert_layout(p.to(DOT), left, assert_trivial=True)
                acc *= gl.convert_layout(decay, sums_by_row, assert_trivial=True)[:, None]
                acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                barrier()
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                p = _as_operand(p.to(DOT), weights, left)
                acc *= decay[:, None]
                if PAIRED:
                    acc_odd *= decay[:, None]
                acc, acc_odd = _add_values(
                    acc, acc_odd, p, v_tile, v_ring, stage, row_head, right, PACKED, HEADS
                )
                if HEADS > 1:
                    barrier()
                    mbarrier.arrive(empty.index(stage), count=1)
            step += 1
        l = sums if GROUPED else gl.sum(sums, 1)
        if PAIRED:
            acc = gl.convert_layout(gl.join(acc, acc_odd).reshape([TILE_M, V_ALL]), mma)
        if SCALES == "token" and HEADS == 1:
            acc *= exp2_of(unit - ROOM)
        elif SCALES == "token":
            of_row = exp2_of(unit - ROOM)
            acc *= gl.convert_layout(of_row, sums_by_row, assert_trivial=True)[:, None]
        elif SCALES == "head" and HEADS > 1:
            acc *= gl.load(v_scale + (head * HEADS + head_of_row) * vs_head)[:, None]

        m = gl.convert_layout(m, sums_by_row, assert_trivial=True)
        l = gl.convert_layout(l, sums_by_row, assert_trivial=True)
        _finish_head(
            out, lse, split_accs, split_sums, split_info, arrivals, m, l, acc, sums_row, v_column,
            sinks, factor, seq * num_kv_heads + head, head, head_start, per_head, first, count,
            program, programs, total, num_seqs, max_splits, first_token, query_len, num_kv_heads,
            out_token, out_head, GROUP, V_SIZE, HAS_SINKS, SPLITS_FIXED, ROWS, AT_ONCE, LANES,
            MOST_MERGED, MERGE_GROUP, MERGE_ROWS,
        )  # fmt: skip
        work += count
        if work == before + per_head * (1 if VISIBLE else num_kv_heads):
            before = work
            entry += 1
