"""The same by torch's own operations, one after the other: what a framework's block runs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...device import DeviceInfo
from .problem import Problem

__all__ = ["run", "supports"]


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Nothing is refused here."""
    return None


def run(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    residual_eps: float | None,
    negative_slope: float,
) -> Tensor:
    """``[batch, channels, *grid]``; autograd sees torch's operations."""
    y = F.instance_norm(x, eps=eps)
    if residual is not None:
        if residual_eps is not None:
            residual = F.instance_norm(residual, eps=residual_eps)
        y += residual
    return F.leaky_relu(y, negative_slope, inplace=negative_slope > 0)
