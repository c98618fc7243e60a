"""Shared by fused operations on rows: their problem, and the strides of a tensor's rows."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from ..errors import UnsupportedError

MOST_ROWS = 1 << 30


class RowsProblem(NamedTuple):
    """A call as host integers and types: what chooses its implementation."""

    size: int
    """Elements of a row, or of a head."""
    num_rows: int
    dtype: torch.dtype
    is_regular: bool
    """Whether the strides are ones that a kernel supports."""
    needs_gradient: bool
    norm_dtypes: tuple[torch.dtype, ...] = ()
    """Types of the norms' weights."""

    def refuse(self, widest: int, irregular: str) -> str | None:
        """Return why a kernel cannot run this, or None if it can.

        Args:
            widest: The most elements of a row that it takes.
            irregular: The reason to return if the call is not regular.
        """
        if self.needs_gradient:
            return "a gradient is wanted; the reference has one"
        if not 0 < self.size <= widest:
            return f"a row has {self.size} numbers; 1 to {widest} run"
        if self.num_rows > MOST_ROWS:
            return f"there are {self.num_rows} rows; {MOST_ROWS} and fewer run"
        for dtype in self.norm_dtypes:
            if dtype != self.dtype:
                return f"a norm's weight is {dtype} and the rows are {self.dtype}"
        return None if self.is_regular else irregular


def check_name(argument: str, name: str, known: Collection[str]) -> None:
    """Raise UnsupportedError unless ``name`` is one of those that ``argument`` may be."""
    if name not in known:
        raise UnsupportedError(f"{argument} is {name!r}, expected one of {', '.join(known)}")


class Rows(NamedTuple):
    """Offsets of rows: ``(row // inner) * outer_stride + (row % inner) * inner_stride``."""

    num: int
    inner: int
    outer_stride: int
    inner_stride: int
    out_strides: tuple[int, ...]
    """Strides of a dense tensor of the same shape with the rows in that order."""


def fold(shape: tuple[int, ...], strides: tuple[int, ...]) -> Rows | None:
    """A tensor's rows in memory order; None if two strides do not describe them.

    Examples:
        >>> fold((1, 4, 3, 64), (999, 64, 256, 1))[:4]  # heads before tokens, laid out after them
        (12, 1, 64, 0)
        >>> fold((1, 3, 4, 64), (999, 512, 64, 1))[:4]  # a part of a wider projection
        (12, 4, 512, 64)
    """
    size = shape[-1]
    order = sorted(range(len(shape) - 1), key=lambda at: -strides[at])
    out_strides, num = [1] * len(shape), 1
    for at in reversed(order):
        out_strides[at] = num * size
        num *= shape[at]
    merged: list[tuple[int, int]] = []
    for count, stride in ((shape[at], strides[at]) for at in order if shape[at] != 1):
        if merged and merged[-1][1] == count * stride:
            merged[-1] = merged[-1][0] * count, stride
        else:
            merged.append((count, stride))
    if len(merged) > 2 or (size > 1 and strides[-1] != 1):
        return None
    if len(merged) < 2:
        merged = [*merged, (1, 0)] if merged else [(1, 0), (1, 0)]
    (_, outer_stride), (inner, inner_stride) = merged
    return Rows(num, inner, outer_stride, inner_stride, tuple(out_strides))
