"""Why Hopper's kernels cannot run a problem."""

from __future__ import annotations

import torch

from ....shapes import dtype_name
from ....tiles.hopper.tiling import PACKED_FORMATS, TILINGS, refuse_cap
from ..problem import Problem
from .gpu_plan import DECODE_ROWS, FEW_ROWS

_HALVES = (torch.float16, torch.bfloat16)


def refuse_hopper_decode(problem: Problem) -> str | None:
    """Return why ``hopper_decode`` cannot run ``problem``, or None if it can."""
    q, kv = map(dtype_name, (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _HALVES:
        return f"q is {q}; float16 and bfloat16 run"
    if problem.kv_dtype != problem.q_dtype and problem.kv_dtype.itemsize != 1:
        return f"q is {q} but k_cache is {kv}: equal types, and 8 bits, run"
    most = DECODE_ROWS if _uses_wgmma(problem) else FEW_ROWS
    if problem.rows > most:
        return f"{problem.rows} rows of a sequence share a KV head; up to {most} run"
    if problem.width > 256:
        return f"a head of {problem.width} is wider than 256"
    return _refuse_unaligned(problem)


def refuse_hopper_prefill(problem: Problem) -> str | None:
    """Return why Hopper's forward kernel cannot run ``problem``, or None if it can."""
    q, kv = map(dtype_name, (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _HALVES:
        return f"q is {q}; float16 and bfloat16 run"
    for name in ("head_size", "v_head_size"):
        size, widest = getattr(problem, name), TILINGS[-1].width
        if size % 8 or size > widest:
            return f"{name} is {size}; multiples of 8 up to {widest} run"
    if problem.kv_dtype not in (problem.q_dtype, *PACKED_FORMATS):
        return f"q is {q} but k_cache is {kv}; equal types, and 8 bits, run"
    if problem.q_dtype == torch.float16 and problem.scale_kind == "token":
        return "q is float16, in which values times their token's scale may overflow"
    if problem.max_visible is not None:
        return "it takes no visible_blocks"
    if problem.rows <= DECODE_ROWS:
        return f"{problem.rows} rows of a sequence share a KV head; more than {DECODE_ROWS} run"
    return refuse_cap(problem.logits_soft_cap) or _refuse_unaligned(problem)


def _uses_wgmma(problem: Problem) -> bool:
    """Return whether ``hopper_decode`` can take more than ``FEW_ROWS`` rows, by ``wgmma``."""
    sizes = problem.head_size, problem.v_head_size
    return problem.kv_dtype.itemsize == 2 and min(sizes) > 32 and max(sizes) <= 128


def _refuse_unaligned(problem: Problem) -> str | None:
    """Return why rows of the caches cannot be copied 16 bytes at a time, or None if they can."""
    unit = 16 // problem.kv_dtype.itemsize
    if problem.head_size % unit or problem.v_head_size % unit or not problem.is_aligned:
        return "rows of the caches do not begin at multiples of 16 bytes"
    return None
