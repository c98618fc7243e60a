"""Torch tensors as the flat NumPy arrays that kernels index with their own strides."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["flat"]

# NumPy has no bfloat16 and Numba no float16: kernels tell the two apart by these stand-ins.
_STAND_INS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A one-dimensional view of all memory from the tensor's first element to its last.

    Numba does not vectorise over a stride that it cannot know, so it is handed contiguous
    memory; offsets come from the tensor's own strides.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 0 in tensor.shape:
        span = 0
    whole = tensor.detach().as_strided((span,), (1,))
    return whole.view(_STAND_INS.get(tensor.dtype, tensor.dtype)).numpy()
