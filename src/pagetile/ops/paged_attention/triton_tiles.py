"""How the decode kernels of a GPU are cut: measured where that was done, a formula elsewhere.

``triton_tiles.json`` holds what ``python -m benchmarks tune`` found the fastest, by the GPU's name
and the kind of problem. Lengths do not matter for this, nor how many sequences there are.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...device import DeviceInfo
from .problem import Problem

__all__ = ["MEASURED", "Tiles", "choose_tiles", "is_float32", "kind_of"]

MEASURED = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Tiles:
    """Of a decode kernel."""

    tile_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles on their way from memory at a time."""
    programs: int
    """On a multiprocessor."""
    max_registers: int = 0
    """Of a thread; 0 leaves it to the compiler."""
    fetch_registers: int = 0
    """Of a thread that only fetches."""


def choose_tiles(problem: Problem, device: DeviceInfo, hopper: bool) -> Tiles:
    """The tiles for a problem.

    Args:
        problem: A call of few new tokens a sequence.
        device: Where it runs.
        hopper: Whether by ``hopper_decode``.
    """
    found = _measured().get(device.name, {}).get(kind_of(problem, hopper))
    if found is not None:
        return Tiles(**found)
    return _hopper_tiles(problem) if hopper else _portable_tiles(problem, device)


def kind_of(problem: Problem, hopper: bool) -> str:
    """What tiles depend on, in words.

    Example:
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> kind_of(problem, hopper=True)
        'hopper, 16-bit keys, heads up to 128'
    """
    keys = "float32" if is_float32(problem) else f"{8 * problem.kv_dtype.itemsize}-bit"
    scales = " with a scale for each token" if problem.scale_kind == "token" else ""
    width = next(n for n in (64, 128, 256, 512) if problem.width <= n)
    rows = "" if hopper or problem.rows <= 16 else ", more than 16 rows"
    return f"{'hopper' if hopper else 'triton'}, {keys} keys{scales}, heads up to {width}{rows}"


@functools.cache
def _measured() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(MEASURED.read_text())) if MEASURED.exists() else {}


def _hopper_tiles(problem: Problem) -> Tiles:
    is_wide = problem.width > 128
    if problem.kv_dtype.itemsize == 1:
        return Tiles(64, 4, 3, 1, 168, 88) if is_wide else Tiles(64, 4, 3, 2, 128, 72)
    if problem.width <= 64:
        return Tiles(64, 4, 3, 2, 128, 80)
    return Tiles(32, 4, 6, 1, 168, 88) if is_wide else Tiles(64, 4, 2, 2, 128, 80)


def _portable_tiles(problem: Problem, device: DeviceInfo) -> Tiles:
    """Such that a tile's rows, their results and its keys stay in registers."""
    width, has_many_rows = problem.width, problem.rows > 16
    is_8_bit = problem.kv_dtype.itemsize == 1
    if is_float32(problem):
        if width > 256 or (width > 128 and device.is_small):
            return Tiles(16, 8, 1, 1)
        num_stages = 3 if width <= 64 else 1 if has_many_rows and device.is_small else 2
        return Tiles(32, 4, num_stages, 2)
    if width <= 128:
        # More warps where one would not hold its part of the rows or of the scales.
        num_stages = 2 if has_many_rows and is_8_bit else 3
        return Tiles(64, 8 if has_many_rows or is_8_bit else 4, num_stages, 2)
    if width > 256:
        return Tiles(32, 8, 2, 1)
    return Tiles(32, 8, 2, 1) if has_many_rows else Tiles(64, 8 if is_8_bit else 4, 2, 2)


def is_float32(problem: Problem) -> bool:
    """Whether products are of float32: so are those of two types of 16 bits."""
    q, kv = problem.q_dtype, problem.kv_dtype
    return torch.float32 in (q, kv) or (kv.itemsize == 2 and q != kv)
