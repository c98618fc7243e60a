"""From a problem and a device to a plan: a pure function of host integers."""

from __future__ import annotations

import functools

from ...device import DeviceInfo
from ...tiles.cpu.plan import SPLIT_SIZE
from ...tiles.cpu.plan import Plan as CpuPlan
from ...tiles.cpu.plan import make_plan as make_cpu_plan
from .problem import Problem
from .triton_plan import GpuPlan, make_gpu_plan, refuse_hopper

__all__ = ["SPLIT_SIZE", "CpuPlan", "GpuPlan", "Plan", "make_plan"]

Plan = CpuPlan | GpuPlan


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False) -> Plan:
    """How a device's implementation would cut a problem.

    Args:
        problem: A call.
        device: Where it would run; it need not be this machine's.
        batch_invariant: Whether a sequence's result must have the same bits whoever else is in
            the batch. On a CPU it always has; on a GPU it costs some of decode's speed, and holds
            among batches of one ``max_query_len``. Decode then keeps a partial result of every
            1024 keys: ``rows * v_head_size * 4`` bytes each, with ``rows`` the next power of two
            of ``max_query_len * group``, for as many keys as ``max_seq_len`` and the block tables
            allow, of every sequence and KV head.

    Example:
        >>> import torch
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> h200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
        >>> make_plan(problem, h200).split_size  # as many keys for each program
        0
        >>> make_plan(problem, h200, batch_invariant=True).split_size
        1024
    """
    if device.kind != "cuda":
        return make_cpu_plan(problem, device)
    hopper = device.capability == (9, 0) and refuse_hopper(problem) is None
    return make_gpu_plan(problem, device, batch_invariant=batch_invariant, hopper=hopper)
