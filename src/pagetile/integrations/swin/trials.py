"""Inputs of trial runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import dense_mask
from .swapped import Randn

__all__ = ["mask_of", "windows"]


def windows(num_tokens: int, dim: int, randn: Randn) -> tuple[Tensor, Tensor]:
    """Two images of two windows each, and a mild mask: -100 would hide what happens behind it."""
    thirds = torch.arange(num_tokens, device="cpu") % 3
    regions = torch.stack((torch.zeros_like(thirds), thirds))
    mask = dense_mask(regions, torch.float64)
    assert mask is not None
    return randn(4, num_tokens, dim), mask / 100


def mask_of(mask: Tensor | None) -> Tensor:
    """What a layer hands to its attention, in one form."""
    dense = dense_mask(mask, torch.float64)
    return torch.empty(0) if dense is None else dense
