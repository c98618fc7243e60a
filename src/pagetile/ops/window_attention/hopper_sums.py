"""The sum over all windows of a bias's gradient, from the sums of each program.

Those lie as threads hold them, so that each writes 16 bytes beside its neighbour's: an odd number
of tokens would leave rows of the matrix anywhere, and single numbers to be written. Here they are
read in whole lines, and what is left of them, one matrix a head, is put in order. What else the
gradient of a table is made from, some programs find meanwhile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from . import hopper_plan
from .hopper_marks import EARLY
from .triton_backward import find_tokens

__all__ = ["sum_tiles"]

PIECE = tl.constexpr(hopper_plan.PIECE)
KEYS = tl.constexpr(hopper_plan.SUM_KEYS)
NUMBERS = tl.constexpr(hopper_plan.SUM_OFFSETS)


@triton.jit
def sum_tiles(
    dbias,  # float32 [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    tokens,  # int32 [size + 1], see ``invert_offsets``; of no table not written
    sums,  # float32 [num_chunks, NUM_HEADS, tiles of rows, tiles of keys, PIECE * KEYS]
    offsets,  # int32 [NUM_TOKENS]
    num_chunks,
    size,  # -1 without a table
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    MOST: tl.constexpr,  # chunks at once
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: parts of a tile × tiles of keys × tiles of rows × heads, and of a table's numbers."""
    PARTS: tl.constexpr = PIECE * KEYS // TILE
    KEY_TILES: tl.constexpr = (NUM_TOKENS + KEYS - 1) // KEYS
    ROW_TILES: tl.constexpr = (NUM_TOKENS + PIECE - 1) // PIECE
    PROGRAMS: tl.constexpr = NUM_HEADS * ROW_TILES * KEY_TILES * PARTS
    program = tl.program_id(0)
    if program >= PROGRAMS:
        find_tokens(tokens, offsets, program - PROGRAMS, NUM_TOKENS, size, NUMBERS, WIDTH)
    else:
        place = tl.arange(0, TILE)
        at = sums + program * TILE + place
        total = tl.zeros([TILE], tl.float32)
        for first in range(0, num_chunks, MOST):
            chunk = first + tl.arange(0, MOST)
            some = at[None, :] + (chunk.to(tl.int64) * (PROGRAMS * TILE))[:, None]
            is_there = (chunk < num_chunks)[:, None]
            # Past the first-level cache: this kernel may begin before the one before has ended.
            total += tl.sum(tl.load(some, mask=is_there, other=0.0, cache_modifier=".cg"), 0)
        # The order of ``store_sums``: eight keys after another, and of these sixteen rows a warp.
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
