"""Attention backward on Hopper for heads wider than 128; see ``hopper_gradients``.

``dK`` and ``dV`` of 64 keys, 2 × 256 columns, fill the registers of two warpgroups. So a program
owns 64 keys, and each warpgroup half of the columns of ``dK``, ``dV`` and ``dQ``. One computes
``P``, the other ``dS``::

    0:  Pᵀ = exp(k qᵀ - lse) ─┐                        ┌─ dV += Pᵀ dO   dK += dSᵀ q   dQ += dS k
                              ├─ shared memory, both ──┤
    1:  dSᵀ = Pᵀ ∘ (v dOᵀ - δ)┘                        └─ 0: columns 0 to 127, 1: from 128 on

The first warpgroup uses ``dS`` one step after the second computed it, so it multiplies while the
second computes the next ``dS``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...tiles.hopper.layouts import product_layout, wide_rows
from ...tiles.hopper.record import record
from ...tiles.hopper.ring import PipelineBarriers, make_barriers
from .hopper_walk import (
    ROWS,
    SWIZZLED,
    advance,
    as_tile,
    find_walk,
    numbers,
    recompute_weights,
    start_scores,
    store_rows,
)

HALF = gl.constexpr(128)  # columns of a warpgroup


@record
class WideExchange:
    """``P`` and ``dS`` of two tiles in shared memory, and their barriers."""

    p: gl.shared_memory_descriptor  # [2, ROWS, TILE_M]
    p_barriers: PipelineBarriers
    ds: gl.shared_memory_descriptor  # of the step before at ``use``, of this one at ``use + 1``
    ds_barriers: PipelineBarriers


@gluon.jit
def make_wide_exchange(dtype: gl.constexpr, config):
    """Allocate two tiles of each, and their barriers."""
    p = gl.allocate_shared_memory(dtype, [2, ROWS, config.TILE_M], SWIZZLED)
    p_barriers = make_barriers(1, 2, 1, 1)
    ds = gl.allocate_shared_memory(dtype, [2, ROWS, config.TILE_M], SWIZZLED)
    return WideExchange(p, p_barriers, ds, make_barriers(1, 2, 1, 1))


@gluon.jit
def _half_of(piece, R: gl.constexpr, INDEX: gl.constexpr):
    """128 columns of a tile; the swizzled layout stores them contiguously."""
    return piece._reinterpret(piece.dtype, [2, R, HALF], SWIZZLED).index(INDEX)


@gluon.jit
def _start_dq(ds, k_half, config):
    """Start the product for a warpgroup's half of the columns of ``dQ``."""
    dq = gl.zeros([config.TILE_M, HALF], gl.float32, product_layout(HALF))
    return warpgroup_mma(ds.permute((1, 0)), k_half, dq, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(d_q, dq, row, config, WG: gl.constexpr):
    """Add to ``dQ`` of the tile that begins with ``row``, 16 bytes a thread."""
    LAYOUT: gl.constexpr = wide_rows(HALF)
    dq = gl.convert_layout(dq, LAYOUT)
    r = row + gl.arange(0, config.TILE_M, gl.SliceLayout(1, LAYOUT))[:, None]
    c = WG * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.atomic_add(d_q + r.to(gl.int64) * config.WIDTH + c, dq, sem="relaxed")


@gluon.jit
def _p_step(
    d_q, dk, dv, memory, exchange, use, previous_row, causal_limit, num_keys, window, scale, config
):  # fmt: skip
    """First warpgroup: compute ``P`` of a tile; multiply with it and with the previous ``dS``."""
    M: gl.constexpr = config.TILE_M
    slot = memory.barriers.slot(0, use)
    last_slot = memory.barriers.slot(0, gl.maximum(use - 1, 0))
    q = as_tile(memory.q.index(slot), M, config.WIDTH)
    k = as_tile(memory.k.index(0), ROWS, config.WIDTH)
    ds = exchange.ds.index(use % 2)
    memory.barriers.wait_full(0, use)
    s = start_scores(k, q, config)
    exchange.ds_barriers.wait_full(0, use)
    dk = warpgroup_mma(ds, _half_of(memory.q.index(last_slot), M, 0), dk, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    p = recompute_weights(s, memory.lse2.index(slot), causal_limit, num_keys, window, scale, config)
    exchange.p_barriers.wait_empty(0, use)
    exchange.p.index(use % 2).store(p.to(k.dtype))
    fence_async_shared()
    exchange.p_barriers.fill(0, use)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    memory.barriers.release_last(0, use)
    dq = _start_dq(ds, _half_of(memory.k.index(0), ROWS, 0), config)
    d_out_half = _half_of(memory.d_out.index(slot), M, 0)
    dv = warpgroup_mma(exchange.p.index(use % 2), d_out_half, dv, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    exchange.ds_barriers.release(0, use)
    _add_dq(d_q, dq, previous_row, config, 0)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return dk, dv


@gluon.jit
def _ds_step(d_q, dk, dv, memory, exchange, use, row, config):
    """Second warpgroup: compute ``dS`` of a tile; multiply with it and with ``P``."""
    M: gl.constexpr = config.TILE_M
    slot = memory.barriers.slot(0, use)
    v = as_tile(memory.v.index(0), ROWS, config.WIDTH)
    d_out = as_tile(memory.d_out.index(slot), M, config.WIDTH)
    shared_p = exchange.p.index(use % 2)
    shared_ds = exchange.ds.index((use + 1) % 2)
    memory.barriers.wait_full(0, use)
    dp = warpgroup_mma_wait(0, deps=(start_scores(v, d_out, config),))
    exchange.p_barriers.wait_full(0, use)
    S_LAYOUT: gl.constexpr = dp.type.layout
    p = shared_p.load(S_LAYOUT).to(gl.float32)
    ds = p * (dp - numbers(memory.delta.index(slot), dp))
    exchange.ds_barriers.wait_empty(0, use + 1)
    shared_ds.store(ds.to(v.dtype))
    fence_async_shared()
    exchange.ds_barriers.fill(0, use + 1)
    dq = _start_dq(shared_ds, _half_of(memory.k.index(0), ROWS, 1), config)
    dv = warpgroup_mma(shared_p, _half_of(memory.d_out.index(slot), M, 1), dv, is_async=True)
    dk = warpgroup_mma(shared_ds, _half_of(memory.q.index(slot), M, 1), dk, is_async=True)
    dq = warpgroup_mma_wait(2, deps=(dq,))
    _add_dq(d_q, dq, row, config, 1)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    exchange.p_barriers.release(0, use)
    memory.barriers.release(0, use)
    return dk, dv


@gluon.jit
def walk_half_role(d_q, d_k, d_v, memory, exchange, batch, scale, softmax_scale, config, warpgroup):
    """One warpgroup: visit all tiles of queries that see the program's keys."""
    WG: gl.constexpr = warpgroup.INDEX
    M: gl.constexpr = config.TILE_M
    walk = find_walk(batch, config)
    dk = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    dv = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    if WG == 1:  # the first step reads a previous ``dS`` of zeros
        exchange.ds.index(0).store(gl.zeros([ROWS, M], exchange.ds.dtype, product_layout(M)))
        fence_async_shared()
        exchange.ds_barriers.fill(0, 0)
    memory.keys_barriers.wait_full(0, 0)
    tile = walk.start
    head_row = (walk.kv_head * config.GROUP * batch.num_seqs + walk.seq) * batch.pitch
    previous_row = head_row + tile * M
    num_keys = batch.seq_len - walk.first_key
    num_steps = config.GROUP * (walk.high - walk.low)
    for use in range(num_steps):
        if WG == 0:
            causal_limit = tile * M + num_keys - batch.query_len
            dk, dv = _p_step(
                d_q, dk, dv, memory, exchange, use, previous_row, causal_limit, num_keys,
                batch.window, scale, config,
            )  # fmt: skip
        else:
            row = head_row + tile * M
            dk, dv = _ds_step(d_q, dk, dv, memory, exchange, use, row, config)
        previous_row = head_row + tile * M
        tile, head_row = advance(walk, tile, head_row, batch.num_seqs * batch.pitch, config)
    if WG == 0:  # noqa: SIM102
        if num_steps > 0:  # as in ``hopper_gradients``
            ds = exchange.ds.index(num_steps % 2)
            q_half = _half_of(memory.q.index(memory.barriers.slot(0, num_steps - 1)), M, 0)
            exchange.ds_barriers.wait_full(0, num_steps)
            dk = warpgroup_mma(ds, q_half, dk, is_async=True)
            dq = _start_dq(ds, _half_of(memory.k.index(0), ROWS, 0), config)
            dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
            _add_dq(d_q, dq, previous_row, config, 0)
    store_rows(d_k, dk * softmax_scale, 0, WG * HALF, walk, batch, config)
    store_rows(d_v, dv, 0, WG * HALF, walk, batch, config)
