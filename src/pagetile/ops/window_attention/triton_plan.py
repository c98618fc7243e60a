"""How window attention is cut up for a GPU: a pure function of host integers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from ...device import DeviceInfo
from .problem import Problem

__all__ = ["Plan", "cover", "make_plan"]

_NOWHERE, _REGISTERS, _SHARED = 0, 1, 2
_FEW_PAIRS = 512  # of windows and heads
_MOST_SHARED = 232_448  # bytes of a program on Hopper
_MOST_KEPT = 576
"""Tokens beyond which a row of bias no longer fits into registers beside its scores."""


@dataclass(frozen=True)
class Plan:
    """Tiles of the three kernels, and how many programs of each share the windows."""

    forward_m: int
    """Rows of a tile of the forward kernel, whose programs share windows as ``chunks`` says."""
    tile_m: int
    """Rows of a tile of the gradients' kernels, or columns."""
    tiles: tuple[int, ...]
    """Of the other side: keys, or rows for the gradients by columns."""
    groups: tuple[tuple[int, ...], ...]
    """The same, cut for the gradients by rows: a launch each."""
    kept: int
    """Where the forward kernel keeps its tile of bias."""
    kept_backward: int
    stages: int
    one_tile_stages: int
    """Of the kernel that finds all gradients of a window of one tile; 0: it is not for this one."""
    chunks: int
    chunks_backward: int


@functools.lru_cache(maxsize=1024)
def make_plan(problem: Problem, device: DeviceInfo) -> Plan:
    """Choose tiles and programs.

    Example:
        >>> problem = Problem(343, 3, 343, 16, torch.float16, table_size=2197)
        >>> plan = make_plan(problem, DeviceInfo("cuda", 132))
        >>> plan.tiles, plan.groups, plan.chunks
        ((128, 128, 64, 32), ((64, 64), (64, 64), (64, 32)), 29)
    """
    num_tokens, is_wide = problem.num_tokens, problem.dtype == torch.float32
    tile_m = min(64, max(16, _next_power_of_2(num_tokens)))
    tiles: tuple[int, ...] = (tile_m,)
    backward = tiles
    if num_tokens > tile_m:
        tiles = cover(num_tokens, 64 if is_wide else 128)
        backward = cover(num_tokens, 64)
    groups = tuple(backward[at : at + 2] for at in range(0, len(backward), 2))
    can_keep = not is_wide and num_tokens <= _MOST_KEPT
    is_kept = can_keep and (problem.has_bias or len(tiles) == 1)
    forward_m = _forward_rows(problem, tile_m)
    programs, backward_programs = (
        -(-num_tokens // rows) * problem.num_heads for rows in (forward_m, tile_m)
    )
    return Plan(
        forward_m=forward_m,
        tile_m=tile_m,
        tiles=tiles,
        groups=groups if problem.has_bias else (backward,),
        kept=_REGISTERS if is_kept else _NOWHERE,
        kept_backward=_NOWHERE if not is_kept else _REGISTERS if num_tokens <= 400 else _SHARED,
        stages=_stages(problem, sum(tiles)),
        one_tile_stages=_one_tile_stages(problem, device, tile_m),
        chunks=_chunks(problem, 4 * device.num_workers // programs),
        chunks_backward=_chunks(problem, 2 * device.num_workers // backward_programs),
    )


def _forward_rows(problem: Problem, tile_m: int) -> int:
    """Rows of a forward tile; measured on an H200."""
    if _is_odd(problem):
        return 128  # twice as many for each fetch of keys
    is_few = problem.num_windows * problem.num_heads < _FEW_PAIRS
    most_bytes = 64 if problem.num_tokens < 193 else 32
    if is_few and problem.num_tokens > 64 and _row_bytes(problem) <= most_bytes:
        return 32  # or there are fewer programs than multiprocessors
    return tile_m


def _is_odd(problem: Problem) -> bool:
    """Whether rows of several tiles can only be fetched in pieces of 4 bytes and fewer."""
    return problem.num_tokens > 64 and problem.dtype.itemsize == 2 and problem.head_size % 4 > 0


def cover(num_tokens: int, width: int) -> tuple[int, ...]:
    """Powers of two up to ``width`` that together reach ``num_tokens``, with little to spare.

    Example:
        >>> cover(343, 128), cover(49, 64), cover(392, 64)
        ((128, 128, 64, 32), (64,), (64, 64, 64, 64, 64, 64, 16))
    """
    tiles, left = [], num_tokens
    while left > 0:
        tile = min(width, max(16, _next_power_of_2(left)))
        if tile > 32 and 4 * (tile - left) > tile:
            tile //= 2
        tiles.append(tile)
        left -= tile
    return tuple(tiles)


def _next_power_of_2(number: int) -> int:
    return int(1 << (number - 1).bit_length())


def _chunks(problem: Problem, wanted: int) -> int:
    """Programs that share the windows of a tile, each of which meets one bias only.

    A prime number: windows at the border of a map cost more, for their mask, and they stand at
    multiples of its sides. Program ``i`` of 14 would get all or none of those of 14 × 14 × 14.
    """
    chunks = max(1, min(problem.num_windows, wanted))
    if problem.num_biases > 1:
        return max(1, chunks // problem.num_biases) * problem.num_biases
    while any(chunks % divisor == 0 for divisor in range(2, math.isqrt(chunks) + 1)):
        chunks -= 1
    return chunks


def _stages(problem: Problem, num_keys: int) -> int:
    """How many windows' keys and values may lie in shared memory at once."""
    if problem.dtype == torch.float32 or _is_odd(problem):
        return 1  # in registers: operands are split, or come in pieces of 4 bytes
    window = 2 * num_keys * _row_bytes(problem)
    return 3 if 3 * window <= 100_000 else 2 if 2 * window <= 100_000 else 1


def _one_tile_stages(problem: Problem, device: DeviceInfo, tile_m: int) -> int:
    """Windows whose operands may lie in shared memory at once, with what is made of them.

    As read off compiled kernels: on the way are four operands and a mask that is a matrix, beside
    them the weights and what they change by; one at a time no mask, but up to six tiles of tokens.
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
    """Of a token in a tile."""
    return max(16, _next_power_of_2(problem.head_size)) * problem.dtype.itemsize
