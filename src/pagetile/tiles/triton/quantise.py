"""Quantise rows to 8 bits as the reference does.

::

    scale = max(amax / LARGEST, SMALLEST)          of a token's KV head, if scales are per token
    value = round(x / scale)

Scales per head are given; values are then clamped to ``LARGEST``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...device import DeviceInfo
from .launch import refuse

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def refuse_cache(device: DeviceInfo, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot read and write a cache of these elements; None if they can."""
    reason = refuse(device, **({} if dtype in _EIGHT_BITS else {"k_cache": dtype}))
    is_old = device.kind == "cuda" and device.capability < (8, 9)
    if reason is None and is_old and dtype == torch.float8_e4m3fn:
        return f"k_cache is float8_e4m3fn, which {device.name} cannot convert; e5m2 and int8 run"
    return reason


@triton.jit
def larger(a, b):
    """The larger one; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(x):
    """The largest absolute value of each row."""
    return tl.reduce(tl.abs(x), 1, larger)


@triton.jit
def row_scales(
    scale, at, is_row, largest,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """The scales of rows: with "token" computed from ``largest`` and stored, with "head" loaded."""
    if SCALES == "token":
        found = _scale_of(largest, LARGEST, SMALLEST)
        tl.store(scale + at, found, mask=is_row)
    else:
        found = tl.load(scale + at, mask=is_row, other=1.0)
    return found


@triton.jit
def _scale_of(amax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """The scale of each row from its largest absolute value; NaN if that is NaN or infinite."""
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), SMALLEST)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def encode(x, scale, SCALES: tl.constexpr, LARGEST: tl.constexpr, code: tl.constexpr):
    """Quantise float32 rows by their scales to the 8-bit type ``code``."""
    if SCALES == "token":
        # No value exceeds LARGEST, and a NaN in a row has made its scale NaN.
        x = _divide(x, scale)
        is_number = (scale == scale)[:, None]
    else:
        x = _divide(_clamp(x, (LARGEST * scale)[:, None]), scale)
        is_number = x == x
    if code == tl.int8:
        x = _round_to_int8(x, is_number)
    return x.to(code)


@triton.jit
def _divide(x, scale):
    """``x / scale`` by the reciprocal and one correction by the remainder.

    It rounds like a division (except near the end of float32's range), keeps the sign of zero, and
    takes a third of the time.
    """
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    quotient = x * inverse
    excess = tl.fma(quotient, scale[:, None], -x)
    # Triton's -x is 0 - x, which turns the 0 of an exact quotient into +0 and -0 into it.
    return tl.fma(excess * -1.0, inverse, quotient)


@triton.jit
def _clamp(x, bound):
    x = tl.maximum(x, -bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _round_to_int8(x, is_number):
    """Return bits whose last byte is the int8; 0 for NaN."""
    # Adding 1.5 * 2 ** 23 rounds to an integer, in the low bits.
    return tl.where(is_number, x + 12582912.0, 0.0).to(tl.int32, bitcast=True)
