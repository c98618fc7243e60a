"""RMS norm by the torch operations of Transformers' models."""

from __future__ import annotations

import torch
from torch import Tensor


def run(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """``[..., size]`` like ``x``; float64 stays float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if kind == "rounded":
        return weight * y.to(x.dtype)
    scale = weight.to(wide.dtype)
    return (y * (1.0 + scale if kind == "shifted" else scale)).to(x.dtype)
