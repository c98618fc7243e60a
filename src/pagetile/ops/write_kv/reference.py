"""Reference of ``write_kv``, in eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scales import LARGEST_CODE, SMALLEST_SCALE


def run(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """``cache[slot // block_size, slot % block_size] = token``."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block_size = k_cache.shape[1]
    places = slots // block_size, slots % block_size
    for cache, new, scale in ((k_cache, k[written], k_scale), (v_cache, v[written], v_scale)):
        if scale is not None:
            if scale.dim() == 3:
                scale[places] = measure(new, cache.dtype)
                scale = scale[places]
            new = quantise(new, scale, cache.dtype)
        cache[places] = new.to(cache.dtype)


def measure(new: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each token's head, ``[num_tokens, num_kv_heads]``."""
    amax = new.float().abs().amax(dim=-1)
    # Divide by a tensor: on a GPU torch multiplies by the reciprocal of a Python number.
    scale = (amax / torch.full_like(amax, LARGEST_CODE[dtype])).clamp(min=SMALLEST_SCALE)
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def quantise(new: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide, clamp and round to int8; float8 is rounded later. ``scale`` ``[…, num_kv_heads]``."""
    codes = (new.float() / scale[..., None]).clamp(-LARGEST_CODE[dtype], LARGEST_CODE[dtype])
    return codes.round().nan_to_num(0.0) if dtype == torch.int8 else codes  # int8 has no NaN
