"""The argument contract of window_attention, always checked before any work."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch

from ...errors import DTypeError, ShapeError
from ...shapes import (
    Form,
    bind,
    check_contiguous_rows,
    check_device,
    check_dtype,
    form,
    is_debugging,
)
from ...tiles.types import ALL_FLOATS
from .problem import Operands, Problem

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ROWS = "num_windows num_heads num_tokens head_size"


class _TensorForms(NamedTuple):
    """The shapes and element types of ``Operands``' tensors."""

    q: Form
    k: Form
    v: Form
    bias_table: Form | None
    rel_offsets: Form | None
    bias: Form | None
    regions: Form | None
    mask: Form | None
    logit_scale: Form | None


def check(x: Operands) -> Problem:
    """Raise ShapeError or DTypeError naming the argument at fault, or return the problem."""
    if x.mask is not None and x.mask.requires_grad:
        raise DTypeError("mask requires a gradient, but has none: pass a learned one as bias")
    tensors = (
        x.q, x.k, x.v, x.bias_table, x.rel_offsets, x.bias, x.regions, x.mask, x.logit_scale
    )  # fmt: skip
    forms = tuple(None if tensor is None else form(tensor) for tensor in tensors)
    if torch.compiler.is_compiling():  # sizes may be symbolic, which cannot be cached
        return _check(forms)
    return _check_once(forms)


def _check(forms: tuple[Any, ...]) -> Problem:
    named: list[Any] = [None if fields is None else Form(*fields) for fields in forms]
    x = _TensorForms(*named)
    _check_pairs(x)
    sizes = bind(
        q=(x.q, _ROWS),
        k=(x.k, _ROWS),
        v=(x.v, _ROWS),
        bias_table=(x.bias_table, "table_size num_heads"),
        rel_offsets=(x.rel_offsets, "num_tokens"),
        bias=(x.bias, "num_biases num_heads num_tokens num_tokens"),
        regions=(x.regions, "num_masks num_tokens"),
        mask=(x.mask, "num_masks num_tokens num_tokens"),
        logit_scale=(x.logit_scale, "num_heads"),
    )
    _check_types(x)
    _check_sizes(x, sizes)
    return Problem(
        num_windows=sizes["num_windows"],
        num_heads=sizes["num_heads"],
        num_tokens=sizes["num_tokens"],
        head_size=sizes["head_size"],
        dtype=x.q.dtype,
        table_size=sizes.get("table_size"),
        num_biases=sizes.get("num_biases", 0),
        num_masks=sizes.get("num_masks", 0),
        has_regions=x.regions is not None,
        learned_dtypes=tuple(
            tensor.dtype for tensor in (x.bias_table, x.bias, x.logit_scale) if tensor is not None
        ),
        mask_dtype=None if x.mask is None else x.mask.dtype,
        cosine=x.logit_scale is not None,
    )


_check_once = functools.lru_cache(maxsize=4096)(_check)


def check_values(x: Operands) -> None:
    """Raise ShapeError if the offsets do not fit the table.

    Reads them where that costs nothing: on a CPU, or under ``PAGETILE_DEBUG=1``.
    """
    if x.bias_table is None or x.rel_offsets is None or not x.rel_offsets.numel():
        return
    if x.rel_offsets.device.type != "cpu" and not is_debugging():
        return
    _check_offsets(tuple(x.rel_offsets.tolist()), x.bias_table.shape[0])


@functools.lru_cache(maxsize=256)
def _check_offsets(offsets: tuple[int, ...], table_size: int) -> None:
    least, most = min(offsets), max(offsets)
    needed = 2 * (most - least) + 1
    other = "one of them is of another window"
    if table_size < needed:
        raise ShapeError(
            f"bias_table has {table_size} rows but rel_offsets reach from {least} to {most}, which "
            f"needs {needed}: {other}, or the table is for another window: "
            "make them with rel_offsets(window, table_window)"
        )
    if len(set(offsets)) < len(offsets):
        raise ShapeError("rel_offsets has the same number twice: each token has its own position")
    for step in _grid_steps(offsets):
        if table_size % step:
            raise ShapeError(
                f"bias_table has {table_size} rows but rel_offsets step by {step} along an axis, "
                f"and prod(2·w - 1) is a multiple of each step: {other}"
            )


