"""Regions as kernels on Hopper ask for them.

As columns of ones, for the products that mask (``hopper_forward``), and as bits, for windows of
one tile (``hopper_one_tile``).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...tiles.triton.launch import INTERPRETED
from . import hopper_plan

__all__ = ["mark_regions", "match_regions"]

EARLY = tl.constexpr(not INTERPRETED)  # whether the kernel after this one may begin
MOST = tl.constexpr(hopper_plan.MOST_REGIONS)
MIXED = tl.constexpr(hopper_plan.MIXED)
MANY = tl.constexpr(hopper_plan.MANY)
PIECE = tl.constexpr(hopper_plan.PIECE)
WORDS = tl.constexpr(hopper_plan.WORDS)


@triton.jit
def mark_regions(
    kinds,  # int32 [num_masks]: 0 of one region, MIXED, or MANY of more than ``limit``
    marks,  # float16 [num_masks, NUM_TOKENS, 4 * MOST], of windows that are MIXED
    regions,  # integers [num_masks, NUM_TOKENS]
    factor,  # of float16: what is taken from a score between regions
    limit,  # regions of a window that marks are for
    NUM_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rank the regions of a window.

    Columns of keys: a one for its region, and one that all have. Of queries: factor times a one
    for its region, less ``factor``. Their products are 0 within a region and -factor across.
    """
    if EARLY:
        gdc_launch_dependents()
    window = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TILE)
    inside = token < NUM_TOKENS
    first = tl.load(regions + window * NUM_TOKENS).to(tl.int64)
    region = tl.load(regions + window * NUM_TOKENS + token, mask=inside, other=0).to(tl.int64)
    region = tl.where(inside, region, first)
    largest = tl.max(region, 0)
    least = tl.min(region, 0)
    kind = 0
    if least < largest:
        rank = tl.zeros([TILE], tl.int32)
        count = 1
        while (least < largest) & (count < MOST):
            rank += (region > least).to(tl.int32)
            least = tl.min(tl.where(region > least, region, largest), 0)
            count += 1
        count += (least < largest).to(tl.int32)
        kind = tl.where(count > limit, MANY, MIXED)
        place = tl.arange(0, 4 * MOST)
        column = place % (2 * MOST)
        of_query = tl.where(column < MOST, factor, -factor)
        value = tl.where(place < 2 * MOST, 1.0, of_query)
        is_mine = (rank[:, None] == column[None, :]) | (column == MOST)[None, :]
        at = (window * NUM_TOKENS + token) * (4 * MOST)
        marked = tl.where(is_mine, value[None, :], 0.0).to(tl.float16)
        tl.store(marks + at[:, None] + place[None, :], marked, mask=inside[:, None])
    tl.store(kinds + window, kind)


@triton.jit
def match_regions(
    words,  # int32 [num_masks, WORDS]
    regions,  # integers [num_masks, NUM_TOKENS], up to PIECE tokens
    NUM_TOKENS: tl.constexpr,
):
    """For each query of a window, a bit for every key: whether they are of one region.

    Two words a query, and then whether there are several regions.
    """
    if EARLY:
        gdc_launch_dependents()
    window = tl.program_id(0).to(tl.int64)
    row, half, bit = tl.arange(0, PIECE), tl.arange(0, 2), tl.arange(0, 32)
    column = half[:, None] * 32 + bit[None, :]
    regions += window * NUM_TOKENS
    mine = tl.load(regions + row, mask=row < NUM_TOKENS, other=0)
    theirs = tl.load(regions + column, mask=column < NUM_TOKENS, other=0)
    # Queries past the end are of every region: what a mask adds is not to make weights of them.
    is_one = (mine[:, None, None] == theirs[None, :, :]) | (row >= NUM_TOKENS)[:, None, None]
    word = tl.sum(tl.where(is_one, (1 << bit)[None, None, :], 0), 2)
    words += window * WORDS
    tl.store(words + row[:, None] * 2 + half[None, :], word)
    first = tl.load(regions)
    tl.store(words + 2 * PIECE, tl.max(((mine != first) & (row < NUM_TOKENS)).to(tl.int32), 0))
