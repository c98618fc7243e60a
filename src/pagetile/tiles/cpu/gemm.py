"""Products of small float32 matrices in scratch memory, four rows by 64 columns at a time.

The rest of the columns goes by sixteens, eight rows at a time: as many sums as hide the latency.

::

    c[r, n]  =  Σ_k a[r, k] · b[k, n]        or, with ``adds``,  +=

``b`` and ``c`` have contiguous rows; ``a`` is read number by number, so it may lie transposed.
The sixteen vectors of a block of ``c`` stay in registers while ``k`` runs.
"""

from __future__ import annotations

from .compile import inner
from .microkernels import store_64
from .simd import fma, load, load_half, load_splat, store, store_transposed, zeros

__all__ = ["load_rows", "multiply", "transpose"]


@inner()
def _multiply_4x64(c, at, c_row, a, a_at, a_row, a_step, b, b_at, b_step, steps, adds):
    c0, c1, c2, c3 = at, at + c_row, at + 2 * c_row, at + 3 * c_row
    a0, a1, a2, a3 = a_at, a_at + a_row, a_at + 2 * a_row, a_at + 3 * a_row
    s00 = s01 = s02 = s03 = zeros()
    s10 = s11 = s12 = s13 = zeros()
    s20 = s21 = s22 = s23 = zeros()
    s30 = s31 = s32 = s33 = zeros()
    if adds:
        s00, s01, s02, s03 = load(c, c0), load(c, c0 + 16), load(c, c0 + 32), load(c, c0 + 48)
        s10, s11, s12, s13 = load(c, c1), load(c, c1 + 16), load(c, c1 + 32), load(c, c1 + 48)
        s20, s21, s22, s23 = load(c, c2), load(c, c2 + 16), load(c, c2 + 32), load(c, c2 + 48)
        s30, s31, s32, s33 = load(c, c3), load(c, c3 + 16), load(c, c3 + 32), load(c, c3 + 48)
    for k in range(steps):
        n, j = b_at + k * b_step, k * a_step
        b0, b1, b2, b3 = load(b, n), load(b, n + 16), load(b, n + 32), load(b, n + 48)
        w = load_splat(a, a0 + j)
        s00, s01, s02, s03 = fma(w, b0, s00), fma(w, b1, s01), fma(w, b2, s02), fma(w, b3, s03)
        w = load_splat(a, a1 + j)
        s10, s11, s12, s13 = fma(w, b0, s10), fma(w, b1, s11), fma(w, b2, s12), fma(w, b3, s13)
        w = load_splat(a, a2 + j)
        s20, s21, s22, s23 = fma(w, b0, s20), fma(w, b1, s21), fma(w, b2, s22), fma(w, b3, s23)
        w = load_splat(a, a3 + j)
        s30, s31, s32, s33 = fma(w, b0, s30), fma(w, b1, s31), fma(w, b2, s32), fma(w, b3, s33)
    store_64(c, c0, s00, s01, s02, s03)
    store_64(c, c1, s10, s11, s12, s13)
    store_64(c, c2, s20, s21, s22, s23)
    store_64(c, c3, s30, s31, s32, s33)


@inner()
def _multiply_4x16(c, at, c_row, a, a_at, a_row, a_step, b, b_at, b_step, steps, adds):
    c0, c1, c2, c3 = at, at + c_row, at + 2 * c_row, at + 3 * c_row
    a0, a1, a2, a3 = a_at, a_at + a_row, a_at + 2 * a_row, a_at + 3 * a_row
    s0 = s1 = s2 = s3 = zeros()
    if adds:
        s0, s1, s2, s3 = load(c, c0), load(c, c1), load(c, c2), load(c, c3)
    for k in range(steps):
        x, j = load(b, b_at + k * b_step), k * a_step
        s0, s1 = fma(load_splat(a, a0 + j), x, s0), fma(load_splat(a, a1 + j), x, s1)
        s2, s3 = fma(load_splat(a, a2 + j), x, s2), fma(load_splat(a, a3 + j), x, s3)
    store(c, c0, s0)
    store(c, c1, s1)
    store(c, c2, s2)
    store(c, c3, s3)


