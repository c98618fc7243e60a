"""The public operation: contract and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...shapes import bind, check_dtype
from ..dispatch import choose

IMPLEMENTATIONS = ("triton", "cpu", "reference")


def copy_blocks(
    caches: Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]],
    src_to_dst: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Copy whole blocks inside each cache, or from one cache to another, in place.

    All sources are as they were before the call: a block may be read by one pair and
    overwritten by another.

    On a GPU, and between it and pinned host memory, nobody waits: like a kernel the copy takes
    its turn on the current stream. Synchronise before the host reads what was copied to it, or
    overwrites what was copied from it. Host memory that is not pinned is waited for.

    Args:
        caches: The caches to copy in, one a layer for keys and one for values:
            ``[num_blocks, …]`` each, any type. A pair ``(source, destination)`` copies between
            two tensors, host and device included.
        src_to_dst: int64 ``[n, 2]`` on the CPU: source block, destination block; no destination
            twice.
        impl: ``"auto"``, or one of ``"triton"``, ``"cpu"``, ``"reference"``.

    Raises:
        ShapeError: A block lies outside a cache, a destination stands twice, or a pair's blocks
            differ in shape. Nothing is written then.
        DTypeError: ``src_to_dst`` is not int64, or a pair differs in type.
        UnsupportedError: The named ``impl`` cannot copy between these. Nothing is written then.

    Example:
        >>> cache = torch.arange(4.0)[:, None].repeat(1, 3)
        >>> copy_blocks([cache], torch.tensor([[3, 0], [0, 1]]))
        >>> cache[:, 0].tolist()
        [3.0, 0.0, 2.0, 3.0]
    """
    bind(src_to_dst=(src_to_dst, "n 2"))
    check_dtype("src_to_dst", src_to_dst, torch.int64)
    pairs = [cache if isinstance(cache, tuple) else (cache, cache) for cache in caches]
    lowest, highest = _bound(src_to_dst)
    for source, destination in pairs:
        _check(source, destination, lowest, highest)
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for source, destination in pairs:
        groups.setdefault(_choose(source, destination, impl), []).append((source, destination))
    for module, group in groups.items():
        module.run(group, src_to_dst)


def _choose(source: Tensor, destination: Tensor, impl: str) -> Any:
    device = DeviceInfo.of(source.device if source.is_cuda else destination.device)
    return choose(__package__, IMPLEMENTATIONS, (source, destination), device, impl)


def _bound(src_to_dst: Tensor) -> tuple[list[int], list[int]]:
    """The lowest and the highest source and destination."""
    if not len(src_to_dst):
        return [0, 0], [-1, -1]
    destinations = np.sort(src_to_dst[:, 1].numpy())
    if (destinations[1:] == destinations[:-1]).any():
        raise ShapeError("src_to_dst names a destination block twice: which copy should win?")
    pairs = src_to_dst.numpy()
    lowest: list[int] = pairs.min(axis=0).tolist()
    highest: list[int] = pairs.max(axis=0).tolist()
    return lowest, highest


def _check(source: Tensor, destination: Tensor, lowest: list[int], highest: list[int]) -> None:
    check_dtype("a destination cache", destination, source.dtype)
    if source.shape[1:] != destination.shape[1:]:
        raise ShapeError(
            f"blocks are {list(source.shape[1:])} in the source cache but "
            f"{list(destination.shape[1:])} in the destination"
        )
    for name, cache, low, high in zip(
        ("source", "destination"), (source, destination), lowest, highest, strict=True
    ):
        if low < 0 or high >= cache.shape[0]:
            raise ShapeError(
                f"src_to_dst names {name} blocks {low} to {high}, "
                f"expected 0 to {cache.shape[0] - 1}"
            )
