"""Positions and regions of the tokens of windows, as one integer per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError, UnsupportedError
from ...shapes import check_tensors
from ..attention_checks import is_size

_MOST_ROWS = 2**31 - 1  # of a table that int32 offsets can index


def rel_offsets(
    window: Sequence[int], table_window: Sequence[int] | None = None, num_tokens: int | None = None
) -> Tensor:
    """Return a number for each token; their differences index a table of relative-position biases.

    The N × N index that Swin implementations store is, entry for entry,
    ``offsets[i] - offsets[j] + centre`` with ``centre = (table_size - 1) / 2`` and:

        offset(x, y, z) = (x · (2·h - 1) + y) · (2·d - 1) + z      for a table of w × h × d

    Args:
        window: Tokens along each axis; the last varies fastest.
        table_window: The window that the table was made for, if it is another one. Its table has
            ``prod(2·w - 1)`` rows.
        num_tokens: Keep this many of the tokens. MONAI's windows that are clamped to a small
            grid take the first offsets of the whole window, and were trained that way.

    Returns:
        int32 ``[num_tokens]`` on the CPU.

    Raises:
        ShapeError: ``window`` does not fit into ``table_window``, has too few tokens, or needs a
            table whose rows int32 cannot count.

    Examples:
        >>> rel_offsets((2, 3))
        tensor([0, 1, 2, 5, 6, 7], dtype=torch.int32)
        >>> rel_offsets((2, 2), table_window=(3, 3))
        tensor([0, 1, 5, 6], dtype=torch.int32)
    """
    window = as_sizes("window", window)
    table = window if table_window is None else as_sizes("table_window", table_window)
    if len(table) != len(window) or any(a > b for a, b in zip(window, table, strict=True)):
        raise ShapeError(f"window is {list(window)}, expected at most table_window={list(table)}")
    table_size = math.prod(2 * size - 1 for size in table)
    if table_size > _MOST_ROWS:
        raise ShapeError(
            f"window={list(table)} needs a table of {table_size} rows, expected at most "
            f"{_MOST_ROWS}"
        )
    wanted = math.prod(window) if num_tokens is None else num_tokens
    if not is_size(wanted, least=1) or wanted > math.prod(window):
        raise ShapeError(
            f"num_tokens is {wanted}, expected at least 1, and at most the {math.prod(window)} of "
            f"window={list(window)}"
        )
    # Only the wanted tokens are built: a clamped window may have far more.
    token, stride = torch.arange(wanted, device="cpu"), 1
    offsets = torch.zeros_like(token)
    for size, length in zip(reversed(window), reversed(table), strict=True):
        offsets += token % size * stride
        token //= size
        stride *= 2 * length - 1
    return offsets.to(torch.int32)


def shift_regions(grid: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """Return the region of the map that each token comes from, after a cyclic shift.

    Rolling a map by ``-shift`` brings tokens from opposite borders into one window. Tokens of one
    region were neighbours before; where two tokens' regions differ, the shift mask applies. For a
    line of 6 in windows of 3, shifted by 1:

        tokens after the roll   1 2 3 | 4 5 0
        regions                 0 0 0 | 1 1 2

    Args:
        grid: Size of the (padded) map along each axis, a multiple of the window.
        window: Tokens along each axis.
        shift: How far the map is rolled along each axis; 0 where it is not.

    Returns:
        uint8 ``[num_windows, num_tokens]`` on the CPU; windows in the order of the grid, the last
        axis fastest. int32 from six axes on, which have more regions than uint8 has numbers.

    Raises:
        ShapeError: The axes disagree, or a size is out of range.

    Examples:
        >>> shift_regions((6,), (3,), (1,))
        tensor([[0, 0, 0],
                [1, 1, 2]], dtype=torch.uint8)
    """
    grid, window = as_sizes("grid", grid), as_sizes("window", window)
    shift = as_sizes("shift", shift, least=0)
    if not len(grid) == len(window) == len(shift):
        raise ShapeError(
            f"grid has {len(grid)} axes, window {len(window)} and shift {len(shift)}, expected as "
            "many in each"
        )
    for size, length, step in zip(grid, window, shift, strict=True):
        if size % length:
            raise ShapeError(
                f"grid={list(grid)} is not a multiple of window={list(window)}: pad it"
            )
        if step >= length:
            raise ShapeError(f"shift={list(shift)} is not from 0 to less than {list(window)}")
    dtype = torch.uint8 if 3 ** len(grid) <= 256 else torch.int32
    regions = torch.zeros([1] * len(grid), dtype=dtype, device="cpu")
    for axis, (size, length, step) in enumerate(zip(grid, window, shift, strict=True)):
        line = regions.new_zeros(size)
        if step:
            line[size - length :] = 1
            line[size - step :] = 2
        regions = regions * 3 + line.view([-1 if a == axis else 1 for a in range(len(grid))])
    return partition(regions, window)


def as_sizes(name: str, sizes: Any, *, least: int = 1) -> tuple[int, ...]:
    """Return ``sizes`` as a tuple of integers, one for each axis.

    Raises:
        ShapeError: They are not integers, one for each axis, or one is below ``least``.
    """
    try:
        listed = tuple(sizes)
    except TypeError:
        listed = ()
    if not listed or not all(is_size(size, least=least) for size in listed):
        raise ShapeError(
            f"{name} is {sizes!r}, expected an integer for each axis, at least {least}, such as "
            "(7, 7)"
        )
    return tuple(map(int, listed))


def partition(numbers: Tensor, window: Sequence[int]) -> Tensor:
    """Cut a padded map ``[*grid]`` into ``[num_windows, num_tokens]``."""
    sizes = zip(numbers.shape, window, strict=True)
    split = [n for size, length in sizes for n in (size // length, length)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return numbers.view(split).permute(order).reshape(-1, math.prod(window))


def clamp(
    grid: Sequence[int], window: Sequence[int], shift: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return window and shift for a map; along an axis no longer than the window it is clamped.

    It is then not shifted along that axis.

    Args:
        grid: Tokens of the map along each axis.
        window: Sizes, as from ``as_sizes``.
        shift: Sizes, as from ``as_sizes``.

    Raises:
        ShapeError: The axes disagree, or a size is out of range.
    """
    if not len(grid) == len(window) == len(shift):
        raise ShapeError(
            f"qkv's grid is {list(grid)}, window={list(window)} and shift={list(shift)}, expected "
            "as many numbers in each"
        )
    for size, length, step in zip(grid, window, shift, strict=True):
        if size < 1:
            raise ShapeError(f"qkv's grid is {list(grid)}, expected sizes from 1 on")
        if step >= length:
            raise ShapeError(f"shift={list(shift)} is not from 0 to less than {list(window)}")
    return (
        tuple(min(size, length) for size, length in zip(grid, window, strict=True)),
        tuple(
            step if size > length else 0
            for size, length, step in zip(grid, window, shift, strict=True)
        ),
    )


