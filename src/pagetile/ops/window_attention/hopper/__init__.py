"""Window attention on a Hopper GPU: what it supports, and the launches of a call."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ....device import DeviceInfo
from ....tiles.hopper.launch import refuse
from ....tiles.state import AttentionOutput
from .. import triton
from ..problem import Gradients, Operands, Problem, empty_like
from ..triton.launchers import POINTER_TYPES
from . import one_tile
from .constants import MAX_REGIONS, ONE_HOT_COLUMNS, ONE_TILE_TOKENS, PIECE
from .launch import (
    LOG2_E,
    BiasGradient,
    GradientKernels,
    KernelArguments,
    align_tokens,
    element_types,
    make_region_encoder,
    plan_forward,
    plan_gradients,
)
from .plan import make_plan

__all__ = ["backward", "forward", "supports"]

_FEWEST_TOKENS, _MOST_TOKENS, _WIDEST = 33, 1024, 64
_NARROWEST_PADDED = 18  # smallest head size for which padding rows (a copy) is worthwhile
_NARROW = 16  # largest head size at which few windows of 193 to 256 tokens are left to Triton
_MOST_ONE_HOT = 2048.0  # most of mask_value / scale that float16 products may add
_LARGEST = 65_504.0  # finite float16


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run, or None where it runs and was measured faster than Triton."""
    rows = -(-problem.head_size // 8) * 8  # padded
    reason = refuse(device, problem.dtype, rows, rows)
    if reason is not None:
        return reason
    if problem.cosine:
        return "rows have to be normalised first, which is left to triton"
    if torch.float64 in problem.learned_dtypes:
        return "float64 is for the reference"
    if problem.mask_dtype is not None or problem.num_biases > 1:
        return "a dense mask, or several biases, are left to triton"
    if problem.head_size > _WIDEST:
        return f"head_size is {problem.head_size}; up to {_WIDEST} run"
    if problem.head_size % 8 and (
        problem.head_size < _NARROWEST_PADDED or problem.num_tokens <= ONE_TILE_TOKENS
    ):
        return (
            f"head_size is {problem.head_size}; multiples of 8 run, and any from "
            f"{_NARROWEST_PADDED} on in windows of more than {ONE_TILE_TOKENS} tokens"
        )
    if not _FEWEST_TOKENS <= problem.num_tokens <= _MOST_TOKENS:
        return (
            f"num_tokens is {problem.num_tokens}; {_FEWEST_TOKENS} to {_MOST_TOKENS} is where "
            "this is faster than triton"
        )
    if problem.num_tokens <= ONE_TILE_TOKENS:
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
    """Fewest windows times heads that repay the time programs take to build their bias tile."""
    if problem.num_tokens < 193:
        return 256
    return 128 if problem.num_tokens <= 256 and problem.head_size <= _NARROW else 0


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """Launch one kernel; with regions, a small one that encodes them runs before it."""
    if not problem.num_windows:
        return AttentionOutput(empty_like(x.q), x.q.new_empty(x.q.shape[:3], dtype=torch.float32))
    if problem.num_tokens <= ONE_TILE_TOKENS:
        return one_tile.forward(problem, x)
    plan, launcher = plan_forward(problem, DeviceInfo.of(x.q.device), element_types(x))
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    arguments = _StreamArguments(problem, x)
    launcher(
        (-(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks, 1, 1),
        out,
        lse,
        arguments.q,
        arguments.k,
        arguments.v,
        arguments.one_hot,
        arguments.one_hot,
        *arguments.common(plan.chunks, arguments.scale * LOG2_E),
    )
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Launch delta, the row kernel, the column kernel, and the sum of the bias gradient."""
    if not problem.num_windows:
        return triton.backward(problem, x, out, lse, dout, dlse)
    if problem.num_tokens <= ONE_TILE_TOKENS:
        return one_tile.backward(problem, x, lse, dout, dlse)
    device = DeviceInfo.of(x.q.device)
    kernels = plan_gradients(problem, device, element_types(x), dlse is not None)
    if kernels is None:
        return triton.backward(problem, x, out, lse, dout, dlse)
    dout, dlse = align_tokens(dout), None if dlse is None else dlse.contiguous()
    buffers = _GradientBuffers.of(problem, kernels, x, lse)
    arguments = _StreamArguments(problem, x, is_backward=True)
    _run_deltas(arguments, kernels, buffers, out, lse, dout, dlse)
    _run_rows(arguments, kernels, buffers, dout)
    _run_columns(arguments, kernels, buffers, dout)
    bias = buffers.bias
    if problem.has_bias:
        bias.sum_windows(kernels.sum_kernel, arguments.offsets)
    return triton.finish(x, buffers.dq, buffers.dk, buffers.dv, bias.dbias, tokens=bias.tokens)


class _GradientBuffers(NamedTuple):
    """Results of the gradient kernels, allocated before the first launch (see ``launch``)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    bias: BiasGradient
    pivot: Tensor
    """float32 ``[num_windows * num_heads, num_tokens padded to pieces]``, like ``delta``."""
    delta: Tensor
    dq_partial: Tensor
    """float32 dQ between several launches of the row kernel."""

    @classmethod
    def of(
        cls, problem: Problem, kernels: GradientKernels, x: Operands, lse: Tensor
    ) -> _GradientBuffers:
        """Allocate the buffers, uninitialised."""
        num_pairs = problem.num_windows * problem.num_heads
        pivot, delta = lse.new_empty((2, num_pairs, -(-problem.num_tokens // PIECE) * PIECE))
        dq, dk, dv = (empty_like(x.q) for _ in range(3))
        has_partial = kernels.rows_plan.launches > 1
        return cls(
            dq,
            dk,
            dv,
            BiasGradient.of(problem, kernels.rows_plan.chunks, lse),
            pivot,
            delta,
            torch.empty_like(dq, dtype=torch.float32) if has_partial else pivot,
        )


class _StreamArguments(KernelArguments):
    """Arguments of the kernels whose warps form streams, with regions as one-hot columns."""

    def __init__(self, problem: Problem, x: Operands, is_backward: bool = False) -> None:
        super().__init__(problem, x, transposes_table=is_backward)
        factor = self.scale * LOG2_E
        self.factor = _to_float16(factor) if problem.dtype == torch.float16 else factor
        self.regions = None if x.regions is None else x.regions.contiguous()
        classes, self.one_hot = self._encode(-x.mask_value / self.scale)
        self.masks = [classes, classes if self.regions is None else self.regions]

    def _encode(self, factor: float) -> tuple[Tensor, Tensor]:
        """The mask class of every window, and the one-hot columns of its regions.

        If ``factor`` is large, its sum with a score would lose digits: then regions are compared.
        """
        device, num_tokens = self.q.device, self.problem.num_tokens
        num_masks = 1 if self.regions is None else len(self.regions)
        classes = torch.empty(num_masks, dtype=torch.int32, device=device)
        one_hot = torch.empty(
            num_masks, num_tokens, 2 * ONE_HOT_COLUMNS, dtype=torch.float16, device=device
        )
        if self.regions is not None:
            is_exact = abs(factor) < _MOST_ONE_HOT
            factor, limit = (_to_float16(factor), MAX_REGIONS) if is_exact else (0.0, 0)
            encoder = make_region_encoder(POINTER_TYPES[self.regions.dtype], num_tokens)
            encoder((num_masks, 1, 1), classes, one_hot, self.regions, factor, limit)
        return classes, one_hot


def _to_float16(number: float) -> float:
    """The nearest finite float16.

    Examples:
        >>> _to_float16(565.685), _to_float16(1e6)
        (565.5, 65504.0)
    """
    number = max(-_LARGEST, min(_LARGEST, number))
    return float(struct.unpack("e", struct.pack("e", number))[0])


def _run_deltas(
    arguments: _StreamArguments,
    kernels: GradientKernels,
    buffers: _GradientBuffers,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> None:
    """Launch the kernel that computes pivot and delta of every row."""
    num_pairs, padded = buffers.pivot.shape
    tile = kernels.delta_kernel.constants["TILE"]
    kernels.delta_kernel(
        (num_pairs * -(-padded // tile), 1, 1),
        buffers.pivot,
        buffers.delta,
        out,
        dout,
        lse,
        lse if dlse is None else dlse,
        *dout.stride()[:3],
        arguments.factor / arguments.scale,
    )


def _run_rows(
    arguments: _StreamArguments, kernels: GradientKernels, buffers: _GradientBuffers, dout: Tensor
) -> None:
    """Launch the kernel of dQ and of the bias gradient's sums: each launch covers some keys."""
    problem, plan = arguments.problem, kernels.rows_plan
    grid = (-(-problem.num_tokens // PIECE) * problem.num_heads * plan.chunks, 1, 1)
    values = [
        buffers.dq,
        buffers.dq_partial,
        buffers.bias.sums,
        arguments.q,
        dout,
        arguments.one_hot,
        buffers.pivot,
        buffers.delta,
        arguments.k,
        arguments.v,
        arguments.one_hot,
        *arguments.common(plan.chunks, arguments.factor),
        arguments.x.softmax_scale,
    ]
    for launch in range(plan.launches):
        kernels.row_kernel(grid, *values, launch * plan.splits * plan.keys)


def _run_columns(
    arguments: _StreamArguments, kernels: GradientKernels, buffers: _GradientBuffers, dout: Tensor
) -> None:
    """Launch the kernel of dK and dV."""
    problem, plan = arguments.problem, kernels.columns_plan
    kernels.column_kernel(
        (-(-problem.num_tokens // plan.rows) * problem.num_heads * plan.chunks, 1, 1),
        buffers.dk,
        buffers.dv,
        arguments.k,
        arguments.v,
        arguments.one_hot,
        arguments.q,
        dout,
        arguments.one_hot,
        buffers.pivot,
        buffers.delta,
        *arguments.common(plan.chunks, arguments.factor),
        arguments.scale,
    )
