"""Who else can do it: the ways to get the same attention out of torch, each in its best form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .workload import Dense, Inputs, Workload

__all__ = ["SDPA", "peers"]

SDPA = ("sdpa, enable_gqa", "sdpa, K/V expanded")
"""The ways to call SDPA over contiguous K/V; a comparison takes the faster one."""


def peers(workload: Workload, inputs: Inputs) -> dict[str, Callable[[], list[Tensor]]]:
    """Calls by name; each returns ``[num_seqs, num_heads, new tokens, head_size]`` per length."""
    dense, causal, group = inputs.dense, workload.prefill, workload.group
    result: dict[str, Callable[[], list[Tensor]]] = {
        SDPA[0]: lambda: [
            sdpa(d.q, d.k, d.v, is_causal=causal, enable_gqa=group > 1) for d in dense
        ]
    }
    if group > 1:
        wide = [Dense(d.q, _expand(d.k, group), _expand(d.v, group), d.block_tables) for d in dense]
        result[SDPA[1]] = lambda: [sdpa(d.q, d.k, d.v, is_causal=causal) for d in wide]
    if group > 1 and not workload.prefill:
        result["sdpa, group packed"] = lambda: [_packed(d.q, d.k, d.v, group) for d in dense]
    result["gather + sdpa"] = lambda: [_gather_and_attend(d, inputs, workload) for d in dense]
    return result


def _expand(kv: Tensor, group: int) -> Tensor:
    return kv.repeat_interleave(group, dim=1)


def _packed(q: Tensor, k: Tensor, v: Tensor, group: int) -> Tensor:
    """One new token sees every key, so the heads of a group can stand as rows of one head."""
    return sdpa(q.unflatten(1, (-1, group))[..., 0, :], k, v).flatten(1, 2)[:, :, None]


def _gather_and_attend(dense: Dense, inputs: Inputs, workload: Workload) -> Tensor:
    k, v = (_gather(c, dense, dense.k.shape[2]) for c in (inputs.k_cache, inputs.v_cache))
    if workload.prefill:
        return sdpa(dense.q, k, v, is_causal=True, enable_gqa=workload.group > 1)
    return _packed(dense.q, k, v, workload.group)


def _gather(cache: Tensor, dense: Dense, seq_len: int) -> Tensor:
    pages = torch.index_select(cache, 0, dense.block_tables.flatten())
    tokens = pages.view(len(dense.block_tables), -1, *cache.shape[2:])
    return tokens[:, :seq_len].transpose(1, 2)