@inner()
def _multiply_8x16(c, at, c_row, a, a_at, a_row, a_step, b, b_at, b_step, steps, adds):
    c4, a4 = at + 4 * c_row, a_at + 4 * a_row
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zeros()
    if adds:
        s0, s1 = load(c, at), load(c, at + c_row)
        s2, s3 = load(c, at + 2 * c_row), load(c, at + 3 * c_row)
        s4, s5 = load(c, c4), load(c, c4 + c_row)
        s6, s7 = load(c, c4 + 2 * c_row), load(c, c4 + 3 * c_row)
    for k in range(steps):
        x, j, i = load(b, b_at + k * b_step), a_at + k * a_step, a4 + k * a_step
        s0, s1 = fma(load_splat(a, j), x, s0), fma(load_splat(a, j + a_row), x, s1)
        s2, s3 = fma(load_splat(a, j + 2 * a_row), x, s2), fma(load_splat(a, j + 3 * a_row), x, s3)
        s4, s5 = fma(load_splat(a, i), x, s4), fma(load_splat(a, i + a_row), x, s5)
        s6, s7 = fma(load_splat(a, i + 2 * a_row), x, s6), fma(load_splat(a, i + 3 * a_row), x, s7)
    store(c, at, s0)
    store(c, at + c_row, s1)
    store(c, at + 2 * c_row, s2)
    store(c, at + 3 * c_row, s3)
    store(c, c4, s4)
    store(c, c4 + c_row, s5)
    store(c, c4 + 2 * c_row, s6)
    store(c, c4 + 3 * c_row, s7)


@inner()
def multiply(c, at, c_row, a, a_at, a_row, a_step, b, b_step, rows, columns, steps, adds, b_at=0):
    """Rows by fours, columns by sixteens; ``a[r, k]`` is at ``a_at + r * a_row + k * a_step``."""
    wide = columns - columns % 64
    for column in range(0, wide, 64):
        for r in range(0, rows, 4):
            _multiply_4x64(
                c, at + r * c_row + column, c_row, a, a_at + r * a_row, a_row, a_step,
                b, b_at + column, b_step, steps, adds,
            )  # fmt: skip
    eights = rows - rows % 8
    for column in range(wide, columns, 16):
        for r in range(0, eights, 8):
            _multiply_8x16(
                c, at + r * c_row + column, c_row, a, a_at + r * a_row, a_row, a_step,
                b, b_at + column, b_step, steps, adds,
            )  # fmt: skip
        for r in range(eights, rows, 4):
            _multiply_4x16(
                c, at + r * c_row + column, c_row, a, a_at + r * a_row, a_row, a_step,
                b, b_at + column, b_step, steps, adds,
            )  # fmt: skip


@inner()
def transpose(into, into_row, matrix, row, rows, columns, at=0):
    """``into[c, r] = matrix[r, c]``, sixteen by sixteen as far as both are multiples of it."""
    whole_rows, whole_columns = rows - rows % 16, columns - columns % 16
    for r in range(0, whole_rows, 16):
        for c in range(0, whole_columns, 16):
            _transpose_16x16(into, c * into_row + r, into_row, matrix, at + r * row + c, row)
        for i in range(r, r + 16):
            for c in range(whole_columns, columns):
                into[c * into_row + i] = matrix[at + i * row + c]
    for r in range(whole_rows, rows):
        for c in range(columns):
            into[c * into_row + r] = matrix[at + r * row + c]


@inner()
def _transpose_16x16(into, to, into_row, x, at, row):
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
    """Copy ``rows`` rows, ``step`` apart, into contiguous float32: zeros beside and below them.

    ``size`` is a multiple of 8, ``width`` the next one of 16.
    """
    whole = size // 16 * 16
    for r in range(rows):
        for d in range(0, whole, 16):
            store(tile, r * width + d, load(source, at + r * step + d))
        if whole < size:
            store(tile, r * width + whole, load_half(source, at + r * step + whole))
    tile[rows * width : all_rows * width] = 0
