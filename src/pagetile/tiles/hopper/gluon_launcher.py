"""Launching kernels that are written in Gluon, with descriptors for the copy engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ..triton.launch import Launcher, is_aligned


class Described(NamedTuple):
    """What a launch reads of Triton's ``TensorDescriptor``.

    Boxes and layouts are settled when a kernel is compiled. Triton's own takes them at each call
    again and checks them, which takes as long as a launch where there are eight.
    """

    base: Tensor
    """On a multiple of 16 bytes."""
    shape: Sequence[int]
    strides: Sequence[int]
    """In elements, each a multiple of 16 bytes; the last is 1."""
    padding: str = "zero"


def is_described(x: Tensor) -> bool:
    """Whether the copy engine can go to its rows: on 16 bytes, one after another."""
    return is_aligned(x) and all(stride > 0 for stride in x.stride()[:-1])


def align(x: Tensor) -> Tensor:
    """The same rows where the copy engine can read them."""
    return x if is_described(x) else x.clone(memory_format=torch.contiguous_format)


class GluonLauncher(Launcher):
    """A launcher of kernels written in Gluon; a tensor in a descriptor's place is described."""

    source = GluonASTSource

    def __init__(self, kernel: Any, types: dict[str, str], *rest: Any, **options: Any) -> None:
        super().__init__(kernel, types, *rest, **options)
        kinds = enumerate(types.values())
        self._described = [at for at, kind in kinds if kind.startswith("tensordesc")]

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """As any launcher's."""
        given = list(arguments)
        for at in self._described:
            x = given[at]
            if isinstance(x, Tensor):
                given[at] = Described(x, x.shape, x.stride())
        super().__call__(grid, *given)
