"""Paged attention of many new tokens a sequence on Hopper: see ``tiles.hopper.forward``.

::

    rows of a tile = 128 or 192 = tokens × PACK query heads of one KV head
    keys of a tile = boxes of a page's rows, or a part of them, straight from their pages by TMA,
                     where that is faster; otherwise row by row by cp.async (``Form.gathers``)

Supports float16 and bfloat16, head sizes to 256 in steps of 8 (equal for values), any group,
any block size, rows that begin at multiples of 16 bytes, causal or not, sliding windows, soft
caps up to 64, ALiBi, sinks, log-sum-exp. 8-bit caches are for the Triton kernels, and so are few
new tokens a sequence: a tile of theirs would be nearly empty, and nobody else would help to walk
their keys. In a mixed batch they are left to a launch of ``hopper_decode`` beside this one's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.launch import attend, refuse, refuse_cap
from ...tiles.state import AttentionOutput
from .hopper import SPECIALISED
from .problem import CallForm, Options, PagedBatch, Problem
from .triton import Call, pack, prepare_short
from .triton_plan import DECODE_ROWS, GpuPlan, refuse_unaligned, short_len


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    sizes = problem.head_size, problem.v_head_size
    reason = refuse(device, problem.q_dtype, *sizes) or refuse_cap(problem.logits_soft_cap)
    if reason is None and problem.kv_dtype != problem.q_dtype:
        reason = f"q is {problem.q_dtype} but k_cache is {problem.kv_dtype}; equal types run"
    if reason is None:
        reason = refuse_unaligned(problem)
    if reason is None and problem.rows <= DECODE_ROWS:
        reason = f"{problem.rows} rows of a sequence share a KV head; more than {DECODE_ROWS} run"
    return reason


def prepare(
    problem: Problem, form: CallForm, plan: GpuPlan | None = None
) -> Callable[..., AttentionOutput]:
    """Settle who computes a mixed batch's few rows."""
    return functools.partial(_run, problem, prepare_short(problem, form, plan, SPECIALISED))


def _run(
    problem: Problem,
    short: Call | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor | None,
) -> AttentionOutput:
    """Fill ``out``."""
    out = q.new_empty(problem.out_sizes) if out is None else out
    batch = pack(batch)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if short is not None:
        short(q, k_cache, v_cache, batch, options, out, lse)
    attend(
        out,
        lse,
        q,
        k_cache,
        v_cache,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_tables,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        sliding_window=options.sliding_window,
        logits_soft_cap=options.logits_soft_cap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        short=short_len(problem),
    )
    return AttentionOutput(out, lse)
