"""The gradient of window attention on a GPU: one kernel by rows, one by columns of the scores.

For windows of several tiles; those of one are ``triton_one_tile``'s.

::

    P = exp(S - lse)      dS = P ∘ (dO Vᵀ - δ)      δ = Σ dO ∘ O - dlse
    rows:     dQ = scale · dS K      dB = Σ over windows of dS
    columns:  dV = Pᵀ dO             dK = scale · dSᵀ Q

Both walk windows as the forward kernel does, so a program meets the same tile of the bias's
gradient in every window and sums it in registers: no atomics, one order of sums. Those sums take
the room of a few tiles, so the row kernel takes the keys in groups, a launch each; dQ waits in
float32 from one to the next. What the chunks of windows have summed is added up afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...tiles.triton.online_softmax import LOG2_E
from .triton_tiles import (
    NOWHERE,
    add_mask,
    find_pivot,
    head_scale,
    is_mixed,
    load_biases,
    load_rows,
    normalise,
    scale_and_add_bias,
    unnormalise,
)


@triton.jit
def row_gradients(
    dq,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    dq_so_far,  # float32, the same
    dbias,  # float32 [num_chunks, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    dscale,  # float32 [num_chunks, NUM_HEADS, tiles of tokens]
    delta,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    q,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE], like k, v and dout
    k,
    v,
    dout,
    out,  # like dq
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like dlse
    dlse,
    bias,  # [table_size, NUM_HEADS] or [num_biases, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    mixed,  # int32 [num_masks]
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
    KEPT: tl.constexpr,
    SUMS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FIRST_KEY: tl.constexpr,
    IS_LAST: tl.constexpr,
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of q, by tiles of tokens; of the bias and the scale, by chunks of windows."""
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
    kept = load_biases(
        bias, offsets, rows, FIRST_KEY, head, centre, TILES, KEPT,
        NUM_HEADS, NUM_TOKENS, BIAS, False,
    )  # fmt: skip
    sums = ()
    for t in tl.static_range(len(TILES) if SUMS else 0):
        sums += (tl.full([TILE_M, TILES[t]], 0.0, tl.float32),)  # type: ignore[assignment]
    scale_sum = tl.zeros([TILE_M], tl.float32)
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        # load q and what came back for it
        q_raw = load_rows(q + window * q_window, rows, q_token, D, HEAD_SIZE, NUM_TOKENS)
        q_tile = normalise(q_raw, eps, COSINE)
        dout_tile = load_rows(
            dout + window * dout_window, rows, dout_token, D, HEAD_SIZE, NUM_TOKENS
        )
        at = window * out_window + (rows[:, None] * NUM_HEADS + head) * HEAD_SIZE + d[None, :]
        row_at = window * lse_window + head * NUM_TOKENS + rows
        pivot = find_pivot(tl.load(lse + row_at, mask=is_row, other=float("inf")))
        if FIRST_KEY > 0:
            row_delta = tl.load(delta + row_at, mask=is_row, other=0.0)
        else:
            out_tile = tl.load(out + at, mask=inside, other=0.0)
            row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
            if HAS_DLSE:
                row_delta -= tl.load(dlse + row_at, mask=is_row, other=0.0)
            tl.store(delta + row_at, row_delta, mask=is_row)
        mask_at = mask + window % num_masks * mask_window
        is_masked = is_mixed(mixed, window % num_masks, MASK, NUM_TOKENS <= TILE_M)
        # tiles
        acc = tl.zeros([TILE_M, D], tl.float32)
        new_sums = ()
        first = FIRST_KEY
        for t in tl.static_range(len(TILES)):
            keys = first + tl.arange(0, TILES[t])
            k_tile = load_rows(k + window * k_window, keys, k_token, D, HEAD_SIZE, NUM_TOKENS)
            v_tile = load_rows(v + window * v_window, keys, v_token, D, HEAD_SIZE, NUM_TOKENS)
            k_tile = normalise(k_tile, eps, COSINE)
            s = tl.dot(q_tile, k_tile.T, input_precision="tf32x3")
            s = scale_and_add_bias(
                s, scale * LOG2_E, 0 if KEPT == NOWHERE else kept[t], bias, offsets, rows, keys,
                head, centre, KEPT, NUM_HEADS, NUM_TOKENS, BIAS, False,
            )  # fmt: skip
            s = add_mask(
                s, mask_at, is_masked, rows, keys, mask_value, mask_row, NUM_TOKENS, MASK, False
            )
            p = tl.exp2(s - pivot[:, None])
            dp = tl.dot(dout_tile, v_tile.T, input_precision="tf32x3")
            ds = p * (dp - row_delta[:, None])
            if SUMS:
                new_sums += (sums[t] + ds,)  # type: ignore[assignment]
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="tf32x3")
            first += TILES[t]
        # finish and store
        sums = new_sums
        if FIRST_KEY > 0:
            acc += tl.load(dq_so_far + at, mask=inside, other=0.0)
        if IS_LAST:
            acc *= scale
            if COSINE:
                acc, along = unnormalise(acc, q_raw, eps)
                scale_sum += along
            tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=inside)
        else:
            tl.store(dq_so_far + at, acc, mask=inside)
    # what this chunk's windows sum up to
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
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like delta
    delta,
    bias,  # [table_size, NUM_HEADS] or [num_biases, NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    mixed,  # int32 [num_masks]
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
    KEPT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of k and v, by tiles of keys."""
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
    kept = load_biases(
        bias, offsets, keys, 0, head, centre, TILES, KEPT, NUM_HEADS, NUM_TOKENS, BIAS, True
    )
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        # load k and v
        k_raw = load_rows(k + window * k_window, keys, k_token, D, HEAD_SIZE, NUM_TOKENS)
        k_tile = normalise(k_raw, eps, COSINE)
        v_tile = load_rows(v + window * v_window, keys, v_token, D, HEAD_SIZE, NUM_TOKENS)
        mask_at = mask + window % num_masks * mask_window
        is_masked = is_mixed(mixed, window % num_masks, MASK, NUM_TOKENS <= TILE_M)
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
            # Rows past the end have no weights.
            pivot = find_pivot(tl.load(lse + row_at, mask=is_row, other=float("inf")))
            row_delta = tl.load(delta + row_at, mask=is_row, other=0.0)
            q_tile = normalise(q_tile, eps, COSINE)
            s = tl.dot(k_tile, q_tile.T, input_precision="tf32x3")
            s = scale_and_add_bias(
                s, scale * LOG2_E, 0 if KEPT == NOWHERE else kept[t], bias, offsets, keys, rows,
                head, centre, KEPT, NUM_HEADS, NUM_TOKENS, BIAS, True,
            )  # fmt: skip
            s = add_mask(
                s, mask_at, is_masked, keys, rows, mask_value, mask_row, NUM_TOKENS, MASK, True
            )
            p = tl.exp2(s - pivot[None, :])
            dv_acc = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="tf32x3")
            dp = tl.dot(v_tile, dout_tile.T, input_precision="tf32x3")
            ds = p * (dp - row_delta[None, :])
            dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="tf32x3")
            first += TILES[t]
        # finish and store
        dk_acc *= scale
        if COSINE:
            dk_acc, _ = unnormalise(dk_acc, k_raw, eps)
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
    """The token whose offset is the smallest one plus a number; -1 if there is none.

    After all of them stands the smallest one.
    """
    find_tokens(tokens, offsets, tl.program_id(0), num_tokens, size, TILE, WIDTH)


@triton.jit
def find_tokens(
    tokens, offsets, tile, num_tokens, size, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The same for a tile of numbers."""
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
    """Sum the bias's gradient over the pairs of tokens that share a row of the table.

    Of the pairs that are asked for few are there: what counts is how many are on their way.
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
