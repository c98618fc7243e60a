"""The Triton kernel that keeps to top_k, top_p and min_p.

Nothing is sorted. ``A(v)`` is the amount of tokens whose logit is larger than v: their number for
top_k, the sum of their likelihoods for top_p. A token is kept if what lies above it is less than
what is needed. A row's token was drawn from all tokens; one pass finds A of its logit, and if it is
kept, that is all: nine times in ten for top_p=0.9.

Otherwise the edge is searched for, the smallest logit v with ``A(v) < need``. Each pass over the
row computes A at four pivots and keeps the piece between two of them that holds the edge::

    v       lo ─────── p1 ─────── p2 ─────── p3 ─────── p4 ─────── hi
    A(v)       >= need    >= need    <  need    <  need
                                  └── lo ──── hi ──┘                   the next pass

The same pass finds the smallest and the largest logit between lo and hi, which ends the search as
soon as they are the same. Then the token is drawn anew, from those that are kept.

Logits are compared as integers (``order_of``), so the edge is exact. Likelihoods are integers, too:
2**40 units for the best token, from float32 exponentials. Sums are exact in any order, and what a
row draws does not depend on its batch. One program a row; its threads sum for themselves until a
pass is over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import (
    INVERSE,
    MARGIN,
    NUM_FLOATS,
    NUM_INTS,
    TAIL,
    TOP_K,
    advance,
    from_order,
    has_cut,
    load_logits,
    make_noise,
    order_of,
    position_of,
    shape_logits,
)

ONE = tl.constexpr(2.0**40)  # units of the likeliest token
LOWEST = tl.constexpr(-(2**31))  # below the order of every float
HIGHEST = tl.constexpr(2**31 - 1)
FARTHEST = tl.constexpr(32.0)
"""exp(-FARTHEST) is less than half a unit."""


@triton.jit
def _load(start, source, scalars, THREADS: tl.constexpr, EACH: tl.constexpr):
    """Logits of a tile, ``[THREADS, EACH]``, and nothing past the vocabulary."""
    i, _, _, logits, _, _, _ = source
    stride, vocab_size, _ = scalars
    at = start + tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    line = logits + i.to(tl.int64) * stride
    return tl.load(line + at, mask=at < vocab_size, other=-float("inf"))


@triton.jit
def _orders(x, start, source, scalars, step_masks, THREADS: tl.constexpr, EACH: tl.constexpr):
    """What was loaded as orders, after penalties and bans; LOWEST past the vocabulary."""
    i, row, position, _, ints, floats, addresses = source
    _, vocab_size, num_words = scalars
    at = start + tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    is_token = at < vocab_size
    x = shape_logits(
        x.to(tl.float32), at, is_token, i, row, position, ints, floats, addresses,
        step_masks, num_words,
    )  # fmt: skip
    return tl.where(is_token, order_of(x), LOWEST)


@triton.jit
def _units(orders, least, best, inverse):
    """Likelihoods in units, int64; 0 below the order ``least``."""
    units = tl.exp((from_order(tl.maximum(orders, least)) - best) * inverse) * ONE
    return tl.where(orders >= least, (units + 0.5).to(tl.int64), 0)


@triton.jit
def _needed(total, tail):
    """The units that top_p = 1 - ``tail`` needs of all."""
    return tl.maximum(total - (tail * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _pivot(lo, hi, low, width, by_value, fifths):
    """An order strictly between ``lo`` and ``hi``: evenly spaced by value, or by order."""
    value = order_of(low + width * (0.2 * fifths)).to(tl.int64)
    found = tl.where(by_value, value, lo + (hi - lo) * fifths // 5)
    return tl.minimum(tl.maximum(found, lo + 1), hi - 1).to(tl.int32)


@triton.jit
def _first_pivot(lo, hi, distance):
    """An order strictly between ``lo`` and ``hi``, at a distance from the best logit."""
    found = order_of(from_order(hi.to(tl.int32)) - distance).to(tl.int64)
    return tl.minimum(tl.maximum(found, lo + 1), hi - 1).to(tl.int32)


@triton.jit
def _search(
    source,
    scalars,
    step_masks,
    lo,  # int64: an order with A(lo) >= need, so below every token that counts
    hi,  # int64: the best order, A(hi) = 0
    need,  # int64; found by the first pass if BY_COUNT is false
    tail,  # float64: the share of all likelihoods that is not needed
    span,  # float32: a first step from the best logit
    least,  # int32: the amount of smaller orders is 0
    best,  # float32
    inverse,  # float32
    BY_COUNT: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """The smallest order whose A is less than ``need``, or one between two logits there."""
    num_passes = 0
    lowest = order_of(tl.full((), -float("inf"), tl.float32))
    while hi - lo > 1:
        # The first pass goes down from the best logit, and sums up all likelihoods: those above lo.
        p1 = _first_pivot(lo, hi, 16.0 * span)
        if not BY_COUNT:
            p1 = lo.to(tl.int32)
        p2 = _first_pivot(lo, hi, 8.0 * span)
        p3 = _first_pivot(lo, hi, 3.0 * span)
        p4 = _first_pivot(lo, hi, span)
        if num_passes > 0:
            # Pivots evenly spaced by value need few passes where logits are spread evenly, those
            # evenly spaced by order at most 14 whatever the logits are.
            low = from_order(tl.maximum(lo, lowest).to(tl.int32))
            width = from_order(hi.to(tl.int32)) - low
            by_value = (width < 1024.0) & (num_passes < 12)
            width = tl.where(by_value, width, 0.0)
            p1 = _pivot(lo, hi, low, width, by_value, 1)
            p2 = _pivot(lo, hi, low, width, by_value, 2)
            p3 = _pivot(lo, hi, low, width, by_value, 3)
            p4 = _pivot(lo, hi, low, width, by_value, 4)
        smallest = tl.full((THREADS,), HIGHEST, tl.int32)
        largest = tl.full((THREADS,), LOWEST, tl.int32)
        n1 = tl.zeros((THREADS,), tl.int64)
        n2 = tl.zeros((THREADS,), tl.int64)
        n3 = tl.zeros((THREADS,), tl.int64)
        n4 = tl.zeros((THREADS,), tl.int64)
        ahead = _load(0, source, scalars, THREADS, EACH)
        for start in range(0, scalars[1], THREADS * EACH):
            x = ahead
            ahead = _load(start + THREADS * EACH, source, scalars, THREADS, EACH)
            orders = _orders(x, start, source, scalars, step_masks, THREADS, EACH)
            above = tl.where(orders > lo.to(tl.int32), orders, HIGHEST)
            below = tl.where(orders <= hi.to(tl.int32), orders, LOWEST)
            smallest = tl.minimum(smallest, tl.min(above, 1))
            largest = tl.maximum(largest, tl.max(below, 1))
            if BY_COUNT:
                n1 += tl.sum((orders > p1).to(tl.int32), 1)
                n2 += tl.sum((orders > p2).to(tl.int32), 1)
                n3 += tl.sum((orders > p3).to(tl.int32), 1)
                n4 += tl.sum((orders > p4).to(tl.int32), 1)
            else:
                units = _units(orders, least, best, inverse)
                n1 += tl.sum(tl.where(orders > p1, units, 0), 1)
                n2 += tl.sum(tl.where(orders > p2, units, 0), 1)
                n3 += tl.sum(tl.where(orders > p3, units, 0), 1)
                n4 += tl.sum(tl.where(orders > p4, units, 0), 1)
        if not BY_COUNT:
            need = tl.where(num_passes == 0, _needed(tl.sum(n1, 0), tail), need)
        reached1, reached2 = tl.sum(n1, 0) >= need, tl.sum(n2, 0) >= need
        reached3, reached4 = tl.sum(n3, 0) >= need, tl.sum(n4, 0) >= need
        # No logit lies between lo and the smallest, nor between the largest and hi.
        lo = tl.maximum(lo, tl.min(smallest, 0).to(tl.int64) - 1)
        hi = tl.minimum(hi, tl.max(largest, 0).to(tl.int64))
        lo = tl.maximum(lo, tl.where(reached1, p1.to(tl.int64), lo))
        lo = tl.maximum(lo, tl.where(reached2, p2.to(tl.int64), lo))
        lo = tl.maximum(lo, tl.where(reached3, p3.to(tl.int64), lo))
        lo = tl.maximum(lo, tl.where(reached4, p4.to(tl.int64), lo))
        hi = tl.minimum(hi, tl.where(reached1, hi, p1.to(tl.int64)))
        hi = tl.minimum(hi, tl.where(reached2, hi, p2.to(tl.int64)))
        hi = tl.minimum(hi, tl.where(reached3, hi, p3.to(tl.int64)))
        hi = tl.minimum(hi, tl.where(reached4, hi, p4.to(tl.int64)))
        num_passes += 1
    return hi.to(tl.int32)


@triton.jit
def _order_at_least(value):
    """The order of the smallest float32 that is no less than a float64."""
    rounded = value.to(tl.float32)
    return order_of(rounded) + (rounded.to(tl.float64) < value).to(tl.int32)


@triton.jit
def _least_order(best, floats, row):
    """The smallest order that min_p keeps; that of -inf without it."""
    numbers = floats + row * NUM_FLOATS
    return _order_at_least(best.to(tl.float64) + tl.load(numbers + MARGIN))


@triton.jit
def find_edge(source, scalars, step_masks, best, THREADS: tl.constexpr, EACH: tl.constexpr):
    """The order of the smallest logit that is kept, of a row whose largest logit is finite."""
    _, row, _, _, ints, floats, _ = source
    _, vocab_size, _ = scalars
    top_k = tl.load(ints + row * NUM_INTS + TOP_K)
    tail = tl.load(floats + row * NUM_FLOATS + TAIL)
    inverse = tl.load(floats + row * NUM_FLOATS + INVERSE).to(tl.float32)
    hi = order_of(best).to(tl.int64)
    edge = order_of(tl.full((), -float("inf"), tl.float32))
    if top_k < vocab_size:
        edge = _search(
            source, scalars, step_masks, edge.to(tl.int64) - 1, hi, top_k.to(tl.int64), tail, 1.0,
            edge, best, inverse, True, THREADS, EACH,
        )  # fmt: skip
    if tail > 0:
        least = tl.maximum(edge, order_of(best - FARTHEST / inverse))
        edge = _search(
            source, scalars, step_masks, least.to(tl.int64) - 1, hi, hi * 0, tail, 1.0 / inverse,
            least, best, inverse, False, THREADS, EACH,
        )  # fmt: skip
    return tl.maximum(edge, _least_order(best, floats, row))


@triton.jit
def _is_kept(source, scalars, step_masks, order, best, THREADS: tl.constexpr, EACH: tl.constexpr):
    """Whether an order is kept, in one pass; with top_k and top_p together it may be nevertheless.

    Then top_p's share is one of what top_k keeps. That is at least the order and what lies above.
    """
    _, row, _, _, ints, floats, _ = source
    _, vocab_size, _ = scalars
    top_k = tl.load(ints + row * NUM_INTS + TOP_K)
    tail = tl.load(floats + row * NUM_FLOATS + TAIL)
    inverse = tl.load(floats + row * NUM_FLOATS + INVERSE).to(tl.float32)
    # The best token is always kept, and any that min_p alone keeps.
    is_kept = (order >= order_of(best)) | ((top_k >= vocab_size) & (tail <= 0))
    if is_kept == 0:
        least = order_of(best - FARTHEST / inverse)
        counted = tl.where(top_k < vocab_size, tl.maximum(order, least), least)
        number = tl.zeros((THREADS,), tl.int32)
        above = tl.zeros((THREADS,), tl.int64)
        total = tl.zeros((THREADS,), tl.int64)
        ahead = _load(0, source, scalars, THREADS, EACH)
        for start in range(0, scalars[1], THREADS * EACH):
            x = ahead  # the next tile is on its way while this one is looked at
            ahead = _load(start + THREADS * EACH, source, scalars, THREADS, EACH)
            orders = _orders(x, start, source, scalars, step_masks, THREADS, EACH)
            units = _units(orders, counted, best, inverse)
            number += tl.sum((orders > order).to(tl.int32), 1)
            above += tl.sum(tl.where(orders > order, units, 0), 1)
            total += tl.sum(units, 1)
        need = _needed(tl.sum(total, 0), tail)
        is_kept = (tail <= 0) | (tl.sum(above, 0) < need)
        is_kept &= (top_k >= vocab_size) | (tl.sum(number, 0) < top_k)
    return is_kept


@triton.jit
def _draw_above(edge, source, scalars, step_masks, best, THREADS: tl.constexpr, EACH: tl.constexpr):
    """The token with the largest score whose order is at least ``edge``."""
    _, row, position, _, ints, floats, _ = source
    inverse = tl.load(floats + row * NUM_FLOATS + INVERSE).to(tl.float32)
    largest = tl.full((THREADS,), -float("inf"), tl.float32)
    tokens = tl.full((THREADS,), HIGHEST, tl.int32)
    ahead = _load(0, source, scalars, THREADS, EACH)
    for start in range(0, scalars[1], THREADS * EACH):
        x = ahead
        ahead = _load(start + THREADS * EACH, source, scalars, THREADS, EACH)
        orders = _orders(x, start, source, scalars, step_masks, THREADS, EACH)
        at = start + tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        noise = make_noise(at, row, position, ints)
        scores = (from_order(tl.maximum(orders, edge)) - best) * inverse - tl.log(noise)
        scores = tl.where(orders >= edge, scores, -float("inf"))
        top = tl.max(scores, 1)
        first = tl.min(tl.where(scores == top[:, None], at, HIGHEST), 1)
        tokens = tl.where(top > largest, first, tokens)
        largest = tl.maximum(top, largest)
    found = tl.min(tl.where(largest == tl.max(largest, 0), tokens, HIGHEST), 0)
    return tl.minimum(found, scalars[1] - 1)  # whatever it is, it is a token


@triton.jit
def cut_kernel(
    # outputs
    chosen,  # int64 [n]: what was drawn from all tokens, replaced if it is not kept
    last_tokens,  # int64 [num_rows]
    # inputs
    largest,  # float32 [n]: the largest logit
    logits,  # [n, vocab_size]
    step_masks,  # int32 [n, num_words], or None
    rows,  # int32 or int64 [n]
    lengths,  # int32 [num_rows]: written, as are a row's counts
    ints,  # int32 [num_rows, NUM_INTS]
    floats,  # float64 [num_rows, NUM_FLOATS]
    addresses,  # int64 [num_rows, NUM_TABLES]
    # scalars
    stride,
    vocab_size,
    num_words,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Give a row with cuts a token that they keep; a program a row."""
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    if has_cut(row, ints, floats, vocab_size) == 0:
        return
    best, token = tl.load(largest + i), tl.load(chosen + i)
    if tl.abs(best) < float("inf"):  # or else the row fails
        position = position_of(row, lengths, ints)
        source = i, row, position, logits, ints, floats, addresses
        scalars = stride, vocab_size, num_words
        x = load_logits(token, token < vocab_size, i, logits, stride)
        x = shape_logits(
            x, token, token < vocab_size, i, row, position, ints, floats, addresses,
            step_masks, num_words,
        )  # fmt: skip
        order = order_of(x)
        is_kept = order >= _least_order(best, floats, row)
        if is_kept:
            is_kept = _is_kept(source, scalars, step_masks, order, best, THREADS, EACH)
        if is_kept == 0:
            edge = find_edge(source, scalars, step_masks, best, THREADS, EACH)
            found = _draw_above(edge, source, scalars, step_masks, best, THREADS, EACH)
            token = found.to(tl.int64)
            tl.store(chosen + i, token)
    tl.debug_barrier()  # every warp has read the row, and decided the same
    advance(row, token, last_tokens, lengths, addresses)
