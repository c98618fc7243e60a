"""Launcher of Gluon kernels, with tensor descriptors for TMA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
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
    round_f32_to_tf32: bool = False  # read by Triton 3.7


def is_described(x: Tensor) -> bool:
    """Return whether TMA can read a tensor's rows: 16-byte aligned and contiguous."""
    return is_aligned(x) and all(stride > 0 for stride in x.stride()[:-1])


def align(x: Tensor) -> Tensor:
    """Return the tensor, or a copy that TMA can read."""
    return x if is_described(x) else x.clone(memory_format=torch.contiguous_format)


class GluonLauncher(Launcher):
    """Launches a Gluon kernel; makes descriptors of tensors passed for descriptor parameters.

    Args:
        kernel: As of ``Launcher``, like ``types``, ``rest`` and ``options``.
        types: A descriptor's type is ``tensordesc<dtype[box],layout>``.
        boxes: Boxes of descriptors that copy other boxes than their types', whose sizes must be
            powers of two. Elements keep their order: the boxes fill a part of the shared memory.
    """

    source = GluonASTSource

    def __init__(
        self,
        kernel: Any,
        types: dict[str, str],
        *rest: Any,
        boxes: dict[str, list[int]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(kernel, types, *rest, **options)
        described = {name: kind for name, kind in types.items() if kind.startswith("tensordesc")}
        self._described = [at for at, name in enumerate(types) if name in described]
        self._boxes = [(boxes or {}).get(name) for name in described]

    def compile(self, target: GPUTarget) -> Any:
        """Compile as ``Launcher`` does; Triton makes descriptors with the metadata's boxes."""
        compiled = super().compile(target)
        described = [
            of_type if box is None else of_type | {"block_size": box}
            for of_type, box in zip(compiled.metadata.tensordesc_meta, self._boxes, strict=True)
        ]
        compiled.metadata = compiled.metadata._replace(tensordesc_meta=described)
        return compiled

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch as ``Launcher`` does, with descriptors made of tensors."""
        given = list(arguments)
        for at in self._described:
            x = given[at]
            if isinstance(x, Tensor):
                given[at] = Described(x, x.shape, x.stride())
        super().__call__(grid, *given)
