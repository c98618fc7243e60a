"""The inner loops of attention on a CPU, each holding its result in registers.

``score`` is Q Kᵀ and ``mix`` is P V. Both have two variants: four rows of queries at a time, and
one row for the decode step of a model without grouped heads. They sum in the same order, so a row's
result does not depend on the number of rows; ``products.score_transposed`` sums in another.

============  ==================================  ==========================================
name          computes                            in registers
============  ==================================  ==========================================
scores_4x4    4 queries · 4 keys                  16 vectors, one per pair, summed at the end
scores_1x16   1 query · 16 keys                   the same
mix           4 (or 1) rows of p · values         64 columns of 4 rows, or of 1
…x16, …x32    the same for fewer columns          what is left of a head size
============  ==================================  ==========================================

The type of the left operand, queries or weights, selects the instruction (``simd_pairs``). With
float32, keys and values are converted as they are loaded. With bfloat16, one instruction
(AVX512-BF16) computes two products, of neighbouring columns in scores and of neighbouring keys in
mixes: half the multiplications and no conversion, so a decode step is bound by memory. Weights are
then rounded to bfloat16, as for tensor cores; the softmax's sum is not. Intel's matrix units take
whole tiles of bfloat16 instead (``products``).

Key or value ``n`` is at ``base + rows[n]``, for slots of pages as for a contiguous tile.
"""

from __future__ import annotations

from .blocks import ROWS, WIDE, add_scores_block, mix_block, rows_of_next, score_block
from .compile import inner, inner_by_types
from .gemm import pad_to_fours
from .simd import (
    add,
    fma,
    load,
    load_splat,
    mul,
    prefetch,
    splat,
    store,
    store_quarter,
    sum_each,
    zeros,
)
from .simd_pairs import (
    are_pairs,
    dot,
    dot_pairs,
    keys_of,
    load_as,
    load_pairs,
    load_values,
    load_weights,
    size_of,
    splat_pair,
    zip_high,
    zip_low,
)

PART = 256
"""Columns of sixteen float32 keys that stay in an L1 cache of 32 KiB."""


@inner()
def pad_rows(rows):
    """Return the number of rows that ``score_tile`` takes: one, or a multiple of four."""
    return 1 if rows == 1 else pad_to_fours(rows)


def scores_4x4(q, q_at, q_stride, k, base, rows, ahead, key, width):
    """Dot products of 4 query rows and 4 keys: lane ``4 * row + key``."""
    raise NotImplementedError


@inner_by_types(scores_4x4)
def _(q, q_at, q_stride, k, base, rows, ahead, key, width):
    def of_float32(q, q_at, q_stride, k, base, rows, ahead, key, width):
        return sum_each(score_block(q, q_at, q_stride, k, base, rows, ahead, key, width, 4))

    return _pair_scores_4x4.py_func if are_pairs(q) else of_float32


@inner()
def _pair_scores_4x4(q, q_at, q_stride, k, base, rows, ahead, key, width):
    k0, k1 = base + rows[key], base + rows[key + 1]
    k2, k3 = base + rows[key + 2], base + rows[key + 3]
    q0, q1, q2, q3 = q_at, q_at + q_stride, q_at + 2 * q_stride, q_at + 3 * q_stride
    s00 = s01 = s02 = s03 = zeros()
    s10 = s11 = s12 = s13 = zeros()
    s20 = s21 = s22 = s23 = zeros()
    s30 = s31 = s32 = s33 = zeros()
    for d in range(0, width, size_of(q)):
        for n in range(key, key + 4):
            prefetch(k, base + ahead[n] + d)
        a0, a1 = load_as(q, q, q0 + d), load_as(q, q, q1 + d)
        a2, a3 = load_as(q, q, q2 + d), load_as(q, q, q3 + d)
        b = load_as(q, k, k0 + d)
        s00, s10, s20, s30 = dot(a0, b, s00), dot(a1, b, s10), dot(a2, b, s20), dot(a3, b, s30)
        b = load_as(q, k, k1 + d)
        s01, s11, s21, s31 = dot(a0, b, s01), dot(a1, b, s11), dot(a2, b, s21), dot(a3, b, s31)
        b = load_as(q, k, k2 + d)
        s02, s12, s22, s32 = dot(a0, b, s02), dot(a1, b, s12), dot(a2, b, s22), dot(a3, b, s32)
        b = load_as(q, k, k3 + d)
        s03, s13, s23, s33 = dot(a0, b, s03), dot(a1, b, s13), dot(a2, b, s23), dot(a3, b, s33)
    return sum_each(
        (s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33)
    )


