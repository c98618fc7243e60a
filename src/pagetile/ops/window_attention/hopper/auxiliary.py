"""Small Triton kernels before and after the main ones on Hopper.

- ``encode_regions``: regions as one-hot columns, for masks by matrix products (``forward_kernel``);
- ``pack_regions``: regions as bits, for windows of one tile (``one_tile``);
- ``pad_rows``: rows padded to 16 bytes for TMA, if the head size is not a multiple of 8;
- ``make_deltas``: pivot and delta of every query row, for the gradients;
- ``sum_tiles``: the sum of the row kernel's partial bias gradients.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....tiles.triton.launch import INTERPRETED
from ..triton.backward_kernels import find_tokens
from . import constants

USES_PDL = tl.constexpr(not INTERPRETED)
MAX_REGIONS = tl.constexpr(constants.MAX_REGIONS)
ONE_HOT = tl.constexpr(constants.ONE_HOT)
COMPARED = tl.constexpr(constants.COMPARED)
PIECE = tl.constexpr(constants.PIECE)
REGION_WORDS = tl.constexpr(constants.REGION_WORDS)
SUM_KEYS = tl.constexpr(constants.SUM_KEYS)
SUM_OFFSETS = tl.constexpr(constants.SUM_OFFSETS)


@triton.jit
def encode_regions(
    mask_classes,  # int32 [num_masks]: 0 of one region, ONE_HOT, or COMPARED above ``limit``
    one_hot,  # float16 [num_masks, NUM_TOKENS, 4 * MAX_REGIONS], written for ONE_HOT windows
    regions,  # integers [num_masks, NUM_TOKENS]
    factor,  # a float16 number: subtracted from a score between regions
    limit,  # most regions of a window that is masked by a product
    NUM_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rank the regions of a window, and write them as one-hot columns of keys and of queries.

    A key has a one in its region's column, and a one in a column that all keys share; a query has
    ``factor`` in its region's column and ``-factor`` in the shared one. The product of their
    columns is 0 within a region and ``-factor`` between regions.
    """
    if USES_PDL:
        gdc_launch_dependents()
    window = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TILE)
    inside = token < NUM_TOKENS
    first = tl.load(regions + window * NUM_TOKENS).to(tl.int64)
    region = tl.load(regions + window * NUM_TOKENS + token, mask=inside, other=0).to(tl.int64)
    region = tl.where(inside, region, first)
    largest = tl.max(region, 0)
    least = tl.min(region, 0)
    mask_class = 0
    if least < largest:
        rank = tl.zeros([TILE], tl.int32)
        count = 1
        while (least < largest) & (count < MAX_REGIONS):
            rank += (region > least).to(tl.int32)
            least = tl.min(tl.where(region > least, region, largest), 0)
            count += 1
        count += (least < largest).to(tl.int32)
        mask_class = tl.where(count > limit, COMPARED, ONE_HOT)
        place = tl.arange(0, 4 * MAX_REGIONS)
        column = place % (2 * MAX_REGIONS)
        of_query = tl.where(column < MAX_REGIONS, factor, -factor)
        value = tl.where(place < 2 * MAX_REGIONS, 1.0, of_query)
        is_set = (rank[:, None] == column[None, :]) | (column == MAX_REGIONS)[None, :]
        at = (window * NUM_TOKENS + token) * (4 * MAX_REGIONS)
        encoded = tl.where(is_set, value[None, :], 0.0).to(tl.float16)
        tl.store(one_hot + at[:, None] + place[None, :], encoded, mask=inside[:, None])
    tl.store(mask_classes + window, mask_class)


@triton.jit
def pack_regions(
    region_bits,  # int32 [num_masks, REGION_WORDS]
    regions,  # integers [num_masks, NUM_TOKENS], up to PIECE tokens
    NUM_TOKENS: tl.constexpr,
):
    """Write a bit for every query and key of a window: whether they share a region.

    Two words for each query, then a flag: whether the window has several regions.
    """
    if USES_PDL:
        gdc_launch_dependents()
    window = tl.program_id(0).to(tl.int64)
    row, half, bit = tl.arange(0, PIECE), tl.arange(0, 2), tl.arange(0, 32)
    column = half[:, None] * 32 + bit[None, :]
    regions += window * NUM_TOKENS
    row_region = tl.load(regions + row, mask=row < NUM_TOKENS, other=0)
    column_region = tl.load(regions + column, mask=column < NUM_TOKENS, other=0)
    # Padding queries share every key's region, so that no mask_value is added to their scores.
    is_padding = (row >= NUM_TOKENS)[:, None, None]
    is_same = (row_region[:, None, None] == column_region[None, :, :]) | is_padding
    word = tl.sum(tl.where(is_same, (1 << bit)[None, None, :], 0), 2)
    region_bits += window * REGION_WORDS
    tl.store(region_bits + row[:, None] * 2 + half[None, :], word)
    first = tl.load(regions)
    differs = ((row_region != first) & (row < NUM_TOKENS)).to(tl.int32)
    tl.store(region_bits + 2 * PIECE, tl.max(differs, 0))


