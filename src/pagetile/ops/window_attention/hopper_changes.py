"""Weights, and what they change by, for window attention's gradients on Hopper.

Where they are float16 (``hopper_halves``), a piece's pivots are 64 numbers, negative, and what
rounding took from them, and its δ are negative too; sums are float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from .hopper_halves import exp2_below, times
from .hopper_tiles import FLAT, PIECE

__all__ = ["change", "numbers_of", "pivots_of", "start_changes", "weigh"]

# As a thread holds columns of scores, so that 16 bytes are its own: see ``make_deltas``.
HALF = gl.constexpr(gl.SharedLinearLayout([[1], [8], [16], [2], [4]]))
WHOLE = gl.constexpr(gl.SharedLinearLayout([[1], [8], [16], [2], [4], [32]]))


@gluon.jit
def numbers_of(
    piece, FIRST: gl.constexpr, COUNT: gl.constexpr, AXIS: gl.constexpr, dtype: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """32 or 64 numbers of a piece, such as δ: of rows if ``AXIS`` is 1, of columns if it is 0."""
    ALL: gl.constexpr = PIECE * 32 // dtype.primitive_bitwidth
    some = piece._reinterpret(dtype, [ALL // COUNT, COUNT], FLAT).index(FIRST // COUNT)
    some = some._reinterpret(dtype, [COUNT], HALF if COUNT == PIECE // 2 else WHOLE)
    numbers = some.load(gl.SliceLayout(AXIS, LAYOUT))
    return numbers[:, None] if AXIS == 1 else numbers[None, :]


@gluon.jit
def pivots_of(
    piece, FIRST: gl.constexpr, COUNT: gl.constexpr, AXIS: gl.constexpr, dtype: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """What ``weigh`` wants to know of rows or columns: one number each, or two."""
    pivots = (numbers_of(piece, FIRST, COUNT, AXIS, dtype, LAYOUT),)
    if dtype == gl.float16:
        pivots = pivots + (numbers_of(piece, PIECE + FIRST, COUNT, AXIS, dtype, LAYOUT),)  # type: ignore[assignment] # noqa: RUF005
    return pivots


@gluon.jit
def start_changes(a, b, deltas, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Start the product that weights change by; in float16 from -δ on."""
    R: gl.constexpr = a.shape[0]
    C: gl.constexpr = b.shape[0]
    made = gl.zeros([R, C], dtype, LAYOUT)
    if dtype == gl.float16:
        made += deltas
    return warpgroup_mma(a, b.permute((1, 0)), made, use_acc=dtype == gl.float16, is_async=True)


@gluon.jit
def weigh(s, scale, pivots):
    """2 ** (scale · s - pivot)."""
    if s.dtype == gl.float16:
        p = exp2_below(s, scale, pivots[0], pivots[1])
    else:
        p = gl.exp2(gl.fma(s, scale, -pivots[0]))
    return p


@gluon.jit
def change(p, dp, deltas):
    """What scores change by, from their weights and ``start_changes``."""
    return times(p, dp) if p.dtype == gl.float16 else p * (dp - deltas)
