"""Merge states in eager torch: the definition of correct."""

from __future__ import annotations

import torch
from torch import Tensor

from ...tiles.state import AttentionOutput


def run(outs: Tensor, lses: Tensor) -> AttentionOutput:
    """Weight each state by its share of the softmax's total denominator.

    States without keys are masked before the multiplication, so that their gradients are 0 too.
    """
    wide = torch.promote_types(outs.dtype, torch.float32)
    lses = lses.to(wide)
    pivot = torch.logsumexp(lses.detach(), dim=0)
    pivot = torch.where(pivot == -torch.inf, 0.0, pivot)
    weights = torch.exp(lses - pivot)
    total = weights.sum(dim=0)
    seen = total != 0
    divisor = torch.where(seen, total, 1.0)
    lse = torch.where(seen, pivot + torch.log(divisor), -torch.inf)
    values = torch.where((lses == -torch.inf)[..., None], 0.0, outs.to(wide))
    out = (values * (weights / divisor)[..., None]).sum(dim=0)
    return AttentionOutput(out.to(outs.dtype), lse.float())
