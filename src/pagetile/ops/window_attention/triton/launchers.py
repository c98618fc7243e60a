"""Launchers of Triton's kernels for window attention: types and constants of their parameters."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import triton

from ....tiles.triton.launch import POINTERS, Launcher
from ..problem import Problem
from . import backward_kernels, forward_kernel, tiles
from .plan import Plan

POINTER_TYPES = {**POINTERS, torch.uint8: "*u8", torch.int16: "*i16"}
_GRADIENT_ROWS = ("q", "k", "v", "dout")

ArgumentTypes = tuple[tuple[str, ...], int, int, bool]
"""``TritonArguments.types``."""


@functools.lru_cache(maxsize=256)
def make_small_launcher(
    kernel: Any, types: tuple[Any, ...], constants: tuple[Any, ...]
) -> Launcher:
    """Return the launcher of a kernel that prepares or sums up."""
    return Launcher(kernel, dict(types), dict(constants), num_warps=4)


@functools.lru_cache(maxsize=256)
def make_forward_launcher(problem: Problem, plan: Plan, argument_types: ArgumentTypes) -> Launcher:
    """Return the launcher of ``attend``."""
    types = _types(problem, argument_types, ("out", "lse"), ("q", "k", "v"), (), ("num_heads",))
    constants = {
        **_features(problem), "BIAS_CACHE": plan.bias_cache,
        **_tiles(problem, plan.forward_m, plan.tiles), "STAGES": plan.stages,
    }  # fmt: skip
    num_warps = _num_warps(plan.forward_m)
    return Launcher(forward_kernel.attend, types, constants, num_warps=num_warps)


@functools.lru_cache(maxsize=256)
def make_one_tile_launcher(
    problem: Problem, plan: Plan, argument_types: ArgumentTypes, has_dlse: bool
) -> Launcher:
    """Return the launcher of ``window_gradients``."""
    results = ("dq", "dk", "dv", "dbias", "dscale")
    types = _types(problem, argument_types, results, _GRADIENT_ROWS, ("lse", "dlse"))
    return _make_gradient_launcher(
        backward_kernels.window_gradients, types, problem, plan, plan.tiles, plan.one_tile_stages,
        SUMS=problem.has_bias, HAS_DLSE=has_dlse,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def make_row_launcher(
    problem: Problem, plan: Plan, argument_types: ArgumentTypes, group: tuple[int, ...],
    first: int, is_last: bool, has_dlse: bool,
) -> Launcher:  # fmt: skip
    """Return the launcher of ``row_gradients`` for a group of key tiles from ``first`` on."""
    results = ("dq", "dq_partial", "dbias", "dscale", "delta")
    types = _types(problem, argument_types, results, _GRADIENT_ROWS, ("out", "lse", "dlse"))
    if is_last and first == 0:
        types["dq_partial"] = types["dq"]
    return _make_gradient_launcher(
        backward_kernels.row_gradients, types, problem, plan, group, plan.stages,
        SUMS=problem.has_bias, HAS_DLSE=has_dlse, FIRST_KEY=first, IS_LAST=is_last,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def make_pivot_launcher(
    problem: Problem, plan: Plan, argument_types: ArgumentTypes
) -> Launcher | None:
    """Return the launcher of ``find_pivots``; None where the log-sum-exp will do."""
    features, cache = _features(problem), plan.bias_cache_backward
    if not tiles.has_exact_pivots(features["BIAS"], features["MASK"], cache):
        return None
    types = _types(problem, argument_types, ("pivots",), _GRADIENT_ROWS, ("lse",))
    kernel, sizes = backward_kernels.find_pivots, tuple(itertools.chain(*plan.groups))
    return _make_gradient_launcher(kernel, types, problem, plan, sizes, 1)


@functools.lru_cache(maxsize=256)
def make_column_launcher(problem: Problem, plan: Plan, argument_types: ArgumentTypes) -> Launcher:
    """Return the launcher of ``column_gradients``."""
    types = _types(problem, argument_types, ("dk", "dv"), _GRADIENT_ROWS, ("lse", "delta"))
    kernel, sizes = backward_kernels.column_gradients, tuple(itertools.chain(*plan.groups))
    stages = plan.stages if len(sizes) == 1 else min(plan.stages, 2)
    return _make_gradient_launcher(kernel, types, problem, plan, sizes, stages)


def _make_gradient_launcher(
    kernel: Any, types: dict[str, str], problem: Problem, plan: Plan, sizes: tuple[int, ...],
    stages: int, **constants: Any,
) -> Launcher:  # fmt: skip
    """Return the launcher of a kernel that visits tiles of these ``sizes``."""
    constants = {
        "NUM_HEADS": problem.num_heads, **_features(problem),
        "BIAS_CACHE": plan.bias_cache_backward, **constants,
        **_tiles(problem, plan.tile_m, sizes), "STAGES": stages,
    }  # fmt: skip
    return Launcher(kernel, types, constants, num_warps=_num_warps(plan.tile_m))


def _types(
    problem: Problem, argument_types: ArgumentTypes, results: tuple[str, ...],
    rows: tuple[str, ...], others: tuple[str, ...], numbers: tuple[str, ...] = (),
) -> dict[str, str]:  # fmt: skip
    """Types of all parameters except the constants, in the order that the kernels share."""
    extras, factor, out_factor, is_aligned = argument_types
    own, stride = POINTER_TYPES[problem.dtype], f"i64:{factor}"
    floats = ("lse", "pivots", "dlse", "delta", "dq_partial", "dbias", "dscale")
    types = {name: "*fp32" if name in floats else own + ":16" for name in results}
    types |= dict.fromkeys(rows, own + ":16" * is_aligned)
    types |= {name: "*fp32" if name in floats else own + ":16" for name in others}
    names = ("bias", "offsets", "needs_mask", "mask", "logit_scale")
    types |= dict(zip(names, extras, strict=True))
    types["needs_mask"] = "*i32"  # not read without regions
    integers = ("num_windows", "num_chunks", "num_masks", "num_biases", "centre")
    types |= dict.fromkeys(numbers + integers, "i32")
    types |= dict.fromkeys(("softmax_scale", "mask_value", "eps"), "fp32")
    types |= {"out_window": f"i64:{out_factor}", "lse_window": "i64", "mask_window": "i64",
              "mask_row": "i64", "bias_window": "i64"}  # fmt: skip
    axes = ("window", "head", "token")
    return types | {f"{name}_{axis}": stride for name in rows for axis in axes}


def _features(problem: Problem) -> dict[str, Any]:
    bias = 1 if problem.table_size is not None else 2 if problem.num_biases else 0
    mask = 1 if problem.has_regions else 2 if problem.num_masks else 0
    return {
        "NUM_TOKENS": problem.num_tokens, "HEAD_SIZE": problem.head_size,
        "BIAS": bias, "MASK": mask, "COSINE": problem.cosine,
    }  # fmt: skip


def _tiles(problem: Problem, tile_m: int, tiles: tuple[int, ...]) -> dict[str, Any]:
    d = max(16, triton.next_power_of_2(problem.head_size))
    return {"TILE_M": tile_m, "TILES": tiles, "D": d}


def _num_warps(tile_m: int) -> int:
    """One warp for each 16 rows of a tile, the rows of a tensor-core product."""
    return max(1, tile_m // 16)
