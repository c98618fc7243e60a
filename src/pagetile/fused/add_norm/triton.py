"""A residual addition and the norms around it on a GPU in one launch.

::

    hidden[row] = residual[row] + before(x[row])
    normed[row] = after(hidden[row])

Grid: tiles of ``TILE_M`` whole rows, each of which is read once. Supports float32, float16 and
bfloat16, contiguous rows of up to 16384 elements.
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
from ...tiles.triton.launch import POINTERS, Launcher, begins_early, refuse
from ...tiles.triton.norms import normalise
from ..rms_norm import Norm
from ..rows import RowsProblem

TILE = 1024  # elements of a program, or one whole row if that is longer
WIDEST = 16384


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    return problem.refuse(WIDEST, "a tensor has gaps") or refuse(device, x=problem.dtype)


@triton.jit
def _add_norm(
    hidden,  # [num_rows, SIZE]
    normed,  # [num_rows, SIZE]
    residual,  # [num_rows, SIZE]
    x,  # [num_rows, SIZE], or float32 [PARTS, num_rows, SIZE]
    before_weight,  # [SIZE]
    after_weight,  # [SIZE]
    num_rows,
    before_eps,
    after_eps,
    PARTS: tl.constexpr,  # partial products of a split-K linear layer to sum; 0: x is whole
    SIZE: tl.constexpr,
    BEFORE: tl.constexpr,  # a kind of ``rms_norm``, or ""
    AFTER: tl.constexpr,
    TILE_M: tl.constexpr,
    W: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = hidden.dtype.element_ty
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, W)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    if BEFORE != "":
        first = tl.load(before_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if AFTER != "":
        second = tl.load(after_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(1, PARTS):
            at_part = part * num_rows.to(tl.int64) * SIZE + at
            y += tl.load(x + at_part, mask=inside, other=0.0)
        y = y.to(dtype).to(tl.float32)
    sum_before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if BEFORE != "":
        scale = tl.rsqrt(tl.sum(y * y, 1) / SIZE + before_eps)
        y = normalise(y, scale[:, None], first[None, :], BEFORE, dtype)
    y = (sum_before + y).to(dtype)
    tl.store(hidden + at, y, mask=inside)
    if AFTER != "":
        y = y.to(tl.float32)
        scale = tl.rsqrt(tl.sum(y * y, 1) / SIZE + after_eps)
        y = normalise(y, scale[:, None], second[None, :], AFTER, dtype)
        tl.store(normed + at, y.to(dtype), mask=inside)


def run(
    residual: Tensor, x: Tensor, before: Norm | None, after: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """One launch over all rows."""
    size = x.shape[-1]
    hidden = torch.empty_like(residual)
    normed = hidden if after is None else torch.empty_like(residual)
    num_rows = residual.numel() // size
    num_parts = x.shape[0] if x.dim() > residual.dim() else 0
    if num_rows:
        # An absent weight is never read, so any address will do.
        weights = tuple(x if n is None else n.weight for n in (before, after))
        addresses = functools.reduce(int.__or__, (t.data_ptr() for t in (residual, x, *weights)))
        launcher = make_launcher(
            residual.dtype, size, *("" if n is None else n.kind for n in (before, after)),
            addresses % 16 == 0, begins_early(x.device), num_parts,
        )  # fmt: skip
        grid = -(-num_rows // launcher.constants["TILE_M"]), 1, 1
        eps = (0.0 if n is None else n.eps for n in (before, after))
        launcher(grid, hidden, normed, residual, x, *weights, num_rows, *eps)
    return hidden, None if after is None else normed


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype,
    size: int,
    before: str,
    after: str,
    is_aligned: bool,
    is_early: bool,
    num_parts: int = 0,
) -> Launcher:
    """The kernel for rows of ``size``."""
    width = triton.next_power_of_2(size)
    tile_m = max(1, TILE // width)
    is_aligned &= math.gcd(16 // dtype.itemsize, size) == 16 // dtype.itemsize
    names = ("residual", "x", "before_weight", "after_weight")
    types = dict.fromkeys(("hidden", "normed"), f"{POINTERS[dtype]}:16")
    types |= dict.fromkeys(names, POINTERS[dtype] + ":16" * is_aligned)
    types |= {"num_rows": "i32", "before_eps": "fp32", "after_eps": "fp32"}
    if num_parts:
        types["x"] = "*fp32" + ":16" * is_aligned
    constants = {
        "PARTS": num_parts, "SIZE": size, "BEFORE": before, "AFTER": after, "TILE_M": tile_m,
        "W": width,
        "PDL": is_early,
    }  # fmt: skip
    num_warps = min(16, max(1, tile_m * width // 256))
    return Launcher(_add_norm, types, constants, num_warps=num_warps, launch_pdl=is_early)
