"""Products of attention over one tile of keys, by the element types of their operands.

Rows of queries and weights are float32 or bfloat16. If ``packed`` and ``columns`` are of pairs
(uint32), matrix units multiply bfloat16 (``matrix_units``)::

    scores[r, n] = q[r] · keys[n]      acc[r] = decay[r] · acc[r] + Σ_n p[r, n] · values[n]

With up to sixteen rows (``score_few``) keys are the left operand, which is read as it lies in
memory, and scores are transposed; with more, the tile of keys is. A product has the same bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .blocks import PADDING
from .compile import inner, inner_by_types
from .gemm import multiply, transpose, transpose_16x16
from .matrix_units import TILE_ROWS, are_tiles, multiply_keys, multiply_tiles
from .microkernels import mix_tile
from .online_softmax import TILE_N
from .simd import fma, load, mul, prefetch, splat, store, zeros
from .simd_pairs import are_pairs, as_operand, load_pairs, store_pairs, zip_high, zip_low

KEY_ROW = TILE_N + PADDING
"""Elements from a row of a transposed tile of keys to the next."""


def _known(name, holds, doc):
    def op(typingctx, array):
        answer = ir.IntType(1)(holds(array))
        return types.boolean(array), lambda context, builder, sig, args: answer

    op.__name__, op.__qualname__, op.__doc__ = name, name, doc
    return intrinsic(op)


has_matrix_units = _known(
    "has_matrix_units", are_tiles, "Whether products with ``packed`` are of matrix units."
)
is_bfloat16 = _known("is_bfloat16", are_pairs, "Whether an array is of bfloat16.")


def score_transposed(scores, q, q_at, num_rows, keys, num_keys, width):
    """``scores[r, n] = Σ_d q[r, d] · keys[d, n]``; for compiled code only."""
    raise NotImplementedError


@inner_by_types(score_transposed)
def _(scores, q, q_at, num_rows, keys, num_keys, width):
    def of_float32(scores, q, q_at, num_rows, keys, num_keys, width):
        columns = (num_keys + 15) // 16 * 16
        if num_rows == 1:  # in the same order
            for n in range(0, columns, 16):
                s = zeros()
                for d in range(width):
                    s = fma(splat(q[q_at + d]), load(keys, d * KEY_ROW + n), s)
                store(scores, n, s)
            return
        multiply(
            scores, 0, TILE_N, q, q_at, width, 1, keys, KEY_ROW, num_rows, columns, width, False
        )

    def of_pairs(scores, q, q_at, num_rows, keys, num_keys, width):
        pass  # never called: bfloat16 pairs are not transposed

    return of_pairs if are_pairs(q) else of_float32


def pack_queries(columns, at, q, q_at, num_rows, width):
    """Transpose up to sixteen rows of queries for ``score_few``."""
    raise NotImplementedError


@inner_by_types(pack_queries)
def _(columns, at, q, q_at, num_rows, width):
    def of_tiles(columns, at, q, q_at, num_rows, width):
        if num_rows <= TILE_ROWS:
            pairs = width // 2
            for d in range(0, pairs, 16):
                transpose_16x16(columns, at + d * 16, 16, as_operand(q), q_at // 2 + d, pairs)

    def of_vectors(columns, at, q, q_at, num_rows, width):
        pass

    return of_tiles if are_tiles(columns) else of_vectors


def score_few(scores, columns, at, keys, base, rows, row, ahead, sums, width):
    """Scores of packed queries and 64 keys, of which every sixteen are ``row`` apart.

    Prefetches the keys at ``ahead``.
    """
    raise NotImplementedError


@inner_by_types(score_few)
def _(scores, columns, at, keys, base, rows, row, ahead, sums, width):
    def of_tiles(scores, columns, at, keys, base, rows, row, ahead, sums, width):
        multiply_keys(sums, keys, base, rows, row, ahead, columns, at, width // 2)
        for n in range(0, TILE_N, 16):
            transpose_16x16(scores, n, TILE_N, sums, n * 16, 16)

    def of_others(scores, columns, at, keys, base, rows, row, ahead, sums, width):
        pass  # never called

    return of_tiles if are_tiles(columns) and are_pairs(keys) else of_others


def score_many(scores, q, q_at, num_rows, keys, packed, width):
    """Scores of any number of rows and 64 contiguous keys."""
    raise NotImplementedError


@inner_by_types(score_many)
def _(scores, q, q_at, num_rows, keys, packed, width):
    def of_tiles(scores, q, q_at, num_rows, keys, packed, width):
        pairs = width // 2
        transpose(packed, TILE_N, as_operand(keys), pairs, TILE_N, pairs)
        for r in range(0, num_rows, TILE_ROWS):
            multiply_tiles(
                scores, r * TILE_N, TILE_N, as_operand(q), q_at // 2 + r * pairs, pairs,
                packed, 0, TILE_N, TILE_N, pairs,
            )  # fmt: skip

    def of_vectors(scores, q, q_at, num_rows, keys, packed, width):
        pass  # never called

    return of_tiles if are_tiles(packed) else of_vectors


def mix_values(
    acc, at, decay, num_rows, p, tile_n, values, base, rows, ahead, num_keys, packed, sums, width
):  # fmt: skip
    """``mix_tile``; matrix units multiply all ``tile_n`` values, the last ones by weights of 0."""
    raise NotImplementedError


@inner_by_types(mix_values)
def _(
    acc, at, decay, num_rows, p, tile_n, values, base, rows, ahead, num_keys, packed, sums, width
):  # fmt: skip
    def of_vectors(
        acc, at, decay, num_rows, p, tile_n, values, base, rows, ahead, num_keys, packed, sums,
        width,
    ):  # fmt: skip
        mix_tile(
            acc, at, width, decay, num_rows, p, tile_n, values, base, rows, ahead, num_keys, width
        )

    def of_tiles(
        acc, at, decay, num_rows, p, tile_n, values, base, rows, ahead, num_keys, packed, sums,
        width,
    ):  # fmt: skip
        pairs = tile_n // 2
        for n in range(pairs):
            first, second = base + rows[2 * n], base + rows[2 * n + 1]
            later, later_2 = base + ahead[2 * n], base + ahead[2 * n + 1]
            for d in range(0, width, 32):
                prefetch(values, later + d)
                prefetch(values, later_2 + d)
                left, right = load_pairs(values, first + d), load_pairs(values, second + d)
                store_pairs(packed, n * width + d, zip_low(left, right))
                store_pairs(packed, n * width + d + 16, zip_high(left, right))
        for first in range(0, num_rows, TILE_ROWS):
            multiply_tiles(
                sums, 0, width, as_operand(p), first * pairs, pairs, packed, 0, width, width, pairs
            )
            for r in range(min(TILE_ROWS, num_rows - first)):
                factor, to = splat(decay[first + r]), at + (first + r) * width
                for d in range(0, width, 16):
                    total = fma(factor, load(acc, to + d), load(sums, r * width + d))
                    store(acc, to + d, total)

    return of_tiles if are_tiles(packed) else of_vectors


@inner()
def mix_gathered(acc, at, decay, num_rows, p, values, num_keys, width):
    """``mix_tile`` of values that were gathered with ``PADDING`` after each row, as a matrix.

    For a multiple of four rows. The bits are the same: decays of 1 are left out.
    """
    for r in range(num_rows):
        if decay[r] != 1:
            for d in range(at + r * width, at + (r + 1) * width, 16):
                store(acc, d, mul(splat(decay[r]), load(acc, d)))
    row = width + PADDING
    multiply(acc, at, width, p, 0, TILE_N, 1, values, row, num_rows, width, num_keys, True)
