"""Attention backward on Hopper: one pass over the queries for each tile of keys.

::

    Pᵀ = exp(k qᵀ - lse)     dPᵀ = v dOᵀ     dSᵀ = Pᵀ ∘ (dPᵀ - delta)

    dV += Pᵀ dO              dK += dSᵀ q     dQ += dS k, in memory

              queries  0   M   2M   3M
    keys ┌─────┐      ┌───┬───┬───┬───┐      a program owns 128 keys and values of a KV head,
         │dK dV│  ←   │ · │ / │ ■ │ ■ │      each of its two warpgroups 64; one warp loads queries
         └─────┘      └───┴─↓─┴─↓─┴─↓─┘
                            dQ  dQ  dQ

Each program adds its keys' share of ``dQ`` to memory by float32 atomics, so **the last bits of dQ
differ from run to run**. For that both warpgroups store ``dS`` of a tile in shared memory, and each
computes 64 × 64 elements of the tile's ``dQ`` from both.

``dQ`` of a tile is computed one step after its ``dS``, so the warpgroups do not wait for each other
within a step: one may multiply while the other computes exponentials.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.record import record
from ...tiles.hopper.ring import PipelineBarriers, make_barriers
from ...tiles.hopper.roles import specialise
from .hopper_walk import (
    ROWS,
    SWIZZLED,
    GradientsBatch,
    HopperGradientsConfig,
    advance,
    as_tile,
    find_walk,
    load_role,
    make_memory,
    numbers,
    recompute_weights,
    start_scores,
    store_rows,
)
from .hopper_wide_gradients import make_wide_exchange, walk_half_role


@record
class DsExchange:
    """``dS`` of two steps in shared memory, exchanged between the warpgroups, and its barriers."""

    ds: gl.shared_memory_descriptor  # [2 steps * 2 warpgroups, ROWS, TILE_M]
    barriers: PipelineBarriers


@gluon.jit
def _columns_of(piece, R: gl.constexpr, C: gl.constexpr, INDEX: gl.constexpr):
    """64 columns of a tile; the swizzled layout stores them contiguously."""
    return piece._reinterpret(piece.dtype, [C // 64, R, 64], SWIZZLED).index(INDEX)


@gluon.jit
def _start_dq(memory, exchange, step, config, WG: gl.constexpr):
    """Start the products for a warpgroup's 64 × 64 elements of ``dQ``."""
    dq = gl.zeros([64, 64], gl.float32, product_layout(64))
    for w in gl.static_range(2):
        ds = exchange.ds.index(step % 2 * 2 + w)
        if config.WIDTH == 128:  # tiles have 64 queries: a warpgroup takes half of the columns
            ds = ds.permute((1, 0))
            k = _columns_of(memory.k.index(w), ROWS, config.WIDTH, WG)
        else:
            ds = _columns_of(ds, ROWS, config.TILE_M, WG).permute((1, 0))
            k = as_tile(memory.k.index(w), ROWS, config.WIDTH)
        dq = warpgroup_mma(ds, k, dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def _add_dq(d_q, dq, row, config, WG: gl.constexpr):
    """Add to ``dQ`` of the tile that begins with ``row``, 16 bytes a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    dq = gl.convert_layout(dq, LAYOUT)
    r = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    if config.WIDTH == 128:
        c += WG * 64
    else:
        r += WG * 64
    gl.atomic_add(d_q + (row + r).to(gl.int64) * config.WIDTH + c, dq, sem="relaxed")


@gluon.jit
def _step(
    d_q, dk, dv, memory, exchange, use, previous_row, causal_limit, num_keys, window, scale, config,
    WG: gl.constexpr,
):  # fmt: skip
    """Add a tile's terms of ``dK`` and ``dV``, and the previous tile's of ``dQ``."""
    M: gl.constexpr = config.TILE_M
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, product_layout(config.WIDTH), 2)
    slot = memory.barriers.slot(0, use)
    k = as_tile(memory.k.index(WG), ROWS, config.WIDTH)
    v = as_tile(memory.v.index(WG), ROWS, config.WIDTH)
    q = as_tile(memory.q.index(slot), M, config.WIDTH)
    d_out = as_tile(memory.d_out.index(slot), M, config.WIDTH)
    memory.barriers.wait_full(0, use)
    s = start_scores(k, q, config)
    dp = start_scores(v, d_out, config)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = recompute_weights(s, memory.lse2.index(slot), causal_limit, num_keys, window, scale, config)
    weights = gl.convert_layout(p.to(k.dtype), P_LAYOUT, assert_trivial=True)
    dv = warpgroup_mma(weights, d_out, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - numbers(memory.delta.index(slot), dp))

    # The other warpgroup has stored the previous step's dS, and no longer reads this slot, which
    # was filled two steps ago.
    exchange.barriers.wait_full(1 - WG, use)
    own_ds = exchange.ds.index(use % 2 * 2 + WG)
    own_ds.store(ds.to(k.dtype))
    fence_async_shared()
    dq = _start_dq(memory, exchange, use + 1, config, WG)
    dk = warpgroup_mma(own_ds, q, dk, is_async=True)
    dq, dv, weights = warpgroup_mma_wait(1, deps=(dq, dv, weights))
    exchange.barriers.fill(WG, use + 1)
    _add_dq(d_q, dq, previous_row, config, WG)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    memory.barriers.release(0, use)
    return dk, dv


@gluon.jit
def _walk_role(d_q, d_k, d_v, memory, exchange, batch, scale, softmax_scale, config, warpgroup):
    """One warpgroup: visit all tiles of queries that see the program's keys."""
    WG: gl.constexpr = warpgroup.INDEX
    M: gl.constexpr = config.TILE_M
    walk = find_walk(batch, config)
    dk = gl.zeros([ROWS, config.WIDTH], gl.float32, product_layout(config.WIDTH))
    dv = gl.zeros([ROWS, config.WIDTH], gl.float32, product_layout(config.WIDTH))

    # The first step computes dQ from a ``dS`` of zeros, which adds 0 to the first tile.
    zeros = gl.zeros([ROWS, M], exchange.ds.dtype, product_layout(M))
    exchange.ds.index(2 + WG).store(zeros)
    fence_async_shared()
    exchange.barriers.fill(WG, 0)
    memory.keys_barriers.wait_full(0, 0)
    tile = walk.start
    head_row = (walk.kv_head * config.GROUP * batch.num_seqs + walk.seq) * batch.pitch
    previous_row = head_row + tile * M
    num_keys = batch.seq_len - walk.first_key - WG * ROWS  # from the warpgroup's first key on
    num_steps = config.GROUP * (walk.high - walk.low)
    for use in range(num_steps):
        causal_limit = tile * M + num_keys - batch.query_len
        dk, dv = _step(
            d_q, dk, dv, memory, exchange, use, previous_row, causal_limit, num_keys, batch.window,
            scale, config, WG,
        )  # fmt: skip
        previous_row = head_row + tile * M
        tile, head_row = advance(walk, tile, head_row, batch.num_seqs * batch.pitch, config)
    exchange.barriers.wait_full(1 - WG, num_steps)
    if num_steps > 0:  # else the compiler hoists this above the loop, where registers are few
        dq = _start_dq(memory, exchange, num_steps + 1, config, WG)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        _add_dq(d_q, dq, previous_row, config, WG)
    store_rows(d_k, dk * softmax_scale, WG * ROWS, 0, walk, batch, config)
    store_rows(d_v, dv, WG * ROWS, 0, walk, batch, config)


@gluon.jit
def _compute_role(d_q, d_k, d_v, memory, exchange, batch, scale, softmax_scale, config, warpgroup):
    """One warpgroup; ``exchange`` is a ``DsExchange`` or, for wide heads, a ``WideExchange``."""
    if config.WIDTH == 256:
        walk_half_role(
            d_q, d_k, d_v, memory, exchange, batch, scale, softmax_scale, config, warpgroup
        )  # fmt: skip
    else:
        _walk_role(d_q, d_k, d_v, memory, exchange, batch, scale, softmax_scale, config, warpgroup)


@gluon.jit
def gradients_kernel(
    d_q,  # float32 [num_heads, num_seqs, pitch, WIDTH] of zeros; gets the sums, not scaled
    d_k,  # [num_seqs, seq_len, num_kv_heads, HEAD_SIZE]
    d_v,  # as d_k
    k_desc,  # [num_seqs, num_kv_heads, seq_len, HEAD_SIZE] in boxes of [1, 1, ROWS, WIDTH]
    v_desc,
    q_desc,  # [num_seqs, num_heads, query_len, HEAD_SIZE] in boxes of [1, 1, TILE_M, WIDTH]
    d_out_desc,
    lse2_desc,  # float32 [1, num_heads * num_seqs * pitch] in boxes of [1, TILE_M]
    delta_desc,
    num_seqs,
    num_kv_heads,
    query_len,
    pitch,
    seq_len,
    key_tiles,
    section,
    window,
    scale,  # softmax_scale · log2(e)
    softmax_scale,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    KEYS: gl.constexpr,
    TILE_M: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_END: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING: gl.constexpr,
):
    """See the module docstring. Grid: tiles of keys × KV heads × sequences."""
    config = HopperGradientsConfig(
        HEAD_SIZE, WIDTH, KEYS, TILE_M, GROUP, CAUSAL, HAS_WINDOW, HAS_END
    )
    batch = GradientsBatch(
        num_seqs, num_kv_heads, query_len, pitch, seq_len, key_tiles, section, window
    )  # fmt: skip
    if WIDTH == 256:
        exchange = make_wide_exchange(q_desc.dtype, config)
        memory = make_memory(k_desc, q_desc, lse2_desc, STAGES, config)
    else:
        memory = make_memory(k_desc, q_desc, lse2_desc, STAGES, config)
        ds = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, TILE_M], SWIZZLED)
        exchange = DsExchange(ds, make_barriers(2, 2, 1, 1))
    fence_async_shared()
    work = (d_q, d_k, d_v, memory, exchange, batch, scale, softmax_scale, config)
    load = (k_desc, v_desc, q_desc, d_out_desc, lse2_desc, delta_desc, memory, batch, config)
    specialise(_compute_role, work, 2, 4, REGISTERS, [(load_role, load)], 1, LOADING)


@triton.jit
def finish_kernel(
    d_q,  # [num_seqs, query_len, num_heads, HEAD_SIZE]
    sums,  # float32 [num_heads, num_seqs, pitch, WIDTH]
    num_seqs,
    num_heads,
    query_len,
    pitch,
    softmax_scale,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Scale and round ``dQ`` of ``TILE_M`` queries of a head. Grid: tiles × (head, sequence)."""
    tiles = tl.cdiv(query_len, TILE_M)
    token = tl.program_id(0) % tiles * TILE_M + tl.arange(0, TILE_M)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    head, seq = pair // num_seqs, pair % num_seqs
    column = tl.arange(0, WIDTH)
    x = tl.load(sums + (pair * pitch + token)[:, None] * WIDTH + column)
    at = ((seq * query_len + token) * num_heads + head) * HEAD_SIZE
    inside = (token < query_len)[:, None] & (column < HEAD_SIZE)
    tl.store(d_q + at[:, None] + column, x * softmax_scale, mask=inside)
