"""The inner loops of window attention on a CPU: four rows of scores at a time.

A window's keys and values lie transposed, ``[head_size, width]``, so that sixteen lanes are
sixteen keys whatever the head size is: 4 as well as 64. ``width`` is the number of keys, padded
to a multiple of 32; a padded key has a bias of -inf. Rows of four queries lie one after another.
"""

from __future__ import annotations

import numpy as np

from ...tiles.cpu.compile import inner
from ...tiles.cpu.microkernels import store_4x4
from ...tiles.cpu.online_softmax import exp2_scalar
from ...tiles.cpu.simd import (
    LOG2_E,
    add,
    exp2,
    fma,
    load,
    max_lanes,
    maximum,
    mul,
    prefetch,
    splat,
    store,
    store_transposed,
    sub,
    sum_each,
    sum_lanes,
    where_less,
    zeros,
)

_AHEAD = 12
"""Tokens: their rows lie far apart in memory, and are asked for that much ahead of their use."""


@inner()
def inverse_norm(x, at, size, eps):
    """``1 / max(norm, eps)`` of one row."""
    total = np.float32(0)
    for d in range(size):
        total += x[at + d] * x[at + d]
    return np.float32(1) / max(np.sqrt(total), np.float32(eps))


@inner()
def transpose(into, at, x, x_at, x_token, num_tokens, width, size, depth, eps):
    """Tokens' rows as ``[depth, width]``, divided by their norms if ``eps`` is not negative."""
    into[at : at + depth * width] = 0
    if eps < 0 and size >= 16:
        _transpose_plain(into, at, x, x_at, x_token, num_tokens, width, size)
        return
    for n in range(num_tokens):
        row = x_at + n * x_token
        for d in range(0, size, 16):
            prefetch(x, row + _AHEAD * x_token + d)
        factor = inverse_norm(x, row, size, eps) if eps >= 0 else np.float32(1)
        for d in range(size):
            into[at + d * width + n] = x[row + d] * factor


@inner()
def _transpose_plain(into, at, x, x_at, x_token, num_tokens, width, size):
    """Sixteen tokens at a time; the last columns overlap those before."""
    for n in range(0, num_tokens, 16):
        row, left = x_at + n * x_token, num_tokens - n
        for column in range(0, size, 16):
            d = min(column, size - 16)
            for ahead in range(16, 32):  # the next sixteen tokens
                prefetch(x, row + ahead * x_token + d)
            t = row + d
            rows = (
                load(x, t),
                _row(x, t, x_token, 1, left),
                _row(x, t, x_token, 2, left),
                _row(x, t, x_token, 3, left),
                _row(x, t, x_token, 4, left),
                _row(x, t, x_token, 5, left),
                _row(x, t, x_token, 6, left),
                _row(x, t, x_token, 7, left),
                _row(x, t, x_token, 8, left),
                _row(x, t, x_token, 9, left),
                _row(x, t, x_token, 10, left),
                _row(x, t, x_token, 11, left),
                _row(x, t, x_token, 12, left),
                _row(x, t, x_token, 13, left),
                _row(x, t, x_token, 14, left),
                _row(x, t, x_token, 15, left),
            )
            store_transposed(into, at + d * width + n, width, rows)


@inner()
def _row(x, at, x_token, number, left):
    """Sixteen columns of a token; zeros past the last."""
    return load(x, at + number * x_token) if number < left else zeros()


