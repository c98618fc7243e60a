"""Window attention on a Hopper GPU: what can run, and the launches."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import align
from ...tiles.hopper.launch import refuse
from ...tiles.state import AttentionOutput
from . import hopper_one_tile_launch as one_tile
from . import triton
from .hopper_launch import (
    GradientKernels,
    add_sums,
    count_sums,
    find_forward,
    find_gradients,
    make_marker,
)
from .hopper_operands import LOG2_E, normal_scale, types_of
from .hopper_plan import MARKS, MOST_IN_ONE_TILE, MOST_REGIONS, PIECE, make_plan
from .problem import Gradients, Operands, Problem, empty_like
from .triton import KINDS, count_tokens

__all__ = ["backward", "forward", "supports"]

_FEWEST_TOKENS, _MOST_TOKENS, _WIDEST = 33, 1024, 64
_FEWEST_PAIRS, _MANY_TOKENS = 256, 193  # programs make their bias first, which few do not repay
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
    if problem.num_tokens <= MOST_IN_ONE_TILE:
        return None
    pairs = problem.num_windows * problem.num_heads
    if problem.num_tokens < _MANY_TOKENS and pairs < _FEWEST_PAIRS:
        return (
            f"windows times heads are {pairs}; from {_FEWEST_PAIRS} on, or {_MANY_TOKENS} tokens, "
            "this is faster than triton"
        )
    if make_plan(problem, device) is None:
        return f"{problem.num_tokens} tokens of {problem.head_size} do not fit into shared memory"
    return None


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """One launch, and with regions a small one to mark them."""
    if not problem.num_windows:
        return AttentionOutput(empty_like(x.q), x.q.new_empty(x.q.shape[:3], dtype=torch.float32))
    if problem.num_tokens <= MOST_IN_ONE_TILE:
        return one_tile.forward(problem, x)
    plan, launcher = find_forward(problem, DeviceInfo.of(x.q.device), types_of(x))
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    call = _Call(problem, x)
    launcher(
        (-(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks, 1, 1),
        out,
        lse,
        call.q,
        call.k,
        call.v,
        call.marks,
        call.marks,
        *call.others(plan.chunks, call.scale * LOG2_E),
    )
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """What is to be subtracted from rows; by rows; by columns; and the sums over windows."""
    if not problem.num_windows:
        return triton.backward(problem, x, out, lse, dout, dlse)
    if problem.num_tokens <= MOST_IN_ONE_TILE:
        return one_tile.backward(problem, x, lse, dout, dlse)
    device = DeviceInfo.of(x.q.device)
    kernels = find_gradients(problem, device, types_of(x), dlse is not None)
    if kernels is None:
        return triton.backward(problem, x, out, lse, dout, dlse)
    dout, dlse = align(dout), None if dlse is None else dlse.contiguous()
    results = _Results.of(problem, kernels, x, lse)
    call = _Call(problem, x, is_backward=True)
    _make_deltas(call, kernels, results, out, lse, dout, dlse)
    _walk_rows(call, kernels, results, dout)
    _walk_columns(call, kernels, results, dout)
    if problem.has_bias:
        offsets = results.tokens if call.offsets is None else call.offsets
        add_sums(kernels.add_sums, offsets, results.sums, results.dbias, results.tokens)
    return triton.finish(
        x, results.dq, results.dk, results.dv, results.dbias, tokens=results.tokens
    )


class _Results(NamedTuple):
    """What the gradients' kernels write: there before the first of them (``hopper_launch``)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor
    """float32 ``[1, num_heads, num_tokens, num_tokens]``, or nothing."""
    tokens: Tensor
    """int32: whose offsets a table's are; or nothing."""
    sums: Tensor
    """Of the bias's gradient, by chunks of windows: see ``hopper_sums``."""
    pivot: Tensor
    """float32 ``[num_windows * num_heads, whole pieces]``, like ``delta``."""
    delta: Tensor
    dq_so_far: Tensor
    """From launch to launch, float32, where there are several."""

    @classmethod
    def of(cls, problem: Problem, kernels: GradientKernels, x: Operands, lse: Tensor) -> _Results:
        """Nothing in it yet."""
        num_tokens, num_heads = problem.num_tokens, problem.num_heads
        num_pieces = -(-num_tokens // PIECE)
        pivot, delta = lse.new_empty((2, problem.num_windows * num_heads, num_pieces * PIECE))
        num_bias_heads = num_heads if problem.has_bias else 0
        dq, dk, dv = (empty_like(x.q) for _ in range(3))
        is_kept = kernels.rows_plan.launches > 1
        return cls(
            dq,
            dk,
            dv,
            lse.new_empty((1, num_bias_heads, num_tokens, num_tokens)),
            lse.new_empty(count_tokens(problem.table_size), dtype=torch.int32),
            lse.new_empty((kernels.rows_plan.chunks, count_sums(problem))),
            pivot,
            delta,
            torch.empty_like(dq, dtype=torch.float32) if is_kept else pivot,
        )


class _Call:
    """The operands as kernels take them."""

    def __init__(self, problem: Problem, x: Operands, is_backward: bool = False) -> None:
        self.problem, self.x = problem, x
        q, self.scale = normal_scale(x.q, x.softmax_scale)
        self.q, self.k, self.v = align(q), align(x.k), align(x.v)
        factor = self.scale * LOG2_E
        self.factor = _to_float16(factor) if problem.dtype == torch.float16 else factor
        self.regions = None if x.regions is None else x.regions.contiguous()
        self.bias = None if x.bias is None else x.bias.contiguous()
        self.strides = [0, problem.num_tokens**2]  # of a table's entries, and of heads
        if x.bias_table is not None:
            # A head's entries side by side are fewer lines to gather from. Forward, where fewer
            # programs do it, that is less than a launch takes.
            table = x.bias_table.t().contiguous().t() if is_backward else x.bias_table
            self.bias, self.strides = table, [*table.stride()]
        self.offsets = None if x.rel_offsets is None else x.rel_offsets.contiguous()
        self.kinds, self.marks = self._mark(-x.mask_value / self.scale)  # last: see hopper_launch

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


def _make_deltas(
    call: _Call,
    kernels: GradientKernels,
    results: _Results,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> None:
    """What is to be subtracted from rows."""
    num_pairs, padded = results.pivot.shape
    tile = kernels.make_deltas.constants["TILE"]
    kernels.make_deltas(
        (num_pairs * -(-padded // tile), 1, 1),
        results.pivot,
        results.delta,
        out,
        dout,
        lse,
        lse if dlse is None else dlse,
        *dout.stride()[:3],
        call.factor / call.scale,
    )


def _walk_rows(call: _Call, kernels: GradientKernels, results: _Results, dout: Tensor) -> None:
    """Gradients of queries, and by chunks of windows of the bias: each launch has some keys."""
    problem, plan = call.problem, kernels.rows_plan
    grid = (-(-problem.num_tokens // PIECE) * problem.num_heads * plan.chunks, 1, 1)
    arguments = [
        results.dq,
        results.dq_so_far,
        results.sums,
        call.q,
        dout,
        call.marks,
        results.pivot,
        results.delta,
        call.k,
        call.v,
        call.marks,
        *call.others(plan.chunks, call.factor),
        call.x.softmax_scale,
    ]
    for launch in range(plan.launches):
        kernels.walk_rows(grid, *arguments, launch * plan.shares * plan.keys)


def _walk_columns(call: _Call, kernels: GradientKernels, results: _Results, dout: Tensor) -> None:
    """Gradients of keys and values."""
    problem, plan = call.problem, kernels.columns_plan
    kernels.walk_columns(
        (-(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks, 1, 1),
        results.dk,
        results.dv,
        call.k,
        call.v,
        call.marks,
        call.q,
        dout,
        call.marks,
        results.pivot,
        results.delta,
        *call.others(plan.chunks, call.factor),
        call.scale,
    )
