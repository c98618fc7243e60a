"""Gradients of window attention in Triton.

::

    P = exp(S - lse)      dP = dO Vᵀ      dS = P ∘ (dP - δ)      δ = Σ dO ∘ O - dlse
    dQ = scale · dS K     dK = scale · dSᵀ Q     dV = Pᵀ dO      dB = Σ over windows of dS

Windows of several tiles take two kernels: ``row_gradients`` computes dQ and dB, and
``column_gradients`` dK and dV. A program owns a tile of tokens of one head and visits its windows,
so it computes the same tile of the bias gradient in every window and sums it in registers, without
atomics and in a fixed order. Registers hold few such tiles, so the row kernel is launched for one
group of keys at a time and keeps dQ in float32 between launches. The sums of chunks of windows are
added up later. Where finite masks may hide all of a row, ``find_pivots`` runs before them.

Windows of one tile take one kernel, ``window_gradients``: five products instead of seven, and
every operand is loaded once. Grids are those of the forward kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....tiles.triton.online_softmax import finite, update_softmax
from .. import problem
from .tiles import (
    RELOADED,
    find_pivot,
    has_exact_pivots,
    head_scale,
    load_bias_tiles,
    load_cached_bias,
    load_mask_flag,
    load_pivots,
    load_rows,
    normalise,
    normalise_gradient,
    score_tile,
)

MOST_TOP = tl.constexpr(problem.MOST_TOP)


@triton.jit
def find_pivots(
    pivots,  # float32 [2, num_windows, NUM_HEADS, NUM_TOKENS], see ``load_pivots``
    q,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE], like k, v and dout
    k,
    v,
    dout,
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    bias,  # [table_size, NUM_HEADS] or [num_biases, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    needs_mask,  # int32 [num_masks]
    mask,  # integers [num_masks, NUM_TOKENS] or floating [num_masks, NUM_TOKENS, NUM_TOKENS]
    logit_scale,  # [NUM_HEADS]
    num_windows,
    num_chunks,
    num_masks,
    num_biases,
    centre,
    softmax_scale,
    mask_value,
    eps,
    out_window, lse_window, mask_window, mask_row, bias_window,
    q_window, q_head, q_token,
    k_window, k_head, k_token,
    v_window, v_head, v_token,
    dout_window, dout_head, dout_token,
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    COSINE: tl.constexpr,
    BIAS_CACHE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Split the log-sum-exp of rows, in base 2; compute scores again only where it is large."""
    program = tl.program_id(0)
    NUM_TILES: tl.constexpr = (NUM_TOKENS + TILE_M - 1) // TILE_M
    rows = program % NUM_TILES * TILE_M + tl.arange(0, TILE_M)
    head = program // NUM_TILES % NUM_HEADS
    chunk = program // (NUM_TILES * NUM_HEADS)
    is_row = rows < NUM_TOKENS
    q, k = q + head * q_head, k + head * k_head
    bias += chunk % num_biases * bias_window
    scale = head_scale(logit_scale, softmax_scale, head, COSINE)
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        row_at = window * lse_window + head * NUM_TOKENS + rows
        top = find_pivot(tl.load(lse + row_at, mask=is_row, other=0.0))
        log_sum = tl.zeros([TILE_M], tl.float32)
        is_large = (tl.abs(top) > MOST_TOP) & (tl.abs(top) < float("inf"))
        if tl.max(is_large.to(tl.int32), 0) != 0:
            q_tile = load_rows(q + window * q_window, rows, q_token, D, HEAD_SIZE, NUM_TOKENS)
            q_tile = normalise(q_tile, eps, COSINE)
            mask_at = mask + window % num_masks * mask_window
            m = tl.full([TILE_M], float("-inf"), tl.float32)
            l = tl.zeros([TILE_M], tl.float32)
            first = 0
            for t in tl.static_range(len(TILES)):
                keys = first + tl.arange(0, TILES[t])
                k_tile = load_rows(k + window * k_window, keys, k_token, D, HEAD_SIZE, NUM_TOKENS)
                k_tile = normalise(k_tile, eps, COSINE)
                cached = k_tile
                if BIAS_CACHE != RELOADED:
                    cached = load_cached_bias(
                        bias, offsets, rows, keys, head, centre, BIAS_CACHE, NUM_HEADS, NUM_TOKENS,
                        BIAS, False,
                    )  # fmt: skip
                s = score_tile(
                    q_tile, k_tile, scale, cached, bias, offsets, mask_at, 1, rows, keys, head,
                    centre, mask_value, mask_row, NUM_HEADS, NUM_TOKENS, BIAS, MASK, BIAS_CACHE,
                    False,
                )  # fmt: skip
                _p, _decay, m, l = update_softmax(s, m, l)
                first += TILES[t]
            top = tl.where(is_large, m, top)
            log_sum = tl.where(is_large, tl.log2(l), 0.0)
        tl.store(pivots + row_at, top, mask=is_row)
        tl.store(pivots + num_windows * lse_window + row_at, log_sum, mask=is_row)


