"""Writing keys and values as a compiler sees it: one node, which changes its caches."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["write"]


@torch.library.custom_op(
    "pagewise::write_kv", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale")
)
def write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    impl: str,
) -> None:
    """``write_kv``; a scale is written where each token's head has one."""
    from .api import write_kv

    write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, impl=impl)


@write.register_fake
def _(*inputs: object) -> None:
    pass
