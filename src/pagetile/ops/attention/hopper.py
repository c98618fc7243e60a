"""Attention on Hopper: the forward kernel of ``tiles.hopper`` over keys and values in a row.

Supports float16 and bfloat16, head sizes to 256 in steps of 8 (equal for values), any group,
causal or not, sliding windows, soft caps up to 64, ALiBi, sinks, log-sum-exp. Gradients are in
``hopper_backward``; of capped or biased scores they are Triton's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.launch import attend, refuse, refuse_cap
from ...tiles.state import AttentionOutput
from .problem import Lengths, Options, Problem, in_a_row


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = refuse(device, problem.dtype, problem.head_size, problem.v_head_size)
    if reason is None and problem.is_block_sparse:
        reason = "there is a block mask; dense ones run"
    return reason or refuse_cap(problem.logits_soft_cap)


def run(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> AttentionOutput:
    """One launch; a tensor whose rows no descriptor can say is copied before."""
    shape = q.shape[:-1]
    q, k, v, starts, key_starts = in_a_row(q, k, v, lengths)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    attend(
        out,
        lse,
        q,
        k,
        v,
        starts,
        key_starts,
        None,
        max_query_len=problem.max_query_len,
        max_seq_len=problem.max_seq_len,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        sliding_window=options.sliding_window,
        logits_soft_cap=options.logits_soft_cap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
    )
    return AttentionOutput(out.view(*shape, out.shape[-1]), lse.view(shape))