@triton.jit
def row_gradients(
    dq,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    dq_partial,  # float32, the same
    dbias,  # float32 [num_chunks, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    dscale,  # float32 [num_chunks, NUM_HEADS, tiles of tokens]
    delta,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    q,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE], like k, v and dout
    k,
    v,
    dout,
    out,  # like dq
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like dlse; see ``load_pivots``
    dlse,
    bias,  # [table_size, NUM_HEADS] or [num_biases, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    needs_mask,  # int32 [num_masks]
    mask,  # integers [num_masks, NUM_TOKENS] or floating [num_masks, NUM_TOKENS, NUM_TOKENS]
    logit_scale,  # [NUM_HEADS]
    num_windows,
    num_chunks,
    num_masks,
    num_biases,
    centre,
    softmax_scale,
    mask_value,
    eps,
    out_window, lse_window, mask_window, mask_row, bias_window,
    q_window, q_head, q_token,
    k_window, k_head, k_token,
    v_window, v_head, v_token,
    dout_window, dout_head, dout_token,
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    COSINE: tl.constexpr,
    BIAS_CACHE: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    IS_LAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a tile of tokens, and partial sums of dB and of the scale's gradient."""
    EXACT: tl.constexpr = has_exact_pivots(BIAS, MASK, BIAS_CACHE)
    # which tile am I
    program = tl.program_id(0)
    NUM_TILES: tl.constexpr = (NUM_TOKENS + TILE_M - 1) // TILE_M
    tile = program % NUM_TILES
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    head = program // NUM_TILES % NUM_HEADS
    chunk = program // (NUM_TILES * NUM_HEADS)
    is_row = rows < NUM_TOKENS
    d = tl.arange(0, D)
    inside = is_row[:, None] & (d < HEAD_SIZE)[None, :]
    q, k, v = q + head * q_head, k + head * k_head, v + head * v_head
    dout += head * dout_head
    bias += chunk % num_biases * bias_window
    scale = head_scale(logit_scale, softmax_scale, head, COSINE)
    bias_tiles = load_bias_tiles(
        bias, offsets, rows, FIRST_KEY, head, centre, TILES, BIAS_CACHE,
        NUM_HEADS, NUM_TOKENS, BIAS, False,
    )  # fmt: skip
    sums = ()
    for t in tl.static_range(len(TILES) if SUMS else 0):
        sums += (tl.full([TILE_M, TILES[t]], 0.0, tl.float32),)  # type: ignore[assignment]
    scale_sum = tl.zeros([TILE_M], tl.float32)
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        # load q, dO, pivot and δ
        q_raw = load_rows(q + window * q_window, rows, q_token, D, HEAD_SIZE, NUM_TOKENS)
        q_tile = normalise(q_raw, eps, COSINE)
        dout_tile = load_rows(
            dout + window * dout_window, rows, dout_token, D, HEAD_SIZE, NUM_TOKENS
        )
        at = window * out_window + (rows[:, None] * NUM_HEADS + head) * HEAD_SIZE + d[None, :]
        row_at = window * lse_window + head * NUM_TOKENS + rows
        pivot, log_sum = load_pivots(lse, row_at, is_row, num_windows * lse_window, EXACT)
        if FIRST_KEY > 0:
            row_delta = tl.load(delta + row_at, mask=is_row, other=0.0)
        else:
            out_tile = tl.load(out + at, mask=inside, other=0.0)
            row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
            if HAS_DLSE:
                row_delta -= tl.load(dlse + row_at, mask=is_row, other=0.0)
            tl.store(delta + row_at, row_delta, mask=is_row)
        mask_at = mask + window % num_masks * mask_window
        is_masked = load_mask_flag(needs_mask, window % num_masks, MASK, NUM_TOKENS <= TILE_M)
        # tiles
        acc = tl.zeros([TILE_M, D], tl.float32)
        new_sums = ()
        first = FIRST_KEY
        for t in tl.static_range(len(TILES)):
            keys = first + tl.arange(0, TILES[t])
            k_tile = load_rows(k + window * k_window, keys, k_token, D, HEAD_SIZE, NUM_TOKENS)
            v_tile = load_rows(v + window * v_window, keys, v_token, D, HEAD_SIZE, NUM_TOKENS)
            k_tile = normalise(k_tile, eps, COSINE)
            s = score_tile(
                q_tile, k_tile, scale, 0 if BIAS_CACHE == RELOADED else bias_tiles[t], bias,
                offsets, mask_at, is_masked, rows, keys, head, centre, mask_value, mask_row,
                NUM_HEADS, NUM_TOKENS, BIAS, MASK, BIAS_CACHE, False,
            )  # fmt: skip
            s -= pivot[:, None]
            if EXACT:
                s -= log_sum[:, None]
            p = tl.exp2(s)
            dp = tl.dot(dout_tile, v_tile.T, input_precision="tf32x3")
            ds = p * (dp - row_delta[:, None])
            if SUMS:
                new_sums += (sums[t] + ds,)  # type: ignore[assignment]
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="tf32x3")
            first += TILES[t]
        # finish and store
        sums = new_sums
        if FIRST_KEY > 0:
            acc += tl.load(dq_partial + at, mask=inside, other=0.0)
        if IS_LAST:
            acc *= scale
            if COSINE:
                acc, along = normalise_gradient(acc, q_raw, eps)
                scale_sum += along
            tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=inside)
        else:
            tl.store(dq_partial + at, acc, mask=inside)
    # store the sums of this chunk's windows
    block = (chunk * NUM_HEADS + head).to(tl.int64) * NUM_TOKENS
    first = FIRST_KEY
    for t in tl.static_range(len(TILES) if SUMS else 0):
        keys = first + tl.arange(0, TILES[t])
        sum_at = (block + rows)[:, None] * NUM_TOKENS + keys[None, :]
        tl.store(dbias + sum_at, sums[t], mask=is_row[:, None] & (keys < NUM_TOKENS)[None, :])
        first += TILES[t]
    if COSINE and IS_LAST:
        tl.store(dscale + program // NUM_TILES * NUM_TILES + tile, tl.sum(scale_sum, 0))


@triton.jit
def column_gradients(
    dk,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE], like dv
    dv,
    q,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE], like k, v and dout
    k,
    v,
    dout,
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like delta; see ``load_pivots``
    delta,
    bias,  # [table_size, NUM_HEADS] or [num_biases, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    needs_mask,  # int32 [num_masks]
    mask,  # integers [num_masks, NUM_TOKENS] or floating [num_masks, NUM_TOKENS, NUM_TOKENS]
    logit_scale,  # [NUM_HEADS]
    num_windows,
    num_chunks,
    num_masks,
    num_biases,
    centre,
    softmax_scale,
    mask_value,
    eps,
    out_window, lse_window, mask_window, mask_row, bias_window,
    q_window, q_head, q_token,
    k_window, k_head, k_token,
    v_window, v_head, v_token,
    dout_window, dout_head, dout_token,
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    COSINE: tl.constexpr,
    BIAS_CACHE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a tile of keys."""
    EXACT: tl.constexpr = has_exact_pivots(BIAS, MASK, BIAS_CACHE)
    # which tile am I
    program = tl.program_id(0)
    NUM_TILES: tl.constexpr = (NUM_TOKENS + TILE_M - 1) // TILE_M
    keys = program % NUM_TILES * TILE_M + tl.arange(0, TILE_M)
    head = program // NUM_TILES % NUM_HEADS
    chunk = program // (NUM_TILES * NUM_HEADS)
    d = tl.arange(0, D)
    inside = (keys < NUM_TOKENS)[:, None] & (d < HEAD_SIZE)[None, :]
    q, k, v = q + head * q_head, k + head * k_head, v + head * v_head
    dout += head * dout_head
    bias += chunk % num_biases * bias_window
    scale = head_scale(logit_scale, softmax_scale, head, COSINE)
    bias_tiles = load_bias_tiles(
        bias, offsets, keys, 0, head, centre, TILES, BIAS_CACHE, NUM_HEADS, NUM_TOKENS, BIAS, True
    )
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        # load k and v
        k_raw = load_rows(k + window * k_window, keys, k_token, D, HEAD_SIZE, NUM_TOKENS)
        k_tile = normalise(k_raw, eps, COSINE)
        v_tile = load_rows(v + window * v_window, keys, v_token, D, HEAD_SIZE, NUM_TOKENS)
        mask_at = mask + window % num_masks * mask_window
        is_masked = load_mask_flag(needs_mask, window % num_masks, MASK, NUM_TOKENS <= TILE_M)
        # tiles
        dk_acc = tl.zeros([TILE_M, D], tl.float32)
        dv_acc = tl.zeros([TILE_M, D], tl.float32)
        first = 0
        for t in tl.static_range(len(TILES)):
            rows = first + tl.arange(0, TILES[t])
            is_row = rows < NUM_TOKENS
            q_tile = load_rows(q + window * q_window, rows, q_token, D, HEAD_SIZE, NUM_TOKENS)
            dout_tile = load_rows(
                dout + window * dout_window, rows, dout_token, D, HEAD_SIZE, NUM_TOKENS
            )
            row_at = window * lse_window + head * NUM_TOKENS + rows
            # Pivots are inf past the end, so that those rows get weights of 0.
            pivot, log_sum = load_pivots(lse, row_at, is_row, num_windows * lse_window, EXACT)
            row_delta = tl.load(delta + row_at, mask=is_row, other=0.0)
            q_tile = normalise(q_tile, eps, COSINE)
            s = score_tile(
                k_tile, q_tile, scale, 0 if BIAS_CACHE == RELOADED else bias_tiles[t], bias,
                offsets, mask_at, is_masked, keys, rows, head, centre, mask_value, mask_row,
                NUM_HEADS, NUM_TOKENS, BIAS, MASK, BIAS_CACHE, True,
            )  # fmt: skip
            s -= pivot[None, :]
            if EXACT:
                s -= log_sum[None, :]
            p = tl.exp2(s)
            dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="tf32x3")
            dp = tl.dot(v_tile, dout_tile.T, input_precision="tf32x3")
            ds = p * (dp - row_delta[None, :])
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="tf32x3")
            first += TILES[t]
        # finish and store
        dk_acc *= scale
        if COSINE:
            dk_acc, _ = normalise_gradient(dk_acc, k_raw, eps)
        at = window * out_window + (keys[:, None] * NUM_HEADS + head) * HEAD_SIZE + d[None, :]
        tl.store(dk + at, dk_acc.to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def invert_offsets(
    tokens,  # int32 [size + 1]
    offsets,  # int32 [num_tokens]
    num_tokens,
    size,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Invert ``rel_offsets``: entry n is the token whose offset is the smallest offset plus n.

    It is -1 if there is no such token; the last entry is the smallest offset.
    """
    find_tokens(tokens, offsets, tl.program_id(0), num_tokens, size, TILE, WIDTH)


