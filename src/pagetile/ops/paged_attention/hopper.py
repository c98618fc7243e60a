"""Paged attention of few new tokens on Hopper: the implementation around ``hopper_decode``."""

from __future__ import annotations

import functools

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import GluonLauncher
from ...tiles.hopper.launch import refuse_device
from . import triton
from .hopper_decode import decode_kernel
from .plan import GpuPlan, make_gpu_plan, refuse_hopper_decode
from .problem import CallForm, Problem
from .triton import Kernel, PreparedLaunch

make_plan = functools.partial(make_gpu_plan, hopper=True)
SPECIALISED = Kernel(decode_kernel, GluonLauncher, takes_pairs=True, joins_heads=True)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run ``problem``, or None if it can."""
    return refuse_device(device) or refuse_hopper_decode(problem)


def prepare(problem: Problem, form: CallForm, plan: GpuPlan | None = None) -> PreparedLaunch:
    """Return the launch that calls of a form share."""
    return triton.prepare(problem, form, plan, SPECIALISED)
