"""Weights, and what they change by, for window attention's gradients on Hopper.

Where they are float16 (``hopper_halves``), a piece's pivots are 64 numbers, negative, and what
rounding took from them, and its δ are negative too; sums are float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .hopper_halves import exp2_below, times
from .hopper_tiles import FLAT, PIECE

__all__ = ["change", "start_changes", "weigh"]


@gluon.jit
def _numbers(
    piece, FIRST: gl.constexpr, dtype: gl.constexpr, AXIS: gl.constexpr, COUNT: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Some numbers of a piece: of rows if ``AXIS`` is 1, of columns if it is 0."""
    ALL: gl.constexpr = PIECE * 32 // dtype.primitive_bitwidth
    some = piece._reinterpret(dtype, [ALL // COUNT, COUNT], FLAT).index(FIRST // COUNT)
    numbers = some.load(gl.SliceLayout(AXIS, LAYOUT))
    return numbers[:, None] if AXIS == 1 else numbers[None, :]


@gluon.jit
def start_changes(
    a, b, deltas, FIRST: gl.constexpr, AXIS: gl.constexpr, dtype: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the product that weights change by; in float16 from -δ on."""
    R: gl.constexpr = a.shape[0]
    C: gl.constexpr = b.shape[0]
    made = gl.zeros([R, C], dtype, LAYOUT)
    if dtype == gl.float16:
        made += _numbers(deltas, FIRST, dtype, AXIS, R if AXIS == 1 else C, LAYOUT)
    return warpgroup_mma(a, b.permute((1, 0)), made, use_acc=dtype == gl.float16, is_async=True)


@gluon.jit
def weigh(s, scale, pivots, FIRST: gl.constexpr, AXIS: gl.constexpr):
    """2 ** (scale · s - pivot)."""
    LAYOUT: gl.constexpr = s.type.layout
    COUNT: gl.constexpr = s.shape[1 - AXIS]
    pivot = _numbers(pivots, FIRST, s.dtype, AXIS, COUNT, LAYOUT)
    if s.dtype == gl.float16:
        rest = _numbers(pivots, PIECE + FIRST, s.dtype, AXIS, COUNT, LAYOUT)
        p = exp2_below(s, scale, pivot, rest)
    else:
        p = gl.exp2(gl.fma(s, scale, -pivot))
    return p


@gluon.jit
def change(p, dp, deltas, FIRST: gl.constexpr, AXIS: gl.constexpr):
    """What scores change by, from their weights and ``start_changes``."""
    if p.dtype == gl.float16:
        ds = times(p, dp)
    else:
        LAYOUT: gl.constexpr = p.type.layout
        COUNT: gl.constexpr = p.shape[1 - AXIS]
        ds = p * (dp - _numbers(deltas, FIRST, gl.float32, AXIS, COUNT, LAYOUT))
    return ds
