"""Tile sizes and work split of window attention in Triton: a pure function of host integers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ....device import DeviceInfo
from ....shapes import power_of_2
from ..problem import Problem

_RELOADED, _REGISTERS, _SHARED = 0, 1, 2
_FEW_PAIRS = 512  # windows times heads that leave multiprocessors idle with large tiles
_MOST_SHARED = 232_448  # bytes of a program on Hopper
_MOST_KEPT = 576
"""Most tokens whose bias rows fit into registers beside the scores."""


@dataclass(frozen=True)
class Plan:
    """Tiles of the three kernels, and how many programs of each share the windows."""

    forward_m: int
    """Rows of a tile of the forward kernel."""
    tile_m: int
    """Rows of a tile of the row kernel, or keys of a tile of the column kernel."""
    tiles: tuple[int, ...]
    """Tile sizes along the other axis of the scores."""
    groups: tuple[tuple[int, ...], ...]
    """The same tiles in groups of keys; the row kernel is launched once for each group."""
    bias_cache: int
    """Where the forward kernel keeps its bias tiles: reloaded, registers or shared memory."""
    bias_cache_backward: int
    stages: int
    one_tile_stages: int
    """Stages of the one-tile gradient kernel; 0 where windows have several tiles or do not fit."""
    chunks: int
    """Programs that share the windows of a forward tile."""
    chunks_backward: int


@functools.lru_cache(maxsize=1024)
def make_plan(problem: Problem, device: DeviceInfo) -> Plan:
    """Choose tiles and the number of programs.

    Examples:
        >>> problem = Problem(343, 3, 343, 16, torch.float16, table_size=2197)
        >>> plan = make_plan(problem, DeviceInfo("cuda", 132))
        >>> plan.tiles, plan.groups, plan.chunks
        ((128, 128, 64, 32), ((64, 64), (64, 64), (64, 32)), 29)
    """
    num_tokens, is_wide = problem.num_tokens, problem.dtype == torch.float32
    tile_m = min(64, max(16, power_of_2(num_tokens)))
    tiles: tuple[int, ...] = (tile_m,)
    backward = tiles
    if num_tokens > tile_m:
        tiles = cover(num_tokens, 64 if is_wide else 128)
        backward = cover(num_tokens, 64)
    groups = tuple(backward[at : at + 2] for at in range(0, len(backward), 2))
    can_cache = not is_wide and num_tokens <= _MOST_KEPT
    caches_bias = can_cache and (problem.has_bias or len(tiles) == 1)
    forward_m = _forward_rows(problem, tile_m)
    programs, backward_programs = (
        -(-num_tokens // rows) * problem.num_heads for rows in (forward_m, tile_m)
    )
    return Plan(
        forward_m=forward_m,
        tile_m=tile_m,
        tiles=tiles,
        groups=groups if problem.has_bias else (backward,),
        bias_cache=_REGISTERS if caches_bias else _RELOADED,
        bias_cache_backward=_RELOADED
        if not caches_bias
        else _REGISTERS
        if num_tokens <= 400
        else _SHARED,
        stages=_stages(problem, sum(tiles)),
        one_tile_stages=_one_tile_stages(problem, device, tile_m),
        chunks=_chunks(problem, 4 * device.num_workers // programs),
        chunks_backward=_chunks(problem, 2 * device.num_workers // backward_programs),
    )


def _forward_rows(problem: Problem, tile_m: int) -> int:
    """Rows of a forward tile; measured on an H200."""
    if _is_odd(problem):
        return 128  # the keys, loaded in small pieces, serve twice as many rows
    is_few = problem.num_windows * problem.num_heads < _FEW_PAIRS
    most_bytes = 64 if problem.num_tokens < 193 else 32
    if is_few and problem.num_tokens > 64 and _row_bytes(problem) <= most_bytes:
        return 32  # smaller tiles, or some multiprocessors would get no program
    return tile_m


def _is_odd(problem: Problem) -> bool:
    """Whether rows of several tiles can only be loaded in pieces of at most 4 bytes."""
    return problem.num_tokens > 64 and problem.dtype.itemsize == 2 and problem.head_size % 4 > 0


def cover(num_tokens: int, width: int) -> tuple[int, ...]:
    """Tile sizes, powers of two up to ``width``, that cover ``num_tokens`` with little padding.

    Examples:
        >>> cover(343, 128), cover(49, 64), cover(392, 64)
        ((128, 128, 64, 32), (64,), (64, 64, 64, 64, 64, 64, 16))
    """
    tiles, left = [], num_tokens
    while left > 0:
        tile = min(width, max(16, power_of_2(left)))
        if tile > 32 and 4 * (tile - left) > tile:
            tile //= 2
        tiles.append(tile)
        left -= tile
    return tuple(tiles)


def _chunks(problem: Problem, wanted: int) -> int:
    """How many programs share the windows of a tile; each program uses one bias only.

    A prime number, because windows at the border of a map cost more (they need a mask) and recur
    with the period of the map's sides: one of 14 programs would get all border windows of a
    14 × 14 × 14 map along an axis, and the others none.
    """
    chunks = max(1, min(problem.num_windows, wanted))
    if problem.num_biases > 1:
        return max(1, chunks // problem.num_biases) * problem.num_biases
    while any(chunks % divisor == 0 for divisor in range(2, math.isqrt(chunks) + 1)):
        chunks -= 1
    return chunks


def _stages(problem: Problem, num_keys: int) -> int:
    """How many windows' keys and values, and rows of a dense mask, are in shared memory at once."""
    if problem.dtype == torch.float32 or _is_odd(problem):
        return 1  # operands go through registers: split into tf32 parts, or loaded in small pieces
    window = 2 * num_keys * _row_bytes(problem)
    if problem.mask_dtype is not None:
        window += 64 * num_keys * 4  # a boolean mask is converted to float32
    return 3 if 3 * window <= 100_000 else 2 if 2 * window <= 100_000 else 1


def _one_tile_stages(problem: Problem, device: DeviceInfo, tile_m: int) -> int:
    """How many windows the one-tile gradient kernel has in shared memory at once.

    Sizes as measured on compiled kernels: a stage holds four operands and a dense mask; beside
    the stages are the weights and their gradients. A single stage holds no mask, but up to six
    tiles of tokens.
    """
    if problem.num_tokens > tile_m:
        return 0
    most = 1 if problem.dtype == torch.float32 else 3
    tile = tile_m * _row_bytes(problem)
    made = 2 * tile_m**2 * problem.dtype.itemsize + 1024
    mask = 4 * tile_m**2 if problem.mask_dtype is not None else 0
    room = device.shared_memory or _MOST_SHARED
    for stages in range(most, 1, -1):
        if max(6 * tile, stages * (4 * tile + mask) + made) <= room:
            return stages
    return int(max(6 * tile, 4 * tile + made) <= room)


def _row_bytes(problem: Problem) -> int:
    """Bytes of a token in a tile."""
    return max(16, power_of_2(problem.head_size)) * problem.dtype.itemsize
