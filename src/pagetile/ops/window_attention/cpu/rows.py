"""Memory layouts of window attention on a CPU: rows, columns, biases and regions.

A window's keys and values are transposed, ``[depth, width]``, so that the sixteen lanes of a vector
are sixteen keys for any head size, 4 as well as 64. ``width`` is the number of keys, padded to a
multiple of 32; a padded key has a bias of -inf. Queries are stored by rows. ``operands`` has the
layouts of bfloat16 pairs.
"""

from __future__ import annotations

import numpy as np

from ....tiles.cpu.compile import inner
from ....tiles.cpu.online_softmax import exp2_scalar
from ....tiles.cpu.simd import (
    LOG2_E,
    add,
    div,
    fma,
    lane_numbers,
    load,
    load_one,
    maximum,
    mul,
    prefetch,
    splat,
    sqrt,
    store,
    store_one,
    store_transposed,
    sub,
    sum_lanes,
    where_less,
    zeros,
)

NO_NORM = np.float32(-1)
"""``eps`` of rows that are not normalised."""
AHEAD = 12
"""Prefetch distance in tokens, for rows that are far apart in memory."""


@inner()
def inverse_norm(x, at, size, eps):
    """``1 / max(norm, eps)`` of one row."""
    sums, whole = zeros(), size // 16 * 16
    for d in range(0, whole, 16):
        lanes = load(x, at + d)
        sums = fma(lanes, lanes, sums)
    total = sum_lanes(sums)
    for d in range(whole, size):
        value = load_one(x, at + d)
        total += value * value
    return np.float32(1) / max(np.sqrt(total), np.float32(eps))


@inner()
def clamped_inverse(eps):
    """The ``inverse_norm`` of a row whose norm was clamped, which has no gradient."""
    return np.float32(1) / np.float32(eps) if eps > 0 else np.float32(np.inf)


@inner()
def transpose(into, at, x, x_at, x_token, num_tokens, width, size, depth):
    """Transpose tokens' rows to ``[depth, width]``."""
    into[at : at + depth * width] = 0
    if size >= 16:
        transpose_plain(into, at, x, x_at, x_token, num_tokens, width, size)
        return
    for n in range(num_tokens):
        row = x_at + n * x_token
        prefetch(x, row + AHEAD * x_token)
        for d in range(size):
            store_one(into, at + d * width + n, load_one(x, row + d))


@inner()
def normalise(columns, at, inverses, inverses_at, num_tokens, width, size, eps):
    """Divide transposed tokens by their norms; ``inverses`` gets 1 / norm, or 0 for padding."""
    for n in range(0, width, 16):
        sums = zeros()
        for d in range(size):
            lanes = load(columns, at + d * width + n)
            sums = fma(lanes, lanes, sums)
        inverse = div(splat(np.float32(1)), maximum(sqrt(sums), splat(np.float32(eps))))
        token = add(lane_numbers(), splat(np.float32(n)))
        inverse = where_less(token, splat(np.float32(num_tokens)), inverse, zeros())
        store(inverses, inverses_at + n, inverse)
        for d in range(size):
            here = at + d * width + n
            store(columns, here, mul(load(columns, here), inverse))


@inner()
def normalise_gradient(gradient, columns, at, inverses, inverses_at, width, size, eps):
    """Turn the gradient of normalised tokens into that of the tokens, in place.

    ``(g - unit · Σ_d unit · g) / norm``; a norm clamped to ``eps`` is a constant.
    """
    for n in range(0, width, 16):
        inverse, along = load(inverses, inverses_at + n), zeros()
        for d in range(size):
            here = at + d * width + n
            along = fma(load(columns, here), load(gradient, here), along)
        along = where_less(inverse, splat(clamped_inverse(eps)), along, zeros())
        for d in range(size):
            here = at + d * width + n
            kept = sub(load(gradient, here), mul(load(columns, here), along))
            store(gradient, here, mul(kept, inverse))


@inner()
def transpose_plain(into, at, x, x_at, x_token, num_tokens, width, size):
    """Transpose sixteen tokens at a time; the last columns overlap those before."""
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
    """Sixteen columns of a token; zeros past the last token."""
    return load(x, at + number * x_token) if number < left else zeros()


