"""The sum over all windows of a bias's gradient, from the sums of each program by rows.

Those lie as threads hold them, so that each writes 16 bytes beside its neighbour's: an odd number
of tokens would leave rows of the matrix anywhere, and single numbers to be written. Here they are
read in whole lines, and what is left of them, one matrix a head, is put in order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from . import hopper_plan
from .hopper_marks import EARLY

__all__ = ["sum_tiles"]

PIECE = tl.constexpr(hopper_plan.PIECE)
KEYS = tl.constexpr(hopper_plan.SUM_KEYS)


@triton.jit
def sum_tiles(
    dbias,  # float32 [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    sums,  # float32 [num_chunks, NUM_HEADS, tiles of rows, tiles of keys, PIECE * KEYS]
    num_chunks,
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    MOST: tl.constexpr,  # chunks at once
    TILE: tl.constexpr,
):
    """Grid: parts of a tile × tiles of keys × tiles of rows × heads."""
    PARTS: tl.constexpr = PIECE * KEYS // TILE
    KEY_TILES: tl.constexpr = (NUM_TOKENS + KEYS - 1) // KEYS
    ROW_TILES: tl.constexpr = (NUM_TOKENS + PIECE - 1) // PIECE
    SIZE: tl.constexpr = NUM_HEADS * ROW_TILES * KEY_TILES * PIECE * KEYS
    program = tl.program_id(0)
    place = tl.arange(0, TILE)
    at = sums + program * TILE + place
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, num_chunks, MOST):
        chunk = first + tl.arange(0, MOST)
        some = at[None, :] + (chunk.to(tl.int64) * SIZE)[:, None]
        is_there = (chunk < num_chunks)[:, None]
        # Past the first-level cache: this kernel begins before the one before has ended.
        total += tl.sum(tl.load(some, mask=is_there, other=0.0, cache_modifier=".cg"), 0)
    # The order of ``hopper_rows``: eight keys after another, and of these sixteen rows a warp.
    place += program % PARTS * TILE
    row = place // 128 % 4 * 16 + place // 2 % 2 * 8 + place // 16 % 8
    key = place // (8 * PIECE) * 8 + place // 4 % 4 * 2 + place % 2
    tile = program // PARTS
    key += tile % KEY_TILES * KEYS
    row += tile // KEY_TILES % ROW_TILES * PIECE
    head = tile // (KEY_TILES * ROW_TILES)
    inside = (row < NUM_TOKENS) & (key < NUM_TOKENS)
    tl.store(dbias + (head * NUM_TOKENS + row) * NUM_TOKENS + key, total, mask=inside)
    if EARLY:
        gdc_wait()  # see ``hopper_launch``
