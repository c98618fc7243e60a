"""The inner loops of window attention on a CPU, a tile of rows of scores at a time.

Products keep their results in registers; ``rows`` describes the layouts of their operands. Scores
are in base 2: multiplied by log2(e).
"""

from __future__ import annotations

import numpy as np

from ....tiles.cpu.compile import folded, inner
from ....tiles.cpu.gemm import multiply
from ....tiles.cpu.microkernels import store_4x4
from ....tiles.cpu.simd import (
    LOG2_E,
    add,
    exp2,
    fma,
    load,
    load_one,
    max_lanes,
    maximum,
    mul,
    splat,
    store,
    sub,
    sum_each,
    sum_lanes,
    where_less,
    zeros,
)
from .rows import ROWS

# --- products --------------------------------------------------------------------------------


@inner()
def score(s, rows, num_rows, keys, at, width, depth):
    """``s[r, n] = Σ_d rows[r, d] · keys[d, n]`` for rows by fours."""
    padded = (num_rows + 3) // 4 * 4
    multiply(s, 0, width, rows, 0, depth, 1, keys, width, padded, width, depth, False, at)


@inner()
def mix_columns(result, weights, num_rows, values, at, width, depth):
    """``result[r, d] = Σ_n weights[r, n] · values[d, n]``, four rows and columns at a time."""
    for d in range(0, depth, 4):
        v0 = at + d * width
        v1, v2, v3 = v0 + width, v0 + 2 * width, v0 + 3 * width
        for r in range(0, num_rows, 4):
            w0 = r * width
            w1, w2, w3 = w0 + width, w0 + 2 * width, w0 + 3 * width
            a00 = a01 = a02 = a03 = zeros()
            a10 = a11 = a12 = a13 = zeros()
            a20 = a21 = a22 = a23 = zeros()
            a30 = a31 = a32 = a33 = zeros()
            for n in range(0, width, 16):
                b0, b1 = load(values, v0 + n), load(values, v1 + n)
                b2, b3 = load(values, v2 + n), load(values, v3 + n)
                w = load(weights, w0 + n)
                a00, a01 = fma(w, b0, a00), fma(w, b1, a01)
                a02, a03 = fma(w, b2, a02), fma(w, b3, a03)
                w = load(weights, w1 + n)
                a10, a11 = fma(w, b0, a10), fma(w, b1, a11)
                a12, a13 = fma(w, b2, a12), fma(w, b3, a13)
                w = load(weights, w2 + n)
                a20, a21 = fma(w, b0, a20), fma(w, b1, a21)
                a22, a23 = fma(w, b2, a22), fma(w, b3, a23)
                w = load(weights, w3 + n)
                a30, a31 = fma(w, b0, a30), fma(w, b1, a31)
                a32, a33 = fma(w, b2, a32), fma(w, b3, a33)
            sums = sum_each(
                (a00, a01, a02, a03, a10, a11, a12, a13, a20, a21, a22, a23, a30, a31, a32, a33)
            )
            store_4x4(result, r * depth + d, depth, sums)


@inner()
def mix_rows(result, weights, num_rows, values, at, num_tokens, width, depth):
    """Like ``mix_columns`` for ``values[n, d]``, which needs no sums over lanes."""
    wide, padded = depth // 32 * 32, (num_rows + 3) // 4 * 4
    if wide > 0:
        multiply(
            result, 0, depth, weights, 0, width, 1, values, depth, padded, wide, num_tokens, False,
            at,
        )  # fmt: skip
    if wide < depth:
        for r in range(0, num_rows, 4):
            _mix_4x16(result, weights, r, values, at + wide, wide, num_tokens, width, depth)


@folded()
def _mix_4x16(result, weights, r, values, at, d, num_tokens, width, depth):
    """Sixteen columns with separate sums of even and odd tokens, which hides latency."""
    w0 = r * width
    w1, w2, w3 = w0 + width, w0 + 2 * width, w0 + 3 * width
    a0 = a1 = a2 = a3 = zeros()
    b0 = b1 = b2 = b3 = zeros()
    for n in range(0, num_tokens - 1, 2):
        v = load(values, at + n * depth)
        a0, a1 = fma(splat(weights[w0 + n]), v, a0), fma(splat(weights[w1 + n]), v, a1)
        a2, a3 = fma(splat(weights[w2 + n]), v, a2), fma(splat(weights[w3 + n]), v, a3)
        v = load(values, at + (n + 1) * depth)
        b0, b1 = fma(splat(weights[w0 + n + 1]), v, b0), fma(splat(weights[w1 + n + 1]), v, b1)
        b2, b3 = fma(splat(weights[w2 + n + 1]), v, b2), fma(splat(weights[w3 + n + 1]), v, b3)
    if num_tokens % 2:
        n = num_tokens - 1
        v = load(values, at + n * depth)
        a0, a1 = fma(splat(weights[w0 + n]), v, a0), fma(splat(weights[w1 + n]), v, a1)
        a2, a3 = fma(splat(weights[w2 + n]), v, a2), fma(splat(weights[w3 + n]), v, a3)
    to = r * depth + d
    store(result, to, add(a0, b0))
    store(result, to + depth, add(a1, b1))
    store(result, to + 2 * depth, add(a2, b2))
    store(result, to + 3 * depth, add(a3, b3))


