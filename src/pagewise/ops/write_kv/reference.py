"""The definition, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo


def supports(dtypes: tuple[torch.dtype, torch.dtype], device: DeviceInfo) -> str | None:
    """Everything, everywhere."""
    return None


def run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """``cache[slot // block_size, slot % block_size] = token``."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block_size = k_cache.shape[1]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[slots // block_size, slots % block_size] = new[written].to(cache.dtype)
