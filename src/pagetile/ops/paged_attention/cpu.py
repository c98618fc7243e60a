"""Paged attention on a CPU: the pages as they lie, walked by ``tiles.cpu.forward``."""

from __future__ import annotations

import torch

from ...device import DeviceInfo
from ...tiles.cpu.arrays import refuse
from ...tiles.cpu.forward import attend, make_call
from ...tiles.cpu.plan import make_plan
from ...tiles.state import AttentionOutput
from .cpu_checks import check_values
from .problem import Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    caches = {"k_cache": problem.kv_dtype} if problem.scale_kind == "none" else {}
    return refuse(device, q=problem.q_dtype, **caches)


def run(problem, q, k_cache, v_cache, batch, options, out, plan=None):
    """Check the values of the batch's integers, and attend."""
    plan = plan or make_plan(problem, DeviceInfo.of(q.device))
    out = q.new_empty(problem.out_sizes) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    k_scale, v_scale = (
        None if scale is None else scale.expand(k_cache.shape[:3])
        for scale in (options.k_scale, options.v_scale)
    )
    call = make_call(
        q, k_cache, v_cache, out, lse, options, plan,
        block_tables=batch.block_tables, seq_lens=batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q,
        block_size=problem.block_size,
        k_strides=k_cache.stride()[:3], v_strides=v_cache.stride()[:3],
        k_scale=k_scale, v_scale=v_scale, per_token=problem.scale_kind == "token",
    )  # fmt: skip
    check_values(
        problem, batch, k_cache.shape[0], cu_seqlens_q=call.cu_seqlens_q, seq_lens=call.seq_lens,
        block_tables=call.block_tables,
    )  # fmt: skip
    attend(call, problem.num_kv_heads, plan)
    return AttentionOutput(out, lse)
