"""Softmax one tile of keys at a time, in powers of two: what a tile does to the rows' state.

A state ``(m, l, acc)`` stands for attention over the keys seen so far::

    m = max s        l = Σ 2 ** (s - m)        acc = Σ 2 ** (s - m) v        out = acc / l
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST = tl.constexpr(-100)
ROOM = tl.constexpr(14)  # a weight of 1 becomes 2 ** 14 in float16, so that small ones fit too


@triton.constexpr_function
def precision_of(*widths):
    """How float32 is multiplied: three products of TF32, or one by one for heads too wide.

    TF32's sums of 512 products have three times eager code's error, and its operands spill.
    """
    return "ieee" if max(widths) > 256 else "tf32x3"


@triton.jit
def update_softmax(s, m, l):
    """From a tile's scores ``[..., N]`` and a state: weights, the decay of ``acc``, new m and l."""
    new_m = tl.maximum(m, tl.max(s, -1))
    pivot = finite(new_m)
    p = tl.exp2(s - tl.expand_dims(pivot, -1))
    decay = tl.exp2(m - pivot)
    return p, decay, new_m, l * decay + tl.sum(p, -1)


@triton.jit
def scale_weights(p, decay, scale, unit):
    """Weights ``[M, N]`` times the values' scales ``[N]``, with all their digits in float16.

    The state's ``acc`` is in units of ``2 ** (unit - ROOM)``: the largest power of two in a scale
    so far is ``2 ** unit``. It begins with SMALLEST, and ends with ``acc * exp2_of(unit - ROOM)``.
    """
    bits = scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    new_unit = tl.maximum(unit, (tl.max(bits, 0) >> 23) - 127)
    p *= (scale * exp2_of(-new_unit + ROOM))[None, :]
    return p, decay * exp2_of(tl.maximum(unit - new_unit, -127)), new_unit


@triton.jit
def exp2_of(exponent):
    """2 to the power of an integer from -126 to 127; of -127, 0."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fit_queries(q, dtype: tl.constexpr):
    """Queries ``[M, D]`` as they are multiplied, and a factor ``[M, 1]`` of their scores, or 1.

    Rows of bfloat16 may not fit in float16; they are divided by their largest power of two.
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
    """One state from several, ``[STATES, M]`` and ``[STATES, M, V]``, each over keys of its own."""
    new_m = tl.max(m, 0)
    share = tl.exp2(m - finite(new_m)[None, :])
    return new_m, tl.sum(l * share, 0), tl.sum(acc * share[:, :, None], 0)


@triton.jit
def merge(m, l, acc, other_m, other_l, other_acc):
    """Fold the state of other keys into a state."""
    new_m = tl.maximum(m, other_m)
    pivot = finite(new_m)
    decay, other_decay = tl.exp2(m - pivot), tl.exp2(other_m - pivot)
    acc = acc * decay[:, None] + other_acc * other_decay[:, None]
    return new_m, l * decay + other_l * other_decay, acc


@triton.jit
def finite(m):
    """A pivot for exponents: where no key was seen yet, -inf - -inf would be no number."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def add_sink(m, l, acc, sink):
    """One more logit (in powers of two) in each row's softmax, with no value; -inf is none."""
    new_m = tl.maximum(m, sink)
    pivot = finite(new_m)
    decay = tl.exp2(m - pivot)
    return new_m, l * decay + tl.exp2(sink - pivot), acc * decay[:, None]


@triton.jit
def finish(m, l, acc):
    """A state's output and log-sum-exp; 0 and -inf for a row that saw no key."""
    seen = l != 0  # NaN counts as seen: it has to show
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
