"""Copies from the host to the device that do not block the host.

Host memory that is pinned is read by the GPU itself, when the copy's turn comes on the stream.
Torch keeps such memory until then, and hands it out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: where an array begins, so that kernels can read it in wide words


def send(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array as a tensor on the device; on a CPU it is the array itself."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_integers(numbers: Any, device: torch.device) -> Tensor:
    """Numbers, in lists, as int64 on the device."""
    return send(np.array(numbers, np.int64), device)


def send_all(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Several arrays as tensors on the device, by one copy; on a CPU they are the arrays."""
    if device.type != "cuda":
        return [send(array, device) for array in arrays]
    return unpack(pack(arrays, device).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> Tensor:
    """Several arrays one after another in host memory, pinned for a GPU: bytes ``[n]``.

    Examples:
        >>> import numpy as np
        >>> arrays = [np.arange(3), np.ones((2, 2), np.int32)]
        >>> packed = pack(arrays, torch.device("cpu"))
        >>> [tensor.tolist() for tensor in unpack(packed, arrays)]
        [[0, 1, 2], [[1, 1], [1, 1]]]
    """
    ends = _lay_out(arrays)
    packed = torch.empty(
        ends[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
    )
    memory = packed.numpy()
    for array, start in zip(arrays, ends, strict=False):
        memory[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return packed


def unpack(packed: Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
    """Views of packed arrays of these shapes and types, wherever they have been brought."""
    return [
        packed[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for array, start in zip(arrays, _lay_out(arrays), strict=False)
    ]


def _lay_out(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Where each array begins, and the end of all."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return starts
