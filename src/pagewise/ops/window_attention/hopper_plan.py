"""How window attention is cut up for a Hopper GPU: a pure function of host integers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...device import DeviceInfo
from .problem import Problem

__all__ = ["MARKS", "PIECE", "Plan", "make_plan"]

PIECE = 64
"""Keys that are fetched at once."""
MARKS = 16
"""Columns of a product that masks."""
_REST = 32
_SHARED_BYTES = 232_448
_Q_STAGES = 2
# Warps of a stream, streams, registers of a thread: the fastest first (lab log). The more warps,
# the more there is to do while one waits; all of them share a multiprocessor's registers.
_CUTS = ((8, 3, 80), (4, 4, 112), (4, 3, 160), (4, 2, 232))
_MOST_WASTED = 1.1  # of rows, by tiles of 128 against tiles of 64
_WAVES = 4


@dataclass(frozen=True)
class Plan:
    """Tiles of the kernel, and how many programs share the windows."""

    warps: int
    """Of a stream; it owns sixteen rows for each."""
    streams: int
    stages: int
    q_stages: int
    groups: int
    """Whole pieces of a window."""
    rest: int
    """Columns after them."""
    registers: int
    chunks: int

    @property
    def rows(self) -> int:
        """Queries of a program."""
        return 16 * self.warps


@functools.lru_cache(maxsize=1024)
def make_plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """Choose tiles and programs; None where a tile of bias leaves no room for keys.

    Example:
        >>> import torch
        >>> plan = make_plan(Problem(343, 6, 343, 16, torch.float16), DeviceInfo("cuda", 132))
        >>> plan.warps, plan.streams, plan.groups, plan.rest, plan.chunks
        (8, 3, 5, 32, 7)
    """
    num_tokens, width = problem.num_tokens, find_width(problem.head_size)
    groups, last = divmod(num_tokens, PIECE)
    rest = _REST if 0 < last <= _REST else 0
    groups += last > _REST
    columns = groups * PIECE + rest
    numbers = 2 * (width + (MARKS if problem.has_regions else 0))  # bytes of a query
    for warps, streams, registers in _CUTS:
        rows = 16 * warps
        if _round_up(num_tokens, rows) > _MOST_WASTED * _round_up(num_tokens, 64):
            continue
        fixed = 2 * rows * columns + streams * _Q_STAGES * rows * numbers + 2048
        stages = (_SHARED_BYTES - fixed) // (streams * PIECE * (numbers + 2 * width))
        if stages >= 2:
            tiles = _round_up(num_tokens, rows) // rows * problem.num_heads
            chunks = _share(tiles, problem.num_windows, streams, device.num_workers)
            return Plan(
                warps, streams, min(4, stages), _Q_STAGES, groups, rest, registers, chunks
            )  # fmt: skip
    return None


def find_width(head_size: int) -> int:
    """Columns of a tile of queries, keys or values.

    Example:
        >>> find_width(8), find_width(24)
        (16, 32)
    """
    return max(16, 1 << (head_size - 1).bit_length())


def _share(tiles: int, num_windows: int, streams: int, num_workers: int) -> int:
    """Programs that share the windows of a tile, so that few multiprocessors wait at the end."""

    def duration(chunks: int) -> float:
        waves = -(-tiles * chunks // num_workers)
        rounds = -(-num_windows // chunks) / streams
        return waves * (1 + max(1.0, rounds))  # a wave begins by making its tile of bias

    most = max(1, num_windows)
    choices = {max(1, min(wave * num_workers // tiles, most)) for wave in range(1, _WAVES + 1)}
    return min(sorted(choices), key=duration)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
