"""Torch tensors as the flat NumPy arrays that kernels index with their own strides."""

from __future__ import annotations

import numpy as np
import torch

from ...device import DeviceInfo
from ..types import refuse_types

# NumPy has no bfloat16 or float8 and Numba no float16: other types hold their bits (``formats``).
_STAND_INS = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.bool,
}


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A one-dimensional view of all memory from the tensor's first element to its last.

    Numba does not vectorise over unknown strides, so kernels get contiguous memory and compute
    offsets from the tensor's strides.
    """
    whole = tensor.detach() if tensor.requires_grad else tensor
    if not tensor.is_contiguous():
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        span = sum((n - 1) * stride for n, stride in pairs) + 1 if tensor.numel() else 0
        whole = whole.as_strided((span,), (1,))
    stand_in = _STAND_INS.get(tensor.dtype)
    if stand_in is not None:
        whole = whole.view(stand_in)
    return whole.numpy().reshape(-1)  # NumPy's reshape takes a third of torch's time


def refuse(device: DeviceInfo, **dtypes: torch.dtype) -> str | None:
    """Return why the CPU kernels do not support these types on this device; None if they do."""
    if device.kind != "cpu":
        return f"the tensors are on {device.kind}"
    return refuse_types(**dtypes)