@triton.jit
def find_tokens(
    tokens, offsets, tile, num_tokens, size, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One tile of ``invert_offsets``."""
    number = tile * TILE + tl.arange(0, TILE)
    token = tl.arange(0, WIDTH)
    u = tl.load(offsets + token, mask=token < num_tokens, other=2147483647)
    smallest = tl.min(u, 0)
    match = ((u - smallest)[None, :] == number[:, None]) & (token < num_tokens)[None, :]
    found = tl.max(tl.where(match, token[None, :], -1), 1)
    tl.store(tokens + number, tl.where(number < size, found, smallest), mask=number <= size)


@triton.jit
def table_gradient(
    dtable,  # [table_size, num_heads]
    dbias,  # float32 [num_heads, num_tokens, num_tokens]
    tokens,  # int32 [centre + 2], see ``invert_offsets``
    offsets,  # int32 [num_tokens]
    num_tokens,
    table_size,
    TILE: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Sum the bias gradient over the pairs of tokens that share a row of the table.

    Candidate pairs are few, so the loop is bound by latency and loads many of them at once.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    centre = (table_size - 1) // 2
    dbias += head.to(tl.int64) * num_tokens * num_tokens
    first_number = centre - row - tl.load(tokens + centre + 1)
    total = tl.zeros([TILE, TILE_M], tl.float32)
    for first in range(0, num_tokens, TILE_M):
        i = first + tl.arange(0, TILE_M)
        inside = (i < num_tokens)[None, :] & (row < table_size)[:, None]
        number = tl.load(offsets + i, mask=i < num_tokens, other=0)[None, :] + first_number[:, None]
        is_pair = inside & (number >= 0) & (number <= centre)
        j = tl.load(tokens + number, mask=is_pair, other=-1)
        total += tl.load(dbias + i[None, :] * num_tokens + j, mask=j >= 0, other=0.0)
    at = dtable + row * tl.num_programs(1) + head
    tl.store(at, tl.sum(total, 1).to(dtable.dtype.element_ty), mask=row < table_size)


@triton.jit
def window_gradients(
    dq,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE], like dk and dv
    dk,
    dv,
    dbias,  # float32 [num_chunks, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    dscale,  # float32 [num_chunks, NUM_HEADS]
    q,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE], like k, v and dout
    k,
    v,
    dout,
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like dlse
    dlse,
    bias,  # [table_size, NUM_HEADS] or [num_biases, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    needs_mask,  # not read: masking one tile is cheaper than loading the flag
    mask,  # integers [num_masks, NUM_TOKENS] or floating [num_masks, NUM_TOKENS, NUM_TOKENS]
    logit_scale,  # [NUM_HEADS]
    num_windows,
    num_chunks,
    num_masks,
    num_biases,
    centre,
    softmax_scale,
    mask_value,
    eps,
    out_window, lse_window, mask_window, mask_row, bias_window,
    q_window, q_head, q_token,
    k_window, k_head, k_token,
    v_window, v_head, v_token,
    dout_window, dout_head, dout_token,
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    COSINE: tl.constexpr,
    BIAS_CACHE: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of one head of a chunk of windows."""
    EXACT: tl.constexpr = has_exact_pivots(BIAS, MASK, BIAS_CACHE)
    head = tl.program_id(0) % NUM_HEADS
    chunk = tl.program_id(0) // NUM_HEADS
    rows = tl.arange(0, TILE_M)
    is_row = rows < NUM_TOKENS
    d = tl.arange(0, D)
    inside = is_row[:, None] & (d < HEAD_SIZE)[None, :]
    q, k, v = q + head * q_head, k + head * k_head, v + head * v_head
    dout += head * dout_head
    bias += chunk % num_biases * bias_window
    scale = head_scale(logit_scale, softmax_scale, head, COSINE)
    bias_tiles = load_bias_tiles(
        bias, offsets, rows, 0, head, centre, TILES, BIAS_CACHE, NUM_HEADS, NUM_TOKENS, BIAS, False
    )
    sums = tl.zeros([TILE_M, TILE_M], tl.float32)
    scale_sum = tl.zeros([TILE_M], tl.float32)
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        # load
        q_raw = load_rows(q + window * q_window, rows, q_token, D, HEAD_SIZE, NUM_TOKENS)
        k_raw = load_rows(k + window * k_window, rows, k_token, D, HEAD_SIZE, NUM_TOKENS)
        v_tile = load_rows(v + window * v_window, rows, v_token, D, HEAD_SIZE, NUM_TOKENS)
        dout_tile = load_rows(
            dout + window * dout_window, rows, dout_token, D, HEAD_SIZE, NUM_TOKENS
        )
        row_at = window * lse_window + head * NUM_TOKENS + rows
        # lse is inf past the end, so that those rows get weights of 0.
        pivot = find_pivot(tl.load(lse + row_at, mask=is_row, other=float("inf")))
        # weights
        q_tile, k_tile = normalise(q_raw, eps, COSINE), normalise(k_raw, eps, COSINE)
        mask_at = mask + window % num_masks * mask_window
        s = score_tile(
            q_tile, k_tile, scale, 0 if BIAS_CACHE == RELOADED else bias_tiles[0], bias, offsets,
            mask_at, 1, rows, rows, head, centre, mask_value, mask_row, NUM_HEADS, NUM_TOKENS, BIAS,
            MASK, BIAS_CACHE, False,
        )  # fmt: skip
        if EXACT:
            pivot = finite(tl.max(s, 1))
        p = tl.exp2(s - pivot[:, None])
        if EXACT:
            row_sum = tl.sum(p, 1)
            p /= tl.where(row_sum != 0.0, row_sum, 1.0)[:, None]  # NaN stays NaN
        # score gradients
        dp = tl.dot(dout_tile, v_tile.T, input_precision="tf32x3")
        # A program has whole rows, so δ is computed from the weights, not from the rounded output:
        # a row of dS then sums to 0 up to float32 rounding.
        total = tl.sum(p, 1)
        delta = tl.sum(p * dp, 1) / tl.where(total > 0.0, total, 1.0)
        if HAS_DLSE:
            delta -= tl.load(dlse + row_at, mask=is_row, other=0.0)
        ds = p * (dp - delta[:, None])
        if SUMS:
            sums += ds
        # token gradients
        weights, ds_tile = p.to(dout_tile.dtype), ds.to(q_tile.dtype)
        dv_tile = tl.dot(weights.T, dout_tile, input_precision="tf32x3")
        dq_tile = tl.dot(ds_tile, k_tile, input_precision="tf32x3") * scale
        dk_tile = tl.dot(ds_tile.T, q_tile, input_precision="tf32x3") * scale
        if COSINE:
            dq_tile, along = normalise_gradient(dq_tile, q_raw, eps)
            dk_tile, _ = normalise_gradient(dk_tile, k_raw, eps)
            scale_sum += along
        at = window * out_window + (rows[:, None] * NUM_HEADS + head) * HEAD_SIZE + d[None, :]
        tl.store(dq + at, dq_tile.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)
    # store the sums of this chunk's windows
    if SUMS:
        block = (chunk * NUM_HEADS + head).to(tl.int64) * NUM_TOKENS
        sum_at = (block + rows)[:, None] * NUM_TOKENS + rows[None, :]
        tl.store(dbias + sum_at, sums, mask=is_row[:, None] & is_row[None, :])
    if COSINE:
        tl.store(dscale + tl.program_id(0), tl.sum(scale_sum, 0))
