"""Ways to compute the same attention with torch on a CPU, each in its fastest form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagetile.testing import PagedInputs

from .workload import Dense, lay_out

SDPA = ("sdpa, enable_gqa", "sdpa, K/V expanded", "sdpa, group packed")
"""The ways to call SDPA over contiguous K/V; a comparison uses the fastest."""

Peer = Callable[[], list[Tensor]]


def make_peers(inputs: PagedInputs) -> dict[str, Peer]:
    """Calls by name; each returns ``[num_seqs, num_heads, query_len, v_head_size]`` tensors."""
    case, dense = inputs.case, lay_out(inputs)
    causal, group = max(case.query_lens) > 1, case.num_heads // case.num_kv_heads
    result: dict[str, Peer] = {
        SDPA[0]: lambda: [
            sdpa(d.q, d.k, d.v, is_causal=causal, enable_gqa=group > 1) for d in dense
        ]
    }
    if group > 1:
        wide = [
            (d.q, d.k.repeat_interleave(group, dim=1), d.v.repeat_interleave(group, dim=1))
            for d in dense
        ]
        result[SDPA[1]] = lambda: [sdpa(*qkv, is_causal=causal) for qkv in wide]
    if group > 1 and not causal:
        result[SDPA[2]] = lambda: [_packed(d.q, d.k, d.v) for d in dense]
    result["gather + sdpa"] = lambda: [_gather_and_attend(d, inputs, causal) for d in dense]
    return result


def to_tokens(results: list[Tensor]) -> Tensor:
    """A peer's results in our form, ``[num_tokens, num_heads, v_head_size]``."""
    return torch.cat([result.transpose(1, 2).flatten(0, 1) for result in results])


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pack a group's heads as rows of one head, as decode allows: its token attends to all keys."""
    return sdpa(q.view(*k.shape[:2], -1, q.shape[-1]), k, v).view(*q.shape[:3], -1)


def _gather_and_attend(dense: Dense, inputs: PagedInputs, causal: bool) -> Tensor:
    k, v = (_gather(c, dense, dense.k.shape[2]) for c in (inputs.k_cache, inputs.v_cache))
    if causal:
        return sdpa(dense.q, k, v, is_causal=True, enable_gqa=k.shape[1] < dense.q.shape[1])
    return _packed(dense.q, k, v)


def _gather(cache: Tensor, dense: Dense, seq_len: int) -> Tensor:
    pages = torch.index_select(cache, 0, dense.block_tables.flatten())
    tokens = pages.view(len(dense.block_tables), -1, *cache.shape[2:])
    return tokens[:, :seq_len].transpose(1, 2)