@inner()
def turn_back(into, to, into_token, x, at, num_tokens, width, size, factor):
    """Tokens' rows, ``into_token`` apart, from what lies as ``transpose`` leaves it."""
    whole = num_tokens // 16 * 16 if size >= 16 else 0
    for n in range(0, whole, 16):
        for column in range(0, size, 16):
            d = min(column, size - 16)  # the last columns overlap those before
            t = at + d * width + n
            columns = (
                _column(x, t, width, 0, factor),
                _column(x, t, width, 1, factor),
                _column(x, t, width, 2, factor),
                _column(x, t, width, 3, factor),
                _column(x, t, width, 4, factor),
                _column(x, t, width, 5, factor),
                _column(x, t, width, 6, factor),
                _column(x, t, width, 7, factor),
                _column(x, t, width, 8, factor),
                _column(x, t, width, 9, factor),
                _column(x, t, width, 10, factor),
                _column(x, t, width, 11, factor),
                _column(x, t, width, 12, factor),
                _column(x, t, width, 13, factor),
                _column(x, t, width, 14, factor),
                _column(x, t, width, 15, factor),
            )
            store_transposed(into, to + n * into_token + d, into_token, columns)
    for n in range(whole, num_tokens):
        for d in range(size):
            into[to + n * into_token + d] = x[at + d * width + n] * factor


@inner()
def _column(x, at, width, number, factor):
    """A column of sixteen tokens."""
    return mul(load(x, at + number * width), splat(factor))


@inner()
def copy_rows(into, at, x, x_at, x_token, num_tokens, size, depth):
    """Tokens' rows one after another, ``[num_tokens, depth]``, filled up with zeros."""
    whole = size // 16 * 16
    for n in range(num_tokens):
        row, to = x_at + n * x_token, at + n * depth
        for d in range(0, whole, 16):
            prefetch(x, row + _AHEAD * x_token + d)
            store(into, to + d, load(x, row + d))
        if whole < size:
            prefetch(x, row + _AHEAD * x_token + whole)
            store(into, to + whole, zeros())
            for d in range(whole, size):
                into[to + d] = x[row + d]


@inner()
def gather_rows(into, x, x_at, x_token, first, num_rows, size, depth, scale, eps):
    """Four rows from token ``first`` on, ``[4, depth]``, times ``scale``; 0 past the last."""
    into[: 4 * depth] = 0
    for r in range(num_rows):
        row = x_at + (first + r) * x_token
        for d in range(0, size, 16):
            prefetch(x, row + _AHEAD * x_token + d)
        factor = scale * inverse_norm(x, row, size, eps) if eps >= 0 else scale
        write_row(into, r * depth, x, row, factor, size)


