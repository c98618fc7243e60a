"""Tiles of the decode kernels: measured ones, or those of a formula.

``decode_tiles.json`` has the fastest tiles that ``python -m benchmarks tune`` found, by the GPU's
name and the kind of problem.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....device import DeviceInfo
from ..problem import Problem
from .gpu_plan import FEW_ROWS

MEASURED = Path(__file__).with_name("decode_tiles.json")

LINE_BYTES = 128
"""Bytes of a line of the L2 cache. Neighbouring heads that share a line are read in one tile."""

NARROW = 80
"""Up to this width four heads may be read together, above it two: four heads of 112 are slower."""

LEAST_JOINED = 32
"""Fewest joined heads of all sequences: with fewer, merging more splits costs what reading
saves."""

IN_FLIGHT = 80 << 10
"""Bytes in flight with which a multiprocessor reads joined heads fastest; more are slower."""


@dataclass(frozen=True)
class DecodeTiles:
    """Tiles of a decode kernel; only ``tile_heads`` depends on the number of sequences."""

    tile_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight from memory at a time."""
    programs: int
    """CTAs on a multiprocessor."""
    max_registers: int = 0
    """Register cap per thread; 0 means the compiler's default."""
    fetch_registers: int = 0
    """Register cap per thread of a loading warp."""
    tile_heads: int = 1
    """Neighbouring KV heads of a tile."""


def choose_decode_tiles(problem: Problem, device: DeviceInfo, hopper: bool) -> DecodeTiles:
    """Look up the measured tiles for a problem, or compute them.

    Args:
        problem: A call of few new tokens a sequence.
        device: The GPU.
        hopper: Whether for ``hopper_decode``.
    """
    found = _measured().get(device.name, {}).get(kind_of(problem, hopper))
    if found is not None:
        return DecodeTiles(**found)
    return _hopper_tiles(problem) if hopper else _portable_tiles(problem, device)


def kind_of(problem: Problem, hopper: bool) -> str:
    """Return the kind of problem, a key of ``decode_tiles.json``.

    Examples:
        >>> import torch
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> kind_of(problem, hopper=True)
        'hopper, 16-bit keys, heads up to 128'
    """
    is_float32 = problem.multiplies_float32
    keys = "float32" if is_float32 else f"{8 * problem.kv_dtype.itemsize}-bit"
    scales = " with a scale for each token" if problem.scale_kind == "token" else ""
    width = next(n for n in (64, 128, 256, 512) if problem.width <= n)
    rows = "" if problem.rows <= FEW_ROWS else f", more than {FEW_ROWS} rows"
    tile_heads = _choose_tile_heads(problem) if hopper else 1
    joined = f", {tile_heads} in a tile" if tile_heads > 1 else ""
    kernel = "hopper" if hopper else "triton"
    return f"{kernel}, {keys} keys{scales}, heads up to {width}{rows}{joined}"


@functools.cache
def _measured() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(MEASURED.read_text())) if MEASURED.exists() else {}


def _choose_tile_heads(problem: Problem) -> int:
    """Return how many neighbouring KV heads ``hopper_decode`` reads together.

    As many as fill whole lines of the L2 cache, or two of an 8-bit cache, which then share a
    softmax, if their rows fit a tile and the batch is large.
    """
    if problem.max_visible is not None:  # neighbouring heads read different keys
        return 1
    itemsize = problem.kv_dtype.itemsize
    heads = 2 if itemsize == 1 and problem.width <= 128 else 1
    most = heads if itemsize == 1 else 4 if problem.width <= NARROW else 2
    sizes = problem.head_size, problem.v_head_size
    while heads < most and any(heads * size * itemsize % LINE_BYTES for size in sizes):
        heads *= 2
    while heads > 1 and (
        problem.num_kv_heads % heads
        or heads * problem.rows > FEW_ROWS
        or problem.num_seqs * problem.num_kv_heads < LEAST_JOINED * heads
    ):
        heads //= 2
    return heads


def _hopper_tiles(problem: Problem) -> DecodeTiles:
    heads = _choose_tile_heads(problem)
    ring = _fit_ring(problem) if heads == 1 else _fit_joined_ring(problem, heads)
    tile_n, num_stages, programs = ring
    if programs == 1:
        registers = 168, 88
    else:
        # With two stages and many rows of a head the computing warps need more registers.
        needs_more = heads == 1 and num_stages == 2 and problem.rows > 8
        registers = 128, 72 if problem.kv_dtype.itemsize == 1 or needs_more else 80
    return DecodeTiles(tile_n, 4, num_stages, programs, *registers, tile_heads=heads)


def _fit_ring(problem: Problem) -> tuple[int, int, int]:
    """Return keys and stages of a ring of one head's tiles, and CTAs of a multiprocessor."""
    if problem.rows > FEW_ROWS or problem.width <= 64:
        return 64, 3, 2
    is_wide = problem.width > 128
    if problem.kv_dtype.itemsize == 1:
        return 64, 3, 1 if is_wide else 2
    return (32, 3, 1) if is_wide else (64, 2, 2)


def _fit_joined_ring(problem: Problem, heads: int) -> tuple[int, int, int]:
    """Return the same of a ring whose tiles hold several heads."""
    if problem.kv_dtype.itemsize == 1:
        return 64, 2, 2
    if problem.width <= 64:
        return 128 // heads, 3, 2
    if heads == 4:
        return 32, 3, 1
    programs = 1 if problem.width > 128 else 2
    row_bytes = (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
    num_stages = 2 if 2 * programs * 32 * heads * row_bytes >= IN_FLIGHT else 3
    return 32, num_stages, programs


def _portable_tiles(problem: Problem, device: DeviceInfo) -> DecodeTiles:
    """Return tiles whose rows, results and keys stay in registers."""
    width, has_many_rows = problem.width, problem.rows > FEW_ROWS
    is_8_bit = problem.kv_dtype.itemsize == 1
    if problem.multiplies_float32:
        if width > 256 or (width > 128 and device.is_small):
            return DecodeTiles(16, 8, 1, 1)
        num_stages = 3 if width <= 64 else 1 if has_many_rows and device.is_small else 2
        return DecodeTiles(32, 4, num_stages, 2)
    if width <= 128:
        # More warps where one would not hold its part of the rows or of the scales.
        num_stages = 2 if has_many_rows and is_8_bit else 3
        return DecodeTiles(64, 8 if has_many_rows or is_8_bit else 4, num_stages, 2)
    if width > 256:
        return DecodeTiles(32, 8, 2, 1) if has_many_rows or is_8_bit else DecodeTiles(32, 4, 2, 2)
    return (
        DecodeTiles(32, 8, 2, 1) if has_many_rows else DecodeTiles(64, 8 if is_8_bit else 4, 2, 2)
    )
