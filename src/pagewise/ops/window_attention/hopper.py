"""Window attention on a Hopper GPU: what can run, and the launches."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import align
from ...tiles.hopper.launch import refuse
from ...tiles.state import AttentionOutput
from . import triton
from .hopper_launch import (
    make_columns_launcher,
    make_deltas_launcher,
    make_launcher,
    make_marker,
    make_rows_launcher,
    make_sums_launcher,
)
from .hopper_plan import (
    MARKS,
    MOST_REGIONS,
    PIECE,
    SUM_KEYS,
    Plan,
    RowsPlan,
    make_columns_plan,
    make_plan,
    make_rows_plan,
)
from .hopper_sums import PART
from .problem import Gradients, Operands, Problem, empty_like
from .triton import KINDS

__all__ = ["backward", "forward", "supports"]

_LOG2_E = 1 / math.log(2)
_FEWEST_TOKENS, _MOST_TOKENS, _WIDEST = 193, 1024, 64
_LEAST_SCALE = 1 / 16
_MOST_MARKED = 2048.0
_LARGEST = 65_504.0  # of float16


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
    if not problem.num_windows:
        return AttentionOutput(out, lse)
    call = _Call(problem, x)
    launcher = make_launcher(call.kind, replace(plan, chunks=1), *call.types)
    launcher(
        (-(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks, 1, 1),
        out,
        lse,
        call.q,
        call.k,
        call.v,
        call.marks,
        call.marks,
        *call.others(plan.chunks, call.scale * _LOG2_E),
    )
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """What is to be subtracted from rows; by rows; by columns; and the sums over windows."""
    device = DeviceInfo.of(x.q.device)
    rows_plan, columns_plan = make_rows_plan(problem, device), make_columns_plan(problem, device)
    if rows_plan is None or columns_plan is None or not problem.num_windows:
        return triton.backward(problem, x, out, lse, dout, dlse)
    dout, dlse = align(dout), None if dlse is None else dlse.contiguous()
    call = _Call(problem, x, is_backward=True)
    pivot, delta = _make_deltas(call, out, lse, dout, dlse)
    dq, sums = _walk_rows(call, rows_plan, pivot, delta, dout)
    is_early = rows_plan.launches == 1
    dk, dv = _walk_columns(call, columns_plan, pivot, delta, dout, is_early)
    dbias = _sum_up(call, sums) if problem.has_bias else None
    return triton.finish(x, dq, dk, dv, dbias)


class _Call:
    """The operands as kernels take them."""

    def __init__(self, problem: Problem, x: Operands, is_backward: bool = False) -> None:
        self.problem, self.x = problem, x
        self.kind = replace(problem, num_windows=1, num_masks=min(problem.num_masks, 1))
        q, self.scale = normal_scale(x.q, x.softmax_scale)
        self.q, self.k, self.v = align(q), align(x.k), align(x.v)
        factor = self.scale * _LOG2_E
        self.factor = _to_float16(factor) if problem.dtype == torch.float16 else factor
        self.regions = None if x.regions is None else x.regions.contiguous()
        self.bias = x.bias if x.bias is None else x.bias.contiguous()
        self.strides = [0, problem.num_tokens**2]  # of a table's entries, and of heads
        if x.bias_table is not None:
            # Programs gather from a head's entries: side by side they are fewer lines.
            table = x.bias_table.t().contiguous().t() if is_backward else x.bias_table.contiguous()
            self.bias, self.strides = table, [*table.stride()]
        self.offsets = None if x.rel_offsets is None else x.rel_offsets.contiguous()
        self.kinds, self.marks = self._mark(-x.mask_value / self.scale)  # last: see hopper_launch
        self.types = (
            "*fp32" if self.bias is None else KINDS[self.bias.dtype],
            "*i32" if self.regions is None else KINDS[self.regions.dtype],
        )

    def _mark(self, factor: float) -> tuple[Tensor, Tensor]:
        """Which windows are of several regions, and their marks.

        Too large a factor is left to comparing: its sum with a score would have few digits.
        """
        device, num_tokens = self.q.device, self.problem.num_tokens
        num_masks = 1 if self.regions is None else len(self.regions)
        kinds = torch.empty(num_masks, dtype=torch.int32, device=device)
        marks = torch.empty(num_masks, num_tokens, 2 * MARKS, dtype=torch.float16, device=device)
        if self.regions is not None:
            can_mark = abs(factor) < _MOST_MARKED
            factor, limit = (_to_float16(factor), MOST_REGIONS) if can_mark else (0.0, 0)
            marker = make_marker(KINDS[self.regions.dtype], num_tokens)
            marker((num_masks, 1, 1), kinds, marks, self.regions, factor, limit)
        return kinds, marks

    def others(self, chunks: int, factor: float) -> list[Any]:
        """What all three kernels take after their tokens; scores are multiplied by ``factor``."""
        problem, x, anything = self.problem, self.x, self.kinds
        return [
            anything if self.bias is None else self.bias,
            anything if self.offsets is None else self.offsets,
            self.kinds,
            anything if self.regions is None else self.regions,
            problem.num_windows,
            chunks,
            max(1, problem.num_masks),
            0 if x.bias_table is None else (x.bias_table.shape[0] - 1) // 2,
            *self.strides,
            factor,
            1 / self.scale,
            x.mask_value / self.scale,
        ]


def _to_float16(number: float) -> float:
    """The nearest finite number of float16.

    Example:
        >>> _to_float16(565.685), _to_float16(1e6)
        (565.5, 65504.0)
    """
    number = max(-_LARGEST, min(_LARGEST, number))
    return float(struct.unpack("e", struct.pack("e", number))[0])


def normal_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a scale of at least 1/16: bias and mask are divided by it.

    q is multiplied by a power of two, which is exact but for float16's subnormals.

    Example:
        >>> normal_scale(torch.tensor([3.0]), -1.5)
        (tensor([-3.]), 1.5)
        >>> normal_scale(torch.tensor([3.0]), 1 / 64)
        (tensor([0.7500]), 0.0625)
        >>> normal_scale(torch.tensor([3.0]), 0.0)
        (tensor([0.]), 0.6931471805599453)
    """
    if not scale < _LEAST_SCALE:
        return q, scale
    if scale == 0:
        return torch.zeros_like(q), 1 / _LOG2_E  # any would do: the factor of scores is then 1
    size = min(1.0, 2.0 ** math.floor(math.log2(abs(scale) / _LEAST_SCALE)))
    factor = math.copysign(size, scale)
    return q * factor, scale / factor


