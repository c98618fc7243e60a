"""Paged attention in eager torch: the definition of correct.

One sequence at a time: fetch its keys and values from the pages, score, mask, softmax, mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
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
    out: Tensor,
    plan: Plan | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> AttentionOutput:
    """Fill ``out``; ``compute_dtype`` is float32, or float64 for float64 queries, if not given."""
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(starts[seq], starts[seq + 1])
        table = batch.block_tables[seq]
        keys = fetch(k_cache, options.k_scale, table, seq_len, dtype)
        values = fetch(v_cache, options.v_scale, table, seq_len, dtype)
        out[rows], lse[rows] = _attend(q[rows].to(dtype), keys, values, options)
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


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """One sequence: ``q`` ``[query_len, num_heads, …]``, ``k`` ``[seq_len, num_kv_heads, …]``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.softmax_scale
    if options.logits_soft_cap is not None:
        scores = options.logits_soft_cap * torch.tanh(scores / options.logits_soft_cap)
    query_len, seq_len = q.shape[0], k.shape[0]
    key_positions = torch.arange(seq_len, device=q.device)
    distance = key_positions - torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
    if options.alibi_slopes is not None:
        scores = scores + options.alibi_slopes.to(scores.dtype)[:, None, None] * distance
    if options.causal:
        scores = scores.masked_fill(distance > 0, -torch.inf)
    if options.sliding_window is not None:
        scores = scores.masked_fill(distance <= -options.sliding_window, -torch.inf)
    if options.sinks is not None:
        # One more column to share the softmax with, whose value is nothing.
        sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, query_len, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    lse = (
        torch.logsumexp(scores, dim=-1)
        if scores.shape[-1]
        else scores.new_full(scores.shape[:2], -torch.inf)
    )
    pivot = lse.masked_fill(lse == -torch.inf, 0.0)  # no visible key: -inf - -inf is no number
    weights = torch.exp(scores - pivot[..., None])
    out = torch.einsum("hqk,khd->qhd", weights[..., :seq_len], v)
    return out.to(q.dtype), lse.T
