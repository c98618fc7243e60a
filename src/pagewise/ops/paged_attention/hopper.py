"""Paged attention on Hopper by Gluon: warps of their own fetch what the others compute on."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ...device import DeviceInfo
from ...tiles.state import AttentionOutput
from ...tiles.triton.launch import Launcher, refuse
from .hopper_decode import decode_kernel
from .problem import Options, PagedBatch, Problem
from .triton import DecodeKernel, launch_decode
from .triton_plan import HOPPER_ROWS, GpuPlan, make_gpu_plan

_HALVES = (torch.float16, torch.bfloat16)


class GluonLauncher(Launcher):
    """A launcher of kernels that are written in Gluon."""

    source = GluonASTSource


SPECIALISED = DecodeKernel(decode_kernel, GluonLauncher, takes_pairs=True)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    reason = refuse(device)
    if reason is not None:
        return reason
    if device.capability != (9, 0):
        return f"{device.name or device.kind} is not a Hopper GPU"
    if _is_decode(problem):
        return _refuse_decode(problem)
    if not problem.is_plain:
        return "capped or biased scores and sinks run in decode only"
    if not problem.is_aligned:
        return "rows of the caches do not begin at multiples of 16 bytes"
    from . import hopper_prefill

    return hopper_prefill.supports(problem, device)


def _is_decode(problem: Problem) -> bool:
    return problem.max_query_len * problem.group <= HOPPER_ROWS


def _refuse_decode(problem: Problem) -> str | None:
    q, kv = (str(dtype)[6:] for dtype in (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _HALVES:
        return f"q is {q}; float16 and bfloat16 run"
    if problem.kv_dtype != problem.q_dtype and problem.kv_dtype.itemsize != 1:
        return f"q is {q} but k_cache is {kv}: equal types, and 8 bits, run"
    if max(problem.head_size, problem.v_head_size) > 256:
        return f"a head of {max(problem.head_size, problem.v_head_size)} is wider than 256"
    unit = 16 // problem.kv_dtype.itemsize
    if problem.head_size % unit or problem.v_head_size % unit or not problem.is_aligned:
        return "rows of the caches do not begin at multiples of 16 bytes"
    return None


def run(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor,
    plan: GpuPlan | None = None,
) -> AttentionOutput:
    """Launch the kernel for few or for many rows a sequence."""
    if not _is_decode(problem):
        from . import hopper_prefill

        return hopper_prefill.run(problem, q, k_cache, v_cache, batch, options, out)
    plan = plan or make_gpu_plan(problem, DeviceInfo.of(q.device), hopper=True)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    launch_decode(problem, q, k_cache, v_cache, batch, options, out, lse, plan, SPECIALISED)
    return AttentionOutput(out, lse)
