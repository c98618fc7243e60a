"""Window attention forward in Triton: a program keeps its tile's bias and visits many windows.

::

    s = (scale q) kᵀ + B + M        out = softmax(s) v        lse = log Σ exp s

A program owns one head and ``TILE_M`` tokens, and takes every ``num_chunks``-th window. The bias
of its tile is the same in all of them and is loaded once. Keys and values are loaded two windows
ahead::

    program (tokens 64…127, head 1):   window 5      window 5 + num_chunks     …
                                       k0 k1 k2 …    k0 k1 k2 …
                                       └ online softmax over a row's tiles, all unrolled

Grid: tiles of tokens × heads × chunks of windows. Programs of one window are neighbours, so all but
the first read its keys from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....tiles.triton.online_softmax import finish, update_softmax
from .tiles import (
    RELOADED,
    head_scale,
    load_bias_tiles,
    load_mask_flag,
    load_rows,
    normalise,
    score_tile,
)


@triton.jit
def attend(
    out,  # [num_windows, NUM_TOKENS, num_heads, HEAD_SIZE]
    lse,  # float32 [num_windows, num_heads, NUM_TOKENS]
    q,  # [num_windows, num_heads, NUM_TOKENS, HEAD_SIZE], like k and v
    k,
    v,
    bias,  # [table_size, num_heads] or [num_biases, num_heads, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    needs_mask,  # int32 [num_masks]
    mask,  # integers [num_masks, NUM_TOKENS] or floating [num_masks, NUM_TOKENS, NUM_TOKENS]
    logit_scale,  # [num_heads]
    num_heads,
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
    """See the module docstring."""
    # which tile am I
    program = tl.program_id(0)
    NUM_TILES: tl.constexpr = (NUM_TOKENS + TILE_M - 1) // TILE_M
    rows = program % NUM_TILES * TILE_M + tl.arange(0, TILE_M)
    head = program // NUM_TILES % num_heads
    chunk = program // (NUM_TILES * num_heads)
    is_row = rows < NUM_TOKENS
    q, k, v = q + head * q_head, k + head * k_head, v + head * v_head
    bias += chunk % num_biases * bias_window
    scale = head_scale(logit_scale, softmax_scale, head, COSINE)
    bias_tiles = load_bias_tiles(
        bias, offsets, rows, 0, head, centre, TILES, BIAS_CACHE, num_heads, NUM_TOKENS, BIAS, False
    )
    for window in tl.range(chunk, num_windows, num_chunks, num_stages=STAGES):
        # load q
        q_tile = load_rows(q + window * q_window, rows, q_token, D, HEAD_SIZE, NUM_TOKENS)
        q_tile = normalise(q_tile, eps, COSINE)
        mask_at = mask + window % num_masks * mask_window
        is_masked = load_mask_flag(needs_mask, window % num_masks, MASK, len(TILES) == 1)
        # tiles
        m = tl.full([TILE_M], float("-inf"), tl.float32)
        l = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, D], tl.float32)
        first = 0
        for t in tl.static_range(len(TILES)):
            keys = first + tl.arange(0, TILES[t])
            k_tile = load_rows(k + window * k_window, keys, k_token, D, HEAD_SIZE, NUM_TOKENS)
            v_tile = load_rows(v + window * v_window, keys, v_token, D, HEAD_SIZE, NUM_TOKENS)
            k_tile = normalise(k_tile, eps, COSINE)
            s = score_tile(
                q_tile, k_tile, scale, 0 if BIAS_CACHE == RELOADED else bias_tiles[t], bias,
                offsets, mask_at, is_masked, rows, keys, head, centre, mask_value, mask_row,
                num_heads, NUM_TOKENS, BIAS, MASK, BIAS_CACHE, False,
            )  # fmt: skip
            p, decay, m, l = update_softmax(s, m, l)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="tf32x3")
            first += TILES[t]
        # finish and store
        result, row_lse = finish(m, l, acc)
        d = tl.arange(0, D)
        at = out + window * out_window + (rows[:, None] * num_heads + head) * HEAD_SIZE + d[None, :]
        inside = is_row[:, None] & (d < HEAD_SIZE)[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=inside)
        tl.store(lse + window * lse_window + head * NUM_TOKENS + rows, row_lse, mask=is_row)
