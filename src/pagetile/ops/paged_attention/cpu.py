"""Paged attention on a CPU, by ``tiles.cpu.forward`` directly on the pages."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from ...device import DeviceInfo
from ...tiles.cpu.arrays import refuse
from ...tiles.cpu.forward import attend, make_call
from ...tiles.cpu.plan import make_plan as make_cpu_plan
from ...tiles.state import AttentionOutput
from .problem import Problem
from .value_checks import check_values, check_visible_blocks


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run ``problem``, or None if it can."""
    caches = {"k_cache": problem.kv_dtype} if problem.scale_kind == "none" else {}
    return refuse(device, q=problem.q_dtype, **caches)


def make_plan(problem, device, *, batch_invariant=False):
    """Return the plan; results never depend on the batch."""
    return make_cpu_plan(problem, device)


def prepare(problem, form, plan=None):
    """Return the function that runs calls of a form."""
    return functools.partial(_run, problem, plan)


def _run(problem, plan, call):
    """Check the values of the batch's integers, and attend."""
    plan = plan or make_cpu_plan(problem, DeviceInfo.of(call.q.device))
    q, k_cache, v_cache, batch = call[:4]
    out = q.new_empty(problem.out_sizes) if call.out is None else call.out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    k_scale, v_scale = (
        None if scale is None else scale.expand(k_cache.shape[:3])
        for scale in (call.k_scale, call.v_scale)
    )
    mask = None
    if call.visible_blocks is not None:
        mask = _mask_of(problem, batch, call.visible_blocks)
        plan = replace(plan, decode_heads=1)  # heads of an item read the same tiles
    work = make_call(
        q, k_cache, v_cache, out, lse, call, plan,
        block_tables=batch.block_tables, seq_lens=batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q,
        block_size=problem.block_size,
        k_strides=k_cache.stride()[:3], v_strides=v_cache.stride()[:3],
        k_scale=k_scale, v_scale=v_scale, per_token=problem.scale_kind == "token",
        block_mask=mask,
    )  # fmt: skip
    check_values(
        problem, batch, k_cache.shape[0], cu_seqlens_q=work.cu_seqlens_q, seq_lens=work.seq_lens,
        block_tables=work.block_tables,
    )  # fmt: skip
    if call.visible_blocks is not None:
        check_visible_blocks(call.visible_blocks, batch.seq_lens, problem.block_size)
    attend(work, problem.num_kv_heads, plan)
    return AttentionOutput(out, lse)


class _BlockMask(NamedTuple):
    """The attributes that ``tiles.cpu.block_mask`` reads: one row of blocks for all queries."""

    mask: torch.Tensor
    """bool ``[num_seqs, num_heads, 1, max_blocks_per_seq]``."""
    block_q: int
    block_k: int


def _mask_of(problem, batch, visible_blocks):
    """Return the mask that hides all blocks that are not listed; lists are not checked yet."""
    num_blocks = batch.block_tables.shape[1]
    mask = visible_blocks.new_zeros(*visible_blocks.shape[:2], 1, num_blocks + 1, dtype=torch.bool)
    listed = torch.where(visible_blocks < 0, num_blocks, visible_blocks)
    listed = listed.clamp(max=num_blocks).long()
    mask.scatter_(3, listed[:, :, None], True)
    mask = mask[..., :num_blocks].repeat_interleave(problem.group, dim=1)
    return _BlockMask(mask, 1 << 30, problem.block_size)
