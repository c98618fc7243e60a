"""Paged attention in eager torch: the definition of correct.

One sequence at a time: fetch its keys and values from the pages, score, mask, softmax, mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.eager import attend
from ...tiles.state import AttentionOutput
from .plan import Plan
from .problem import Options, PagedBatch, Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Everything, everywhere."""
    return None


def run(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor | None,
    plan: Plan | None = None,
) -> AttentionOutput:
    """Fill ``out``, computed in float32, or in float64 for float64 queries."""
    out = q.new_empty(problem.out_sizes) if out is None else out
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(starts[seq], starts[seq + 1])
        table = batch.block_tables[seq]
        keys = fetch(k_cache, options.k_scale, table, seq_len, dtype)
        values = fetch(v_cache, options.v_scale, table, seq_len, dtype)
        out[rows], lse[rows] = attend(
            q[rows].to(dtype),
            keys,
            values,
            softmax_scale=options.softmax_scale,
            causal=options.causal,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=options.alibi_slopes,
            sinks=options.sinks,
        )
    return AttentionOutput(out, lse)


def fetch(
    cache: Tensor, scale: Tensor | None, block_table: Tensor, seq_len: int, dtype: torch.dtype
) -> Tensor:
    """A sequence's entries in order and in full, ``[seq_len, num_kv_heads, size]``."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    entries = cache[blocks].flatten(0, 1)[:seq_len].to(dtype)
    if scale is None:
        return entries
    if scale.dim() == 3:  # one a token: it lies as the entries do
        scale = scale[blocks].flatten(0, 1)[:seq_len]
    return entries * scale.to(dtype)[..., None]
