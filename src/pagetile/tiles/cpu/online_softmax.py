"""Online softmax: the state of a row, and its update by a tile of keys.

A state ``(m, l, acc)`` is attention over the keys seen so far, with exponentials in base 2::

    m = max s        l = Σ 2 ** (s - m)        acc = Σ 2 ** (s - m) v        out = acc / l

Rows of scores are ``TILE_N`` float32 in a flat array, from ``at`` on.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from .compile import aligned, allocating, inner
from .microkernels import add_scaled
from .simd import (
    add,
    exp2,
    first_lane,
    fma,
    lane_numbers,
    load,
    max_lanes,
    maximum,
    mul,
    splat,
    store,
    sub,
    sum_lanes,
    tanh,
    where_less,
    zeros,
)
from .simd_pairs import store_weights

TILE_N = 64

State = namedtuple("State", "acc m l")


@allocating()
def make_state(rows, width):
    """Allocate the states of ``rows`` rows, ``width`` columns each."""
    return State(
        aligned(rows * width, np.float32), np.empty(rows, np.float32), np.empty(rows, np.float32)
    )


@inner()
def update_softmax_row(state, row, s, weights, at, highest):
    """Turn a row of scores into weights, and update ``m`` and ``l``.

    Returns the factor that ``acc`` must be multiplied by before the tile's values are added.
    """
    m = max(state.m[row], max_lanes(highest))
    pivot = m if m > -np.inf else np.float32(0)  # without keys -inf - -inf would be NaN
    decay = exp2_scalar(state.m[row] - pivot)
    shift = splat(pivot)
    sums = zeros()
    for n in range(at, at + TILE_N, 32):
        p0, p1 = exp2(sub(load(s, n), shift)), exp2(sub(load(s, n + 16), shift))
        store_weights(weights, n, p0, p1)
        sums = add(add(sums, p0), p1)
    state.m[row] = m
    state.l[row] = state.l[row] * decay + sum_lanes(sums)
    return decay


@inner()
def exp2_scalar(x):
    """``2 ** x`` of a scalar, with the bits of ``simd.exp2``."""
    return first_lane(exp2(splat(np.float32(x))))


# The following rewrite a row of a tile of scores in place; most return its maxima by lane.


@inner()
def scale_row(s, at, scale):
    """Multiply by ``scale``."""
    highest = splat(np.float32(-np.inf))
    for n in range(at, at + TILE_N, 16):
        scaled = mul(splat(scale), load(s, n))
        store(s, n, scaled)
        highest = maximum(scaled, highest)
    return highest


@inner()
def multiply_row(into, at, s, factors):
    """``into[at + n] = s[at + n] * factors[n]``, with a factor for every key."""
    for n in range(0, TILE_N, 16):
        store(into, at + n, mul(load(s, at + n), load(factors, n)))


@inner()
def cap_row(s, at, cap):
    """``cap * tanh(score)``."""
    highest = splat(np.float32(-np.inf))
    for n in range(at, at + TILE_N, 16):
        capped = mul(splat(cap), tanh(load(s, n)))
        store(s, n, capped)
        highest = maximum(capped, highest)
    return highest


@inner()
def add_alibi(s, at, slope, distance):
    """Add slope × (key position - query position), which is ``distance`` at the first key."""
    highest = splat(np.float32(-np.inf))
    for n in range(0, TILE_N, 16):
        steps = add(lane_numbers(), splat(np.float32(distance + n)))
        biased = fma(splat(slope), steps, load(s, at + n))
        store(s, at + n, biased)
        highest = maximum(biased, highest)
    return highest


@inner()
def mask_row(s, at, first, end):
    """Mask the keys before ``first`` and from ``end`` on."""
    nothing = splat(np.float32(-np.inf))
    highest = nothing
    for n in range(0, TILE_N, 16):
        lane = add(lane_numbers(), splat(np.float32(n)))
        kept = where_less(lane, splat(end), load(s, at + n), nothing)
        kept = where_less(lane, splat(first), nothing, kept)
        store(s, at + n, kept)
        highest = maximum(kept, highest)
    return highest


@inner()
def start_state(state, at, rows, width):
    """Set states to those of no keys."""
    state.m[at : at + rows] = -np.inf
    state.l[at : at + rows] = 0
    state.acc[at * width : (at + rows) * width] = 0


@inner()
def merge_states(into, at, other, other_at, rows, width):
    """Merge the states of ``other`` into those of ``into``."""
    for r in range(rows):
        a, b = at + r, other_at + r
        if other.l[b] == 0:  # no keys; with a NaN among the scores it would be NaN
            continue
        m = max(into.m[a], other.m[b])
        scale, other_scale = exp2_scalar(into.m[a] - m), exp2_scalar(other.m[b] - m)
        add_scaled(into.acc, a * width, scale, other.acc, b * width, other_scale, width)
        into.l[a] = into.l[a] * scale + other.l[b] * other_scale
        into.m[a] = m
