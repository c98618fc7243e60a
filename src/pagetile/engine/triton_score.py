"""The Triton kernel that finds the best score of every tile of a step's logits.

A row that only samples needs the scores of few tiles. The noise E of a token is ``-log(1 - u)``,
which is at least u, and ``log2(u)`` is at least the bits of u, read as a number whose fraction is
the mantissa. So a bound of a score takes two conversions and no logarithm::

    score = (x - best) / temperature - log(E)  <=  (x - best) / temperature - log(2) * bits(u)

A program finds the bounds of ``TILES`` tiles and computes the scores of the one with the largest
bound, then of others whose bound is not below the best score so far, mostly none. The scores of a
tile are the same bits as in rows that ask for more, for which every tile is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import (
    INVERSE,
    NUM_FLOATS,
    NUM_INTS,
    NUM_LOGPROBS,
    NUM_TABLES,
    load_logits,
    make_noise,
    noise_keys,
    noise_words,
    position_of,
    shape_logits,
)

_LOG_2 = 0.6931471805599453
_BAND = 0.01
"""Added to bounds: more than what rounding does to a score that can win, which is above -3."""
LARGEST_BOUND = tl.constexpr(158 * _LOG_2 + _BAND)  # 158 = 127 of a float's exponent, 31 of u
BIT = tl.constexpr(-_LOG_2 / 2**23)  # by which bounds fall for one in a float's bits


@triton.jit
def bound_of(words):
    """At least -log of the noise that belongs to random bits."""
    u = (words & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5  # times 2**-31
    bits = u.to(tl.int32, bitcast=True).to(tl.float32)
    return bits * BIT + LARGEST_BOUND


@triton.jit
def _find_best(x, at, is_token, best, inverse, row, position, ints):
    """The best score of a tile, less the part of its best logit, and its token."""
    score = tl.where(x == best, 0.0, -float("inf"))
    if inverse >= 0:
        noise = make_noise(at, row, position, ints)
        centre = tl.where(tl.abs(best) < float("inf"), best, 0.0)
        score = (x - centre) * inverse - tl.log(noise)
    largest = tl.max(score, 0)
    token = tl.min(tl.where((score == largest) & is_token, at, 2147483647), 0)
    return largest, token


@triton.jit
def _score_tile(
    bests, scores, tokens, raw_bests, sums, logits, step_masks, i, row, tile, position, inverse,
    ints, floats, addresses, stride, vocab_size, num_words,
    NUM_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write all outputs of one tile of a row, whatever its sampling parameters are."""
    at = tile * TILE + tl.arange(0, TILE)
    is_token = at < vocab_size
    x = load_logits(at, is_token, i, logits, stride)
    out = i * NUM_TILES + tile
    if tl.load(ints + row * NUM_INTS + NUM_LOGPROBS) >= 0:
        top = tl.max(x, 0)
        centre = tl.where(top > -float("inf"), top, 0.0)  # no infinity less infinity
        tl.store(raw_bests + out, top)
        tl.store(sums + out, tl.sum(tl.exp(x - centre), 0))
    x = shape_logits(
        x, at, is_token, i, row, position, ints, floats, addresses, step_masks, num_words
    )
    best = tl.max(x, 0)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    score, token = _find_best(x, at, is_token, best, inverse, row, position, ints)
    tl.store(bests + out, tl.where(is_nan, float("nan"), best))
    tl.store(scores + out, score)
    tl.store(tokens + out, token)