def _scores_1x16(q, q_at, k, base, rows, ahead, key, width):
    """Dot products of one query row and 16 keys."""
    raise NotImplementedError


@inner_by_types(_scores_1x16)
def _(q, q_at, k, base, rows, ahead, key, width):
    def of_float32(q, q_at, k, base, rows, ahead, key, width):
        return sum_each(score_block(q, q_at, 0, k, base, rows, ahead, key, width, 1))

    return _pair_scores_1x16.py_func if are_pairs(q) else of_float32


@inner()
def _pair_scores_1x16(q, q_at, k, base, rows, ahead, key, width):
    k0, k1 = base + rows[key], base + rows[key + 1]
    k2, k3 = base + rows[key + 2], base + rows[key + 3]
    k4, k5 = base + rows[key + 4], base + rows[key + 5]
    k6, k7 = base + rows[key + 6], base + rows[key + 7]
    k8, k9 = base + rows[key + 8], base + rows[key + 9]
    k10, k11 = base + rows[key + 10], base + rows[key + 11]
    k12, k13 = base + rows[key + 12], base + rows[key + 13]
    k14, k15 = base + rows[key + 14], base + rows[key + 15]
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zeros()
    s8 = s9 = s10 = s11 = s12 = s13 = s14 = s15 = zeros()
    for d in range(0, width, size_of(q)):
        for n in range(key, key + 16):
            prefetch(k, base + ahead[n] + d)
        a = load_as(q, q, q_at + d)
        s0, s1 = dot(a, load_as(q, k, k0 + d), s0), dot(a, load_as(q, k, k1 + d), s1)
        s2, s3 = dot(a, load_as(q, k, k2 + d), s2), dot(a, load_as(q, k, k3 + d), s3)
        s4, s5 = dot(a, load_as(q, k, k4 + d), s4), dot(a, load_as(q, k, k5 + d), s5)
        s6, s7 = dot(a, load_as(q, k, k6 + d), s6), dot(a, load_as(q, k, k7 + d), s7)
        s8, s9 = dot(a, load_as(q, k, k8 + d), s8), dot(a, load_as(q, k, k9 + d), s9)
        s10, s11 = dot(a, load_as(q, k, k10 + d), s10), dot(a, load_as(q, k, k11 + d), s11)
        s12, s13 = dot(a, load_as(q, k, k12 + d), s12), dot(a, load_as(q, k, k13 + d), s13)
        s14, s15 = dot(a, load_as(q, k, k14 + d), s14), dot(a, load_as(q, k, k15 + d), s15)
    return sum_each((s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15))


@inner()
def score_tile(scores, q, q_at, q_stride, num_rows, k, base, rows, ahead, tile_n, width):
    """``scores[r, n] = q[r] · k[base + rows[n]]`` for one row, or a multiple of four."""
    if num_rows == 1:
        for n in range(0, tile_n, 16):
            store(scores, n, _scores_1x16(q, q_at, k, base, rows, ahead, n, width))
        return
    for r in range(0, num_rows, 4):
        for n in range(0, tile_n, 4):
            s = scores_4x4(q, q_at + r * q_stride, q_stride, k, base, rows, ahead, n, width)
            store_4x4(scores, r * tile_n + n, tile_n, s)


