"""Shift masks as region ids, where the frameworks keep ``[num_windows, num_tokens, num_tokens]``.

A layer passes a mask to its attention as ``None``, as region ids ``[num_windows, num_tokens]`` of
an integer type, or as the framework's dense mask. Where the ids of two tokens differ, the mask's
one value is added to their score.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...errors import ShapeError
from ...ops.window_attention import regions_from_mask, shift_regions

MASK_VALUE = -100.0  # every framework adds it between regions


def dense_mask(mask: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Convert a mask in any form to the dense mask of the framework's own code."""
    if mask is None or mask.ndim == 3:
        return mask
    differ = mask[:, :, None] != mask[:, None, :]
    return torch.zeros(differ.shape, dtype=dtype, device=mask.device).masked_fill_(
        differ, MASK_VALUE
    )


class RegionMemory:
    """Cache of the region ids that a module used last.

    Ids of a shifted grid are keyed by the grid's sizes; ids read from a dense mask are keyed by
    that tensor and its version counter, which in-place changes increment. Copies and pickles start
    empty.
    """

    __slots__ = ("_grid", "_mask")

    def __init__(self) -> None:
        self._grid: tuple[tuple[Any, ...], Tensor] | None = None
        self._mask: tuple[weakref.ref[Tensor], int, dict[str, Any]] | None = None

    def __reduce__(self) -> tuple[type[RegionMemory], tuple[()]]:
        return RegionMemory, ()

    def of_grid(
        self,
        grid: tuple[int, ...],
        window: tuple[int, ...],
        shift: tuple[int, ...],
        device: torch.device,
    ) -> Tensor:
        """Return the region ids of a padded, shifted map of ``grid`` tokens."""
        if torch.compiler.is_compiling():
            return shift_regions(grid, window, shift).to(device)
        key = (grid, window, shift, device)
        seen = self._grid  # read once: another thread may replace it
        if seen is not None and seen[0] == key:
            return seen[1]
        regions = shift_regions(grid, window, shift).to(device)
        # Fake tensors, inference tensors and tensors of a CUDA graph that has yet to run must not
        # be cached for later calls.
        if type(regions) is Tensor and not regions.is_inference() and not _is_capturing(regions):
            self._grid = key, regions
        return regions

    def of_mask(self, mask: Tensor | None, times: int = 1) -> dict[str, Any]:
        """Return the arguments of ``window_attention`` for ``mask``, added ``times`` times."""
        arguments = self._of_mask(mask)
        if times != 1:
            for name in arguments.keys() & {"mask", "mask_value"}:
                arguments[name] = arguments[name] * times
        return arguments

    def _of_mask(self, mask: Tensor | None) -> dict[str, Any]:
        if mask is None:
            return {}
        if mask.ndim == 2:
            return {"regions": mask, "mask_value": MASK_VALUE}
        if torch.compiler.is_compiling() or mask.is_inference() or _is_capturing(mask):
            return {"mask": mask}
        seen = self._mask
        if seen is not None and seen[0]() is mask and seen[1] == mask._version:
            return dict(seen[2])
        arguments = _read(mask)
        if not arguments.get("regions", mask).is_inference():
            self._mask = weakref.ref(mask), mask._version, arguments
        return dict(arguments)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _read(mask: Tensor) -> dict[str, Any]:
    """Return the mask as region ids if it comes from regions, or else itself."""
    try:
        regions = regions_from_mask(mask)
    except ShapeError:
        return {"mask": mask}
    value = (mask.min() + mask.max()).item()  # one of them is zero
    return {"regions": regions, "mask_value": value}
