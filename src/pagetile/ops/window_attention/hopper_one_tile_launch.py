"""Windows of one tile on a Hopper GPU: the launches.

With regions, the kernel begins while ``match_regions`` runs: it makes its tile of bias and fetches
its first windows, and then waits for the words. Whatever else it reads is there before.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import GluonLauncher, align
from ...tiles.state import AttentionOutput
from ...tiles.triton.launch import Launcher
from .hopper_launch import (
    BiasGradient,
    describe_tokens,
    known_of,
    make_sums_launcher,
    types_of_others,
)
from .hopper_marks import match_regions
from .hopper_one_tile import attend_windows, window_gradients
from .hopper_operands import LOG2_E, Call, types_of
from .hopper_plan import PIECE, WORDS, OneTilePlan, make_one_tile_plan
from .problem import Gradients, Operands, Problem, empty_like
from .triton import KINDS, finish

__all__ = ["backward", "forward", "make_gradients_launcher", "make_launcher", "make_matcher"]


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """One launch, and with regions a small one before it."""
    plan, launcher = _find_forward(problem, DeviceInfo.of(x.q.device), types_of(x)[0])
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    call = _Call(problem, x)
    grid, others = (problem.num_heads * plan.chunks, 1, 1), call.others(plan.chunks, call.factor)
    launcher(grid, lse, out, call.q, call.k, call.v, *others)
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """The same, and the sums over windows."""
    bias = types_of(x)[0]
    plan, launcher = _find_gradients(problem, DeviceInfo.of(x.q.device), bias, dlse is not None)
    dq, dk, dv = (empty_like(x.q) for _ in range(3))
    bias_gradient = BiasGradient.of(problem, plan.chunks, lse)
    dout, dlse = align(dout), lse if dlse is None else dlse.contiguous()
    call = _Call(problem, x)
    grid, others = (problem.num_heads * plan.chunks, 1, 1), call.others(plan.chunks, call.factor)
    launcher(grid, bias_gradient.sums, lse, dlse, dq, dk, dv, call.q, call.k, call.v, dout,
             *others, x.softmax_scale, call.scale)  # fmt: skip
    if problem.has_bias:
        kind = problem.num_heads, problem.num_tokens, plan.chunks
        bias_gradient.add_up(make_sums_launcher(*kind, is_early=False), call.offsets)
    return finish(x, dq, dk, dv, bias_gradient.dbias, tokens=bias_gradient.tokens)


class _Call(Call):
    """The same, and the words of regions."""

    def __init__(self, problem: Problem, x: Operands) -> None:
        super().__init__(problem, x)
        self.factor = self.scale * LOG2_E
        self.masks = [self.q]  # or anything
        if x.regions is not None:
            regions = x.regions.contiguous()
            self.masks = [regions.new_empty(len(regions), WORDS, dtype=torch.int32)]
            matcher = make_matcher(KINDS[regions.dtype], problem.num_tokens)
            matcher((len(regions), 1, 1), *self.masks, regions)  # last: see above


@functools.lru_cache(maxsize=1024)
def _find_forward(
    problem: Problem, device: DeviceInfo, bias: str
) -> tuple[OneTilePlan, GluonLauncher]:
    """The plan, and the kernel that goes by it."""
    plan = make_one_tile_plan(problem, device, is_backward=False)
    return plan, make_launcher(problem.of_one_window(), replace(plan, chunks=1), bias)


@functools.lru_cache(maxsize=1024)
def _find_gradients(
    problem: Problem, device: DeviceInfo, bias: str, has_dlse: bool
) -> tuple[OneTilePlan, GluonLauncher]:
    """The same of the gradients."""
    plan = make_one_tile_plan(problem, device, is_backward=True)
    kind = problem.of_one_window()
    return plan, make_gradients_launcher(kind, replace(plan, chunks=1), bias, has_dlse)


@functools.lru_cache(maxsize=256)
def make_matcher(regions: str, num_tokens: int) -> Launcher:
    """The kernel that matches regions of an element type."""
    types = {"words": "*i32", "regions": regions}
    return Launcher(match_regions, types, {"NUM_TOKENS": num_tokens}, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_launcher(problem: Problem, plan: OneTilePlan, bias: str) -> GluonLauncher:
    """The forward kernel for one kind of problem and its bias's element type."""
    types = {"lse": "*fp32"}
    types |= dict.fromkeys(
        ("out_desc", "q_desc", "k_desc", "v_desc"), describe_tokens(problem, PIECE)
    )
    return _make(attend_windows, problem, plan, types | _others(bias), known_of(problem))


@functools.lru_cache(maxsize=256)
def make_gradients_launcher(
    problem: Problem, plan: OneTilePlan, bias: str, has_dlse: bool
) -> GluonLauncher:
    """The kernel of all gradients."""
    types = {"dbias": "*fp32:16", "lse": "*fp32", "dlse": "*fp32"}
    results = ("dq_desc", "dk_desc", "dv_desc")
    operands = ("q_desc", "k_desc", "v_desc", "dout_desc")
    types |= dict.fromkeys(results + operands, describe_tokens(problem, PIECE)) | _others(bias)
    types |= {"dq_scale": "fp32", "dk_scale": "fp32"}
    return _make(window_gradients, problem, plan, types, known_of(problem) | {"HAS_DLSE": has_dlse})


def _make(
    kernel: Any, problem: Problem, plan: OneTilePlan, types: dict[str, str], known: dict[str, Any]
) -> GluonLauncher:
    constants = known | {"STAGES": plan.stages}
    return GluonLauncher(
        kernel, types, constants, num_warps=4, maxnreg=plan.registers,
        launch_pdl=problem.has_regions,
    )  # fmt: skip


def _others(bias: str) -> dict[str, str]:
    return types_of_others(bias, {"words": "*i32"})