def _make_deltas(
    call: _Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pivots and deltas, ``[num_windows * num_heads, whole pieces]``."""
    problem = call.problem
    num_pairs = problem.num_windows * problem.num_heads
    padded = -(-problem.num_tokens // PIECE) * PIECE
    pivot, delta = lse.new_empty(2, num_pairs, padded).unbind(0)
    launcher = make_deltas_launcher(call.kind, dlse is not None)
    launcher(
        (num_pairs * -(-padded // launcher.constants["TILE"]), 1, 1),
        pivot,
        delta,
        out,
        dout,
        lse,
        lse if dlse is None else dlse,
        *dout.stride()[:3],
        call.factor / call.scale,
    )
    return pivot, delta


def _walk_rows(
    call: _Call, plan: RowsPlan, pivot: Tensor, delta: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and by chunks of windows of the bias: each launch has some keys."""
    problem, x = call.problem, call.x
    num_tokens, num_heads = problem.num_tokens, problem.num_heads
    dq = empty_like(x.q)
    so_far = torch.empty_like(dq, dtype=torch.float32) if plan.launches > 1 else pivot
    tiles = -(-num_tokens // PIECE) * -(-num_tokens // SUM_KEYS)
    shape = (plan.chunks, num_heads * tiles * PIECE * SUM_KEYS)
    sums = pivot.new_empty(shape if problem.has_bias else 4)
    launcher = make_rows_launcher(call.kind, replace(plan, chunks=1), *call.types)
    grid = (-(-num_tokens // PIECE) * num_heads * plan.chunks, 1, 1)
    arguments = [
        dq,
        so_far,
        sums,
        call.q,
        dout,
        call.marks,
        pivot,
        delta,
        call.k,
        call.v,
        call.marks,
        *call.others(plan.chunks, call.factor),
        x.softmax_scale,
    ]
    for launch in range(plan.launches):
        launcher(grid, *arguments, launch * plan.shares * plan.keys)
    return dq, sums


def _sum_up(call: _Call, sums: Tensor) -> Tensor:
    """The bias's gradient, ``[1, num_heads, num_tokens, num_tokens]``."""
    num_heads, num_tokens = call.problem.num_heads, call.problem.num_tokens
    dbias = sums.new_empty(1, num_heads, num_tokens, num_tokens)
    chunks, size = sums.shape
    launcher = make_sums_launcher(num_heads, num_tokens)
    launcher((size // PART.value, 1, 1), dbias, sums, chunks)
    return dbias


def _walk_columns(
    call: _Call, plan: Plan, pivot: Tensor, delta: Tensor, dout: Tensor, is_early: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values."""
    problem = call.problem
    dk, dv = empty_like(call.x.q), empty_like(call.x.q)
    launcher = make_columns_launcher(call.kind, replace(plan, chunks=1), *call.types, is_early)
    launcher(
        (-(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks, 1, 1),
        dk,
        dv,
        call.k,
        call.v,
        call.marks,
        call.q,
        dout,
        call.marks,
        pivot,
        delta,
        *call.others(plan.chunks, call.factor),
        call.scale,
    )
    return dk, dv
