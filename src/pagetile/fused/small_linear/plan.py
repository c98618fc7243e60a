"""How a product of few rows is cut, and where that is faster than torch's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .problem import Problem

__all__ = ["MOST_FEW", "MOST_ROWS", "Plan", "is_faster", "make_plan"]

MOST_FEW = 4
"""Rows that are multiplied number by number; more go through tensor cores."""
MOST_ROWS = 64
_WIDEST = 4096
"""Numbers of a row that a program of few rows has at a time."""
_TILE_BYTES = 32 << 10
"""Bytes of the weight that a program of few rows has in registers."""


class Plan(NamedTuple):
    """How the weight is cut into programs."""

    kind: str
    """``few`` or ``tiles``, the kernel."""
    tile_m: int
    """Rows of ``x`` of a program."""
    tile_n: int
    """Rows of the weight of a program; of a gated one as many of the gate and of the other."""
    tile_k: int
    """Numbers of a row that are read at a time."""
    num_warps: int
    stages: int = 1
    """Tiles of ``tiles`` that are on their way at a time."""


def make_plan(problem: Problem) -> Plan:
    """The cut for a problem that ``supports`` takes."""
    if problem.num_rows <= MOST_FEW:
        return _plan_few(problem)
    tile_m = max(16, 1 << (problem.num_rows - 1).bit_length())
    tile_n = 32 if problem.num_columns >= 16384 else 16
    tile_k = 128 if problem.size % 256 else 256
    while tile_k > 32 and tile_k >= 2 * problem.size:
        tile_k //= 2
    stages = 4 if (tile_m + tile_n * (1 + problem.is_gated)) * tile_k <= 16384 else 3
    return Plan("tiles", tile_m, tile_n, tile_k, num_warps=4, stages=stages)


def _plan_few(problem: Problem) -> Plan:
    width = min(_WIDEST, 1 << (problem.size - 1).bit_length())
    # A width that divides a row wastes no lanes; a narrow one takes many passes.
    divisor = problem.size & -problem.size
    if problem.size > width or (divisor < problem.size and divisor >= 1024):
        width = max(1024, min(width, divisor)) if divisor >= 1024 else width
    row_bytes = width * problem.dtype.itemsize * (1 + problem.is_gated)
    tile_n = max(1, min(16, _TILE_BYTES // row_bytes))
    return Plan("few", problem.num_rows, tile_n, width, num_warps=4)


@functools.lru_cache(maxsize=4096)
def is_faster(
    num_rows: int,
    num_columns: int,
    size: int,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
    has_norm: bool = False,
) -> bool:
    """Whether the kernel here takes less time than torch's product and what goes with it.

    Args:
        num_rows: Rows of ``x``.
        num_columns: Numbers of a row of the result.
        size: Numbers of a row of ``x``.
        dtype: The type of all of them.
        is_gated: Whether the weight has as many rows again, and an activation follows.
        has_norm: Whether a norm comes before the product.
    """
    most = MOST_FEW if has_norm or dtype.itemsize > 2 else MOST_ROWS
    return 0 < num_rows <= most and dtype != torch.float64 and size * dtype.itemsize % 16 == 0
