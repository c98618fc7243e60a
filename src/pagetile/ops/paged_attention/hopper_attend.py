"""The computing warps of ``hopper_decode``: attention over the tiles that arrive in the ring.

Up to 16 rows of a head, or of several joined heads, are multiplied by ``mma`` (``hopper_mma``), up
to 64 rows of a head (``TILE_M`` 64) by ``wgmma``: then each warp has 16 rows, and
``triton_decode.merge_kernel`` merges the states of splits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.triton.online_softmax import LOG2_E, apply_score_mods, exp2_of, update_softmax
from ...tiles.triton.visible_blocks import compact_position
from .hopper_merge import finish_head
from .hopper_mma import as_operand, attend_by_mma
from .triton_work import find_bounds, find_range, list_of


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
        q_upper = as_operand(q_upper, queries, left)
    if TILE_M == 64:
        queries.store(q_tile)
        fence_async_shared()
        barrier()
    else:
        q_tile = as_operand(q_tile, queries, left)
    return q_tile, q_upper, unit


@gluon.jit
def _attend_by_wgmma(
    rings, bars, queries, step, low, high, keys, nothing, bounds, slopes, scale, soft_cap, blocks,
    listed, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr, VISIBLE: gl.constexpr,
):  # fmt: skip
    """Attention of up to 64 rows of 16-bit types over key tiles ``low`` to ``high``.

    ``bounds`` are those of ``attend_role``. Returns ``(m, l, acc, step)``.
    """
    k_ring, v_ring, _, _ = rings
    full, empty = bars
    position, row_first, row_end, first_key, end_key, common_first, common_end = bounds
    STAGES: gl.constexpr = k_ring.shape[0]
    TILE_M: gl.constexpr = nothing.shape[0]
    TILE_N: gl.constexpr = nothing.shape[1]
    V: gl.constexpr = v_ring.shape[2]
    sums_mma: gl.constexpr = product_layout(V)
    left: gl.constexpr = gl.DotOperandLayout(0, sums_mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, nothing.type.layout)
    m = gl.full([TILE_M], float("-inf"), gl.float32, by_row)
    l = gl.full([TILE_M], 0.0, gl.float32, by_row)
    acc = gl.full([TILE_M, V], 0.0, gl.float32, sums_mma)
    for tile in range(low, high):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        fence_async_shared()  # cp.async writes by the generic proxy
        k_tile = k_ring.index(stage).permute((1, 0))
        s = warpgroup_mma(queries, k_tile, nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,)) * scale
        key = tile * TILE_N + keys
        s = apply_score_mods(
            s, key, position, slopes, soft_cap, blocks, first_key, end_key, listed[5],
            HAS_CAP, HAS_ALIBI, VISIBLE,
        )  # fmt: skip
        if tile * TILE_N < common_first or (tile + 1) * TILE_N > common_end:
            seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_end[:, None])
            s = gl.where(seen, s, float("-inf"))
        p, decay, m, l = update_softmax(s, m, l)
        p = gl.convert_layout(p.to(k_ring.dtype), left, assert_trivial=True)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, sums_mma), assert_trivial=True)
        acc *= decay[:, None]
        acc = warpgroup_mma(p, v_ring.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return m, l, acc, step


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
    k_ring, v_ring, _, _ = rings
    TILE_N: gl.constexpr = k_ring.shape[1]
    PAIRED: gl.constexpr = PACKED != "none"
    V: gl.constexpr = (2 if PAIRED else 1) * v_ring.shape[2]
    WGMMA: gl.constexpr = TILE_M == 64
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, gl.num_warps()], [16, 8])
    mma: gl.constexpr = product_layout(TILE_N) if WGMMA else small
    sums_mma: gl.constexpr = product_layout(V) if WGMMA else small
    left: gl.constexpr = gl.DotOperandLayout(0, sums_mma, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    sums_by_row: gl.constexpr = gl.SliceLayout(1, sums_mma)

    row = gl.arange(0, TILE_M, layout=by_row)
    sums_row = gl.arange(0, TILE_M, layout=sums_by_row)
    keys = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, mma))
    v_column = gl.arange(0, V, layout=gl.SliceLayout(0, sums_mma))
    nothing = gl.full([TILE_M, TILE_N], 0.0, gl.float32, mma)
    head_of_row = row % GROUP // (GROUP // HEADS)
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
        slopes = 0.0
        if HAS_ALIBI:
            slopes = LOG2_E * gl.load(
                alibi_slopes + head * GROUP + row % GROUP,
                mask=row < query_len * GROUP, other=0.0,
            )  # fmt: skip
        q_tile, q_upper, scale = _place_queries(
            q, queries, first_token, head, query_len, q_token, q_head, by_row, left, GROUP, PAIRED,
            WIDTH, TILE_M, k_ring.shape[2],
        )  # fmt: skip
        scale *= softmax_scale / soft_cap if HAS_CAP else softmax_scale * LOG2_E
        factor = 1.0
        if SCALES == "head" and HEADS == 1:
            scale *= gl.load(k_scale + head * ks_head)
            factor = gl.load(v_scale + head * vs_head)
        elif SCALES == "head":
            scale *= gl.load(k_scale + (head * HEADS + head_of_row) * ks_head)[:, None]
        bounds = (position, row_first, row_end, first_key, end_key, common_first, common_end)
        if WGMMA:
            m, l, acc, step = _attend_by_wgmma(
                rings, bars, queries, step, low, high, keys, nothing, bounds, slopes, scale,
                soft_cap, blocks, listed, HAS_CAP, HAS_ALIBI, VISIBLE,
            )  # fmt: skip
        else:
            m, l, acc, step = attend_by_mma(
                rings, bars, weights, q_tile, q_upper, step, low, high, keys, nothing, head_of_row,
                bounds, slopes, scale, soft_cap, blocks, listed, PACKED, HAS_CAP, HAS_ALIBI, SCALES,
                VISIBLE, HEADS,
            )  # fmt: skip
        if SCALES == "head" and HEADS > 1:
            acc *= gl.load(v_scale + (head * HEADS + head_of_row) * vs_head)[:, None]

        m = gl.convert_layout(m, sums_by_row, assert_trivial=True)
        l = gl.convert_layout(l, sums_by_row, assert_trivial=True)
        finish_head(
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
