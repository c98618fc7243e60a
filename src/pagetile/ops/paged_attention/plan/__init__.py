"""Launch plans of paged attention: tiles and splits, from host integers and the device only.

``refusals`` says which problems Hopper's kernels take. ``decode`` plans the decode kernels with the
tiles of ``decode_tiles``, ``prefill`` the kernels for many new tokens, ``prefixes`` the one for
shared prefixes. Plans for CPUs come from ``tiles.cpu.plan``.
"""

from __future__ import annotations

import functools

from ....device import DeviceInfo
from ....tiles.cpu.plan import Plan as CpuPlan
from ....tiles.cpu.plan import make_plan as make_cpu_plan
from ..problem import Problem
from .decode import make_decode_plan
from .gpu_plan import DECODE_ROWS, FEW_ROWS, GpuPlan
from .prefill import make_hopper_prefill_plan, make_triton_prefill_plan
from .refusals import refuse_hopper_decode, refuse_hopper_prefill

Plan = CpuPlan | GpuPlan

__all__ = [
    "GpuPlan",
    "Plan",
    "make_gpu_plan",
    "make_hopper_prefill_plan",
    "make_plan",
    "refuse_hopper_decode",
    "refuse_hopper_prefill",
]


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False) -> Plan:
    """Return the plan of the implementation that ``impl="auto"`` would choose on a device.

    Args:
        problem: A call.
        device: The device, which need not be this machine's.
        batch_invariant: Whether a sequence's result must have the same bits whatever other
            sequences are in the batch. On a CPU it always has; on a GPU it costs some of decode's
            speed, and holds among batches of one ``max_query_len``. Decode then keeps a partial
            result of every 1024 keys: ``rows * v_head_size * 4`` bytes each, with ``rows`` the next
            power of two of ``max_query_len * group``, for as many keys as ``max_seq_len`` and the
            block tables allow, of every sequence and KV head.

    Examples:
        >>> import torch
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> h200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
        >>> make_plan(problem, h200).split_size  # as many keys for each CTA
        0
        >>> make_plan(problem, h200, batch_invariant=True).split_size
        1024
    """
    if device.kind != "cuda":
        return make_cpu_plan(problem, device)
    is_hopper = device.capability == (9, 0)
    if is_hopper and refuse_hopper_prefill(problem) is None:
        return make_hopper_prefill_plan(problem, device, batch_invariant=batch_invariant)
    hopper = is_hopper and refuse_hopper_decode(problem) is None
    return make_gpu_plan(problem, device, batch_invariant=batch_invariant, hopper=hopper)


@functools.lru_cache(maxsize=4096)
def make_gpu_plan(
    problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False, hopper: bool = False
) -> GpuPlan:
    """Return the plan of a decode kernel, or of Triton's prefill.

    Args:
        problem: A call.
        device: A GPU, or a CPU that interprets.
        batch_invariant: Whether a sequence's result must not depend on its neighbours.
        hopper: Whether the plan is for ``hopper_decode``.

    Examples:
        >>> import torch
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> make_gpu_plan(problem, DeviceInfo("cuda", 132, "NVIDIA H200")).path
        'decode'
    """
    # A decode tile of many wide rows leaves no room for keys or results.
    is_bulky = problem.width > (128 if problem.multiplies_float32 else 256)
    if problem.rows > (FEW_ROWS if is_bulky else DECODE_ROWS):
        return make_triton_prefill_plan(problem, device, batch_invariant=batch_invariant)
    return make_decode_plan(problem, device, batch_invariant=batch_invariant, hopper=hopper)
