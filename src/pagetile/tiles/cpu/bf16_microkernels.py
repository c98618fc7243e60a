"""The micro-kernels again for bfloat16 times bfloat16, two products an instruction (AVX512-BF16).

Same shapes, same order of sums within a row as in ``microkernels``, half the multiplications
and no conversion: a decode step becomes bound by memory. Weights are rounded to bfloat16, as
they are wherever matrix units mix values; the softmax's sum is not. Keys and values of 8 bits
become bfloat16 as they are loaded, exactly.
"""

from __future__ import annotations

from .compile import inner
from .microkernels import store_4x4, store_64
from .simd import load, mul, prefetch, splat, store, sum_each, zeros
from .simd_pairs import dot_pairs, load_pairs, splat_pair, zip_high, zip_low


@inner()
def _scores_4x4(q, q_at, q_stride, k, base, rows, ahead, key, width):
    k0, k1 = base + rows[key], base + rows[key + 1]
    k2, k3 = base + rows[key + 2], base + rows[key + 3]
    q0, q1, q2, q3 = q_at, q_at + q_stride, q_at + 2 * q_stride, q_at + 3 * q_stride
    s00 = s01 = s02 = s03 = zeros()
    s10 = s11 = s12 = s13 = zeros()
    s20 = s21 = s22 = s23 = zeros()
    s30 = s31 = s32 = s33 = zeros()
    for d in range(0, width, 32):
        for n in range(key, key + 4):
            prefetch(k, base + ahead[n] + d)
        a0, a1 = load_pairs(q, q0 + d), load_pairs(q, q1 + d)
        a2, a3 = load_pairs(q, q2 + d), load_pairs(q, q3 + d)
        b = load_pairs(k, k0 + d)
        s00, s10 = dot_pairs(s00, a0, b), dot_pairs(s10, a1, b)
        s20, s30 = dot_pairs(s20, a2, b), dot_pairs(s30, a3, b)
        b = load_pairs(k, k1 + d)
        s01, s11 = dot_pairs(s01, a0, b), dot_pairs(s11, a1, b)
        s21, s31 = dot_pairs(s21, a2, b), dot_pairs(s31, a3, b)
        b = load_pairs(k, k2 + d)
        s02, s12 = dot_pairs(s02, a0, b), dot_pairs(s12, a1, b)
        s22, s32 = dot_pairs(s22, a2, b), dot_pairs(s32, a3, b)
        b = load_pairs(k, k3 + d)
        s03, s13 = dot_pairs(s03, a0, b), dot_pairs(s13, a1, b)
        s23, s33 = dot_pairs(s23, a2, b), dot_pairs(s33, a3, b)
    return sum_each(
        (s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33)
    )


@inner()
def _scores_1x16(q, q_at, k, base, rows, ahead, key, width):
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
    for d in range(0, width, 32):
        for n in range(key, key + 16):
            prefetch(k, base + ahead[n] + d)
        a = load_pairs(q, q_at + d)
        s0 = dot_pairs(s0, a, load_pairs(k, k0 + d))
        s1 = dot_pairs(s1, a, load_pairs(k, k1 + d))
        s2 = dot_pairs(s2, a, load_pairs(k, k2 + d))
        s3 = dot_pairs(s3, a, load_pairs(k, k3 + d))
        s4 = dot_pairs(s4, a, load_pairs(k, k4 + d))
        s5 = dot_pairs(s5, a, load_pairs(k, k5 + d))
        s6 = dot_pairs(s6, a, load_pairs(k, k6 + d))
        s7 = dot_pairs(s7, a, load_pairs(k, k7 + d))
        s8 = dot_pairs(s8, a, load_pairs(k, k8 + d))
        s9 = dot_pairs(s9, a, load_pairs(k, k9 + d))
        s10 = dot_pairs(s10, a, load_pairs(k, k10 + d))
        s11 = dot_pairs(s11, a, load_pairs(k, k11 + d))
        s12 = dot_pairs(s12, a, load_pairs(k, k12 + d))
        s13 = dot_pairs(s13, a, load_pairs(k, k13 + d))
        s14 = dot_pairs(s14, a, load_pairs(k, k14 + d))
        s15 = dot_pairs(s15, a, load_pairs(k, k15 + d))
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
            s = _scores_4x4(q, q_at + r * q_stride, q_stride, k, base, rows, ahead, n, width)
            store_4x4(scores, r * tile_n + n, tile_n, s)