@inner()
def transpose_back(into, to, into_token, x, at, num_tokens, width, size, factor):
    """Write tokens' rows, ``into_token`` apart, from transposed ones."""
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
            store_one(into, to + n * into_token + d, load_one(x, at + d * width + n) * factor)


@inner()
def _column(x, at, width, number, factor):
    """A column of sixteen tokens."""
    return mul(load(x, at + number * width), splat(factor))


@inner()
def copy_rows(into, at, x, x_at, x_token, num_rows, size, depth, eps):
    """Copy tokens' rows to ``[num_rows, depth]``, padded with zeros.

    They are divided by their norms, unless ``eps`` is ``NO_NORM``.
    """
    for r in range(num_rows):
        row, to = x_at + r * x_token, at + r * depth
        for d in range(0, size, 16):
            prefetch(x, row + AHEAD * x_token + d)
        factor = inverse_norm(x, row, size, eps) if eps >= 0 else np.float32(1)
        write_row(into, to, x, row, factor, size)
        into[to + size : to + depth] = 0


@inner()
def find_runs(into, offsets):
    """Write the start of each run of consecutive offsets, then the end; return their number."""
    count = 0
    for n in range(len(offsets)):
        if n == 0 or offsets[n] != offsets[n - 1] + 1:
            into[count] = n
            count += 1
    into[count] = len(offsets)
    return count


@inner()
def reverse_table(into, table, table_size, head):
    """Copy a head's biases times log2(e), last first, so that a run of keys is contiguous."""
    num_heads = len(table) // max(1, table_size)
    for n in range(table_size):
        into[n] = table[(table_size - 1 - n) * num_heads + head] * LOG2_E


@inner()
def gather_bias(into, reversed_table, table_size, offsets, runs, first, num_rows, width):
    """Rows of a head's bias from ``reversed_table`` (0 without a table), -inf past the last key.

    Runs are copied sixteen elements at a time: the excess is overwritten, or past the last row.
    """
    num_tokens, num_runs = len(offsets), len(runs) - 1
    centre = table_size - 1 - (table_size - 1) // 2
    for r in range(num_rows):
        at = r * width
        start = centre - offsets[first + r]
        if not table_size:
            into[at : at + num_tokens] = 0
        elif 4 * num_runs > num_tokens:  # unsigned indices save a wrap-around test
            for n in range(num_tokens):
                into[np.uint64(at + n)] = reversed_table[np.uint64(start + offsets[n])]
        else:
            for run in range(num_runs):
                n = runs[run]
                source = start + offsets[n]
                for i in range(0, runs[run + 1] - n, 16):
                    store(into, at + n + i, load(reversed_table, source + i))
        into[at + num_tokens : at + width] = -np.inf


@inner()
def scatter_bias(table, table_at, table_size, gradient, offsets, first, num_rows, width):
    """Add rows of a bias gradient to the table's; unsigned indices save a wrap-around test."""
    num_tokens = len(offsets)
    for r in range(num_rows):
        row = table_at + (table_size - 1) // 2 + offsets[first + r]
        at = r * width
        for n in range(num_tokens):
            table[np.uint64(row - offsets[n])] += gradient[np.uint64(at + n)]


@inner()
def number_regions(into, at, regions, first, num_tokens):
    """Number a window's regions in order of appearance; return how many there are."""
    count = 0
    for n in range(num_tokens):
        same = n - 1  # most often the neighbour's region
        while same >= 0 and regions[first + same] != regions[first + n]:
            same -= 1
        into[at + n] = into[at + same] if same >= 0 else np.float32(count)
        count += same < 0
    return count


@inner()
def write_row(into, at, x, x_at, factor, size):
    """``into[d] = factor · x[d]``."""
    whole = size // 16 * 16
    for d in range(0, whole, 16):
        store(into, at + d, mul(load(x, x_at + d), splat(factor)))
    for d in range(whole, size):
        store_one(into, at + d, load_one(x, x_at + d) * factor)


@inner()
def head_scale(logit_scale, softmax_scale, head):
    """The factor of a head's q·k; the same for all heads if ``logit_scale`` is empty."""
    if len(logit_scale) == 0:
        return np.float32(softmax_scale)
    learned = min(logit_scale[head], np.float32(4.605170185988092))
    return np.float32(softmax_scale) * exp2_scalar(learned * LOG2_E)
