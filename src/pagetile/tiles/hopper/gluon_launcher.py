"""Launcher of Gluon kernels, with tensor descriptors for TMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ..triton.launch import Launcher, is_aligned


class Described(NamedTuple):
    """A tensor descriptor with the fields of Triton's ``TensorDescriptor`` that a launch reads.

    Boxes and layouts are fixed when a kernel is compiled. Triton's class checks them at every
    call; for eight descriptors that takes as long as a launch.
    """

    base: Tensor
    """A tensor that begins at a multiple of 16 bytes."""
    shape: Sequence[int]
    strides: Sequence[int]
    """Strides in elements, each a multiple of 16 bytes; the last is 1."""
    padding: str = "zero"


def is_described(x: Tensor) -> bool:
    """Return whether TMA can read a tensor's rows: 16-byte aligned and contiguous."""
    return is_aligned(x) and all(stride > 0 for stride in x.stride()[:-1])


def align(x: Tensor) -> Tensor:
    """Return the tensor, or a copy that TMA can read."""
    return x if is_described(x) else x.clone(memory_format=torch.contiguous_format)


class GluonLauncher(Launcher):
    """Launches a Gluon kernel; makes descriptors of tensors passed for descriptor parameters."""

    source = GluonASTSource

    def __init__(self, kernel: Any, types: dict[str, str], *rest: Any, **options: Any) -> None:
        super().__init__(kernel, types, *rest, **options)
        kinds = enumerate(types.values())
        self._described = [at for at, kind in kinds if kind.startswith("tensordesc")]

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch as ``Launcher`` does, with descriptors made of tensors."""
        given = list(arguments)
        for at in self._described:
            x = given[at]
            if isinstance(x, Tensor):
                given[at] = Described(x, x.shape, x.stride())
        super().__call__(grid, *given)
