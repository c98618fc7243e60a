"""The inner loops of window attention on a CPU, a block of rows of scores at a time.

Products keep their results in registers; ``rows`` describes the layouts of their operands. Scores
are in base 2: multiplied by log2(e).
"""

from __future__ import annotations

import numpy as np

from ....tiles.cpu.compile import inner
from ....tiles.cpu.gemm import multiply, pad_to_fours
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
from ....tiles.cpu.simd_pairs import as_operand, keys_of
from .operands import store_32

# --- products --------------------------------------------------------------------------------


@inner()
def score(s, rows, num_rows, keys, slot, z, size):
    """``s[r, n] = Σ_d rows[r, d] · keys[d, n]`` for rows by fours."""
    step, padded = keys_of(rows), pad_to_fours(num_rows)
    multiply(
        s, 0, z.width, as_operand(rows), 0, z.row // step, 1, as_operand(keys), z.width, padded,
        z.width, (size + step - 1) // step, False, slot * z.slot // step,
    )  # fmt: skip


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
def mix_window(result, weights, by_rows, by_columns, slot, x, z, num_rows):
    """Multiply a block of weights with a window, by rows or by columns (``sizes_of``)."""
    if z.columns == 0:
        mix_columns(result, weights, num_rows, by_columns, slot * z.slot, z.width, z.depth)
        return
    step, padded = keys_of(weights), pad_to_fours(num_rows)
    multiply(
        result, 0, z.columns, as_operand(weights), 0, z.width // step, 1, as_operand(by_rows),
        z.columns, padded, z.columns, (x.num_tokens + step - 1) // step, False,
        slot * z.tokens * z.columns // step,
    )  # fmt: skip


@inner()
def add_outer(into, slot, weights, rows, z, num_rows):
    """``into[d, n] += Σ_r weights[r, n] · rows[r, d]``: the gradients of both products."""
    step, padded = keys_of(weights), pad_to_fours(num_rows)
    multiply(
        into, slot * z.depth * z.width, z.width, as_operand(rows), 0, 1, z.row, as_operand(weights),
        z.width, z.depth, z.width, padded // step, True,
    )  # fmt: skip


@inner()
def inner_products(into, x, depth, y, y_at, y_row, num_rows, size):
    """``into[r] = Σ_d x[r, d] · y[r, d]`` for the rows of a block."""
    for r in range(0, num_rows, 8):
        count = min(8, num_rows - r)
        _inner_products_8(into, r, x, depth, y, y_at + r * y_row, y_row, count, size)


@inner()
def _inner_products_8(into, at, x, depth, y, y_at, y_row, num_rows, size):
    """``inner_products`` of up to eight rows from ``at`` on; eight more elements are set to 0."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zeros()
    y1, y2, y3 = y_at + y_row, y_at + 2 * y_row, y_at + 3 * y_row
    y4, y5, y6, y7 = y_at + 4 * y_row, y1 + 4 * y_row, y2 + 4 * y_row, y3 + 4 * y_row
    whole, x0 = size // 16 * 16 if num_rows == 8 else 0, at * depth
    for d in range(x0, x0 + whole, 16):
        n = d - x0
        a0 = fma(load(x, d), load(y, y_at + n), a0)
        a1 = fma(load(x, depth + d), load(y, y1 + n), a1)
        a2 = fma(load(x, 2 * depth + d), load(y, y2 + n), a2)
        a3 = fma(load(x, 3 * depth + d), load(y, y3 + n), a3)
        a4 = fma(load(x, 4 * depth + d), load(y, y4 + n), a4)
        a5 = fma(load(x, 5 * depth + d), load(y, y5 + n), a5)
        a6 = fma(load(x, 6 * depth + d), load(y, y6 + n), a6)
        a7 = fma(load(x, 7 * depth + d), load(y, y7 + n), a7)
    z = zeros()
    store(into, at, sum_each((a0, a1, a2, a3, a4, a5, a6, a7, z, z, z, z, z, z, z, z)))
    for r in range(num_rows):
        for d in range(whole, size):
            into[at + r] += load_one(x, x0 + r * depth + d) * load_one(y, y_at + r * y_row + d)


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
def add_bias_and_mask(s, scale, bias, regions, regions_at, first, num_rows, width, value):
    """Multiply a block of scores by ``scale`` and add bias and mask, ``value`` where it is masked.

    ``regions_at`` is -1 for a window of one region.
    """
    factor = splat(scale)
    for r in range(num_rows):
        at = r * width
        if regions_at < 0:
            for n in range(at, at + width, 16):
                store(s, n, fma(load(s, n), factor, load(bias, n)))
            continue
        row_region = splat(regions[regions_at + first + r])
        for n in range(0, width, 16):
            score = fma(load(s, at + n), factor, load(bias, at + n))
            difference = sub(load(regions, regions_at + n), row_region)
            masked = add(score, splat(value))
            score = where_less(mul(difference, difference), splat(np.float32(0.5)), score, masked)
            store(s, at + n, score)


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
def softmax_rows(weights, s, num_rows, maxima, sums, width):
    """Turn rows of scores into weights, and rows up to a multiple of four into zeros."""
    for r in range(num_rows):
        at = r * width
        highest = splat(np.float32(-np.inf))
        for n in range(at, at + width, 16):
            highest = maximum(load(s, n), highest)
        m = max_lanes(highest)
        pivot = splat(m if m > -np.inf else np.float32(0))
        total = zeros()
        for n in range(at, at + width, 32):
            p0, p1 = exp2(sub(load(s, n), pivot)), exp2(sub(load(s, n + 16), pivot))
            store_32(weights, n, p0, p1)
            total = add(total, add(p0, p1))
        maxima[r], sums[r] = m, sum_lanes(total)
    weights[num_rows * width : pad_to_fours(num_rows) * width] = 0


@inner()
def subtract_maximum(s, at, width):
    """Subtract the maximum of a row of scores from it; return log2 of the sum of its weights."""
    highest = splat(np.float32(-np.inf))
    for n in range(at, at + width, 16):
        highest = maximum(load(s, n), highest)
    pivot, total = splat(max_lanes(highest)), zeros()
    for n in range(at, at + width, 16):
        shifted = sub(load(s, n), pivot)
        store(s, n, shifted)
        total = add(total, exp2(shifted))
    return np.log2(sum_lanes(total))
