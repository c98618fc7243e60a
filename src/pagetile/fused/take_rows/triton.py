"""Embedding lookup on a GPU: a program copies ``TILE`` elements of one row.

A row number outside the table is clamped to its first or last row, so that no other memory is read.
Supports float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device import DeviceInfo
from ...tiles.triton.launch import POINTERS, Launcher, begins_early, refuse
from ..rows import MOST_ROWS, RowsProblem

TILE = 1024


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.num_rows * (problem.size // TILE + 1) > MOST_ROWS:
        return f"the result is [{problem.num_rows}, {problem.size}]; {MOST_ROWS} tiles run"
    reason = problem.refuse(MOST_ROWS, "table or rows is empty or has gaps")
    return reason or refuse(device, table=problem.dtype)


@triton.jit
def _take(
    out,  # [..., SIZE]
    table,  # [num_rows, SIZE]
    rows,  # int64 [...]
    num_rows,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles: tl.constexpr = (SIZE + TILE - 1) // TILE
    at = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.minimum(tl.maximum(tl.load(rows + at), 0), num_rows - 1)
    tl.store(
        out + at * SIZE + column,
        tl.load(table + row * SIZE + column, mask=inside, other=0.0),
        mask=inside,
    )


def run(table: Tensor, rows: Tensor) -> Tensor:
    """One launch."""
    num_rows, size = table.shape
    out = table.new_empty(*rows.shape, size)
    if rows.numel():
        launcher = make_launcher(
            table.dtype, size, table.data_ptr() % 16 == 0, begins_early(table.device)
        )
        num_programs = rows.numel() * -(-size // launcher.constants["TILE"])
        launcher((num_programs, 1, 1), out, table, rows, num_rows)
    return out


@functools.lru_cache(maxsize=256)
def make_launcher(dtype: torch.dtype, size: int, is_aligned: bool, is_early: bool) -> Launcher:
    """The kernel for rows of ``size``."""
    is_aligned &= size * dtype.itemsize % 16 == 0
    table = POINTERS[dtype] + ":16" * is_aligned
    types = {"out": f"{POINTERS[dtype]}:16", "table": table, "rows": "*i64", "num_rows": "i64"}
    constants = {"SIZE": size, "TILE": min(TILE, triton.next_power_of_2(size)), "PDL": is_early}
    return Launcher(_take, types, constants, num_warps=4, launch_pdl=is_early)
