"""Window attention on a GPU in Triton: what it supports, and the launches of a call."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ....device import DeviceInfo
from ....tiles.state import AttentionOutput
from ....tiles.triton.launch import refuse
from ....tiles.triton.online_softmax import LOG2_E
from ..problem import MAX_LOGIT_SCALE, Gradients, Operands, Problem, empty_like
from . import backward_kernels, launchers, tiles
from .launchers import POINTER_TYPES
from .plan import Plan, make_plan

_MOST_TOKENS, _WIDEST = 1024, 128
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run, or None if it can."""
    if problem.dtype not in _DTYPES or torch.float64 in problem.learned_dtypes:
        return "float64 is for the reference"
    if problem.num_tokens > _MOST_TOKENS:
        return f"num_tokens is {problem.num_tokens}; up to {_MOST_TOKENS} run"
    if problem.head_size > _WIDEST:
        return f"head_size is {problem.head_size}; up to {_WIDEST} run"
    return refuse(device)


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """Launch one kernel; with regions, a small one finds the windows that need a mask first."""
    plan, key, _ = _plan_and_keys(problem, DeviceInfo.of(x.q.device))
    arguments = TritonArguments(problem, x)
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    launcher = launchers.make_forward_launcher(*key, arguments.types)
    programs = -(-problem.num_tokens // plan.forward_m) * problem.num_heads * plan.chunks
    launcher((programs, 1, 1), out, lse, *arguments.qkv, *arguments.extras, problem.num_heads,
             *arguments.scalars(plan.chunks), *arguments.strides)  # fmt: skip
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Launch one kernel for all gradients, or the row and column kernels; sum the bias gradient."""
    plan, _, key = _plan_and_keys(problem, DeviceInfo.of(x.q.device))
    arguments = TritonArguments(problem, x, dout)
    if plan.one_tile_stages:
        return _run_one_tile(arguments, plan, key, lse, dlse)
    lse = _find_pivots(arguments, plan, key, lse)
    rows = _run_rows(arguments, plan, key, out, lse, dlse)
    dbias = _sum_chunks(problem, rows.sums)
    dk, dv = empty_like(x.q), empty_like(x.q)
    programs = -(-problem.num_tokens // plan.tile_m) * problem.num_heads * plan.chunks_backward
    launcher = launchers.make_column_launcher(*key, arguments.types)
    launcher((programs, 1, 1), dk, dv, *arguments.qkv, lse, rows.delta, *arguments.extras,
             *arguments.scalars(plan.chunks_backward), *arguments.strides)  # fmt: skip
    return finish(x, rows.dq, dk, dv, dbias, rows.dscale)


def _run_one_tile(
    arguments: TritonArguments,
    plan: Plan,
    key: tuple[Problem, Plan],
    lse: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """All gradients in one launch, and then the sums over chunks of windows."""
    problem, x, chunks = arguments.problem, arguments.x, plan.chunks_backward
    num_tokens, num_heads = problem.num_tokens, problem.num_heads
    dq, dk, dv = (empty_like(x.q) for _ in range(3))
    sums = lse.new_empty((chunks, num_heads, num_tokens, num_tokens) if problem.has_bias else 1)
    dscale = lse.new_empty((chunks, num_heads, 1) if problem.cosine else 1)
    launcher = launchers.make_one_tile_launcher(*key, arguments.types, dlse is not None)
    launcher((num_heads * chunks, 1, 1), dq, dk, dv, sums, dscale, *arguments.qkv, lse,
             lse if dlse is None else dlse.contiguous(), *arguments.extras,
             *arguments.scalars(chunks), *arguments.strides)  # fmt: skip
    return finish(x, dq, dk, dv, _sum_chunks(problem, sums), dscale)


def _find_pivots(
    arguments: TritonArguments, plan: Plan, key: tuple[Problem, Plan], lse: Tensor
) -> Tensor:
    """What the gradient kernels take for ``lse``: the same, or exact pivots (``load_pivots``)."""
    problem = arguments.problem
    launcher = launchers.make_pivot_launcher(*key, arguments.types)
    if launcher is None:
        return lse
    pivots = lse.new_empty(2, *lse.shape)
    programs = -(-problem.num_tokens // plan.tile_m) * problem.num_heads * plan.chunks_backward
    launcher((programs, 1, 1), pivots, *arguments.qkv, lse, *arguments.extras,
             *arguments.scalars(plan.chunks_backward), *arguments.strides)  # fmt: skip
    return pivots


class RowGradients(NamedTuple):
    """Results of the row kernel."""

    dq: Tensor
    delta: Tensor
    """float32 ``[num_windows, num_heads, num_tokens]``."""
    sums: Tensor
    """Bias gradient by chunks of windows: float32 ``[chunks, heads, tokens, tokens]``."""
    dscale: Tensor
    """Partial gradients of the scales: float32 ``[chunks, heads, tiles]``."""


def _run_rows(
    arguments: TritonArguments,
    plan: Plan,
    key: tuple[Problem, Plan],
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
) -> RowGradients:
    """Launch the row kernel: dQ, delta, and partial gradients of bias and scales."""
    problem = arguments.problem
    dq = empty_like(arguments.x.q)
    chunks, num_tokens, num_heads = plan.chunks_backward, problem.num_tokens, problem.num_heads
    num_tiles = -(-num_tokens // plan.tile_m)
    partial = torch.empty_like(dq, dtype=torch.float32) if len(plan.groups) > 1 else dq
    delta = lse.new_empty(problem.num_windows, num_heads, num_tokens)
    sums = lse.new_empty((chunks, num_heads, num_tokens, num_tokens) if problem.has_bias else 1)
    dscale = lse.new_empty((chunks, num_heads, num_tiles) if problem.cosine else 1)
    first = 0
    for group in plan.groups:
        is_last = group is plan.groups[-1]
        launcher = launchers.make_row_launcher(
            *key, arguments.types, group, first, is_last, dlse is not None
        )
        launcher((num_tiles * num_heads * chunks, 1, 1), dq, partial, sums, dscale, delta,
                 *arguments.qkv, out, lse, lse if dlse is None else dlse.contiguous(),
                 *arguments.extras, *arguments.scalars(chunks), *arguments.strides)  # fmt: skip
        first += sum(group)
    return RowGradients(dq, delta, sums, dscale)


def _sum_chunks(problem: Problem, sums: Tensor) -> Tensor | None:
    """Sum the bias gradient over chunks of windows; chunk ``c`` has bias ``c % num_biases``."""
    if not problem.has_bias:
        return None
    return sums.view(-1, max(1, problem.num_biases), *sums.shape[1:]).sum(dim=0)


def finish(
    x: Operands,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbias: Tensor | None,
    dscale: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Gradients:
    """Convert gradients to the types of the inputs, and reduce a bias gradient to its table.

    Args:
        x: The inputs.
        dq: ``[num_windows, num_heads, num_tokens, head_size]``, like ``dk`` and ``dv``.
        dk: As ``dq``.
        dv: As ``dq``.
        dbias: float32 ``[num_biases, num_heads, num_tokens, num_tokens]``, or None without a bias.
        dscale: float32 ``[chunks, num_heads, tiles]``, partial gradients of the scales.
        tokens: The result of ``invert_offsets``, if it ran already.
    """
    table = bias = scale = None
    if x.bias_table is not None:
        assert dbias is not None
        table = _sum_table(x, dbias, tokens)
    if x.bias is not None:
        assert dbias is not None
        bias = dbias.to(x.bias.dtype)
    if x.logit_scale is not None:
        assert dscale is not None
        clamped = x.logit_scale > MAX_LOGIT_SCALE
        scale = dscale.sum(dim=(0, 2)).masked_fill(clamped, 0.0).to(x.logit_scale.dtype)
    return Gradients(dq, dk, dv, table, bias, scale)


@functools.lru_cache(maxsize=1024)
def _plan_and_keys(
    problem: Problem, device: DeviceInfo
) -> tuple[Plan, tuple[Problem, Plan], tuple[Problem, Plan]]:
    """The plan, and the parts of problem and plan that forward and gradient kernels depend on.

    Kernels serve any number of windows. The forward kernel also serves any number of heads; the
    gradient kernels would spill more registers if the number of heads were a variable.
    """
    plan = make_plan(problem, device)
    one = problem.of_one_window()
    shape = replace(plan, chunks=1, chunks_backward=1)
    return plan, (replace(one, num_heads=1), shape), (one, shape)


class TritonArguments:
    """Arguments of the kernels in their order, and the types that they are compiled for."""

    def __init__(self, problem: Problem, x: Operands, dout: Tensor | None = None) -> None:
        self.problem, self.x = problem, x
        self.qkv = [x.q, x.k, x.v] + ([] if dout is None else [dout])
        unused = x.q
        bias = x.bias_table if x.bias is None else x.bias
        if bias is not None:
            bias = bias.contiguous()
        mask, needs_mask = _find_mask(x, is_one_tile=problem.num_tokens <= 64)
        self.extras = [
            unused if bias is None else bias,
            unused if x.rel_offsets is None else x.rel_offsets.contiguous(),
            unused if needs_mask is None else needs_mask,
            unused if mask is None else mask,
            unused if x.logit_scale is None else x.logit_scale.contiguous(),
        ]
        num_tokens, row = problem.num_tokens, problem.num_heads * problem.head_size
        self.strides = [
            num_tokens * row,
            num_tokens * problem.num_heads,
            0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(1),
            0 if x.bias is None else problem.num_heads * num_tokens * num_tokens,
        ]
        for rows in self.qkv:
            self.strides += rows.stride()[:3]
        # Elements of the widest vector load, up to 16 bytes, that every row start allows.
        in_rows = [stride for rows in self.qkv for stride in rows.stride()[:3]]
        factor = math.gcd(16 // x.q.element_size(), problem.head_size, *in_rows)
        is_aligned = all(rows.data_ptr() % 16 == 0 for rows in self.qkv)
        types = tuple(POINTER_TYPES[t.dtype] for t in self.extras)
        self.types = types, factor, math.gcd(8, self.strides[0]), is_aligned

    def scalars(self, num_chunks: int) -> list[Any]:
        """The scalar arguments, between tensors and strides."""
        x, table_size = self.x, self.problem.table_size
        return [
            self.problem.num_windows,
            num_chunks,
            max(1, self.problem.num_masks),
            max(1, self.problem.num_biases),
            0 if table_size is None else (table_size - 1) // 2,
            x.softmax_scale,
            x.mask_value * LOG2_E.value,
            x.qk_norm_eps,
        ]


def _find_mask(x: Operands, is_one_tile: bool) -> tuple[Tensor | None, Tensor | None]:
    """Regions or an additive matrix, and flags of windows with several regions."""
    if x.regions is not None and is_one_tile:
        return x.regions.contiguous(), None
    if x.regions is not None:
        regions = x.regions.contiguous()
        num_masks, num_tokens = regions.shape
        needs_mask = torch.empty(num_masks, dtype=torch.int32, device=regions.device)
        types = {"needs_mask": "*i32", "regions": POINTER_TYPES[regions.dtype], "num_tokens": "i32",
                 "window_stride": "i64"}  # fmt: skip
        launcher = launchers.make_small_launcher(tiles.find_masked_windows, tuple(types.items()),
                          (("WIDTH", triton.next_power_of_2(num_tokens)),))  # fmt: skip
        launcher((num_masks, 1, 1), needs_mask, regions, num_tokens, num_tokens)
        return regions, needs_mask
    if x.mask is not None and x.mask.dtype == torch.bool:
        extras = torch.zeros(x.mask.shape, dtype=torch.float32, device=x.mask.device)
        return extras.masked_fill_(~x.mask, x.mask_value), None
    return None if x.mask is None else x.mask.contiguous(), None


def _sum_table(x: Operands, dbias: Tensor, tokens: Tensor | None) -> Tensor:
    """Reduce the bias gradient to the table: each entry is one sum in a fixed order."""
    assert x.bias_table is not None
    assert x.rel_offsets is not None
    table_size, num_heads = x.bias_table.shape
    num_tokens, offsets = len(x.rel_offsets), x.rel_offsets.contiguous()
    if tokens is None:
        tokens = dbias.new_empty(count_tokens(table_size), dtype=torch.int32)
        types = {"tokens": "*i32", "offsets": "*i32", "num_tokens": "i32", "size": "i32"}
        constants = (("TILE", 16), ("WIDTH", triton.next_power_of_2(num_tokens)))
        launcher = launchers.make_small_launcher(
            backward_kernels.invert_offsets, tuple(types.items()), constants
        )
        launcher((-(-len(tokens) // 16), 1, 1), tokens, offsets, num_tokens, len(tokens) - 1)
    dtable = torch.empty_like(x.bias_table, memory_format=torch.contiguous_format)
    types = {"dtable": POINTER_TYPES[dtable.dtype], "dbias": "*fp32", "tokens": "*i32",
             "offsets": "*i32", "num_tokens": "i32", "table_size": "i32"}  # fmt: skip
    tile = 8
    constants = (("TILE", tile), ("TILE_M", min(128, triton.next_power_of_2(num_tokens))))
    launcher = launchers.make_small_launcher(
        backward_kernels.table_gradient, tuple(types.items()), constants
    )
    launcher((-(-table_size // tile), num_heads, 1), dtable, dbias, tokens, offsets, num_tokens,
             table_size)  # fmt: skip
    return dtable


def count_tokens(table_size: int | None) -> int:
    """The length of the result of ``invert_offsets``."""
    return 0 if table_size is None else (table_size - 1) // 2 + 2
