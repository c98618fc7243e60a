"""Paged attention of few new tokens on Hopper, by Gluon: some warps fetch, the others compute."""

from __future__ import annotations

from triton.experimental.gluon._runtime import GluonASTSource

from ...device import DeviceInfo
from ...tiles.triton.launch import Launcher, refuse
from . import triton
from .hopper_decode import decode_kernel
from .problem import CallForm, Problem
from .triton import Call, Kernel
from .triton_plan import GpuPlan, refuse_hopper


class GluonLauncher(Launcher):
    """A launcher of kernels that are written in Gluon."""

    source = GluonASTSource


SPECIALISED = Kernel(decode_kernel, GluonLauncher, takes_pairs=True)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    reason = refuse(device)
    if reason is not None:
        return reason
    if device.capability != (9, 0):
        return f"{device.name or device.kind} is not a Hopper GPU"
    return refuse_hopper(problem)


def prepare(problem: Problem, form: CallForm, plan: GpuPlan | None = None) -> Call:
    """Settle what depends on no tensor's elements."""
    return triton.prepare(problem, form, plan, SPECIALISED)
