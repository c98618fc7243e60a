"""How operands of products lie in scratch memory: as float32, or as pairs of bfloat16.

AVX512-BF16 multiplies pairs along the summed axis. So a matrix whose lanes lie along the other axis
has its rows zipped by twos::

    float32                      pairs
    [k, n]  a0 a1 a2 …           [k / 2, n, 2]  a0 b0 a1 b1 a2 b2 …
            b0 b1 b2 …

and one whose elements are repeated in all lanes is stored by rows. The scratch arrays' element type
decides (uint16: bfloat16); ``keys_of`` is the number of elements that one step multiplies.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from ....tiles.cpu.compile import inner, inner_by_types
from ....tiles.cpu.gemm import pad_to_fours
from ....tiles.cpu.linking import LINKED
from ....tiles.cpu.simd import add, exp2, load, mul, prefetch, splat, store, sub
from ....tiles.cpu.simd_pairs import (
    are_pairs,
    as_operand,
    interleave,
    load_pairs,
    round_pairs,
    store_pairs,
    zip_low,
)
from .rows import AHEAD, copy_rows, transpose, transpose_plain


def other_array(element, array, size):
    """``array`` itself for float32, which lies one way only; else a new one of ``size``."""
    raise NotImplementedError


@overload(other_array, jit_options=LINKED)
def _(element, array, size):
    if are_pairs(element):
        return lambda element, array, size: np.zeros(size, np.uint16)
    return lambda element, array, size: array


# --- rows of q and of the result's gradient, and windows of keys and values ------------------


def load_block(rows, zipped, x, x_at, x_token, num_rows, size, row, eps):
    """Load a block's rows, padded with rows of zeros to a multiple of four, and zip them."""
    raise NotImplementedError


@inner_by_types(load_block)
def _(rows, zipped, x, x_at, x_token, num_rows, size, row, eps):
    def of_float32(rows, zipped, x, x_at, x_token, num_rows, size, row, eps):
        copy_rows(rows, 0, x, x_at, x_token, num_rows, size, row, eps)
        rows[num_rows * row : pad_to_fours(num_rows) * row] = 0

    def of_pairs(rows, zipped, x, x_at, x_token, num_rows, size, row, eps):
        padded = pad_to_fours(num_rows)
        _copy_bits(rows, x, x_at, x_token, num_rows, size, row)
        rows[num_rows * row : padded * row] = 0
        if len(zipped) > 0:
            _zip(zipped, 0, rows, row, padded, row)

    return of_pairs if are_pairs(rows) else of_float32


def load_columns(into, slot, staging, x, x_at, x_token, num_tokens, z, size):
    """Load a window's tokens for products over the head: transposed, padded with zeros."""
    raise NotImplementedError


@inner_by_types(load_columns)
def _(into, slot, staging, x, x_at, x_token, num_tokens, z, size):
    def of_float32(into, slot, staging, x, x_at, x_token, num_tokens, z, size):
        transpose(into, slot * z.slot, x, x_at, x_token, num_tokens, z.width, size, z.depth)

    def of_pairs(into, slot, staging, x, x_at, x_token, num_tokens, z, size):
        _copy_bits(staging, x, x_at, x_token, num_tokens, size, z.staged)
        pairs = z.staged // 2
        transpose_plain(
            as_operand(into), slot * z.slot // 2, as_operand(staging), 0, pairs, z.width, z.width,
            pairs,
        )  # fmt: skip

    return of_pairs if are_pairs(into) else of_float32


def load_rows(into, slot, staging, x, x_at, x_token, num_tokens, z, size, eps):
    """Load a window's tokens for products over tokens: by rows, or by zipped rows."""
    raise NotImplementedError


@inner_by_types(load_rows)
def _(into, slot, staging, x, x_at, x_token, num_tokens, z, size, eps):
    def of_float32(into, slot, staging, x, x_at, x_token, num_tokens, z, size, eps):
        at = slot * z.tokens * z.columns
        copy_rows(into, at, x, x_at, x_token, num_tokens, size, z.columns, eps)

    def of_pairs(into, slot, staging, x, x_at, x_token, num_tokens, z, size, eps):
        _copy_bits(staging, x, x_at, x_token, num_tokens, size, z.staged)
        at = slot * z.tokens * z.columns
        _zip(into, at, staging, z.staged, z.tokens, z.columns)

    return of_pairs if are_pairs(into) else of_float32