@inner()
def _prefetch_64(v, at):
    prefetch(v, at + 0)
    prefetch(v, at + 32)


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
    for n in range(0, num_keys, 2):
        _prefetch_64(v, ahead[n] + column)
        _prefetch_64(v, ahead[n + 1] + column)
        even, odd = rows[n] + column, rows[n + 1] + column
        left, right = load_pairs(v, even), load_pairs(v, odd)
        b0, b1 = zip_low(left, right), zip_high(left, right)
        left, right = load_pairs(v, even + 32), load_pairs(v, odd + 32)
        b2, b3 = zip_low(left, right), zip_high(left, right)
        w = splat_pair(p, p0 + n)
        a00, a01 = dot_pairs(a00, w, b0), dot_pairs(a01, w, b1)
        a02, a03 = dot_pairs(a02, w, b2), dot_pairs(a03, w, b3)
        w = splat_pair(p, p1 + n)
        a10, a11 = dot_pairs(a10, w, b0), dot_pairs(a11, w, b1)
        a12, a13 = dot_pairs(a12, w, b2), dot_pairs(a13, w, b3)
        w = splat_pair(p, p2 + n)
        a20, a21 = dot_pairs(a20, w, b0), dot_pairs(a21, w, b1)
        a22, a23 = dot_pairs(a22, w, b2), dot_pairs(a23, w, b3)
        w = splat_pair(p, p3 + n)
        a30, a31 = dot_pairs(a30, w, b0), dot_pairs(a31, w, b1)
        a32, a33 = dot_pairs(a32, w, b2), dot_pairs(a33, w, b3)
    store_64(acc, at0, a00, a01, a02, a03)
    store_64(acc, at1, a10, a11, a12, a13)
    store_64(acc, at2, a20, a21, a22, a23)
    store_64(acc, at3, a30, a31, a32, a33)


@inner()
def _mix_1x64(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    d = splat(decay)
    a0, a1 = mul(d, load(acc, at)), mul(d, load(acc, at + 16))
    a2, a3 = mul(d, load(acc, at + 32)), mul(d, load(acc, at + 48))
    for n in range(0, num_keys, 2):
        _prefetch_64(v, ahead[n] + column)
        _prefetch_64(v, ahead[n + 1] + column)
        even, odd = rows[n] + column, rows[n + 1] + column
        w = splat_pair(p, p_at + n)
        left, right = load_pairs(v, even), load_pairs(v, odd)
        a0 = dot_pairs(a0, w, zip_low(left, right))
        a1 = dot_pairs(a1, w, zip_high(left, right))
        left, right = load_pairs(v, even + 32), load_pairs(v, odd + 32)
        a2 = dot_pairs(a2, w, zip_low(left, right))
        a3 = dot_pairs(a3, w, zip_high(left, right))
    store_64(acc, at, a0, a1, a2, a3)


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


@inner()
def mix_tile(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    """``acc[r] = decay[r] * acc[r] + Σ_n p[r, n] * v[base + rows[n]]``.

    Keys come in pairs: with an odd ``num_keys`` the next weight must be 0 and its row readable.
    """
    wide = width - width % 64
    if num_rows == 1:
        for column in range(0, wide, 64):
            _mix_1x64(acc, at + column, decay[0], p, 0, v, rows, ahead, base + column, num_keys)
        for column in range(wide, width, 32):
            _mix_1x32(acc, at + column, decay[0], p, 0, v, rows, ahead, base + column, num_keys)
        return
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
