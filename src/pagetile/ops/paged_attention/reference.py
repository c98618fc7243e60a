"""Paged attention in eager torch: the definition of correct.

One sequence at a time: gather its keys and values from the pages, then masked softmax attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...tiles.eager import attend
from ...tiles.state import AttentionOutput
from .plan import Plan
from .problem import Arguments, CallForm, Problem


def prepare(
    problem: Problem, form: CallForm, plan: Plan | None = None
) -> Callable[[Arguments], AttentionOutput]:
    """Return the function that runs calls of a form; it takes no plan."""
    return functools.partial(run, problem)


def run(problem: Problem, call: Arguments) -> AttentionOutput:
    """Fill ``out``, computed in float32, or in float64 for float64 queries."""
    q, batch = call.q, call.batch
    out = q.new_empty(problem.out_sizes) if call.out is None else call.out
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    for seq, seq_len in enumerate(seq_lens):
        rows = slice(starts[seq], starts[seq + 1])
        table = batch.block_tables[seq]
        keys = fetch(call.k_cache, call.k_scale, table, seq_len, dtype)
        values = fetch(call.v_cache, call.v_scale, table, seq_len, dtype)
        visible = _visible_keys(call, problem, seq, seq_len)
        if visible is not None:  # a hidden NaN times a weight of 0 would be NaN
            values = values.masked_fill(~visible[:: problem.group, 0].T[..., None], 0.0)
        out[rows], lse[rows] = attend(
            q[rows].to(dtype),
            keys,
            values,
            softmax_scale=call.softmax_scale,
            causal=call.causal,
            sliding_window=call.sliding_window,
            logits_soft_cap=call.logits_soft_cap,
            alibi_slopes=call.alibi_slopes,
            sinks=call.sinks,
            visible=visible,
        )
    return AttentionOutput(out, lse)


def _visible_keys(call: Arguments, problem: Problem, seq: int, seq_len: int) -> Tensor | None:
    """Return which keys the listed blocks hold, bool ``[num_heads, 1, seq_len]``; None: all."""
    if call.visible_blocks is None:
        return None
    blocks = torch.arange(seq_len, device=call.q.device) // problem.block_size
    listed = call.visible_blocks[seq]  # [num_kv_heads, max_visible]
    visible = (listed[:, :, None] == blocks).any(dim=1)
    return visible.repeat_interleave(problem.group, dim=0)[:, None]


def fetch(
    cache: Tensor, scale: Tensor | None, block_table: Tensor, seq_len: int, dtype: torch.dtype
) -> Tensor:
    """Return a sequence's entries in order and in full, ``[seq_len, num_kv_heads, size]``."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    entries = cache[blocks].flatten(0, 1)[:seq_len].to(dtype)
    if scale is None:
        return entries
    if scale.dim() == 3:  # one a token: it lies as the entries do
        scale = scale[blocks].flatten(0, 1)[:seq_len]
    return entries * scale.to(dtype)[..., None]