@inner()
def score_in_parts(scores, sums, part, q, q_at, num_rows, k, rows, ahead, width):
    """``score_tile`` of sixteen keys and rows of ``width``, ``PART`` columns at a time.

    A part of the keys is converted once, into ``part``, and stays in the L1 cache for all queries.
    A score's lanes, in ``sums``, add in the same order.
    """
    sums[: num_rows * 256] = 0
    for start in range(0, width, PART):
        size = min(PART, width - start)
        for n in range(16):
            for d in range(0, size, 16):
                prefetch(k, ahead[n] + start + d)
                store(part, n * PART + d, load(k, rows[n] + start + d))
        for r in range(0, num_rows, 4):
            at = q_at + r * width + start
            for n in range(0, 16, 4):
                add_scores_block(sums, (r + n // 4) * 256, q, at, width, part, n * PART, PART, size)
    for r in range(0, num_rows, 4):
        for n in range(0, 16, 4):
            store_4x4(scores, r * 16 + n, 16, sum_each(_load_lanes(sums, (r + n // 4) * 256)))


@inner()
def _load_lanes(sums, at):
    """Sixteen vectors."""
    return (
        load(sums, at), load(sums, at + 16), load(sums, at + 32), load(sums, at + 48),
        load(sums, at + 64), load(sums, at + 80), load(sums, at + 96), load(sums, at + 112),
        load(sums, at + 128), load(sums, at + 144), load(sums, at + 160), load(sums, at + 176),
        load(sums, at + 192), load(sums, at + 208), load(sums, at + 224), load(sums, at + 240),
    )  # fmt: skip


@inner()
def store_4x4(scores, at, stride, s):
    """Four rows of four scores."""
    store_quarter(scores, at, s, 0)
    store_quarter(scores, at + stride, s, 1)
    store_quarter(scores, at + 2 * stride, s, 2)
    store_quarter(scores, at + 3 * stride, s, 3)


@inner()
def _prefetch_64(p, v, ahead, n, column):
    for i in range(n, n + keys_of(p)):
        for c in range(0, 64, size_of(p)):
            prefetch(v, ahead[i] + column + c)


@inner()
def _mix_1x64(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    d = splat(decay)
    a0, a1 = mul(d, load(acc, at)), mul(d, load(acc, at + 16))
    a2, a3 = mul(d, load(acc, at + 32)), mul(d, load(acc, at + 48))
    for n in range(0, num_keys, keys_of(p)):
        _prefetch_64(p, v, ahead, n, column)
        first, last = rows[n] + column, rows[n + keys_of(p) - 1] + column
        w = load_weights(p, p_at + n)
        b0, b1 = load_values(p, v, first, last)
        a0, a1 = dot(w, b0, a0), dot(w, b1, a1)
        b2, b3 = load_values(p, v, first + 32, last + 32)
        a2, a3 = dot(w, b2, a2), dot(w, b3, a3)
    store_64(acc, at, a0, a1, a2, a3)


@inner()
def store_64(acc, at, a0, a1, a2, a3):
    """Sixty-four columns of one row."""
    store(acc, at, a0)
    store(acc, at + 16, a1)
    store(acc, at + 32, a2)
    store(acc, at + 48, a3)


@inner()
def mix_tile(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    """``acc[r] = decay[r] * acc[r] + Σ_n p[r, n] * v[base + rows[n]]``, ``num_keys`` terms.

    Where weights are multiplied in pairs and ``num_keys`` is odd, the next weight must be 0 and its
    row readable.
    """
    wide = width - width % 64
    if num_rows == 1:
        for column in range(0, wide, 64):
            _mix_1x64(acc, at + column, decay[0], p, 0, v, rows, ahead, base + column, num_keys)
        for column in range(wide, width, size_of(p)):
            _mix_1_narrow(acc, at + column, decay[0], p, 0, v, rows, ahead, base + column, num_keys)
        return
    _mix_rows(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width)


@inner()
def add_scaled(acc, at, scale, other, other_at, other_scale, width):
    """``acc = scale * acc + other_scale * other`` over ``width`` floats, a multiple of 16."""
    a, b = splat(scale), splat(other_scale)
    for d in range(0, width, 16):
        scaled = mul(a, load(acc, at + d))
        store(acc, at + d, add(scaled, mul(b, load(other, other_at + d))))


# --- several rows, by the element type of weights ----------------------------------------------


def _mix_rows(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    """``mix_tile`` for a multiple of four rows."""
    raise NotImplementedError


@inner_by_types(_mix_rows)
def _(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    def of_float32(
        acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width
    ):
        wide, r = width - width % WIDE, 0
        while r < num_rows:
            count = rows_of_next(num_rows - r, ROWS)
            start = at + r * stride
            for column in range(0, wide, WIDE):
                mix_block(
                    acc, start + column, stride, decay, r, p, r * tile_n, tile_n,
                    v, rows, ahead, base + column, num_keys, count, WIDE,
                )  # fmt: skip
            if WIDE > 16:
                for column in range(wide, width, 16):
                    mix_block(
                        acc, start + column, stride, decay, r, p, r * tile_n, tile_n,
                        v, rows, ahead, base + column, num_keys, count, 16,
                    )  # fmt: skip
            r += count

    def of_pairs(
        acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width
    ):
        wide = width - width % 64
        for r in range(0, num_rows, 4):
            for column in range(0, wide, 64):
                start = at + r * stride + column
                _mix_4x64(
                    acc, start, stride, decay, r, p, r * tile_n, tile_n,
                    v, rows, ahead, base + column, num_keys,
                )  # fmt: skip
            for column in range(wide, width, 32):
                start = at + r * stride + column
                _mix_4x32(
                    acc, start, stride, decay, r, p, r * tile_n, tile_n,
                    v, rows, ahead, base + column, num_keys,
                )  # fmt: skip

    return of_pairs if are_pairs(p) else of_float32


@inner()
def _mix_4x64(acc, at, stride, decay, r, p, p_at, p_stride, v, rows, ahead, column, num_keys):
    d0, d1, d2, d3 = splat(decay[r]), splat(decay[r + 1]), splat(decay[r + 2]), splat(decay[r + 3])
    at0, at1, at2, at3 = at, at + stride, at + 2 * stride, at + 3 * stride
    a00, a01 = mul(d0, load(acc, at0)), mul(d0, load(acc, at0 + 16))
    a02, a03 = mul(d0, load(acc, at0 + 32)), mul(d0, load(acc, at0 + 48))
    a10, a11 = mul(d1, load(acc, at1)), mul(d1, load(acc, at1 + 16))
    a12, a13 = mul(d1, load(acc, at1 + 32)), mul(d1, load(acc, at1 + 48))
    a20, a21 = mul(d2, load(acc, at2)), mul(d2, load(acc, at2 + 16))
    a22, a23 = mul(d2, load(acc, at2 + 32)), mul(d2, load(acc, at2 + 48))
    a30, a31 = mul(d3, load(acc, at3)), mul(d3, load(acc, at3 + 16))
    a32, a33 = mul(d3, load(acc, at3 + 32)), mul(d3, load(acc, at3 + 48))
    p0, p1, p2, p3 = p_at, p_at + p_stride, p_at + 2 * p_stride, p_at + 3 * p_stride
    for n in range(0, num_keys, keys_of(p)):
        _prefetch_64(p, v, ahead, n, column)
        first, last = rows[n] + column, rows[n + keys_of(p) - 1] + column
        b0, b1 = load_values(p, v, first, last)
        b2, b3 = load_values(p, v, first + 32, last + 32)
        w = load_weights(p, p0 + n)
        a00, a01, a02, a03 = dot(w, b0, a00), dot(w, b1, a01), dot(w, b2, a02), dot(w, b3, a03)
        w = load_weights(p, p1 + n)
        a10, a11, a12, a13 = dot(w, b0, a10), dot(w, b1, a11), dot(w, b2, a12), dot(w, b3, a13)
        w = load_weights(p, p2 + n)
        a20, a21, a22, a23 = dot(w, b0, a20), dot(w, b1, a21), dot(w, b2, a22), dot(w, b3, a23)
        w = load_weights(p, p3 + n)
        a30, a31, a32, a33 = dot(w, b0, a30), dot(w, b1, a31), dot(w, b2, a32), dot(w, b3, a33)
    store_64(acc, at0, a00, a01, a02, a03)
    store_64(acc, at1, a10, a11, a12, a13)
    store_64(acc, at2, a20, a21, a22, a23)
    store_64(acc, at3, a30, a31, a32, a33)


# --- the remaining columns of one row: sixteen of float32, or thirty-two of pairs ----------------


def _mix_1_narrow(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    """``_mix_1x64`` for fewer columns."""
    raise NotImplementedError


@inner_by_types(_mix_1_narrow)
def _(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    return (_mix_1x32 if are_pairs(p) else _mix_1x16).py_func


@inner()
def _mix_1x16(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    a = mul(splat(decay), load(acc, at))
    for n in range(num_keys):
        prefetch(v, ahead[n] + column)
        a = fma(load_splat(p, p_at + n), load(v, rows[n] + column), a)
    store(acc, at, a)


@inner()
def _mix_4x32(acc, at, stride, decay, r, p, p_at, p_stride, v, rows, ahead, column, num_keys):
    d0, d1, d2, d3 = splat(decay[r]), splat(decay[r + 1]), splat(decay[r + 2]), splat(decay[r + 3])
    at0, at1, at2, at3 = at, at + stride, at + 2 * stride, at + 3 * stride
    a00, a01 = mul(d0, load(acc, at0)), mul(d0, load(acc, at0 + 16))
    a10, a11 = mul(d1, load(acc, at1)), mul(d1, load(acc, at1 + 16))
    a20, a21 = mul(d2, load(acc, at2)), mul(d2, load(acc, at2 + 16))
    a30, a31 = mul(d3, load(acc, at3)), mul(d3, load(acc, at3 + 16))
    p0, p1, p2, p3 = p_at, p_at + p_stride, p_at + 2 * p_stride, p_at + 3 * p_stride
    for n in range(0, num_keys, 2):
        prefetch(v, ahead[n] + column)
        prefetch(v, ahead[n + 1] + column)
        left, right = load_pairs(v, rows[n] + column), load_pairs(v, rows[n + 1] + column)
        b0, b1 = zip_low(left, right), zip_high(left, right)
        w = splat_pair(p, p0 + n)
        a00, a01 = dot_pairs(a00, w, b0), dot_pairs(a01, w, b1)
        w = splat_pair(p, p1 + n)
        a10, a11 = dot_pairs(a10, w, b0), dot_pairs(a11, w, b1)
        w = splat_pair(p, p2 + n)
        a20, a21 = dot_pairs(a20, w, b0), dot_pairs(a21, w, b1)
        w = splat_pair(p, p3 + n)
        a30, a31 = dot_pairs(a30, w, b0), dot_pairs(a31, w, b1)
    _store_32(acc, at0, a00, a01)
    _store_32(acc, at1, a10, a11)
    _store_32(acc, at2, a20, a21)
    _store_32(acc, at3, a30, a31)


@inner()
def _mix_1x32(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    d = splat(decay)
    a0, a1 = mul(d, load(acc, at)), mul(d, load(acc, at + 16))
    for n in range(0, num_keys, 2):
        prefetch(v, ahead[n] + column)
        prefetch(v, ahead[n + 1] + column)
        w = splat_pair(p, p_at + n)
        left, right = load_pairs(v, rows[n] + column), load_pairs(v, rows[n + 1] + column)
        a0 = dot_pairs(a0, w, zip_low(left, right))
        a1 = dot_pairs(a1, w, zip_high(left, right))
    _store_32(acc, at, a0, a1)


@inner()
def _store_32(acc, at, a0, a1):
    store(acc, at, a0)
    store(acc, at + 16, a1)
