"""The two products of attention for one row of queries in each of many KV heads.

This is a decode step of a model without grouped heads: every key and value is read for one row, so
it is bound by memory. The outer loop is over keys and the inner one over heads, so memory is read
in order, with a prefetch of a few keys. Sums are in the order of ``score_tile`` and ``mix_tile``,
so that a row gets the same bits::

    key n      head 0 · head 1 · head 2 · …  ─┐ in the order of a page
    key n + 1  head 0 · head 1 · head 2 · …  ─┘
"""

from __future__ import annotations

from .compile import inner, inner_by_types
from .simd import fma, load, mul, prefetch, splat, store, sum_each, zeros
from .simd_pairs import (
    are_pairs,
    dot,
    dot_pairs,
    load_as,
    load_pairs,
    size_of,
    splat_pair,
    zip_high,
    zip_low,
)


@inner()
def score_heads(scores, lanes, q, num_heads, k, k_head, rows, ahead, tile_n, width):
    """``scores[h, n] = q[h] · k[rows[n] + h * k_head]`` for a multiple of 16 heads.

    ``lanes`` is room for 16 numbers.
    """
    for n in range(tile_n):
        later = rows[n + 4] if n + 4 < tile_n else ahead[n + 4 - tile_n]
        for h in range(0, num_heads, 16):
            row, ahead_row = rows[n] + h * k_head, later + h * k_head
            store(lanes, 0, _score_16(q, h * width, k, row, ahead_row, k_head, width))
            for i in range(16):
                scores[(h + i) * tile_n + n] = lanes[i]


@inner()
def _score_16(q, at, k, row, later, k_head, width):
    """Lane ``i`` is head ``i``'s score."""
    return sum_each(
        (
            _dot_row_of(0, q, at, k, row, later, k_head, width),
            _dot_row_of(1, q, at, k, row, later, k_head, width),
            _dot_row_of(2, q, at, k, row, later, k_head, width),
            _dot_row_of(3, q, at, k, row, later, k_head, width),
            _dot_row_of(4, q, at, k, row, later, k_head, width),
            _dot_row_of(5, q, at, k, row, later, k_head, width),
            _dot_row_of(6, q, at, k, row, later, k_head, width),
            _dot_row_of(7, q, at, k, row, later, k_head, width),
            _dot_row_of(8, q, at, k, row, later, k_head, width),
            _dot_row_of(9, q, at, k, row, later, k_head, width),
            _dot_row_of(10, q, at, k, row, later, k_head, width),
            _dot_row_of(11, q, at, k, row, later, k_head, width),
            _dot_row_of(12, q, at, k, row, later, k_head, width),
            _dot_row_of(13, q, at, k, row, later, k_head, width),
            _dot_row_of(14, q, at, k, row, later, k_head, width),
            _dot_row_of(15, q, at, k, row, later, k_head, width),
        )
    )


@inner()
def _dot_row_of(i, q, at, k, row, later, k_head, width):
    return _dot_row(q, at + i * width, k, row + i * k_head, later + i * k_head, width)


@inner()
def mix_heads(acc, decay, num_heads, p, tile_n, v, v_head, rows, ahead, num_keys, width):
    """``acc[h] = decay[h] * acc[h] + Σ_n p[h, n] * v[rows[n] + h * v_head]``.

    Keys come in pairs as in ``mix_tile``: with an odd ``num_keys`` the next weight must be 0.
    """
    for h in range(num_heads):
        factor = splat(decay[h])
        for d in range(h * width, (h + 1) * width, 16):
            store(acc, d, mul(factor, load(acc, d)))
    whole = num_keys - num_keys % 4
    for n in range(0, whole, 4):
        later, m = rows, n + 4
        if m == tile_n:
            later, m = ahead, 0
        for h in range(num_heads):
            at, p_at, column = h * width, h * tile_n + n, h * v_head
            mix_4_keys(acc, at, p, p_at, v, rows, n, later, m, column, width)
    for h in range(num_heads):
        at, p_at, column = h * width, h * tile_n, h * v_head
        mix_keys(acc, at, p, p_at, v, rows, whole, num_keys, column, width)


