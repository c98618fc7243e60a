"""What the gradients' kernels on Hopper subtract: a row's pivot and its δ."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import hopper_plan
from .hopper_marks import EARLY

__all__ = ["make_deltas"]

PIECE = tl.constexpr(hopper_plan.PIECE)


@triton.jit
def make_deltas(
    pivot,  # float32 [num_windows * NUM_HEADS, PADDED], like delta
    delta,
    out,  # [num_windows, NUM_TOKENS, NUM_HEADS, HEAD_SIZE]
    dout,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE]
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like dlse
    dlse,
    dout_window,
    dout_head,
    dout_token,
    pivot_scale,  # log2(e), or a little off: see ``score_type``
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
):
    """``lse`` in powers of two, 0 of a row that saw no key; δ = Σ dO ∘ O - dlse. 0 past the end.

    In float16, of every piece: what is added to scores in two numbers, and -δ (``hopper_changes``).
    A piece is in the order in which threads take its columns: 0, 1, 8, 9, 16, 17, 24, 25, 2, 3, ...
    """
    if EARLY:
        gdc_launch_dependents()
    TILES: tl.constexpr = (PADDED + TILE - 1) // TILE
    pair = (tl.program_id(0) // TILES).to(tl.int64)
    token = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    is_token = token < NUM_TOKENS
    d = tl.arange(0, D)
    inside = is_token[:, None] & (d < HEAD_SIZE)[None, :]
    window, head = pair // NUM_HEADS, pair % NUM_HEADS
    at = ((window * NUM_TOKENS + token) * NUM_HEADS + head) * HEAD_SIZE
    mine = tl.load(out + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = window * dout_window + head * dout_head + token * dout_token
    back = tl.load(dout + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    row_delta = tl.sum(mine * back, 1)
    row_lse = tl.load(lse + pair * NUM_TOKENS + token, mask=is_token, other=0.0)
    if HAS_DLSE:
        row_delta -= tl.load(dlse + pair * NUM_TOKENS + token, mask=is_token, other=0.0)
    row_pivot = tl.where(row_lse == float("-inf"), 0.0, row_lse * pivot_scale)
    is_row = token < PADDED
    inner = token % 32
    place = token - inner + inner % 2 + inner // 8 * 2 + inner // 2 % 4 * 8
    if out.dtype.element_ty == tl.float16:
        at = 2 * (pair * PADDED + place // PIECE * PIECE) + place % PIECE
        high = (-row_pivot).to(tl.float16)
        low = (-row_pivot - high.to(tl.float32)).to(tl.float16)
        pivots = pivot.to(tl.pointer_type(tl.float16))
        tl.store(pivots + at, high, mask=is_row)
        tl.store(pivots + at + PIECE, low, mask=is_row)
        deltas = delta.to(tl.pointer_type(tl.float16))
        tl.store(deltas + at, (-row_delta).to(tl.float16), mask=is_row)
    else:
        tl.store(pivot + pair * PADDED + place, row_pivot, mask=is_row)
        tl.store(delta + pair * PADDED + place, row_delta, mask=is_row)
    if EARLY:
        gdc_wait()  # see ``hopper_launch``
