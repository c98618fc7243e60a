"""Window attention on a Hopper GPU: what can run, and the launches; gradients are Triton's."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...device import DeviceInfo
from ...tiles.hopper.launch import GluonLauncher, refuse
from ...tiles.state import AttentionOutput
from ...tiles.triton.launch import Launcher
from . import triton
from .hopper_columns import column_gradients
from .hopper_deltas import make_deltas
from .hopper_forward import attend
from .hopper_marks import mark_regions
from .hopper_plan import (
    MARKS,
    PIECE,
    Plan,
    RowsPlan,
    find_width,
    make_columns_plan,
    make_plan,
    make_rows_plan,
)
from .hopper_rows import row_gradients
from .problem import Gradients, Operands, Problem
from .triton import KINDS, empty_like

__all__ = ["backward", "forward", "make_launcher", "make_marker", "supports"]

_LOG2_E = 1 / math.log(2)
_NO_BIAS, _TABLE, _DENSE = range(3)
_FEWEST_TOKENS, _MOST_TOKENS, _WIDEST = 193, 1024, 64
_LEAST_SCALE = 1 / 16
_TILE = 64
_MOST_MARKED = 2048.0
_MOST_REGIONS = 8


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can: what was measured, and faster than Triton's."""
    reason = refuse(device, problem.dtype, problem.head_size, problem.head_size)
    if reason is not None:
        return reason
    if problem.cosine:
        return "rows are to be normalised first, which is left to triton"
    if torch.float64 in problem.learned_dtypes:
        return "float64 is for the reference"
    if problem.mask_dtype is not None or problem.num_biases > 1:
        return "a dense mask, or several biases, are left to triton"
    if problem.head_size % 8 or problem.head_size > _WIDEST:
        return f"head_size is {problem.head_size}; multiples of 8 up to {_WIDEST} run"
    if not _FEWEST_TOKENS <= problem.num_tokens <= _MOST_TOKENS:
        return (
            f"num_tokens is {problem.num_tokens}; {_FEWEST_TOKENS} to {_MOST_TOKENS} is where "
            "this is faster than triton"
        )
    if make_plan(problem, device) is None:
        return f"{problem.num_tokens} tokens of {problem.head_size} do not fit into shared memory"
    return None


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """One launch, and with regions a small one to mark them."""
    plan = make_plan(problem, DeviceInfo.of(x.q.device))
    assert plan is not None
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    q, scale = normal_scale(x.q, x.softmax_scale)
    regions = None if x.regions is None else x.regions.contiguous()
    kinds, marks = _mark(problem, x.q.device, regions, -x.mask_value / scale)
    bias = x.bias_table if x.bias is None else x.bias
    launcher = make_launcher(
        replace(problem, num_windows=1, num_masks=min(problem.num_masks, 1)),
        replace(plan, chunks=1),
        "*fp32" if bias is None else KINDS[bias.dtype],
        "*i32" if regions is None else KINDS[regions.dtype],
    )
    programs = -(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks
    launcher(
        (programs if problem.num_windows else 0, 1, 1),
        out,
        lse,
        _describe(q, plan.rows),
        _describe(x.k, PIECE),
        _describe(x.v, PIECE),
        _describe_marks(marks, plan.rows),
        _describe_marks(marks, PIECE),
        lse if bias is None else bias.contiguous(),
        kinds if x.rel_offsets is None else x.rel_offsets.contiguous(),
        kinds,
        kinds if regions is None else regions,
        problem.num_windows,
        plan.chunks,
        max(1, problem.num_masks),
        0 if x.bias_table is None else (x.bias_table.shape[0] - 1) // 2,
        scale * _LOG2_E,
        1 / scale,
        x.mask_value / scale,
    )
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """By rows; by columns; and the sums over windows."""
    plan = make_columns_plan(problem, DeviceInfo.of(x.q.device))
    if plan is None or not problem.num_windows:
        return triton.backward(problem, x, out, lse, dout, dlse)
    pivot, delta = _make_deltas(problem, out, lse, dout, dlse)
    rows_plan = make_rows_plan(problem, DeviceInfo.of(x.q.device))
    if rows_plan is None:
        rows = triton.walk_rows(problem, x, out, lse, dout, dlse)
    else:
        rows = _walk_rows(problem, rows_plan, x, pivot, delta, dout)
    dk, dv = _walk_columns(problem, plan, x, pivot, delta, dout)
    return triton.sum_up(x, rows, dk, dv)


def _walk_rows(
    problem: Problem, plan: RowsPlan, x: Operands, pivot: Tensor, delta: Tensor, dout: Tensor
) -> triton.RowGradients:
    """Gradients of queries, and by chunks of windows of the bias."""
    num_tokens, num_heads = problem.num_tokens, problem.num_heads
    dq = empty_like(x.q)
    sums = pivot.new_empty(
        (plan.chunks, num_heads, num_tokens, num_tokens) if problem.has_bias else 1
    )
    q, scale = normal_scale(x.q, x.softmax_scale)
    regions = None if x.regions is None else x.regions.contiguous()
    kinds, marks = _mark(problem, x.q.device, regions, -x.mask_value / scale)
    bias = x.bias_table if x.bias is None else x.bias
    launcher = make_rows_launcher(
        replace(problem, num_windows=1, num_masks=min(problem.num_masks, 1)),
        replace(plan, chunks=1),
        "*fp32" if bias is None else KINDS[bias.dtype],
        "*i32" if regions is None else KINDS[regions.dtype],
    )
    programs = -(-num_tokens // PIECE) * num_heads * plan.chunks
    launcher(
        (programs, 1, 1),
        dq,
        sums,
        _describe(q, PIECE),
        _describe(dout, PIECE),
        _describe_marks(marks, PIECE),
        _describe_numbers(pivot),
        _describe_numbers(delta),
        _describe(x.k, plan.keys),
        _describe(x.v, plan.keys),
        _describe_marks(marks, plan.keys),
        pivot if bias is None else bias.contiguous(),
        kinds if x.rel_offsets is None else x.rel_offsets.contiguous(),
        kinds,
        kinds if regions is None else regions,
        problem.num_windows,
        plan.chunks,
        max(1, problem.num_masks),
        0 if x.bias_table is None else (x.bias_table.shape[0] - 1) // 2,
        scale * _LOG2_E,
        1 / scale,
        x.mask_value / scale,
        x.softmax_scale,
    )
    return triton.RowGradients(dq, None, sums, None)


def _make_deltas(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pivots and deltas, ``[num_windows * num_heads, whole pieces]``."""
    num_pairs = problem.num_windows * problem.num_heads
    padded = -(-problem.num_tokens // PIECE) * PIECE
    pivot, delta = lse.new_empty(2, num_pairs, padded).unbind(0)
    launcher = _deltas_launcher(
        KINDS[problem.dtype],
        problem.num_heads,
        problem.num_tokens,
        problem.head_size,
        dlse is not None,
    )
    launcher(
        (num_pairs * (padded // PIECE), 1, 1),
        pivot,
        delta,
        out,
        dout,
        lse,
        lse if dlse is None else dlse.contiguous(),
        *dout.stride()[:3],
    )
    return pivot, delta


@functools.lru_cache(maxsize=256)
def _deltas_launcher(
    kind: str, num_heads: int, num_tokens: int, head_size: int, has_dlse: bool
) -> Launcher:
    types = {"pivot": "*fp32", "delta": "*fp32", "out": kind, "dout": kind}
    types |= {"lse": "*fp32", "dlse": "*fp32"}
    types |= dict.fromkeys(("dout_window", "dout_head", "dout_token"), "i64")
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_TOKENS": num_tokens,
        "PADDED": -(-num_tokens // PIECE) * PIECE,
        "HEAD_SIZE": head_size,
        "HAS_DLSE": has_dlse,
        "TILE": PIECE,
        "D": find_width(head_size),
    }
    return Launcher(make_deltas, types, constants, num_warps=4)


def _walk_columns(
    problem: Problem, plan: Plan, x: Operands, pivot: Tensor, delta: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values."""
    dk, dv = empty_like(x.q), empty_like(x.q)
    q, scale = normal_scale(x.q, x.softmax_scale)
    regions = None if x.regions is None else x.regions.contiguous()
    kinds, marks = _mark(problem, x.q.device, regions, -x.mask_value / scale)
    bias = x.bias_table if x.bias is None else x.bias
    launcher = make_columns_launcher(
        replace(problem, num_windows=1, num_masks=min(problem.num_masks, 1)),
        replace(plan, chunks=1),
        "*fp32" if bias is None else KINDS[bias.dtype],
        "*i32" if regions is None else KINDS[regions.dtype],
    )
    programs = -(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks
    launcher(
        (programs if problem.num_windows else 0, 1, 1),
        dk,
        dv,
        _describe(x.k, plan.rows),
        _describe(x.v, plan.rows),
        _describe_marks(marks, plan.rows),
        _describe(q, PIECE),
        _describe(dout, PIECE),
        _describe_marks(marks, PIECE),
        _describe_numbers(pivot),
        _describe_numbers(delta),
        pivot if bias is None else bias.contiguous(),
        kinds if x.rel_offsets is None else x.rel_offsets.contiguous(),
        kinds,
        kinds if regions is None else regions,
        problem.num_windows,
        plan.chunks,
        max(1, problem.num_masks),
        0 if x.bias_table is None else (x.bias_table.shape[0] - 1) // 2,
        scale * _LOG2_E,
        1 / scale,
        x.mask_value / scale,
        scale,
    )
    return dk, dv


def normal_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a positive scale that is not tiny: bias and mask are divided by it.

    Powers of two leave q's digits as they are.

    Example:
        >>> normal_scale(torch.tensor([3.0]), -1.5)
        (tensor([-3.]), 1.5)
        >>> normal_scale(torch.tensor([3.0]), 0.0)
        (tensor([0.]), 1.0)
    """
    if not scale < _LEAST_SCALE:
        return q, scale
    if scale == 0:
        return torch.zeros_like(q), 1.0
    size = min(1.0, 2.0 ** math.floor(math.log2(abs(scale))))
    factor = math.copysign(size, scale)
    return q * factor, scale / factor


def _mark(
    problem: Problem, device: torch.device, regions: Tensor | None, factor: float
) -> tuple[Tensor, Tensor]:
    """Which windows have several regions, and their marks. Too large a factor is for comparing."""
    num_tokens = problem.num_tokens
    num_masks = 1 if regions is None else len(regions)
    kinds = torch.empty(num_masks, dtype=torch.int32, device=device)
    marks = torch.empty(num_masks, num_tokens, 2 * MARKS, dtype=torch.float16, device=device)
    if regions is not None:
        can_mark = abs(factor) < _MOST_MARKED
        high = torch.tensor(factor).half().item() if can_mark else 0.0
        low, limit = (factor - high, _MOST_REGIONS) if can_mark else (0.0, 0)
        marker = make_marker(KINDS[regions.dtype], num_tokens)
        marker((num_masks, 1, 1), kinds, marks, regions, high, low, limit)
    return kinds, marks


@functools.lru_cache(maxsize=256)
def make_marker(regions: str, num_tokens: int) -> Launcher:
    """The kernel that marks regions of an element type."""
    types = {"kinds": "*i32", "marks": "*fp16:16", "regions": regions}
    types |= {"high": "fp32", "low": "fp32", "limit": "i32"}
    constants = {"NUM_TOKENS": num_tokens, "TILE": 1 << (num_tokens - 1).bit_length()}
    return Launcher(mark_regions, types, constants, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_launcher(problem: Problem, plan: Plan, bias: str, regions: str) -> GluonLauncher:
    """The kernel for one kind of problem, and its bias' and its regions' element types."""
    name, width = KINDS[problem.dtype][1:], find_width(problem.head_size)
    tokens, marks = _layout(width, 4), _layout(MARKS, 3)
    types = {"out": f"*{name}:16", "lse": "*fp32"}
    for desc, rows in (("q_desc", plan.rows), ("k_desc", PIECE), ("v_desc", PIECE)):
        types[desc] = f"tensordesc<{name}{[1, 1, rows, width]},{tokens!r}>"
    for desc, rows in (("row_marks_desc", plan.rows), ("marks_desc", PIECE)):
        types[desc] = f"tensordesc<fp16{[1, rows, MARKS]},{marks!r}>"
    types |= {"bias": bias, "offsets": "*i32", "kinds": "*i32", "regions": regions}
    types |= dict.fromkeys(("num_windows", "num_chunks", "num_masks", "centre"), "i32")
    types |= dict.fromkeys(("scale", "inverse", "mask_value"), "fp32")
    return GluonLauncher(attend, types, _constants(problem, plan), num_warps=plan.warps)


def _constants(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What kernels of a problem are compiled for."""
    kind = _DENSE if problem.num_biases else _NO_BIAS
    return {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "HEAD_SIZE": problem.head_size,
        "WIDTH": find_width(problem.head_size),
        "BIAS": kind if problem.table_size is None else _TABLE,
        "MASK": problem.has_regions,
        "GROUPS": plan.groups,
        "REST": plan.rest,
        "STREAMS": plan.streams,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "Q_STAGES": plan.q_stages,
        "REGISTERS": plan.registers,
    }


@functools.lru_cache(maxsize=256)
def make_columns_launcher(problem: Problem, plan: Plan, bias: str, regions: str) -> GluonLauncher:
    """The kernel of keys' and values' gradients, as ``make_launcher``."""
    name, width = KINDS[problem.dtype][1:], find_width(problem.head_size)
    tokens, marks = _layout(width, 4), _layout(MARKS, 3)
    numbers = gl.NVMMASharedLayout(0, 32, rank=2)
    types = {"dk": f"*{name}:16", "dv": f"*{name}:16"}
    for side, rows in (
        ("k_desc v_desc row_marks_desc", plan.rows),
        ("q_desc dout_desc marks_desc", PIECE),
    ):
        first, second, marked = side.split()
        kind = f"tensordesc<{name}{[1, 1, rows, width]},{tokens!r}>"
        types |= {first: kind, second: kind}
        types[marked] = f"tensordesc<fp16{[1, rows, MARKS]},{marks!r}>"
    for desc in ("pivot_desc", "delta_desc"):
        types[desc] = f"tensordesc<fp32{[1, PIECE]},{numbers!r}>"
    types |= {"bias": bias, "offsets": "*i32", "kinds": "*i32", "regions": regions}
    types |= dict.fromkeys(("num_windows", "num_chunks", "num_masks", "centre"), "i32")
    types |= dict.fromkeys(("scale", "inverse", "mask_value", "dk_scale"), "fp32")
    return GluonLauncher(
        column_gradients, types, _constants(problem, plan) | {"TILE": _TILE}, num_warps=plan.warps
    )


@functools.lru_cache(maxsize=256)
def make_rows_launcher(problem: Problem, plan: RowsPlan, bias: str, regions: str) -> GluonLauncher:
    """The kernel of queries' and the bias's gradients, as ``make_launcher``."""
    name, width = KINDS[problem.dtype][1:], find_width(problem.head_size)
    tokens, marks = _layout(width, 4), _layout(MARKS, 3)
    numbers = f"tensordesc<fp32{[1, PIECE]},{gl.NVMMASharedLayout(0, 32, rank=2)!r}>"

    def rows_of(rows: int) -> str:
        return f"tensordesc<{name}{[1, 1, rows, width]},{tokens!r}>"

    def marks_of(rows: int) -> str:
        return f"tensordesc<fp16{[1, rows, MARKS]},{marks!r}>"

    types = {"dq": f"*{name}:16", "dbias": "*fp32"}
    types |= {"q_desc": rows_of(PIECE), "dout_desc": rows_of(PIECE)}
    types |= {"row_marks_desc": marks_of(PIECE), "pivot_desc": numbers, "delta_desc": numbers}
    types |= {"k_desc": rows_of(plan.keys), "v_desc": rows_of(plan.keys)}
    types |= {"marks_desc": marks_of(plan.keys)}
    types |= {"bias": bias, "offsets": "*i32", "kinds": "*i32", "regions": regions}
    types |= dict.fromkeys(("num_windows", "num_chunks", "num_masks", "centre"), "i32")
    types |= dict.fromkeys(("scale", "inverse", "mask_value", "dq_scale"), "fp32")
    kind = _DENSE if problem.num_biases else _NO_BIAS
    constants = {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "HEAD_SIZE": problem.head_size,
        "WIDTH": width,
        "BIAS": kind if problem.table_size is None else _TABLE,
        "MASK": problem.has_regions,
        "SHARES": plan.shares,
        "KEYS": plan.keys,
        "STAGES": plan.stages,
        "BUFFERS": plan.buffers,
        "REGISTERS": plan.registers,
    }
    return GluonLauncher(row_gradients, types, constants, num_warps=4)


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """A window's head in boxes of so many tokens; a copy where tokens do not lie on 16 bytes."""
    unit = 16 // x.element_size()
    strides = x.stride()[:3]
    if x.data_ptr() % 16 or any(stride % unit or stride <= 0 for stride in strides):
        x = x.clone(memory_format=torch.contiguous_format)
    width = find_width(x.shape[3])
    box = [1, 1, rows, width]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, _layout(width, 4))


def _describe_marks(x: Tensor, rows: int) -> TensorDescriptor:
    box = [1, rows, MARKS]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, _layout(MARKS, 3))


def _describe_numbers(x: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, PIECE], layout)


def _layout(width: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(2 * width, 16, rank=rank)
