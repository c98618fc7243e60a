"""The four inner loops of attention on a CPU, each holding its result in registers.

Scores and mixes come in two widths: four rows of queries at a time, and one row for the
decode step of a model without grouped heads. Every sum is taken in the same order in both, so
a row's result does not depend on how many rows travel with it. (Keys that were turned into columns
go through ``products.score_turned``, which has an order of its own.)

============  ==================================  ==========================================
name          computes                            in registers
============  ==================================  ==========================================
scores_4x4    4 queries · 4 keys                  16 vectors, one a pair, summed at the end
scores_1x16   1 query · 16 keys                   the same
mix           4 (or 1) rows of p · values         64 columns of 4 rows, or of 1
…x16          the same for 16 columns             what is left of a head size
============  ==================================  ==========================================

A key or value is found at ``base + rows[n]``: a page's slots and a contiguous tile look the same.
"""

from __future__ import annotations

from .compile import inner
from .simd import add, fma, load, mul, prefetch, splat, store, store_quarter, sum_each, zeros


@inner()
def scores_4x4(q, q_at, q_stride, k, base, rows, ahead, key, width):
    """Dot products of 4 query rows and 4 keys: lane ``4 * row + key``."""
    k0, k1 = base + rows[key], base + rows[key + 1]
    k2, k3 = base + rows[key + 2], base + rows[key + 3]
    q0, q1, q2, q3 = q_at, q_at + q_stride, q_at + 2 * q_stride, q_at + 3 * q_stride
    s00 = s01 = s02 = s03 = zeros()
    s10 = s11 = s12 = s13 = zeros()
    s20 = s21 = s22 = s23 = zeros()
    s30 = s31 = s32 = s33 = zeros()
    for d in range(0, width, 16):
        for n in range(key, key + 4):
            prefetch(k, base + ahead[n] + d)
        a0, a1, a2, a3 = load(q, q0 + d), load(q, q1 + d), load(q, q2 + d), load(q, q3 + d)
        b = load(k, k0 + d)
        s00, s10, s20, s30 = fma(a0, b, s00), fma(a1, b, s10), fma(a2, b, s20), fma(a3, b, s30)
        b = load(k, k1 + d)
        s01, s11, s21, s31 = fma(a0, b, s01), fma(a1, b, s11), fma(a2, b, s21), fma(a3, b, s31)
        b = load(k, k2 + d)
        s02, s12, s22, s32 = fma(a0, b, s02), fma(a1, b, s12), fma(a2, b, s22), fma(a3, b, s32)
        b = load(k, k3 + d)
        s03, s13, s23, s33 = fma(a0, b, s03), fma(a1, b, s13), fma(a2, b, s23), fma(a3, b, s33)
    return sum_each(
        (s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33)
    )


@inner()
def _scores_1x16(q, q_at, k, base, rows, ahead, key, width):
    """Dot products of one query row and 16 keys."""
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
    for d in range(0, width, 16):
        for n in range(key, key + 16):
            prefetch(k, base + ahead[n] + d)
        a = load(q, q_at + d)
        s0, s1 = fma(a, load(k, k0 + d), s0), fma(a, load(k, k1 + d), s1)
        s2, s3 = fma(a, load(k, k2 + d), s2), fma(a, load(k, k3 + d), s3)
        s4, s5 = fma(a, load(k, k4 + d), s4), fma(a, load(k, k5 + d), s5)
        s6, s7 = fma(a, load(k, k6 + d), s6), fma(a, load(k, k7 + d), s7)
        s8, s9 = fma(a, load(k, k8 + d), s8), fma(a, load(k, k9 + d), s9)
        s10, s11 = fma(a, load(k, k10 + d), s10), fma(a, load(k, k11 + d), s11)
        s12, s13 = fma(a, load(k, k12 + d), s12), fma(a, load(k, k13 + d), s13)
        s14, s15 = fma(a, load(k, k14 + d), s14), fma(a, load(k, k15 + d), s15)
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
def store_4x4(scores, at, stride, s):
    """Four rows of four scores."""
    store_quarter(scores, at, s, 0)
    store_quarter(scores, at + stride, s, 1)
    store_quarter(scores, at + 2 * stride, s, 2)
    store_quarter(scores, at + 3 * stride, s, 3)


