"""The states of a head's shares: where they are kept, merged, and written as a result."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["LOG2_E", "finite", "merge_parts", "slot_of", "write_rows"]

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def finite(m):
    """A pivot for exponents: where no key was seen yet, -inf - -inf would be no number."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def slot_of(part, seq_head, first_share, max_splits, SPLITS_FIXED: gl.constexpr):
    """Where the state of a head's ``part``-th share is kept; see ``triton_decode``."""
    if SPLITS_FIXED:
        slot = seq_head * max_splits + part
    else:
        slot = gl.where(part == 0, 2 * first_share + 1, 2 * (first_share + part))
    return slot.to(gl.int64)


@gluon.jit
def write_rows(
    out, lse, m, l, acc, sinks, factor, first_token, head, query_len, num_kv_heads,
    out_token, out_head, GROUP: gl.constexpr, V_SIZE: gl.constexpr, HAS_SINKS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Add the sinks, divide, and write a KV head's rows of ``out`` and ``lse``."""
    row = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, layout))
    is_row = row < query_len * GROUP
    token = (first_token + row // GROUP).to(gl.int64)
    q_head = head * GROUP + row % GROUP
    if HAS_SINKS:
        sink = gl.load(sinks + q_head, mask=is_row, other=0.0) * LOG2_E
        new_m = gl.maximum(m, sink)
        pivot = finite(new_m)
        decay = gl.exp2(m - pivot)
        l = l * decay + gl.exp2(sink - pivot)
        acc = acc * decay[:, None]
        m = new_m
    seen = l != 0  # NaN counts as seen: it has to show
    divisor = gl.where(seen, l, 1.0)
    result = acc * (factor / divisor)[:, None]
    gl.store(
        out + (token * out_token + q_head * out_head)[:, None] + column[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (column < V_SIZE)[None, :],
    )
    row_lse = gl.where(seen, (m + gl.log2(divisor)) * LN_2, float("-inf"))
    gl.store(lse + token * num_kv_heads * GROUP + q_head, row_lse, mask=is_row)


_BY_LANE = gl.constexpr("""{
    .reg .b32 lane;
    mov.u32 lane, %laneid; mad.lo.s32 $0, lane, $2, $1;
}""")


@gluon.jit
def _keep_apart(row, zero):
    """The same rows, of which nobody knows that they are the same for all lanes of a warp.

    ptxas would take what is loaded there into uniform registers, one number after another, and
    wait for each.
    """
    return gl.inline_asm_elementwise(
        _BY_LANE, "=r,r,r", [row, zero + 0 * row], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _load_parts(
    parts, part_sums, start, num_parts, seq_head, first_share, max_splits,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The states of ``PARTS`` shares of a head, from ``start`` on; nothing past the last."""
    pairs: gl.constexpr = gl.SliceLayout(2, layout)
    part = start + gl.arange(0, PARTS, layout=gl.SliceLayout(1, pairs))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, pairs))
    column = gl.arange(0, V, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    is_part = (part < num_parts)[:, None] & (row >= 0)[None, :]
    slots = slot_of(part, seq_head, first_share, max_splits, SPLITS_FIXED)
    sums = part_sums + (slots * 2 * ROWS)[:, None] + _keep_apart(row, num_parts >> 30)[None, :]
    at = parts + ((slots * ROWS * V)[:, None] + (row * V)[None, :])[:, :, None]
    at += gl.expand_dims(gl.expand_dims(column, 0), 1)
    # .cg: from the second-level cache, where the others' stores are.
    m = gl.load(sums, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(sums + ROWS, mask=is_part, other=0.0, cache_modifier=".cg")
    acc = gl.load(at, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
    return m, l, acc


@gluon.jit
def merge_parts(
    parts, part_sums, num_parts, seq_head, first_share, max_splits,
    SPLITS_FIXED: gl.constexpr, ROWS: gl.constexpr, V: gl.constexpr, PARTS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The state of a head from those of all its shares, in the order of their keys."""
    merged: gl.constexpr = gl.SliceLayout(0, layout)
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    m = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    l = gl.full([ROWS], 0.0, gl.float32, by_row)
    acc = gl.full([ROWS, V], 0.0, gl.float32, merged)
    # Half of them are on their way while the other half is added up.
    HALF: gl.constexpr = max(1, PARTS // 2)
    next_m, next_l, next_acc = _load_parts(
        parts, part_sums, 0, num_parts, seq_head, first_share, max_splits, SPLITS_FIXED, ROWS, V,
        HALF, layout,
    )  # fmt: skip
    for start in range(0, num_parts, HALF):
        part_m, part_l, part_acc = next_m, next_l, next_acc
        next_m, next_l, next_acc = _load_parts(
            parts, part_sums, start + HALF, num_parts, seq_head, first_share, max_splits,
            SPLITS_FIXED, ROWS, V, HALF, layout,
        )  # fmt: skip
        new_m = gl.maximum(m, gl.max(part_m, 0))
        pivot = finite(new_m)
        decay = gl.exp2(m - pivot)
        weight = gl.exp2(part_m - pivot[None, :])
        l = l * decay + gl.sum(part_l * weight, 0)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, merged))
        acc = acc * decay[:, None] + gl.sum(part_acc * weight[:, :, None], 0)
        m = new_m
    m = gl.convert_layout(m, gl.SliceLayout(1, merged))
    return m, gl.convert_layout(l, gl.SliceLayout(1, merged)), acc