@triton.jit
def pad_rows(
    padded,  # [num_windows, NUM_HEADS, NUM_TOKENS, PITCH]
    x,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE]
    x_window,
    x_head,
    x_token,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PITCH: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
):
    """Copy rows to a pitch of a multiple of 16 bytes, padded with zeros."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    pair, token = row // NUM_TOKENS, row % NUM_TOKENS
    at = pair // NUM_HEADS * x_window + pair % NUM_HEADS * x_head + token * x_token
    d = tl.arange(0, D)[None, :]
    is_row = (row < num_rows)[:, None]
    value = tl.load(x + at[:, None] + d, mask=is_row & (d < HEAD_SIZE), other=0.0)
    tl.store(padded + row[:, None] * PITCH + d, value, mask=is_row & (d < PITCH))


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
    pivot_scale,  # log2(e), adjusted for the rounding of the scale: see ``score_type``
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
):
    """Compute pivot = lse · log2(e) (0 for a row without keys) and δ = Σ dO ∘ O - dlse.

    Both are 0 past the end. For float16 inputs they are stored as -pivot, in two float16 values,
    and -δ (``softmax``). Each 32 rows are stored in the order in which threads hold the columns of
    an accumulator: 0, 1, 8, 9, 16, 17, 24, 25, 2, 3, ...
    """
    if USES_PDL:
        gdc_launch_dependents()
    TILES: tl.constexpr = (PADDED + TILE - 1) // TILE
    pair = (tl.program_id(0) // TILES).to(tl.int64)
    token = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    is_token = token < NUM_TOKENS
    d = tl.arange(0, D)
    inside = is_token[:, None] & (d < HEAD_SIZE)[None, :]
    window, head = pair // NUM_HEADS, pair % NUM_HEADS
    at = ((window * NUM_TOKENS + token) * NUM_HEADS + head) * HEAD_SIZE
    row_out = tl.load(out + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = window * dout_window + head * dout_head + token * dout_token
    row_dout = tl.load(dout + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    row_delta = tl.sum(row_out * row_dout, 1)
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
    if USES_PDL:
        gdc_wait()  # end after the kernel before: see ``launch``


@triton.jit
def sum_tiles(
    dbias,  # float32 [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    tokens,  # int32 [size + 1], see ``invert_offsets``; not written without a table
    sums,  # float32 [num_chunks, NUM_HEADS, row tiles, key tiles, PIECE * SUM_KEYS]
    offsets,  # int32 [NUM_TOKENS]
    num_chunks,
    size,  # -1 without a table
    NUM_HEADS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks loaded at once
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum the bias gradient over chunks of windows; further programs invert a table's offsets.

    Partial sums are stored in the accumulator's order, 16 bytes a thread, because rows of the
    matrix are unaligned if the number of tokens is odd. This kernel reads whole cache lines and
    writes the total, one matrix a head, in row-major order.
    Grid: parts of a tile × key tiles × row tiles × heads, then programs that invert offsets.
    """
    PARTS: tl.constexpr = PIECE * SUM_KEYS // TILE
    KEY_TILES: tl.constexpr = (NUM_TOKENS + SUM_KEYS - 1) // SUM_KEYS
    ROW_TILES: tl.constexpr = (NUM_TOKENS + PIECE - 1) // PIECE
    PROGRAMS: tl.constexpr = NUM_HEADS * ROW_TILES * KEY_TILES * PARTS
    program = tl.program_id(0)
    if program >= PROGRAMS:
        find_tokens(tokens, offsets, program - PROGRAMS, NUM_TOKENS, size, SUM_OFFSETS, WIDTH)
    else:
        place = tl.arange(0, TILE)
        at = sums + program * TILE + place
        total = tl.zeros([TILE], tl.float32)
        for first in range(0, num_chunks, CHUNKS):
            chunk = first + tl.arange(0, CHUNKS)
            addresses = at[None, :] + (chunk.to(tl.int64) * (PROGRAMS * TILE))[:, None]
            inside = (chunk < num_chunks)[:, None]
            # From L2 (.cg): under PDL this may start before the previous kernel ends, and L1 could
            # hold stale lines.
            total += tl.sum(tl.load(addresses, mask=inside, other=0.0, cache_modifier=".cg"), 0)
        # The order of ``store_bias_sums``: groups of eight keys, in each the 16 rows of every warp.
        place += program % PARTS * TILE
        row = place // 128 % 4 * 16 + place // 2 % 2 * 8 + place // 16 % 8
        key = place // (8 * PIECE) * 8 + place // 4 % 4 * 2 + place % 2
        tile = program // PARTS
        key += tile % KEY_TILES * SUM_KEYS
        row += tile // KEY_TILES % ROW_TILES * PIECE
        head = tile // (KEY_TILES * ROW_TILES)
        inside = (row < NUM_TOKENS) & (key < NUM_TOKENS)
        tl.store(dbias + (head * NUM_TOKENS + row) * NUM_TOKENS + key, total, mask=inside)
    if USES_PDL:
        gdc_wait()  # end after the kernel before: see ``launch``
