"""Paged attention of few new tokens on Hopper, by Gluon: some warps fetch, the others compute."""

from __future__ import annotations

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import GluonLauncher
from ...tiles.hopper.launch import refuse_device
from . import triton
from .hopper_decode import decode_kernel
from .problem import CallForm, Problem
from .triton import Call, Kernel
from .triton_plan import GpuPlan, refuse_hopper

SPECIALISED = Kernel(decode_kernel, GluonLauncher, takes_pairs=True)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    return refuse_device(device) or refuse_hopper(problem)


def prepare(problem: Problem, form: CallForm, plan: GpuPlan | None = None) -> Call:
    """Settle what depends on no tensor's elements."""
    return triton.prepare(problem, form, plan, SPECIALISED)
