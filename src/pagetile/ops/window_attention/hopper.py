"""Window attention on a Hopper GPU: what can run, and the launches."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import align
from ...tiles.hopper.launch import refuse
from ...tiles.state import AttentionOutput
from . import hopper_one_tile_launch as one_tile
from . import triton
from .hopper_launch import (
    BiasGradient,
    GradientKernels,
    find_forward,
    find_gradients,
    make_marker,
)
from .hopper_operands import LOG2_E, Call, types_of
from .hopper_plan import MARKS, MOST_IN_ONE_TILE, MOST_REGIONS, PIECE, make_plan
from .problem import Gradients, Operands, Problem, empty_like
from .triton import KINDS

__all__ = ["backward", "forward", "supports"]

_FEWEST_TOKENS, _MOST_TOKENS, _WIDEST = 33, 1024, 64
_NARROW = 16  # heads, of which few windows of some tokens are left to triton
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
    pairs, fewest = problem.num_windows * problem.num_heads, _fewest_pairs(problem)
    if pairs < fewest:
        return (
            f"windows times heads are {pairs}; from {fewest} on, or with more or wider tokens, "
            "this is faster than triton"
        )
    if make_plan(problem, device) is None:
        return f"{problem.num_tokens} tokens of {problem.head_size} do not fit into shared memory"
    return None


def _fewest_pairs(problem: Problem) -> int:
    """Of windows and heads: programs make their bias first, which few do not repay."""
    if problem.num_tokens < 193:
        return 256
    return 128 if problem.num_tokens <= 256 and problem.head_size <= _NARROW else 0


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
    bias = results.bias
    if problem.has_bias:
        bias.add_up(kernels.add_sums, call.offsets)
    return triton.finish(x, results.dq, results.dk, results.dv, bias.dbias, tokens=bias.tokens)


class _Results(NamedTuple):
    """What the gradients' kernels write: there before the first of them (``hopper_launch``)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    bias: BiasGradient
    pivot: Tensor
    """float32 ``[num_windows * num_heads, whole pieces]``, like ``delta``."""
    delta: Tensor
    dq_so_far: Tensor
    """From launch to launch, float32, where there are several."""

    @classmethod
    def of(cls, problem: Problem, kernels: GradientKernels, x: Operands, lse: Tensor) -> _Results:
        """Nothing in it yet."""
        num_pairs = problem.num_windows * problem.num_heads
        pivot, delta = lse.new_empty((2, num_pairs, -(-problem.num_tokens // PIECE) * PIECE))
        dq, dk, dv = (empty_like(x.q) for _ in range(3))
        is_kept = kernels.rows_plan.launches > 1
        return cls(
            dq,
            dk,
            dv,
            BiasGradient.of(problem, kernels.rows_plan.chunks, lse),
            pivot,
            delta,
            torch.empty_like(dq, dtype=torch.float32) if is_kept else pivot,
        )


class _Call(Call):
    """The same, and the marks of regions."""

    def __init__(self, problem: Problem, x: Operands, is_backward: bool = False) -> None:
        super().__init__(problem, x, turns_table=is_backward)
        factor = self.scale * LOG2_E
        self.factor = _to_float16(factor) if problem.dtype == torch.float16 else factor
        self.regions = None if x.regions is None else x.regions.contiguous()
        kinds, self.marks = self._mark(-x.mask_value / self.scale)
        self.masks = [kinds, kinds if self.regions is None else self.regions]

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
        results.bias.sums,
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
