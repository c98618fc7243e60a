"""The definition, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.state import AttentionOutput


def supports(dtype: torch.dtype, device: DeviceInfo) -> str | None:
    """Everything, everywhere."""
    return None


def run(outs: Tensor, lses: Tensor) -> AttentionOutput:
    """Weigh each state by its share of the whole softmax's denominator."""
    wide = torch.promote_types(outs.dtype, torch.float32)
    lse = torch.logsumexp(lses.to(wide), dim=0)
    seen = (lses != -torch.inf)[..., None]
    weights = torch.exp(lses.to(wide) - lse)[..., None]
    out = torch.where(seen, outs.to(wide) * weights, 0.0).sum(dim=0)
    return AttentionOutput(out.to(outs.dtype), lse.float())
