"""Attention on a CPU: ``tiles.cpu.forward`` over contiguous keys and values.

That kernel reads paged caches, so a sequence's keys are passed as one block: the sequence's slice
of a dense tensor, or, in a ragged one, the block that begins at the sequence's first key.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...device import DeviceInfo
from ...tiles.cpu.arrays import refuse
from ...tiles.cpu.forward import attend, make_call
from ...tiles.cpu.plan import make_plan
from ...tiles.state import AttentionOutput
from .problem import Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    return refuse(device, q=problem.dtype)


def run(problem, q, k, v, lengths, options):
    """Describe each sequence as a block, and attend."""
    device = DeviceInfo.of(q.device)
    # Steps of one query, which the plan's choice is for, are rare here.
    plan = replace(make_plan(problem, device), bf16_tiles=device.bf16_tiles)
    rows = q if problem.is_ragged else q.flatten(0, 1)  # copies if strides do not allow it
    out = q.new_empty(*rows.shape[:2], problem.v_head_size)
    lse = q.new_empty(rows.shape[:2], dtype=torch.float32)
    if problem.is_ragged:
        starts, block_size = lengths.cu_seqlens_k, max(1, k.shape[0])
        seq_lens, tables = starts.diff(), starts[:-1, None]
        starts_q = lengths.cu_seqlens_q
        strides = [(t.stride(0), *t.stride()[:2]) for t in (k, v)]
    else:
        block_size = max(1, k.shape[1])
        numbers = torch.arange(len(q) + 1, dtype=torch.int32, device="cpu")
        seq_lens, tables = torch.full_like(numbers[1:], k.shape[1]), numbers[:-1, None]
        starts_q = numbers * q.shape[1]
        strides = [t.stride()[:3] for t in (k, v)]
    call = make_call(
        rows, k, v, out, lse, options, plan, block_tables=tables, seq_lens=seq_lens,
        cu_seqlens_q=starts_q, block_size=block_size, k_strides=strides[0], v_strides=strides[1],
        transposed=True, block_mask=options.block_mask,
    )  # fmt: skip
    attend(call, problem.num_kv_heads, plan)
    return AttentionOutput(out.view(*q.shape[:-1], out.shape[-1]), lse.view(q.shape[:-1]))
