"""Merge the states of a head's splits from their scratch memory; see ``triton_decode``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tiles.triton.online_softmax import finite
from .triton_work import slot_of

__all__ = ["merge_splits"]

_BY_LANE = gl.constexpr("""{
    .reg .b32 lane;
    mov.u32 lane, %laneid; mad.lo.s32 $0, lane, $2, $1;
}""")


@gluon.jit
def _per_lane(row, zero):
    """The same rows, computed so that ptxas does not see that they are the same in all lanes.

    Otherwise it loads them into uniform registers, one number after another, and waits for each.
    """
    return gl.inline_asm_elementwise(
        _BY_LANE, "=r,r,r", [row, zero + 0 * row], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _load_splits(
    split_accs, split_sums, start, num_splits, seq_head, first_cta, max_splits,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, AT_ONCE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The states of ``AT_ONCE`` splits of a head, from ``start`` on; empty ones past the last."""
    pairs: gl.constexpr = gl.SliceLayout(2, layout)
    split = start + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, pairs))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, pairs))
    column = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    is_split = (split < num_splits)[:, None] & (row >= 0)[None, :]
    slots = slot_of(split, seq_head, first_cta, max_splits, SPLITS_FIXED)
    sums = split_sums + (slots * 2 * ROWS)[:, None] + _per_lane(row, num_splits >> 30)[None, :]
    at = split_accs + ((slots * ROWS * V)[:, None] + (row * V)[None, :])[:, :, None]
    at += gl.expand_dims(gl.expand_dims(column, 0), 1)
    # .cg: from the second-level cache, where the stores of other CTAs are.
    m = gl.load(sums, mask=is_split, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + ROWS, mask=is_split, other=0.0, cache_modifier=".cg")
    acc = gl.load(at, mask=is_split[:, :, None], other=0.0, cache_modifier=".cg")
    return m, l, acc


@gluon.jit
def merge_splits(
    split_accs, split_sums, num_splits, seq_head, first_cta, max_splits,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, AT_ONCE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The state of a head from those of all its splits, in the order of their keys."""
    merged: gl.constexpr = gl.SliceLayout(0, layout)
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    m = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    l = gl.full([ROWS], 0.0, gl.float32, by_row)
    acc = gl.full([ROWS, V], 0.0, gl.float32, merged)
    # One half is being loaded while the other half is added up.
    HALF: gl.constexpr = max(1, AT_ONCE // 2)
    next_m, next_l, next_acc = _load_splits(
        split_accs, split_sums, 0, num_splits, seq_head, first_cta, max_splits, SPLITS_FIXED, ROWS,
        V, HALF, layout,
    )  # fmt: skip
    for start in range(0, num_splits, HALF):
        split_m, split_l, split_acc = next_m, next_l, next_acc
        next_m, next_l, next_acc = _load_splits(
            split_accs, split_sums, start + HALF, num_splits, seq_head, first_cta, max_splits,
            SPLITS_FIXED, ROWS, V, HALF, layout,
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
    return m, gl.convert_layout(l, gl.SliceLayout(1, merged)), acc
