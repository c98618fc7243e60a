"""Products of small matrices in scratch memory, of float32 or of pairs of bfloat16.

::

    c[r, n]  =  Σ_k a[r, k] · b[k, n]        or, with ``adds``,  +=

``b`` and ``c`` have contiguous rows; ``a`` is read element by element, so it may be transposed.
The sums of a block of ``c`` stay in registers over the loop (``blocks``).
"""

from __future__ import annotations

from .blocks import NARROW_ROWS, ROWS, WIDE, multiply_block, rows_of_next
from .compile import inner
from .simd import load, load_half, store, store_transposed


@inner(inline="always")
def pad_to_fours(rows):
    """Return the number of rows, padded to a multiple of four."""
    return (rows + 3) // 4 * 4


@inner()
def multiply(c, at, c_row, a, a_at, a_row, a_step, b, b_step, rows, columns, steps, adds, b_at=0):
    """Multiply; ``a[r, k]`` is at ``a_at + r * a_row + k * a_step``.

    ``rows`` is a multiple of 4 and ``columns`` of 16.
    """
    wide = columns - columns % WIDE
    for column in range(0, wide, WIDE):
        r = 0
        while r < rows:
            count = rows_of_next(rows - r, ROWS)
            multiply_block(
                c, at + r * c_row + column, c_row, a, a_at + r * a_row, a_row, a_step,
                b, b_at + column, b_step, steps, adds, count, ROWS, WIDE,
            )  # fmt: skip
            r += count
    if WIDE == 16:  # nothing is left; this saves compile time
        return
    pairs = columns - columns % 32
    for column in range(wide, pairs, 32):
        for r in range(0, rows, 4):
            multiply_block(
                c, at + r * c_row + column, c_row, a, a_at + r * a_row, a_row, a_step,
                b, b_at + column, b_step, steps, adds, 4, 4, 32,
            )  # fmt: skip
    for column in range(pairs, columns, 16):
        r = 0
        while r < rows:
            count = rows_of_next(rows - r, NARROW_ROWS)
            multiply_block(
                c, at + r * c_row + column, c_row, a, a_at + r * a_row, a_row, a_step,
                b, b_at + column, b_step, steps, adds, count, NARROW_ROWS, 16,
            )  # fmt: skip
            r += count


@inner()
def transpose(into, into_row, matrix, row, rows, columns, at=0):
    """``into[c, r] = matrix[r, c]``, sixteen by sixteen as far as both are multiples of it."""
    whole_rows, whole_columns = rows - rows % 16, columns - columns % 16
    for r in range(0, whole_rows, 16):
        for c in range(0, whole_columns, 16):
            transpose_16x16(into, c * into_row + r, into_row, matrix, at + r * row + c, row)
        for i in range(r, r + 16):
            for c in range(whole_columns, columns):
                into[c * into_row + i] = matrix[at + i * row + c]
    for r in range(whole_rows, rows):
        for c in range(columns):
            into[c * into_row + r] = matrix[at + r * row + c]


@inner()
def transpose_16x16(into, to, into_row, x, at, row):
    """``into[to + c * into_row + r] = x[at + r * row + c]`` for sixteen rows and columns."""
    vectors = (
        load(x, at), load(x, at + row), load(x, at + 2 * row), load(x, at + 3 * row),
        load(x, at + 4 * row), load(x, at + 5 * row), load(x, at + 6 * row), load(x, at + 7 * row),
        load(x, at + 8 * row), load(x, at + 9 * row), load(x, at + 10 * row),
        load(x, at + 11 * row), load(x, at + 12 * row), load(x, at + 13 * row),
        load(x, at + 14 * row), load(x, at + 15 * row),
    )  # fmt: skip
    store_transposed(into, to, into_row, vectors)


@inner()
def load_rows(tile, width, source, at, step, rows, size, all_rows):
    """Copy ``rows`` rows, ``step`` apart, to float32 ``[all_rows, width]``, padded with zeros.

    ``size`` is a multiple of 8, and ``width`` the next multiple of 16.
    """
    whole = size // 16 * 16
    for r in range(rows):
        for d in range(0, whole, 16):
            store(tile, r * width + d, load(source, at + r * step + d))
        if whole < size:
            store(tile, r * width + whole, load_half(source, at + r * step + whole))
    tile[rows * width : all_rows * width] = 0
