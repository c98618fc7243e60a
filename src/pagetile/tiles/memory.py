"""New tensors, for calls that come in thousands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["new_rows"]

# As torch's compiled code allocates: without its dispatcher, in half of the host's time.
_allocate: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def new_rows(
    device: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """A tensor of any content on the current GPU, or where ``device`` is -1 on the CPU.

    ``device`` is a tensor's ``get_device()``.
    """
    if device >= 0 and _allocate is not None:
        new: Tensor = _allocate(sizes, strides, dtype)
        return new
    kind = "cuda" if device >= 0 else "cpu"
    return torch.empty_strided(sizes, strides, dtype=dtype, device=kind)