@folded()
def mix_window(result, weights, by_rows, by_columns, slot, x, z, num_rows):
    """Multiply a tile of weights with the window in ``slot``, by rows or columns (``sizes_of``)."""
    if z.columns:
        at = slot * x.num_tokens * z.columns
        mix_rows(result, weights, num_rows, by_rows, at, x.num_tokens, z.width, z.columns)
    else:
        mix_columns(
            result, weights, num_rows, by_columns, slot * z.depth * z.width, z.width, z.depth
        )


@inner()
def add_outer(into, at, weights, rows, width, depth):
    """``into[d, n] += Σ_r weights[r, n] · rows[r, d]``: the gradients of both products.

    Adds all eight rows of a tile at once, since loads and stores of ``into`` are the bottleneck.
    """
    for n in range(0, width, 16):
        w0, w1 = load(weights, n), load(weights, width + n)
        w2, w3 = load(weights, 2 * width + n), load(weights, 3 * width + n)
        w4, w5 = load(weights, 4 * width + n), load(weights, 5 * width + n)
        w6, w7 = load(weights, 6 * width + n), load(weights, 7 * width + n)
        for d in range(depth):
            here = at + d * width + n
            acc = fma(splat(rows[d]), w0, load(into, here))
            acc = fma(splat(rows[depth + d]), w1, acc)
            acc = fma(splat(rows[2 * depth + d]), w2, acc)
            acc = fma(splat(rows[3 * depth + d]), w3, acc)
            acc = fma(splat(rows[4 * depth + d]), w4, acc)
            acc = fma(splat(rows[5 * depth + d]), w5, acc)
            acc = fma(splat(rows[6 * depth + d]), w6, acc)
            store(into, here, fma(splat(rows[7 * depth + d]), w7, acc))


@inner()
def inner_products(into, x, depth, y, y_at, y_row, num_rows, size):
    """``into[r] = Σ_d x[r, d] · y[r, d]`` for the rows of a tile."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zeros()
    y1, y2, y3 = y_at + y_row, y_at + 2 * y_row, y_at + 3 * y_row
    y4, y5, y6, y7 = y_at + 4 * y_row, y1 + 4 * y_row, y2 + 4 * y_row, y3 + 4 * y_row
    whole = size // 16 * 16 if num_rows == ROWS else 0
    for d in range(0, whole, 16):
        a0 = fma(load(x, d), load(y, y_at + d), a0)
        a1 = fma(load(x, depth + d), load(y, y1 + d), a1)
        a2 = fma(load(x, 2 * depth + d), load(y, y2 + d), a2)
        a3 = fma(load(x, 3 * depth + d), load(y, y3 + d), a3)
        a4 = fma(load(x, 4 * depth + d), load(y, y4 + d), a4)
        a5 = fma(load(x, 5 * depth + d), load(y, y5 + d), a5)
        a6 = fma(load(x, 6 * depth + d), load(y, y6 + d), a6)
        a7 = fma(load(x, 7 * depth + d), load(y, y7 + d), a7)
    z = zeros()
    store(into, 0, sum_each((a0, a1, a2, a3, a4, a5, a6, a7, z, z, z, z, z, z, z, z)))
    for r in range(num_rows):
        for d in range(whole, size):
            into[r] += x[r * depth + d] * load_one(y, y_at + r * y_row + d)


@inner()
def subtract_row(x, at, y, y_at, scale, factor, size):
    """``x[d] = scale · x[d] - factor · y[d]``."""
    whole = size // 16 * 16
    for d in range(0, whole, 16):
        value = sub(mul(load(x, at + d), splat(scale)), mul(load(y, y_at + d), splat(factor)))
        store(x, at + d, value)
    for d in range(whole, size):
        x[at + d] = scale * x[at + d] - factor * y[y_at + d]


# --- scores ----------------------------------------------------------------------------------


@inner()
def add_bias_and_mask(s, bias, bias_at, regions, regions_at, first, num_rows, width, mask_value):
    """Add bias and mask to a tile of scores; ``regions_at`` is -1 for a window of one region."""
    for r in range(num_rows):
        at = r * width
        if regions_at < 0:
            for n in range(at, at + width, 16):
                store(s, n, add(load(s, n), load(bias, bias_at + n)))
            continue
        row_region = splat(regions[regions_at + first + r])
        for n in range(0, width, 16):
            value = add(load(s, at + n), load(bias, bias_at + at + n))
            difference = sub(load(regions, regions_at + n), row_region)
            masked = add(value, splat(mask_value))
            value = where_less(mul(difference, difference), splat(np.float32(0.5)), value, masked)
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
def softmax_rows(s, num_rows, stats, width):
    """Turn rows of scores into weights; ``stats`` gets their maxima, and their sums from 16 on."""
    for r in range(num_rows):
        at = r * width
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
        stats[r], stats[16 + r] = m, sum_lanes(sums)


@inner()
def recompute_weights(s, ds, tops, deltas, num_rows, width):
    """Turn rows of scores into the weights of the forward pass, and into score gradients.

    ``s = 2 ** (s - top)``, ``ds = s · (ds - delta)``.
    """
    for r in range(num_rows):
        pivot = splat(tops[r] if tops[r] > -np.inf else np.float32(0))
        shift = splat(deltas[r])
        for n in range(r * width, (r + 1) * width, 16):
            p = exp2(sub(load(s, n), pivot))
            store(s, n, p)
            store(ds, n, mul(p, sub(load(ds, n), shift)))


@inner()
def accumulate(into, at, x, size):
    """``into[at + n] += x[n]``."""
    for n in range(0, size, 16):
        store(into, at + n, add(load(into, at + n), load(x, n)))
