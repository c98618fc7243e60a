"""Instance norm, residual and leaky ReLU by torch's operations, as in a framework's block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def run(
    x: Tensor,
    residual: Tensor | None,
    eps: float,
    residual_eps: float | None,
    negative_slope: float,
) -> Tensor:
    """Return ``[batch, channels, *grid]``; autograd differentiates torch's operations."""
    y = F.instance_norm(x, eps=eps)
    if residual is not None:
        if residual_eps is not None:
            residual = F.instance_norm(residual, eps=residual_eps)
        y += residual
    return F.leaky_relu(y, negative_slope, inplace=negative_slope > 0)
