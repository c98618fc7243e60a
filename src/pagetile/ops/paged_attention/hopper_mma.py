"""Attention of up to 16 rows over the tiles of a CTA's range, by ``mma``, for ``hopper_decode``.

8-bit keys and values arrive as int16 pairs, because transposed reads of shared memory take units of
16 bits, and are converted to float16 in registers. Of a key's columns 4i to 4i + 3 the first pair
goes to ``k_lower``, the second to ``k_upper``; of a value's pair the first column goes to
``v_even``, the second to ``v_odd``. Each half has a product of its own::

    s = q_lower · k_lower + q_upper · k_upper        acc_even += p · v_even,  acc_odd += p · v_odd

A tile may hold the rows of several neighbouring KV heads (``HEADS``). All rows are multiplied with
each head's keys or values, and only the head's own rows of the result are kept.

Warps split the keys of the first product and the columns of the second, so they synchronise twice a
tile: for the row maxima, and to exchange the weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...tiles.hopper.names import barrier
from ...tiles.hopper.packed import split_packed, widen_packed
from ...tiles.triton.online_softmax import ROOM, SMALLEST, apply_score_mods, exp2_of, finite


@gluon.jit
def as_operand(x, memory, layout: gl.constexpr):
    """Convert the layout through shared memory."""
    memory.store(x)
    return memory.load(layout)


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
def attend_by_mma(
    rings, bars, weights, q_tile, q_upper, step, low, high, keys, nothing, head_of_row, bounds,
    slopes, scale, soft_cap, blocks, listed, PACKED: gl.constexpr, HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr, SCALES: gl.constexpr, VISIBLE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Attention of up to 16 rows over key tiles ``low`` to ``high``, with scales of tokens.

    ``bounds`` are those of ``attend_role``. Returns ``(m, l, acc, step)``.
    """
    k_ring, v_ring, ks_ring, vs_ring = rings
    full, empty = bars
    position, row_first, row_end, first_key, end_key, common_first, common_end = bounds
    STAGES: gl.constexpr = k_ring.shape[0] // HEADS
    TILE_M: gl.constexpr = nothing.shape[0]
    TILE_N: gl.constexpr = nothing.shape[1]
    V: gl.constexpr = v_ring.shape[2]
    PAIRED: gl.constexpr = PACKED != "none"
    DOT: gl.constexpr = gl.float16 if PAIRED else k_ring.dtype
    mma: gl.constexpr = nothing.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    by_key: gl.constexpr = gl.SliceLayout(0, mma)
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    in_each_warp: gl.constexpr = gl.BlockedLayout([TILE_N // 32], [32], [gl.num_warps()], [0])
    row_head = head_of_row[:, None]
    m = gl.full([TILE_M], float("-inf"), gl.float32, by_row)
    sums = nothing  # of each thread's keys
    acc = gl.full([TILE_M, V], 0.0, gl.float32, mma)
    acc_odd = gl.full([TILE_M, V], 0.0, gl.float32, mma) if PAIRED else 0.0
    unit = SMALLEST if HEADS == 1 else gl.full([TILE_M], SMALLEST, gl.int32, by_row)
    for tile in range(low, high):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
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
        s = apply_score_mods(
            s, key, position, slopes, soft_cap, blocks, first_key, end_key, listed[5],
            HAS_CAP, HAS_ALIBI, VISIBLE,
        )  # fmt: skip
        if tile * TILE_N < common_first or (tile + 1) * TILE_N > common_end:
            seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_end[:, None])
            s = gl.where(seen, s, float("-inf"))
            if SCALES == "token" and HEADS == 1:  # slots without a token have any scales
                v_scales = gl.where((key >= first_key) & (key < end_key), v_scales, 0.0)
                scaled = tile * TILE_N + gl.arange(0, TILE_N, layout=in_each_warp)
                is_scaled = (scaled >= first_key) & (scaled < end_key)
                scale_bits = gl.where(is_scaled, scale_bits, 0)
        new_m = gl.maximum(m, _max_of_rows(s))
        pivot = finite(new_m)
        p = gl.exp2(s - pivot[:, None])
        decay = gl.exp2(m - pivot)
        sums = sums * decay[:, None] + p
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
        p = as_operand(p.to(DOT), weights, left)
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
    l = gl.sum(sums, 1)
    if PAIRED:
        acc = gl.convert_layout(gl.join(acc, acc_odd).reshape([TILE_M, 2 * V]), mma)
    if SCALES == "token":
        acc *= exp2_of(unit - ROOM) if HEADS == 1 else exp2_of(unit - ROOM)[:, None]
    return m, l, acc, step
