"""RMS norm on a GPU in one launch.

::

    out[row] = x[row] / sqrt(mean(x[row] ** 2) + eps) * weight

Grid: tiles of ``TILE_M`` whole rows, each of which is read once: one row of a hidden state, or
several of narrow heads. Rows may have any two strides (``fold``); those of ``out`` are dense and in
the same order. Supports float32, float16 and bfloat16, rows of up to 16384 elements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device import DeviceInfo
from ...shapes import Form, form
from ...tiles.triton.launch import POINTERS, Launch, Launcher, begins_early, refuse
from ...tiles.triton.norms import normalise
from ..rows import Rows, RowsProblem, fold

TILE = 1024  # elements of a program, or one whole row if that is longer
WIDEST = 16384


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = problem.refuse(WIDEST, "no two strides lead to all rows of x")
    return reason or refuse(device, x=problem.dtype)


@triton.jit
def _rms_norm(
    out,  # [num_rows, SIZE]
    x,  # [num_rows / inner, inner, SIZE], by two strides
    weight,  # [SIZE]
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    TILE_M: tl.constexpr,
    W: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, W)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]

    at = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(x + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)

    root = tl.rsqrt(tl.sum(y * y, 1) / SIZE + eps)[:, None]
    y = normalise(y, root, scale[None, :], KIND, out.dtype.element_ty)
    at = row.to(tl.int64) * SIZE
    tl.store(out + at[:, None] + column[None, :], y.to(out.dtype.element_ty), mask=inside)


def run(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """One launch over all rows."""
    is_aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0
    launch, strides = _prepare(form(x), eps, kind, is_aligned)
    out = x.new_empty_strided(x.shape, strides)
    if launch is not None:
        launch(out, x, weight.contiguous())
    return out


@functools.lru_cache(maxsize=1024)
def _prepare(
    x: Any, eps: float, kind: str, is_aligned: bool
) -> tuple[Launch | None, tuple[int, ...]]:
    """The launch for an ``x`` of this form, without the tensors, and the strides of ``out``."""
    x = Form(*x)
    rows, size = fold(x.shape, x.strides), x.shape[-1]
    assert rows is not None, "refused by supports"
    if rows.num == 0:
        return None, rows.out_strides
    factor = math.gcd(16 // x.dtype.itemsize, size, rows.outer_stride, rows.inner_stride)
    is_early = begins_early(x.device)
    launcher = make_launcher(x.dtype, size, kind, factor, is_aligned, is_early)
    return launcher.bind(_grid(rows, launcher), *rows[:4], eps), rows.out_strides


def _grid(rows: Rows, launcher: Launcher) -> tuple[int, int, int]:
    return -(-rows.num // launcher.constants["TILE_M"]), 1, 1


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, size: int, kind: str, factor: int, is_aligned: bool, is_early: bool = True
) -> Launcher:
    """The launcher for rows of ``size``, which begin at multiples of ``factor`` elements."""
    width = triton.next_power_of_2(size)
    tile_m = max(1, TILE // width)
    pointer = POINTERS[dtype] + ":16" * is_aligned
    types = {
        "out": f"{POINTERS[dtype]}:16", "x": pointer, "weight": pointer,
        "num_rows": "i32", "inner": "i32",
        "outer_stride": f"i64:{factor}", "inner_stride": f"i64:{factor}",
        "eps": "fp32",
    }  # fmt: skip
    constants = {"SIZE": size, "KIND": kind, "TILE_M": tile_m, "W": width}
    constants["PDL"] = is_early
    num_warps = min(16, max(1, tile_m * width // 256))
    return Launcher(_rms_norm, types, constants, num_warps=num_warps, launch_pdl=is_early)