@inner()
def gather_bias(into, table, table_size, head, offsets, first, num_rows, width):
    """Rows of a head's bias in powers of two, -inf past the last key, and what fills up four."""
    num_tokens, num_heads = len(offsets), len(table) // table_size
    for r in range((num_rows + 3) // 4 * 4):
        u = offsets[first + min(r, num_rows - 1)] + (table_size - 1) // 2
        for n in range(num_tokens):
            into[r * width + n] = table[(u - offsets[n]) * num_heads + head] * LOG2_E
        into[r * width + num_tokens : (r + 1) * width] = -np.inf


@inner()
def number_regions(into, at, regions, first, num_tokens):
    """A window's regions, numbered in the order in which they come; how many there are."""
    count = 0
    for n in range(num_tokens):
        same = n - 1  # a neighbour's mostly
        while same >= 0 and regions[first + same] != regions[first + n]:
            same -= 1
        into[at + n] = into[at + same] if same >= 0 else np.float32(count)
        count += same < 0
    return count


@inner()
def score(s, rows, keys, at, width, depth):
    """``s[r, n] = Σ_d rows[r, d] · keys[d, n]``."""
    r1, r2, r3 = depth, 2 * depth, 3 * depth
    for n in range(0, width, 32):
        s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zeros()
        for d in range(depth):
            b0, b1 = load(keys, at + d * width + n), load(keys, at + d * width + n + 16)
            a = splat(rows[d])
            s00, s01 = fma(a, b0, s00), fma(a, b1, s01)
            a = splat(rows[r1 + d])
            s10, s11 = fma(a, b0, s10), fma(a, b1, s11)
            a = splat(rows[r2 + d])
            s20, s21 = fma(a, b0, s20), fma(a, b1, s21)
            a = splat(rows[r3 + d])
            s30, s31 = fma(a, b0, s30), fma(a, b1, s31)
        store(s, n, s00)
        store(s, n + 16, s01)
        store(s, width + n, s10)
        store(s, width + n + 16, s11)
        store(s, 2 * width + n, s20)
        store(s, 2 * width + n + 16, s21)
        store(s, 3 * width + n, s30)
        store(s, 3 * width + n + 16, s31)


@inner()
def mix(result, weights, values, at, width, depth):
    """``result[r, d] = Σ_n weights[r, n] · values[d, n]``, ``depth`` a multiple of 4."""
    for d in range(0, depth, 4):
        v0 = at + d * width
        v1, v2, v3 = v0 + width, v0 + 2 * width, v0 + 3 * width
        a00 = a01 = a02 = a03 = zeros()
        a10 = a11 = a12 = a13 = zeros()
        a20 = a21 = a22 = a23 = zeros()
        a30 = a31 = a32 = a33 = zeros()
        for n in range(0, width, 16):
            b0, b1 = load(values, v0 + n), load(values, v1 + n)
            b2, b3 = load(values, v2 + n), load(values, v3 + n)
            w = load(weights, n)
            a00, a01, a02, a03 = fma(w, b0, a00), fma(w, b1, a01), fma(w, b2, a02), fma(w, b3, a03)
            w = load(weights, width + n)
            a10, a11, a12, a13 = fma(w, b0, a10), fma(w, b1, a11), fma(w, b2, a12), fma(w, b3, a13)
            w = load(weights, 2 * width + n)
            a20, a21, a22, a23 = fma(w, b0, a20), fma(w, b1, a21), fma(w, b2, a22), fma(w, b3, a23)
            w = load(weights, 3 * width + n)
            a30, a31, a32, a33 = fma(w, b0, a30), fma(w, b1, a31), fma(w, b2, a32), fma(w, b3, a33)
        sums = sum_each(
            (a00, a01, a02, a03, a10, a11, a12, a13, a20, a21, a22, a23, a30, a31, a32, a33)
        )
        store_4x4(result, d, depth, sums)


@inner()
def mix_rows(result, weights, values, at, num_tokens, width, depth):
    """As ``mix`` of ``values[n, d]``, sixteen columns at a time: nothing to add up in the end."""
    w1, w2, w3 = width, 2 * width, 3 * width
    for d in range(0, depth, 16):
        a0 = a1 = a2 = a3 = zeros()
        b0 = b1 = b2 = b3 = zeros()
        # Two tokens at a time: sums of every other one do not wait for each other.
        for n in range(0, num_tokens - 1, 2):
            v = load(values, at + n * depth + d)
            a0, a1 = fma(splat(weights[n]), v, a0), fma(splat(weights[w1 + n]), v, a1)
            a2, a3 = fma(splat(weights[w2 + n]), v, a2), fma(splat(weights[w3 + n]), v, a3)
            v = load(values, at + (n + 1) * depth + d)
            b0, b1 = fma(splat(weights[n + 1]), v, b0), fma(splat(weights[w1 + n + 1]), v, b1)
            b2, b3 = fma(splat(weights[w2 + n + 1]), v, b2), fma(splat(weights[w3 + n + 1]), v, b3)
        if num_tokens % 2:
            n = num_tokens - 1
            v = load(values, at + n * depth + d)
            a0, a1 = fma(splat(weights[n]), v, a0), fma(splat(weights[w1 + n]), v, a1)
            a2, a3 = fma(splat(weights[w2 + n]), v, a2), fma(splat(weights[w3 + n]), v, a3)
        store(result, d, add(a0, b0))
        store(result, depth + d, add(a1, b1))
        store(result, 2 * depth + d, add(a2, b2))
        store(result, 3 * depth + d, add(a3, b3))


@inner()
def add_outer(into, at, weights, rows, width, depth):
    """``into[d, n] += Σ_r weights[r, n] · rows[r, d]``: what ``mix`` and ``score`` hand back."""
    r1, r2, r3 = depth, 2 * depth, 3 * depth
    for n in range(0, width, 16):
        w0, w1 = load(weights, n), load(weights, width + n)
        w2, w3 = load(weights, 2 * width + n), load(weights, 3 * width + n)
        for d in range(depth):
            here = at + d * width + n
            acc = fma(splat(rows[d]), w0, load(into, here))
            acc = fma(splat(rows[r1 + d]), w1, acc)
            acc = fma(splat(rows[r2 + d]), w2, acc)
            store(into, here, fma(splat(rows[r3 + d]), w3, acc))


@inner()
def add_bias_and_mask(s, bias, bias_at, regions, regions_at, first, num_rows, width, mask_value):
    """Add to four rows of scores; ``regions_at`` is -1 for a window of one region."""
    for r in range(4):
        at = r * width
        if regions_at < 0:
            for n in range(at, at + width, 16):
                store(s, n, add(load(s, n), load(bias, bias_at + n)))
            continue
        mine = splat(regions[regions_at + first + min(r, num_rows - 1)])
        for n in range(0, width, 16):
            value = add(load(s, at + n), load(bias, bias_at + at + n))
            apart = sub(load(regions, regions_at + n), mine)
            masked = add(value, splat(mask_value))
            value = where_less(mul(apart, apart), splat(np.float32(0.5)), value, masked)
            store(s, at + n, value)


@inner()
def add_dense(s, x, x_at, num_rows, num_tokens, width):
    """Add rows of a dense bias or mask to rows of scores in powers of two."""
    whole = num_tokens // 16 * 16
    for r in range(num_rows):
        at, row = r * width, x_at + r * num_tokens
        for n in range(0, whole, 16):
            store(s, at + n, fma(load(x, row + n), splat(LOG2_E), load(s, at + n)))
        for n in range(whole, num_tokens):
            s[at + n] += x[row + n] * LOG2_E


@inner()
def soften(s, at, width):
    """One row of scores (powers of two) into weights; their maximum, and what they add up to."""
    highest = splat(np.float32(-np.inf))
    for n in range(at, at + width, 16):
        highest = maximum(load(s, n), highest)
    m = max_lanes(highest)
    pivot = splat(m if m > -np.inf else np.float32(0))
    sums = zeros()
    for n in range(at, at + width, 16):
        p = exp2(sub(load(s, n), pivot))
        store(s, n, p)
        sums = add(sums, p)
    return m, sum_lanes(sums)


@inner()
def soften_again(s, at, width, lse):
    """One row of scores into the weights that the forward pass had."""
    pivot = splat(lse if lse > -np.inf else np.float32(0))
    for n in range(at, at + width, 16):
        store(s, n, exp2(sub(load(s, n), pivot)))


@inner()
def score_gradient(ds, weights, at, width, delta):
    """``ds = weights · (ds - delta)`` for one row."""
    shift = splat(delta)
    for n in range(at, at + width, 16):
        store(ds, n, mul(load(weights, n), sub(load(ds, n), shift)))


@inner()
def write_row(into, at, x, x_at, factor, size):
    """``into[d] = factor · x[d]``."""
    whole = size // 16 * 16
    for d in range(0, whole, 16):
        store(into, at + d, mul(load(x, x_at + d), splat(factor)))
    for d in range(whole, size):
        into[at + d] = x[x_at + d] * factor


@inner()
def inner_product(x, x_at, y, y_at, size):
    """``Σ_d x[d] · y[d]``."""
    sums = zeros()
    whole = size // 16 * 16
    for d in range(0, whole, 16):
        sums = fma(load(x, x_at + d), load(y, y_at + d), sums)
    total = sum_lanes(sums)
    for d in range(whole, size):
        total += x[x_at + d] * y[y_at + d]
    return total


@inner()
def accumulate(into, at, x, size):
    """``into[at + n] += x[n]``."""
    for n in range(0, size, 16):
        store(into, at + n, add(load(into, at + n), load(x, n)))


@inner()
def head_scale(logit_scale, softmax_scale, head):
    """What multiplies q·k of a head; without ``logit_scale`` (no entries) the same for all."""
    if len(logit_scale) == 0:
        return np.float32(softmax_scale)
    learned = min(logit_scale[head], np.float32(4.605170185988092))
    return np.float32(softmax_scale) * exp2_scalar(learned * LOG2_E)
