"""What decides which implementation runs, and where a tensor's rows lie."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Problem(NamedTuple):
    """A call, as host numbers."""

    size: int
    """Numbers of a row."""
    num_rows: int
    is_regular: bool
    """Whether two strides lead to every row, and a row's numbers are neighbours."""
    dtype: torch.dtype
    weight_dtype: torch.dtype
    needs_gradient: bool


class Rows(NamedTuple):
    """Where rows lie: ``(row // inner) * outer_stride + (row % inner) * inner_stride``."""

    num: int
    inner: int
    outer_stride: int
    inner_stride: int
    out_strides: tuple[int, ...]
    """Of a tensor of the same shape whose rows lie in that order without gaps."""


def fold(shape: tuple[int, ...], strides: tuple[int, ...]) -> Rows | None:
    """A tensor's rows in the order of its memory; None where two strides do not lead to them.

    Example:
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