def regions_from_mask(mask: Tensor) -> Tensor:
    """Return the regions of a dense shift mask: a token's is the first token that it may see.

    Reads the mask's values and so synchronises with the device: call it once, not every step.

    Args:
        mask: Floating ``[num_windows, num_tokens, num_tokens]``, 0 within a region and one other
            value between regions. If that is not -100, pass it to ``window_attention`` as
            ``mask_value``.

    Returns:
        int16 ``[num_windows, num_tokens]`` on the device of ``mask``.

    Raises:
        ShapeError: The mask does not come from regions: pass it as ``mask`` instead.
        DTypeError: It is not floating.
        UnsupportedError: It is on the meta device.

    Examples:
        >>> regions_from_mask(torch.tensor([[[0.0, 0, -100], [0, 0, -100], [-100, -100, 0]]]))
        tensor([[0, 0, 2]], dtype=torch.int16)
    """
    check_tensors(mask=mask)
    if not mask.is_floating_point():
        raise DTypeError(f"mask is {mask.dtype}, expected floats, 0 where tokens see each other")
    if mask.dim() != 3 or mask.shape[1] != mask.shape[2]:
        raise ShapeError(
            f"mask has shape {list(mask.shape)}, expected [num_windows, num_tokens, num_tokens]"
        )
    if not mask.shape[1]:
        raise ShapeError(f"mask has shape {list(mask.shape)}, expected at least one token")
    if mask.is_meta:
        raise UnsupportedError("mask is on meta and has no values to read: move it to a device")
    visible = mask == 0
    regions = visible.to(torch.uint8).argmax(dim=-1)
    same = regions[:, :, None] == regions[:, None, :]
    masked = mask[~visible]
    if not torch.equal(same, visible) or (masked.numel() and bool((masked != masked[0]).any())):
        raise ShapeError(
            "mask is not 0 within regions and one other value between them: pass it to "
            "window_attention as mask, not as regions"
        )
    return regions.to(torch.int16)
