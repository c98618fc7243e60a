"""The definition, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
from .problem import Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Everything, everywhere."""
    return None


def run(problem: Problem, q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Accumulate in float32, or float64 for float64 tensors, and round once."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return (q.to(dtype) @ k.to(dtype).mT * softmax_scale).to(q.dtype)
