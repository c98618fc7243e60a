"""``activation(gate) * up`` on a GPU in one launch.

A program computes ``TILE`` elements of one row of the result from both halves of that row of
``gate_up``. Supports float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device import DeviceInfo
from ...tiles.triton.activations import activate
from ...tiles.triton.launch import POINTERS, Launcher, begins_early, refuse
from ..rows import MOST_ROWS, RowsProblem

TILE = 1024


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.num_rows * (problem.size // TILE + 1) > MOST_ROWS:
        return f"the result is [{problem.num_rows}, {problem.size}]; {MOST_ROWS} tiles run"
    reason = problem.refuse(MOST_ROWS, "gate_up has gaps between its rows")
    return reason or refuse(device, gate_up=problem.dtype)


@triton.jit
def _gate(
    out,  # [num_rows, SIZE]
    gate_up,  # [num_rows, 2 * SIZE]
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (SIZE + TILE - 1) // TILE
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    y = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    tl.store(out + row * SIZE + column, y.to(dtype), mask=inside)


def run(gate_up: Tensor, activation: str) -> Tensor:
    """One launch over all rows."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    num_rows = out.numel() // size
    if num_rows:
        is_aligned = gate_up.data_ptr() % 16 == 0
        launcher = make_launcher(
            gate_up.dtype, size, activation, is_aligned, begins_early(gate_up.device)
        )
        launcher((num_rows * -(-size // launcher.constants["TILE"]), 1, 1), out, gate_up)
    return out


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, size: int, activation: str, is_aligned: bool, is_early: bool
) -> Launcher:
    """The kernel for rows of ``size``."""
    is_aligned &= math.gcd(16 // dtype.itemsize, size) == 16 // dtype.itemsize
    pointer = POINTERS[dtype] + ":16" * is_aligned
    constants = {
        "SIZE": size,
        "ACTIVATION": activation,
        "TILE": min(TILE, triton.next_power_of_2(size)),
        "PDL": is_early,
    }
    types = {"out": f"{POINTERS[dtype]}:16", "gate_up": pointer}
    return Launcher(_gate, types, constants, num_warps=4, launch_pdl=is_early)
