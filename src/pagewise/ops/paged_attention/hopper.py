"""Paged attention of few new tokens on Hopper, by Gluon: some warps fetch, the others compute."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonASTSource

from ...device import DeviceInfo
from ...tiles.state import AttentionOutput
from ...tiles.triton.launch import Launcher, refuse
from .hopper_decode import decode_kernel
from .problem import Options, PagedBatch, Problem
from .triton import DecodeKernel, launch_decode, pack
from .triton_plan import GpuPlan, make_gpu_plan, refuse_hopper


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
    return refuse_hopper(problem)


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
    """Launch the kernel."""
    batch = pack(batch)
    plan = plan or make_gpu_plan(problem, DeviceInfo.of(q.device), hopper=True)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    launch_decode(problem, q, k_cache, v_cache, batch, options, out, lse, plan, SPECIALISED)
    return AttentionOutput(out, lse)