@inner()
def _prefetch_64(v, at):
    prefetch(v, at + 0)
    prefetch(v, at + 16)
    prefetch(v, at + 32)
    prefetch(v, at + 48)


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
    for n in range(num_keys):
        _prefetch_64(v, ahead[n] + column)
        b = rows[n] + column
        b0, b1, b2, b3 = load(v, b), load(v, b + 16), load(v, b + 32), load(v, b + 48)
        w = splat(p[p0 + n])
        a00, a01, a02, a03 = fma(w, b0, a00), fma(w, b1, a01), fma(w, b2, a02), fma(w, b3, a03)
        w = splat(p[p1 + n])
        a10, a11, a12, a13 = fma(w, b0, a10), fma(w, b1, a11), fma(w, b2, a12), fma(w, b3, a13)
        w = splat(p[p2 + n])
        a20, a21, a22, a23 = fma(w, b0, a20), fma(w, b1, a21), fma(w, b2, a22), fma(w, b3, a23)
        w = splat(p[p3 + n])
        a30, a31, a32, a33 = fma(w, b0, a30), fma(w, b1, a31), fma(w, b2, a32), fma(w, b3, a33)
    store_64(acc, at0, a00, a01, a02, a03)
    store_64(acc, at1, a10, a11, a12, a13)
    store_64(acc, at2, a20, a21, a22, a23)
    store_64(acc, at3, a30, a31, a32, a33)


@inner()
def _mix_1x64(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    d = splat(decay)
    a0, a1 = mul(d, load(acc, at)), mul(d, load(acc, at + 16))
    a2, a3 = mul(d, load(acc, at + 32)), mul(d, load(acc, at + 48))
    for n in range(num_keys):
        _prefetch_64(v, ahead[n] + column)
        b = rows[n] + column
        w = splat(p[p_at + n])
        a0, a1 = fma(w, load(v, b), a0), fma(w, load(v, b + 16), a1)
        a2, a3 = fma(w, load(v, b + 32), a2), fma(w, load(v, b + 48), a3)
    store_64(acc, at, a0, a1, a2, a3)


@inner()
def store_64(acc, at, a0, a1, a2, a3):
    """Sixty-four columns of one row."""
    store(acc, at, a0)
    store(acc, at + 16, a1)
    store(acc, at + 32, a2)
    store(acc, at + 48, a3)


@inner()
def _mix_4x16(acc, at, stride, decay, r, p, p_at, p_stride, v, rows, ahead, column, num_keys):
    at0, at1, at2, at3 = at, at + stride, at + 2 * stride, at + 3 * stride
    a0, a1 = mul(splat(decay[r]), load(acc, at0)), mul(splat(decay[r + 1]), load(acc, at1))
    a2, a3 = mul(splat(decay[r + 2]), load(acc, at2)), mul(splat(decay[r + 3]), load(acc, at3))
    p0, p1, p2, p3 = p_at, p_at + p_stride, p_at + 2 * p_stride, p_at + 3 * p_stride
    for n in range(num_keys):
        prefetch(v, ahead[n] + column)
        b = load(v, rows[n] + column)
        a0, a1 = fma(splat(p[p0 + n]), b, a0), fma(splat(p[p1 + n]), b, a1)
        a2, a3 = fma(splat(p[p2 + n]), b, a2), fma(splat(p[p3 + n]), b, a3)
    store(acc, at0, a0)
    store(acc, at1, a1)
    store(acc, at2, a2)
    store(acc, at3, a3)


@inner()
def _mix_1x16(acc, at, decay, p, p_at, v, rows, ahead, column, num_keys):
    a = mul(splat(decay), load(acc, at))
    for n in range(num_keys):
        prefetch(v, ahead[n] + column)
        a = fma(splat(p[p_at + n]), load(v, rows[n] + column), a)
    store(acc, at, a)


@inner()
def mix_tile(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    """``acc[r] = decay[r] * acc[r] + Σ_n p[r, n] * v[base + rows[n]]``, ``num_keys`` terms."""
    wide = width - width % 64
    if num_rows == 1:
        for column in range(0, wide, 64):
            _mix_1x64(acc, at + column, decay[0], p, 0, v, rows, ahead, base + column, num_keys)
        for column in range(wide, width, 16):
            _mix_1x16(acc, at + column, decay[0], p, 0, v, rows, ahead, base + column, num_keys)
        return
    for r in range(0, num_rows, 4):
        for column in range(0, wide, 64):
            start = at + r * stride + column
            _mix_4x64(
                acc, start, stride, decay, r, p, r * tile_n, tile_n,
                v, rows, ahead, base + column, num_keys,
            )  # fmt: skip
        for column in range(wide, width, 16):
            start = at + r * stride + column
            _mix_4x16(
                acc, start, stride, decay, r, p, r * tile_n, tile_n,
                v, rows, ahead, base + column, num_keys,
            )  # fmt: skip


@inner()
def add_scaled(acc, at, scale, other, other_at, other_scale, width):
    """``acc = scale * acc + other_scale * other`` over ``width`` floats, a multiple of 16."""
    a, b = splat(scale), splat(other_scale)
    for d in range(0, width, 16):
        scaled = mul(a, load(acc, at + d))
        store(acc, at + d, add(scaled, mul(b, load(other, other_at + d))))