def _grid_steps(offsets: tuple[int, ...]) -> list[int]:
    """Return the steps of ``offsets`` along each axis, if they come from ``rel_offsets``.

    Empty for other tokens or another order, from which the table's size does not follow. In a whole
    window, each step is an odd multiple of the one before: ``2·w - 1``.
    """
    steps, grid, left = [1], [offsets[0]], offsets
    while len(left) > 1:
        step = left[1] - left[0]
        length = next((n for n in range(1, len(left)) if left[n] != left[0] + n * step), len(left))
        steps.append(step)
        grid = [first + n * step for n in range(length) for first in grid]
        left = left[::length]
    is_nested = all(b % a == 0 and b // a % 2 == 1 for a, b in itertools.pairwise(steps))
    is_whole = tuple(grid[: len(offsets)]) == offsets and steps[1:2] == [1]
    return steps if is_nested and is_whole else []


def _check_pairs(x: _TensorForms) -> None:
    """Check arguments that need or exclude each other."""
    if (x.bias_table is None) != (x.rel_offsets is None):
        given, missing = "bias_table", "rel_offsets"
        if x.bias_table is None:
            given, missing = missing, given
        raise ShapeError(
            f"{given} is given without {missing}: pass both, with "
            "rel_offsets=pagetile.rel_offsets(window)"
        )
    for one, other in (("bias_table", "bias"), ("regions", "mask")):
        if getattr(x, one) is not None and getattr(x, other) is not None:
            raise ShapeError(f"both {one} and {other} are given, expected one of them: add them up")


def _check_types(x: _TensorForms) -> None:
    check_dtype("q", x.q, *ALL_FLOATS)
    for name, tensor in (("k", x.k), ("v", x.v)):
        check_dtype(name, tensor, x.q.dtype)
    learned = {"bias_table": x.bias_table, "bias": x.bias, "logit_scale": x.logit_scale}
    for name, parameter in learned.items():
        if parameter is not None:
            check_dtype(name, parameter, *ALL_FLOATS)
    if x.rel_offsets is not None:
        check_dtype("rel_offsets", x.rel_offsets, torch.int32)
    if x.regions is not None:
        check_dtype("regions", x.regions, *_INTEGERS)
    if x.mask is not None:
        check_dtype("mask", x.mask, torch.bool, *ALL_FLOATS)
    others = {"rel_offsets": x.rel_offsets, "regions": x.regions, "mask": x.mask}
    check_device("q", x.q.device, k=x.k, v=x.v, **learned, **others)
    check_contiguous_rows(q=x.q, k=x.k, v=x.v)


def _check_sizes(x: _TensorForms, sizes: dict[str, int]) -> None:
    num_windows, num_tokens = sizes["num_windows"], sizes["num_tokens"]
    for name in ("num_heads", "num_tokens", "head_size"):
        if sizes[name] < 1:
            raise ShapeError(f"q has {name}={sizes[name]}, expected at least 1")
    repeated: tuple[tuple[str, Form | None], ...] = (
        ("bias", x.bias),
        ("regions", x.regions),
        ("mask", x.mask),
    )
    for name, tensor in repeated:
        if tensor is not None and (tensor.shape[0] < 1 or num_windows % tensor.shape[0]):
            raise ShapeError(
                f"{name} is for {tensor.shape[0]} windows but q has num_windows={num_windows}, "
                "which is not a multiple of it: windows are ordered image by image"
            )
    table_size = sizes.get("table_size")
    if table_size is not None and (table_size % 2 == 0 or table_size < 2 * num_tokens - 1):
        raise ShapeError(
            f"bias_table has {table_size} rows, expected prod(2·w - 1) over the axes of a window "
            f"of num_tokens={num_tokens}: an odd number, at least {2 * num_tokens - 1}"
        )
