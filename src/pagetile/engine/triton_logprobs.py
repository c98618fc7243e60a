"""The Triton kernel that reports log-probabilities: rank, log-sum-exp and the likeliest tokens.

``score_kernel`` leaves the best logit of each tile of the vocabulary and the sum of exponentials.
The likeliest tokens come out one by one: the tile with the best one left is searched for it, and
for what is best in it then::

    tiles' bests   7  3  9  8  1      9, searched: then 5 is best in that tile
                   7  3  5  8  1      8, ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import NUM_INTS, NUM_LOGPROBS, from_order, load_logits, order_of

RANK_TILE = tl.constexpr(16384)
NONE_LEFT = tl.constexpr(-(2**31))  # below the order of -inf


@triton.jit
def report_kernel(
    # outputs
    report,  # int32 [n, 2 + 2 * MAX_TOP]: see read_logprobs
    # inputs
    chosen,  # int64 [n]
    bests,  # float32 [n, NUM_TILES]: the largest logit of each tile
    sums,  # float32 [n, NUM_TILES]: of exp(logit - best)
    logits,  # [n, vocab_size]
    rows,  # int32 or int64 [n]
    ints,  # int32 [num_rows, NUM_INTS]
    # scalars
    stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    MAX_TOP: tl.constexpr,
):
    """Write a row's log-probabilities if it asks for them; a program a row."""
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    num_top = tl.load(ints + row * NUM_INTS + NUM_LOGPROBS)
    if num_top < 0:
        return
    # Log-sum-exp.
    tiles = tl.arange(0, NUM_TILES)
    is_tile = tiles < num_tiles
    best = tl.load(bests + i * NUM_TILES + tiles, mask=is_tile, other=-float("inf"))
    total = tl.load(sums + i * NUM_TILES + tiles, mask=is_tile, other=0.0)
    top = tl.max(best, 0)
    lse = tl.log(tl.sum(total.to(tl.float64) * tl.exp((best - top).to(tl.float64)), 0)) + top
    # The token's rank: how many logits are at least as large.
    line = logits + i.to(tl.int64) * stride
    own = tl.load(line + tl.load(chosen + i)).to(tl.float32)
    at_least = 0
    for start in range(0, vocab_size, RANK_TILE):
        at = start + tl.arange(0, RANK_TILE)
        x = load_logits(at, at < vocab_size, i, logits, stride)
        at_least += tl.sum(((x >= own) & (at < vocab_size)).to(tl.int32), 0)
    out = report + i.to(tl.int64) * (2 + 2 * MAX_TOP)
    tl.store(out, at_least)
    tl.store((out + 1 + MAX_TOP).to(tl.pointer_type(tl.float32)), (own - lse).to(tl.float32))
    # The likeliest tokens, of equals the lowest id first.
    left = tl.where(is_tile, order_of(best), NONE_LEFT)
    last_order, last_token = 2147483647, -1
    for j in range(tl.minimum(num_top, MAX_TOP)):
        order = tl.max(left, 0)
        tile = tl.min(tl.where(left == order, tiles, 2147483647), 0)
        at = tile * TILE + tl.arange(0, TILE)
        orders = order_of(load_logits(at, at < vocab_size, i, logits, stride))
        orders = tl.where(at < vocab_size, orders, NONE_LEFT)
        is_next = (orders == order) & ((order != last_order) | (at > last_token))
        token = tl.min(tl.where(is_next, at, 2147483647), 0)
        is_left = (orders < order) | ((orders == order) & (at > token))
        rest = tl.max(tl.where(is_left, orders, NONE_LEFT), 0)
        left = tl.where(tiles == tile, rest, left)
        last_order, last_token = order, token
        value = (from_order(order).to(tl.float64) - lse).to(tl.float32)
        tl.store(out + 1 + j, token)
        tl.store((out + 2 + MAX_TOP + j).to(tl.pointer_type(tl.float32)), value)
