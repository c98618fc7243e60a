"""Paged attention of many new tokens a sequence on Hopper: see ``tiles.hopper.forward``.

::

    rows of a tile = 128 or 192 = tokens × PACK query heads of one KV head
    keys of a tile = boxes of a page's rows, directly from the pages by TMA; if boxes would be
                     small, row by row by cp.async; of 8-bit caches, row by row through
                     registers, where they are converted, or from 16-bit pages that a previous
                     launch unpacks (``triton_unpack``)

Supports float16 and bfloat16, head sizes of keys and of values to 256 in steps of 8, any group,
any block size, rows that begin at multiples of 16 bytes, causal or not, sliding windows, soft
caps up to 64, ALiBi, sinks, log-sum-exp, 8-bit caches. Sequences with few new tokens would leave a
tile nearly empty, so in a mixed batch a launch of ``hopper_decode`` computes them, which starts as
CTAs of this one end, unless both need scratch memory. If tiles are few and keys many, keys are
split among CTAs (``tiles.hopper.splits``), unless the plan is batch-invariant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...tiles.hopper.launch import attend, refuse_device
from ...tiles.state import AttentionOutput
from .hopper import SPECIALISED
from .plan import GpuPlan, make_hopper_prefill_plan, refuse_hopper_prefill
from .plan.prefill import short_len
from .problem import Arguments, CallForm, Problem
from .triton import PreparedLaunch, is_ready, prepare_short, with_contiguous_lengths
from .triton_unpack import UnpackLaunch, prepare_unpacking

make_plan = make_hopper_prefill_plan


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run ``problem``, or None if it can."""
    return refuse_device(device) or refuse_hopper_prefill(problem)


def prepare(
    problem: Problem, form: CallForm, plan: GpuPlan | None = None
) -> Callable[[Arguments], AttentionOutput]:
    """Return the function that runs calls of a form.

    Raises:
        ShapeError: The plan has other tiles than this kernel.
    """
    device = DeviceInfo.of(form.q.device)
    own = make_plan(
        problem,
        device,
        batch_invariant=plan is not None and plan.split_size > 0,
        unpacks=None if plan is None else plan.unpacks,
    )
    if plan not in (None, own):
        raise ShapeError(
            f"the plan has path={plan.path!r}, tiles of {plan.tile_m} x {plan.tile_n}, "
            f"divides_keys={plan.divides_keys} and unpacks={plan.unpacks}, but hopper_prefill runs "
            f"tiles of {own.tile_m} x {own.tile_n} with divides_keys={own.divides_keys} and "
            f"unpacks={own.unpacks}: plan_paged_attention for these tensors"
        )
    # The kernel would not wait for a conversion between the two launches.
    overlaps_prefill = not own.divides_keys and _is_written_in_place(form) and is_ready(form)
    prefill = own if overlaps_prefill else None
    short = prepare_short(problem, form, plan, SPECIALISED, prefill=prefill)
    unpack = prepare_unpacking(problem, form, device) if own.unpacks else None
    return functools.partial(_run, problem, short, unpack, own.divides_keys, overlaps_prefill)


def _is_written_in_place(form: CallForm) -> bool:
    """Return whether the kernel writes to ``out`` itself, not to an aligned copy."""
    if form.out is None:
        return True
    return form.is_aligned and all(s > 0 and s % 8 == 0 for s in form.out.strides[:2])


def _run(
    problem: Problem, short: PreparedLaunch | None, unpack: UnpackLaunch | None,
    divides_keys: bool, overlaps_prefill: bool, call: Arguments,
) -> AttentionOutput:  # fmt: skip
    """Fill ``out``. The short sequences' launch comes last, overlapping this one's, or first."""
    q, batch = call.q, with_contiguous_lengths(call.batch)
    out = q.new_empty(problem.out_sizes) if call.out is None else call.out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if short is not None and not overlaps_prefill:
        short(call._replace(out=out, batch=batch), lse)
    k, v, tables = call.k_cache, call.v_cache, batch.block_tables
    if unpack is not None:
        k, v, tables = unpack(call, batch)
    attend(
        out,
        lse,
        q,
        k,
        v,
        batch.cu_seqlens_q,
        batch.seq_lens,
        tables,
        max_query_len=batch.max_query_len,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
        sliding_window=call.sliding_window,
        logits_soft_cap=call.logits_soft_cap,
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
        short=short_len(problem),
        splits=divides_keys,
        k_scale=_of_heads(problem, call.k_scale),
        v_scale=_of_heads(problem, call.v_scale),
        is_unpacked=unpack is not None,
    )
    if short is not None and overlaps_prefill:
        short(call._replace(out=out, batch=batch), lse)
    return AttentionOutput(out, lse)


def _of_heads(problem: Problem, scale: Tensor | None) -> Tensor | None:
    """Return scales as the kernel takes them: a single number is expanded to all KV heads.

    Scales of heads are copied if they lie too far apart for the kernel's 32-bit offsets.
    """
    if scale is not None and scale.shape in ((), (1,)):
        scale = scale.reshape(1).expand(problem.num_kv_heads)
    if scale is not None and scale.dim() == 1 and len(scale) * scale.stride(0) >= 1 << 31:
        scale = scale.clone(memory_format=torch.contiguous_format)
    return scale
