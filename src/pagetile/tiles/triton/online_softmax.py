"""Online softmax in base 2: the update of rows' states by a tile of keys.

A state ``(m, l, acc)`` is attention over the keys seen so far::

    m = max s        l = Σ 2 ** (s - m)        acc = Σ 2 ** (s - m) v        out = acc / l
"""

import triton
import triton.language as tl

from .visible_blocks import logical_keys

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST = tl.constexpr(-100)  # initial ``unit`` of ``scale_weights``
ROOM = tl.constexpr(14)  # a weight of 1 becomes 2 ** 14 in float16, so that small ones fit too


@triton.constexpr_function
def precision_of(*widths):
    """``input_precision`` of float32 products: tf32x3, or for wide heads ieee.

    With 512 columns tf32x3 has three times the error of eager code, and its operands spill.
    """
    return "ieee" if max(widths) > 256 else "tf32x3"


@triton.jit
def update_softmax(s, m, l):
    """Return the weights of a tile's scores ``[..., N]``, the factor of ``acc``, new m and l."""
    new_m = tl.maximum(m, tl.max(s, -1))
    pivot = finite(new_m)
    p = tl.exp2(s - tl.expand_dims(pivot, -1))
    decay = tl.exp2(m - pivot)
    return p, decay, new_m, l * decay + tl.sum(p, -1)


@triton.jit
def scale_weights(p, decay, scale, unit):
    """Multiply weights ``[M, N]`` by the values' scales ``[N]`` without underflow in float16.

    ``acc`` is in units of ``2 ** (unit - ROOM)``, where ``2 ** unit`` is the largest power of two
    of all scales so far. ``unit`` begins with SMALLEST; at the end the caller multiplies ``acc`` by
    ``exp2_of(unit - ROOM)``.
    """
    bits = scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    new_unit = tl.maximum(unit, (tl.max(bits, 0) >> 23) - 127)
    p *= (scale * exp2_of(-new_unit + ROOM))[None, :]
    return p, decay * exp2_of(tl.maximum(unit - new_unit, -127)), new_unit


@triton.jit
def exp2_of(exponent):
    """``2 ** exponent`` for integers from -126 to 127; 0 for -127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fit_queries(q, dtype: tl.constexpr):
    """Convert queries ``[M, D]`` to ``dtype``; return them and a factor ``[M, 1]`` of their scores.

    bfloat16 rows may overflow float16, so they are divided by their largest power of two.
    """
    unit = 1.0
    if q.dtype == tl.bfloat16 and dtype == tl.float16:
        q = q.to(tl.float32)
        peak = tl.max(tl.abs(q), 1, keep_dims=True)
        exponent = (peak.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        q *= exp2_of(-exponent)
        unit = exp2_of(exponent)
    return q.to(dtype), unit


@triton.jit
def merge_first(m, l, acc):
    """Merge the states of disjoint keys over the first dimension, of size ``STATES``."""
    new_m = tl.max(m, 0)
    weight = tl.exp2(m - finite(new_m)[None, :])
    return new_m, tl.sum(l * weight, 0), tl.sum(acc * weight[:, :, None], 0)


@triton.jit
def merge(m, l, acc, other_m, other_l, other_acc):
    """Merge the states of disjoint keys."""
    new_m = tl.maximum(m, other_m)
    pivot = finite(new_m)
    decay, other_decay = tl.exp2(m - pivot), tl.exp2(other_m - pivot)
    acc = acc * decay[:, None] + other_acc * other_decay[:, None]
    return new_m, l * decay + other_l * other_decay, acc


@triton.jit
def finite(m):
    """Replace a maximum of -inf by 0: without keys, -inf - -inf would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def add_sink(m, l, acc, sink):
    """Add one logit (times log2(e)), without a value, to each row's softmax; -inf adds nothing."""
    new_m = tl.maximum(m, sink)
    pivot = finite(new_m)
    decay = tl.exp2(m - pivot)
    return new_m, l * decay + tl.exp2(sink - pivot), acc * decay[:, None]


@triton.jit
def finish(m, l, acc):
    """A state's output and log-sum-exp; 0 and -inf for a row without keys."""
    seen = l != 0  # true for NaN, so that it propagates
    divisor = tl.where(seen, l, 1.0)
    out = acc * (1.0 / divisor)[:, None]
    return out, tl.where(seen, (m + tl.log2(divisor)) * LN_2, float("-inf"))


@triton.jit
def tanh(x):
    """Hyperbolic tangent, to a few units in the last place."""
    square = x * x
    series = x * (1 + square * (-0.33333334 + square * (0.13333334 - square * 0.05396825)))
    t = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    far = (1 - t) / (1 + t)
    return tl.where(square < 0.04, series, tl.where(x < 0, -far, far))


@triton.jit
def apply_score_mods(
    s, key, position, slopes, soft_cap, blocks, first_key, end_key, block_size,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """Cap scores, and add ALiBi's biases; return scores times log2(e).

    With a cap ``s`` is divided by it, otherwise it is already multiplied by log2(e), as ``slopes``
    are. If VISIBLE, ``key`` has compact keys of the listed ``blocks``.
    """
    if HAS_CAP:
        s = tanh(s) * (soft_cap * LOG2_E)
    if HAS_ALIBI:
        place = key
        if VISIBLE:
            place = logical_keys(blocks, key, first_key, end_key, block_size)
        s += slopes[:, None] * (place[None, :] - position[:, None]).to(tl.float32)
    return s