@inner()
def _dot_row(q, at, k, row, later, width):
    """The lanes whose sum is ``q · k[row]``; prefetches ``k[later]``."""
    s = zeros()
    for d in range(0, width, size_of(q)):
        prefetch(k, later + d)
        s = dot(load_as(q, q, at + d), load_as(q, k, row + d), s)
    return s


# --- by the element type of weights ----------------------------------------------


def mix_4_keys(acc, at, p, p_at, v, rows, n, later, m, column, width):
    """``acc += p[n] * v[rows[n]] + …`` for four keys; prefetches four later ones."""
    raise NotImplementedError


def mix_keys(acc, at, p, p_at, v, rows, first, end, column, width):
    """``acc += Σ p[n] * v[rows[n]]`` for the keys from ``first`` up to ``end``."""
    raise NotImplementedError


@inner_by_types(mix_4_keys)
def _(acc, at, p, p_at, v, rows, n, later, m, column, width):
    def of_float32(acc, at, p, p_at, v, rows, n, later, m, column, width):
        k0, k1, k2, k3 = rows[n], rows[n + 1], rows[n + 2], rows[n + 3]
        w0, w1, w2, w3 = splat(p[p_at]), splat(p[p_at + 1]), splat(p[p_at + 2]), splat(p[p_at + 3])
        for d in range(column, column + width, 16):
            for i in range(m, m + 4):
                prefetch(v, later[i] + d)
            to = at + d - column
            a = fma(w1, load(v, k1 + d), fma(w0, load(v, k0 + d), load(acc, to)))
            store(acc, to, fma(w3, load(v, k3 + d), fma(w2, load(v, k2 + d), a)))

    def of_pairs(acc, at, p, p_at, v, rows, n, later, m, column, width):
        k0, k1, k2, k3 = rows[n], rows[n + 1], rows[n + 2], rows[n + 3]
        w0, w1 = splat_pair(p, p_at), splat_pair(p, p_at + 2)
        for d in range(column, column + width, 32):
            for i in range(m, m + 4):
                prefetch(v, later[i] + d)
            to = at + d - column
            left, right = load_pairs(v, k0 + d), load_pairs(v, k1 + d)
            a0 = dot_pairs(load(acc, to), w0, zip_low(left, right))
            a1 = dot_pairs(load(acc, to + 16), w0, zip_high(left, right))
            left, right = load_pairs(v, k2 + d), load_pairs(v, k3 + d)
            store(acc, to, dot_pairs(a0, w1, zip_low(left, right)))
            store(acc, to + 16, dot_pairs(a1, w1, zip_high(left, right)))

    return of_pairs if are_pairs(p) else of_float32


@inner_by_types(mix_keys)
def _(acc, at, p, p_at, v, rows, first, end, column, width):
    def of_float32(acc, at, p, p_at, v, rows, first, end, column, width):
        for n in range(first, end):
            w = splat(p[p_at + n])
            for d in range(0, width, 16):
                b = load(v, rows[n] + column + d)
                store(acc, at + d, fma(w, b, load(acc, at + d)))

    def of_pairs(acc, at, p, p_at, v, rows, first, end, column, width):
        for n in range(first, end, 2):
            w = splat_pair(p, p_at + n)
            for d in range(0, width, 32):
                left = load_pairs(v, rows[n] + column + d)
                right = load_pairs(v, rows[n + 1] + column + d)
                to = at + d
                store(acc, to, dot_pairs(load(acc, to), w, zip_low(left, right)))
                store(acc, to + 16, dot_pairs(load(acc, to + 16), w, zip_high(left, right)))

    return of_pairs if are_pairs(p) else of_float32
