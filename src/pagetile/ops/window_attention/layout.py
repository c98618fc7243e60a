"""Padding, roll and partition of a map into windows, and the way back, as one index.

::

    a line of 5, windows of 3, shift 1      padded to 6, rolled by -1, cut
    tokens at the places of the windows     1 2 3 | 4 . 0        "." is padding
    places of the tokens                    5 0 1 2 3

Every token has exactly one place, so each direction is one gather of rows, and the gradient of one
is the other: no sums, no atomics, the same bits on every run.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...device import DeviceInfo
from ..eager import choose_gradient, has_dispatch_observers, make_calls
from .geometry import clamp, partition, rel_offsets, shift_regions


class Layout(NamedTuple):
    """Index between the tokens of a map and their places in windows."""

    grid: tuple[int, ...]
    tokens: Tensor
    """int32 ``[num_places]``: the token at each place, -1 for padding."""
    padded: Tensor
    """int64 ``[num_padded]``: the places without a token."""
    places: Tensor
    """int32 ``[num_map_tokens]``: the place of each token."""
    offsets: Tensor
    """int32 ``[num_tokens]``: ``rel_offsets`` of the window, its first ones if it is clamped."""
    regions: Tensor | None
    """uint8 ``[num_windows, num_tokens]``; ``None`` without a shift."""


def layout(
    grid: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], device: torch.device
) -> Layout:
    """Return the layout of a map on ``device``, cached; compiled code has it as a constant.

    Raises:
        ShapeError: The axes disagree, or a size is out of range.
    """
    # Under a tracing mode the tensors are fake, so they must not be cached.
    make = _make if _get_current_dispatch_mode() is None else _make.__wrapped__
    return make(grid, window, shift, device)


# The mark that torch.compiler.assume_constant_result sets (2.11 to 2.13); importing that module
# takes a second.
layout._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def _make(
    grid: tuple[int, ...], whole: tuple[int, ...], shift: tuple[int, ...], device: torch.device
) -> Layout:
    window, shift = clamp(grid, whole, shift)
    extra = [-size % length for size, length in zip(grid, window, strict=True)]
    with torch.inference_mode(False):
        numbers = torch.arange(math.prod(grid), device="cpu").view(grid)
        numbers = F.pad(numbers, [n for size in reversed(extra) for n in (0, size)], value=-1)
        numbers = numbers.roll([-step for step in shift], list(range(len(grid))))
        tokens = partition(numbers, window).flatten()
        # Padded places come first, in order, and then the place of each token in turn.
        order = tokens.argsort(stable=True)
        num_padded = len(tokens) - math.prod(grid)
        return Layout(
            grid,
            tokens.to(device, torch.int32),
            order[:num_padded].to(device),
            order[num_padded:].to(device, torch.int32),
            rel_offsets(whole, num_tokens=math.prod(window)).to(device),
            shift_regions(numbers.shape, window, shift).to(device) if any(shift) else None,
        )


def to_heads(qkv: Tensor, where: Layout, padding: Tensor | None = None) -> tuple[Tensor, ...]:
    """Cut ``[batch, *grid, 3, num_heads, head_size]`` into q, k and v of windows.

    Each is ``[batch * num_windows, num_heads, num_tokens, head_size]``. Padded tokens are
    ``padding`` ``[3, num_heads, head_size]``, or zeros.
    """
    inputs = qkv.flatten(1, len(where.grid)), *where[1:4], padding
    rows = (_cut_operator if has_dispatch_observers(qkv, padding) else _cut_function)(*inputs)
    windows: Tensor = torch.unflatten(rows, 1, (-1, len(where.offsets))).flatten(0, 1)
    return windows.permute(2, 0, 3, 1, 4).unbind()


def from_heads(x: Tensor, where: Layout) -> Tensor:
    """Join windows to a map again: the output of attention, or its log-sum-exp.

    ``[batch * num_windows, num_heads, num_tokens, *row]`` to ``[batch, *grid, num_heads, *row]``.
    """
    num_windows = len(where.tokens) // len(where.offsets)
    windows: Tensor = torch.unflatten(x.transpose(1, 2), 0, (-1, num_windows))
    join = _join_operator if has_dispatch_observers(x) else _join_function
    return torch.unflatten(join(windows.flatten(1, 2), *where[1:4]), 1, where.grid)


def _take_places(
    x: Tensor, tokens: Tensor, padded: Tensor, places: Tensor, padding: Tensor | None
) -> Tensor:
    """``[batch, num_map_tokens, *row]`` to ``[batch, num_places, *row]``."""
    filling = None if padding is None else padding.to(x.dtype)
    return gather_rows(x, tokens, padded, filling)


def _take_tokens(x: Tensor, tokens: Tensor, padded: Tensor, places: Tensor) -> Tensor:
    """``[batch, num_places, *row]`` to ``[batch, num_map_tokens, *row]``."""
    return gather_rows(x, places, padded[:0], None)


def gather_rows(x: Tensor, index: Tensor, absent: Tensor, filling: Tensor | None) -> Tensor:
    """Return ``x[:, index]``; at ``absent``, where the index is negative, ``filling`` or zeros.

    On a CPU ``index_select`` is as fast as a copy; a GPU takes a kernel (``triton/gather_rows``).
    """
    if _has_kernel(x.device):
        from .triton import gather_rows as kernel

        rows: Tensor = kernel.gather_rows(x, index, filling)
        return rows
    if not absent.numel():
        return x.index_select(1, index)
    rows = x.index_select(1, index.clamp(min=0))
    if filling is None:
        return rows.index_fill_(1, absent, 0)
    return rows.index_copy_(1, absent, filling.expand(len(x), len(absent), *filling.shape))


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from .triton import gather_rows as kernel

    return kernel.supports(DeviceInfo.of(device)) is None


_cut = torch.library.custom_op("pagetile::cut_windows", _take_places, mutates_args=())
_join = torch.library.custom_op("pagetile::join_windows", _take_tokens, mutates_args=())


@_cut.register_fake
def _(x: Tensor, tokens: Tensor, padded: Tensor, places: Tensor, padding: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(tokens), *x.shape[2:])


@_join.register_fake
def _(x: Tensor, tokens: Tensor, padded: Tensor, places: Tensor) -> Tensor:
    return x.new_empty(len(x), len(places), *x.shape[2:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *where = inputs
    ctx.save_for_backward(*where[:3])
    ctx.padding_dtype = where[3].dtype if len(where) == 4 and where[3] is not None else None


def _uncut(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dpadding = None
    if ctx.padding_dtype is not None and ctx.needs_input_grad[4]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        dpadding = gradient.index_select(1, saved[1]).sum((0, 1), dtype=wide).to(ctx.padding_dtype)
    join = choose_gradient(_take_tokens, _join_operator, gradient)
    return join(gradient, *saved), None, None, None, dpadding


def _unjoin(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    cut = choose_gradient(_take_places, _cut_operator, gradient)
    return cut(gradient, *ctx.saved_tensors, None), None, None, None


_cut_function, _cut_operator = make_calls("CutWindows", _take_places, _cut, _save, _uncut)
_join_function, _join_operator = make_calls("JoinWindows", _take_tokens, _join, _save, _unjoin)
