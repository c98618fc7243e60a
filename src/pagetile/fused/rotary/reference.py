"""Rotary position embedding by torch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor


def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, is_shared: bool) -> tuple[Tensor, Tensor]:
    """``[1, heads, num_tokens, head_size]`` each; float64 stays float64."""
    if is_shared:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    rotated, rest = x[..., : cos.shape[-1]].to(wide), x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    cos, sin = cos.unsqueeze(1).to(wide), sin.unsqueeze(1).to(wide)
    rotated = rotated * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated.to(x.dtype), rest), -1)