@inner()
def _copy_bits(into, x, x_at, x_token, num_rows, size, row):
    """Copy rows of bfloat16; what lies behind a row's ``size`` elements stays zero."""
    whole = size // 32 * 32
    for r in range(num_rows):
        at, to = x_at + r * x_token, r * row
        for d in range(0, size, 32):
            prefetch(x, at + AHEAD * x_token + d)
        for d in range(0, whole, 32):
            store_pairs(into, to + d, load_pairs(x, at + d))
        for d in range(whole, size):
            into[np.uint64(to + d)] = x[np.uint64(at + d)]


@inner()
def _zip(into, at, x, x_row, num_rows, columns):
    """Zip rows by twos; reads up to sixteen elements behind the last row."""
    for r in range(0, num_rows, 2):
        for d in range(0, columns, 16):
            upper, lower = load_pairs(x, r * x_row + d), load_pairs(x, (r + 1) * x_row + d)
            store_pairs(into, at + r * columns + 2 * d, zip_low(upper, lower))


# --- weights and gradients of scores ---------------------------------------------------------


def store_32(array, at, a, b):
    """Store thirty-two lanes as an operand that is repeated in all lanes."""
    raise NotImplementedError


@inner_by_types(store_32)
def _(array, at, a, b):
    def of_float32(array, at, a, b):
        store(array, at, a)
        store(array, at + 16, b)

    def of_pairs(array, at, a, b):
        store_pairs(array, at, round_pairs(a, b))

    return of_pairs if are_pairs(array) else of_float32


def recompute_weights(element, w, num_rows, width):
    """Turn rows of scores into the weights of the forward pass, and into score gradients.

    ``p = 2 ** (s - top)``, ``ds = p · (dp - delta)``; ``dp`` is read from ``w.ds``. Rows up to a
    multiple of four are zeros. Adds ``ds`` to the gradient of the bias.
    """
    raise NotImplementedError


@inner_by_types(recompute_weights)
def _(element, w, num_rows, width):
    def of_float32(element, w, num_rows, width):
        for r in range(num_rows):
            pivot, shift = splat(w.tops[r]), splat(w.deltas[r])
            for n in range(r * width, (r + 1) * width, 16):
                p, ds = _weight(w, n, pivot, shift)
                store(w.s, n, p)
                store(w.ds, n, ds)
                store(w.dbias, n, add(load(w.dbias, n), ds))
        padded = pad_to_fours(num_rows)
        w.s[num_rows * width : padded * width] = 0
        w.ds[num_rows * width : padded * width] = 0

    def of_pairs(element, w, num_rows, width):
        padded = pad_to_fours(num_rows)
        w.s[num_rows * width : padded * width] = 0
        w.ds[num_rows * width : padded * width] = 0
        w.tops[num_rows:padded] = np.inf
        w.deltas[num_rows:padded] = 0
        for r in range(0, padded, 2):
            pivot, shift = splat(w.tops[r]), splat(w.deltas[r])
            next_pivot, next_shift = splat(w.tops[r + 1]), splat(w.deltas[r + 1])
            for n in range(r * width, (r + 1) * width, 32):
                below = n + width
                p0, ds0 = _weight(w, n, pivot, shift)
                p1, ds1 = _weight(w, below, next_pivot, next_shift)
                p2, ds2 = _weight(w, n + 16, pivot, shift)
                p3, ds3 = _weight(w, below + 16, next_pivot, next_shift)
                zipped = 2 * n - r * width
                store_pairs(w.weights, zipped, interleave(round_pairs(p0, p1)))
                store_pairs(w.weights, zipped + 32, interleave(round_pairs(p2, p3)))
                store_pairs(w.zipped_ds, zipped, interleave(round_pairs(ds0, ds1)))
                store_pairs(w.zipped_ds, zipped + 32, interleave(round_pairs(ds2, ds3)))
                store_pairs(w.ds_rows, n, round_pairs(ds0, ds2))
                store_pairs(w.ds_rows, below, round_pairs(ds1, ds3))
                store(w.dbias, n, add(load(w.dbias, n), ds0))
                store(w.dbias, n + 16, add(load(w.dbias, n + 16), ds2))
                store(w.dbias, below, add(load(w.dbias, below), ds1))
                store(w.dbias, below + 16, add(load(w.dbias, below + 16), ds3))

    return of_pairs if are_pairs(element) else of_float32


@inner(inline="always")
def _weight(w, n, pivot, shift):
    p = exp2(sub(load(w.s, n), pivot))
    return p, mul(p, sub(load(w.ds, n), shift))