@triton.jit
def score_kernel(
    # outputs, of each tile
    bests,  # float32 [n, NUM_TILES]: the largest logit, of a row NaN if any is
    scores,  # float32 [n, NUM_TILES]: the largest score, less the best logit's part
    tokens,  # int32 [n, NUM_TILES]: its token
    raw_bests,  # float32 [n, NUM_TILES]: the model's largest logit, in rows with logprobs
    sums,  # float32 [n, NUM_TILES]: of the model's exp(logit - raw_best), likewise
    # inputs
    logits,  # [n, vocab_size]
    step_masks,  # int32 [n, num_words], or None
    rows,  # int32 or int64 [n]
    lengths,  # int32 [num_rows]
    ints,  # int32 [num_rows, NUM_INTS]
    floats,  # float64 [num_rows, NUM_FLOATS]
    addresses,  # int64 [num_rows, NUM_TABLES]
    # scalars
    stride,
    vocab_size,
    num_words,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a program
    LEAVES_OUT: tl.constexpr,  # whether logits of rows that get no token are left unread
):
    """See the module docstring. Grid: ``(n, programs of TILES tiles)``.

    Tiles whose scores are not computed get -inf, and the program's best logit.
    """
    i, first_tile = tl.program_id(0), tl.program_id(1) * TILES
    if LEAVES_OUT:  # noqa: SIM102 - a constant
        if tl.load(rows + i) < 0:
            return
    if TILES > 1 and step_masks is None:
        # Logits need not wait for the loads that find what the row asks for.
        found = ()
        line = logits + i.to(tl.int64) * stride
        for tile in tl.static_range(TILES):
            at = (first_tile + tile) * TILE + tl.arange(0, TILE)
            ahead = tl.load(line + at, mask=at < vocab_size, other=-float("inf"))
            found += (ahead,)  # type: ignore[assignment]
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    tables = addresses + row * NUM_TABLES
    position = position_of(row, lengths, ints)
    inverse = tl.load(floats + row * NUM_FLOATS + INVERSE).to(tl.float32)
    out = i * NUM_TILES + first_tile
    if TILES > 1 and step_masks is None:
        has_tables = (tl.load(tables) | tl.load(tables + 1) | tl.load(tables + 2)) != 0
        if (has_tables == 0) & (tl.load(ints + row * NUM_INTS + NUM_LOGPROBS) < 0):
            first, second = noise_keys(row, position, ints)
            largest = found[0].to(tl.float32)  # type: ignore[misc]
            for tile in tl.static_range(1, TILES):
                more = found[tile].to(tl.float32)  # type: ignore[var-annotated]
                largest = tl.maximum(largest, more, propagate_nan=tl.PropagateNan.ALL)
            is_nan = tl.max((largest != largest).to(tl.int32), 0) > 0
            most = tl.max(largest, 0)
            centre = tl.where(tl.abs(most) < float("inf"), most, 0.0)
            factor = tl.where(inverse >= 0, inverse, 1.0)
            places = tl.arange(0, TILES)
            bounds = tl.full((TILES,), -float("inf"), tl.float32)
            for tile in tl.static_range(TILES):
                at = (first_tile + tile) * TILE + tl.arange(0, TILE)
                part = (found[tile].to(tl.float32) - centre) * factor
                if inverse >= 0:
                    part += bound_of(noise_words(at, first, second))
                bounds = tl.where(places == tile, tl.max(part, 0), bounds)
            # The tile of an infinite logit is always computed, and stores it as its best.
            known = tl.where(most < float("inf"), most, -float("inf"))
            tile_bests = tl.where(is_nan, float("nan"), known + tl.zeros((TILES,), tl.float32))
            tile_scores = tl.full((TILES,), -float("inf"), tl.float32)
            tile_tokens = tl.full((TILES,), 2147483647, tl.int32)
            winner = tl.full((), -float("inf"), tl.float32)
            bound = tl.max(bounds, 0)
            while (bound >= winner) & (bound > -float("inf")):
                which = tl.min(tl.where(bounds == bound, places, TILES - 1), 0)
                token_at = (first_tile + which) * TILE + tl.arange(0, TILE)
                is_token = token_at < vocab_size
                x = load_logits(token_at, is_token, i, logits, stride)
                best = tl.max(x, 0)
                score, token = _find_best(x, token_at, is_token, best, inverse, row, position, ints)
                winner = tl.maximum(winner, (best - centre) * factor + score)
                tile_bests = tl.where((places == which) & (is_nan == 0), best, tile_bests)
                tile_scores = tl.where(places == which, score, tile_scores)
                tile_tokens = tl.where(places == which, token, tile_tokens)
                bounds = tl.where(places == which, -float("inf"), bounds)
                bound = tl.max(bounds, 0)
            inside = first_tile + places < NUM_TILES
            tl.store(bests + out + places, tile_bests, mask=inside)
            tl.store(scores + out + places, tile_scores, mask=inside)
            tl.store(tokens + out + places, tile_tokens, mask=inside)
            return
    end = first_tile + 1
    if TILES > 1:
        end = tl.minimum(first_tile + TILES, tl.cdiv(vocab_size, TILE))
    for tile in range(first_tile, end):
        _score_tile(
            bests, scores, tokens, raw_bests, sums, logits, step_masks, i, row, tile, position,
            inverse, ints, floats, addresses, stride, vocab_size, num_words, NUM_TILES, TILE,
        )  # fmt: skip
