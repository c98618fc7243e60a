"""Head norms, rotary embedding and cache write by separate operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.write_kv import write_kv
from ..rms_norm import Norm, rms_norm
from ..rotary import rotate
from .problem import Heads


def project(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each ``[num_tokens, heads, size]``."""
    sizes = [heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size]
    q, k, v = torch.split(qkv, [*sizes, heads.num_kv_heads * heads.v_head_size], -1)
    q = q.view(len(q), heads.num_heads, heads.head_size)
    k = k.view(len(k), heads.num_kv_heads, heads.head_size)
    q, k = _norm(q, heads.q_norm), _norm(k, heads.k_norm)
    if cos is not None and sin is not None:
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
        q, k = rotate(q, k, cos, sin, is_shared=heads.is_shared, impl="reference")
        q, k = (x[0].transpose(0, 1) for x in (q, k))
    return q, k, v.view(len(v), heads.num_kv_heads, heads.v_head_size)


def _norm(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return rms_norm(x, norm.weight, eps=norm.eps, kind=norm.kind, impl="reference")


def run(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """The queries."""
    q, k, v = project(qkv, cos, sin, heads)
    write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q
