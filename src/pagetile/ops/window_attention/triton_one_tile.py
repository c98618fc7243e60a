"""All gradients of window attention on a GPU by one kernel, where a window is one tile.

::

    P = exp(S - lse)      dP = dO Vᵀ      dS = P ∘ (dP - δ)      δ = Σ P ∘ dP - dlse
    dQ = scale · dS K     dK = scale · dSᵀ Q     dV = Pᵀ dO      dB = Σ over windows of dS

What ``triton_backward`` finds twice, by rows and by columns, is found once: five products instead
of seven, and each operand is read from memory once.
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
    load_biases,
    load_rows,
    normalise,
    scale_and_add_bias,
    unnormalise,
)


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
    mixed,  # not read: one tile is masked sooner than it is asked
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
    TILE_M: tl.constexpr,
    TILES: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of a head of a chunk of windows."""
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
    kept = load_biases(
        bias, offsets, rows, 0, head, centre, TILES, KEPT, NUM_HEADS, NUM_TOKENS, BIAS, False
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
        # Rows past the end have no weights, whatever a mask adds to them.
        pivot = find_pivot(tl.load(lse + row_at, mask=is_row, other=float("inf")))
        # weights
        q_tile, k_tile = normalise(q_raw, eps, COSINE), normalise(k_raw, eps, COSINE)
        s = tl.dot(q_tile, k_tile.T, input_precision="tf32x3")
        s = scale_and_add_bias(
            s, scale * LOG2_E, 0 if KEPT == NOWHERE else kept[0], bias, offsets, rows, rows,
            head, centre, KEPT, NUM_HEADS, NUM_TOKENS, BIAS, False,
        )  # fmt: skip
        mask_at = mask + window % num_masks * mask_window
        s = add_mask(s, mask_at, 1, rows, rows, mask_value, mask_row, NUM_TOKENS, MASK, False)
        p = tl.exp2(s - pivot[:, None])
        # scores
        dp = tl.dot(dout_tile, v_tile.T, input_precision="tf32x3")
        # All of a row is here: its δ needs no result, rounded as that is, and the gradient of a
        # row of scores is 0 in sum, whatever became of its weights.
        total = tl.sum(p, 1)
        delta = tl.sum(p * dp, 1) / tl.where(total > 0.0, total, 1.0)
        if HAS_DLSE:
            delta -= tl.load(dlse + row_at, mask=is_row, other=0.0)
        ds = p * (dp - delta[:, None])
        if SUMS:
            sums += ds
        # tokens
        weights, changes = p.to(dout_tile.dtype), ds.to(q_tile.dtype)
        dv_tile = tl.dot(weights.T, dout_tile, input_precision="tf32x3")
        dq_tile = tl.dot(changes, k_tile, input_precision="tf32x3") * scale
        dk_tile = tl.dot(changes.T, q_tile, input_precision="tf32x3") * scale
        if COSINE:
            dq_tile, along = unnormalise(dq_tile, q_raw, eps)
            dk_tile, _ = unnormalise(dk_tile, k_raw, eps)
            scale_sum += along
        at = window * out_window + (rows[:, None] * NUM_HEADS + head) * HEAD_SIZE + d[None, :]
        tl.store(dq + at, dq_tile.to(dq.dtype.element_ty), mask=inside)
        tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)
    # what this chunk's windows sum up to
    if SUMS:
        block = (chunk * NUM_HEADS + head).to(tl.int64) * NUM_TOKENS
        sum_at = (block + rows)[:, None] * NUM_TOKENS + rows[None, :]
        tl.store(dbias + sum_at, sums, mask=is_row[:, None] & is_row[None, :])
    if COSINE:
        tl.store(dscale + tl.program_id(0), tl.sum(scale_sum, 0))
