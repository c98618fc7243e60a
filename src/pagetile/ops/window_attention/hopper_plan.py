"""How window attention is cut up for a Hopper GPU: a pure function of host integers."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ...device import DeviceInfo
from .problem import Problem

__all__ = [
    "CAREFUL_TILE",
    "DENSE",
    "MANY",
    "MARKS",
    "MIXED",
    "MOST_IN_ONE_TILE",
    "MOST_REGIONS",
    "NO_BIAS",
    "PIECE",
    "Q_STAGES",
    "SUM_KEYS",
    "SUM_OFFSETS",
    "TABLE",
    "WORDS",
    "OneTilePlan",
    "Plan",
    "RowsPlan",
    "find_width",
    "make_columns_plan",
    "make_one_tile_plan",
    "make_plan",
    "make_rows_plan",
]

# What host and kernels have to agree about.
PIECE = 64
"""Tokens that are multiplied at once, and rows of the gradients by rows."""
SUM_KEYS = 16
"""Keys of a tile of the bias's gradient, as its sums are written."""
SUM_OFFSETS = 16
"""Offsets that a program beside those sums inverts."""
MOST_REGIONS = 8
"""Of a window that is masked by a product."""
MARKS = 2 * MOST_REGIONS
"""Columns of that product."""
CAREFUL_TILE = 32
"""Columns that are gone over at once with running maxima, or comparing regions: with more of them
ptxas finds too few registers, and lets no products overlap in all of the kernel."""
MIXED, MANY = 1, 2
"""Kinds of windows: of several regions, and of more than marks can tell apart or add."""
NO_BIAS, TABLE, DENSE = range(3)
"""Kinds of biases."""
MOST_IN_ONE_TILE = PIECE
"""Tokens of a window that ``hopper_one_tile`` takes."""
WORDS = 2 * PIECE + 4
"""Of a window's regions there: two for each query, one for all, and what makes them 16 bytes."""
Q_STAGES = 2
"""Windows whose own rows are in memory at once."""

_LEAST = 32  # columns of a product
_SHARED_BYTES = 232_448
_OF_SYSTEM = 1024  # bytes of it that every program takes besides
_ALL_SHARED_BYTES = _SHARED_BYTES + _OF_SYSTEM  # of a multiprocessor
_SMALL = 2048  # ones, barriers, and what partitions are handed; more than a unit matrix
# Warps of a stream, streams, registers of a thread, tiles of a piece: the fastest first (lab log).
# The more warps, the more there is to do while one waits; all of them share a multiprocessor's
# registers.
_CUTS = ((8, 3, 80, 2), (8, 3, 80, 1), (4, 4, 112, 1), (4, 3, 160, 1), (4, 2, 232, 1))
_COLUMN_CUTS = ((8, 3, 80, 1), (4, 3, 160, 1), (4, 2, 232, 1))
_NARROW = 16  # of wider heads the gradients by columns do not fit into the first one's registers
# Warpgroups, keys of each, registers of a thread: the fewest keys first. Of heads wider than 32
# memory holds no more than 64 keys in each of three.
_SHARES = (
    *((3, 32, 160), (4, 32, 112)),
    *((3, 64, 160), (4, 64, 112), (3, 96, 160), (3, 128, 160)),
)
_MOST_WASTED = 1.1  # of rows, by tiles of 128 against tiles of 64
_WAVES = 4
_ROWS_SETUP = 5.0  # windows, since sums are written as well
# Programs of a multiprocessor where a window is one tile, as measured: more registers, or more
# programs where a window brings less to compute on.
_FORWARD_PROGRAMS = 5
_GRADIENT_PROGRAMS = ((48, 3), (MOST_IN_ONE_TILE, 2))  # up to so many tokens


@dataclass(frozen=True)
class Plan:
    """Tiles of the kernel, and how many programs share the windows."""

    warps: int
    """Of a stream; it owns sixteen rows for each."""
    streams: int
    stages: int
    q_stages: int
    piece: int
    """Columns that are fetched at once."""
    groups: int
    """Pieces."""
    rest: int
    """Columns after them."""
    tile: int
    """Columns whose scores are computed at once, unless it has to be careful."""
    registers: int
    chunks: int

    @property
    def rows(self) -> int:
        """Tokens of a program."""
        return 16 * self.warps

    @property
    def loading_registers(self) -> int:
        """Of a thread of the loading warp."""
        return _left_over(self.streams * self.warps // 4, self.registers)


@dataclass(frozen=True)
class RowsPlan:
    """How warpgroups share the keys, and programs the windows, for the gradients by rows."""

    launches: int
    """Each takes the next ``shares * keys`` keys."""
    shares: int
    keys: int
    """Of a share."""
    stages: int
    buffers: int
    """Of the shares' parts of a window's result."""
    registers: int
    chunks: int

    @property
    def box(self) -> int:
        """Keys of a copy, which brings a power of two."""
        return self.keys & -self.keys

    @property
    def loading_registers(self) -> int:
        """Of a thread of the loading warp."""
        return _left_over(self.shares, self.registers)


@dataclass(frozen=True)
class OneTilePlan:
    """How programs share windows that are one tile each."""

    programs: int
    """Of a multiprocessor."""
    stages: int
    """Windows of a program that are in memory at once."""
    chunks: int

    @property
    def registers(self) -> int:
        """Of a thread: what programs of four warps leave each other, in eights."""
        return min(255, 65536 // self.programs // 128 // 8 * 8)


@functools.lru_cache(maxsize=1024)
def make_one_tile_plan(problem: Problem, device: DeviceInfo, is_backward: bool) -> OneTilePlan:
    """Choose programs and stages for a window of one tile, or for its gradients.

    Example:
        >>> import torch
        >>> problem = Problem(4096, 3, 49, 32, torch.float16)
        >>> make_one_tile_plan(problem, DeviceInfo("cuda", 132), is_backward=False)
        OneTilePlan(programs=5, stages=2, chunks=216)
    """
    tile = 2 * PIECE * find_width(problem.head_size)
    square = 2 * PIECE * PIECE  # weights, what they change by, and the bias
    operands, working = (3, 2 * tile) if not is_backward else (4, 2 * square)
    if is_backward and 3 * tile > working:  # results lie elsewhere
        working += 3 * tile
    fixed = square + working + 256 + _OF_SYSTEM
    most = _FORWARD_PROGRAMS
    if is_backward:
        most = next(most for tokens, most in _GRADIENT_PROGRAMS if problem.num_tokens <= tokens)
    for programs in range(most, 0, -1):
        stages = min(3, (_ALL_SHARED_BYTES // programs - fixed) // (operands * tile))
        if stages >= 2:
            break
    slots = max(1, programs * device.num_workers // problem.num_heads)
    rounds = max(1, -(-problem.num_windows // slots))
    return OneTilePlan(programs, stages, max(1, -(-problem.num_windows // rounds)))


def _left_over(warpgroups: int, registers: int) -> int:
    """What warpgroups leave of a multiprocessor's 65 536 registers, which go round in eights."""
    even = 65536 // (warpgroups + 1) // 128 // 8 * 8
    return (warpgroups + 1) * even - warpgroups * registers


@functools.lru_cache(maxsize=1024)
def make_plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """Choose tiles and programs of the forward kernel; None where bias leaves no room for keys.

    Example:
        >>> import torch
        >>> plan = make_plan(Problem(343, 6, 343, 16, torch.float16), DeviceInfo("cuda", 132))
        >>> plan.warps, plan.streams, plan.piece, plan.groups, plan.rest, plan.chunks
        (8, 3, 128, 2, 96, 7)
    """
    width = find_width(problem.head_size)
    marks = MARKS if problem.has_regions else 0
    return _cut(problem, device, _CUTS, 2 * (width + marks), 2 * (2 * width + marks))


@functools.lru_cache(maxsize=1024)
def make_columns_plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """The same for the gradients of keys and values, where tokens of a tile are keys."""
    width = find_width(problem.head_size)
    numbers = 2 * (2 * width + (MARKS if problem.has_regions else 0))
    cuts = _COLUMN_CUTS if width <= _NARROW else _COLUMN_CUTS[1:]
    return _cut(problem, device, cuts, numbers, numbers + 8)


@functools.lru_cache(maxsize=1024)
def make_rows_plan(problem: Problem, device: DeviceInfo) -> RowsPlan | None:
    """The same for the gradients of queries and bias, whose sums have to fit into registers.

    In as few launches as that takes, and of those the one with the fewest keys.

    Example:
        >>> import torch
        >>> plan = make_rows_plan(Problem(256, 4, 576, 32, torch.float16), DeviceInfo("cuda", 132))
        >>> plan.launches, plan.shares, plan.keys
        (2, 3, 96)
    """
    shares, keys, _ = _SHARES[0]
    most = -(-problem.num_tokens // (shares * keys))
    for launches, (shares, keys, registers) in itertools.product(range(1, most + 1), _SHARES):
        if problem.num_tokens <= launches * shares * keys:
            plan = _fit_rows(problem, device, launches, shares, keys, registers)
            if plan is not None:
                return plan
    return None


def _fit_rows(
    problem: Problem, device: DeviceInfo, launches: int, shares: int, keys: int, registers: int
) -> RowsPlan | None:
    """As many stages and buffers as there is room for; None if that is too few."""
    width = find_width(problem.head_size)
    numbers = 2 * (2 * width + (MARKS if problem.has_regions else 0))
    fixed = 2 * PIECE * shares * keys + Q_STAGES * PIECE * (numbers + 8) + 2 * _SMALL
    stage, buffer = shares * keys * numbers, shares * PIECE * width * 4
    free = _SHARED_BYTES - fixed - 2 * stage - buffer
    if free < 0:
        return None
    buffers = 1 + (free >= buffer)
    stages = min(4, 2 + (free - (buffers - 1) * buffer) // stage)
    tiles = -(-problem.num_tokens // PIECE) * problem.num_heads
    chunks = _share(tiles, problem.num_windows, 1, device.num_workers, _ROWS_SETUP)
    return RowsPlan(launches, shares, keys, stages, buffers, registers, chunks)


def _cut(
    problem: Problem,
    device: DeviceInfo,
    cuts: tuple[tuple[int, int, int, int], ...],
    row_bytes: int,
    piece_bytes: int,
) -> Plan | None:
    """The first of some cuts that fits; bytes of a token in a tile's rows and in a piece."""
    num_tokens = problem.num_tokens
    columns = _round_up(num_tokens, _LEAST)
    for warps, streams, registers, tiles in cuts:
        rows, piece = 16 * warps, PIECE * tiles
        if _round_up(num_tokens, rows) > _MOST_WASTED * _round_up(num_tokens, 64):
            continue
        fixed = rows * (2 * columns + streams * (Q_STAGES * row_bytes + 4)) + _SMALL
        stages = (_SHARED_BYTES - fixed) // (streams * piece * piece_bytes)
        if stages >= 2:
            owned = _round_up(num_tokens, rows) // rows * problem.num_heads
            chunks = _share(owned, problem.num_windows, streams, device.num_workers)
            few = registers < 112 and problem.dtype != torch.float16
            tile = _LEAST if few else PIECE  # as far as registers hold them
            return Plan(
                warps, streams, min(4, stages), Q_STAGES, piece, *divmod(columns, piece),
                tile, registers, chunks,
            )  # fmt: skip
    return None


def find_width(head_size: int) -> int:
    """Columns of a tile of queries, keys or values.

    Example:
        >>> find_width(8), find_width(24)
        (16, 32)
    """
    return max(16, 1 << (head_size - 1).bit_length())


def _share(tiles: int, num_windows: int, streams: int, num_workers: int, setup: float = 1.0) -> int:
    """Programs that share the windows of a tile, so that few multiprocessors wait at the end.

    ``setup``: what a program does besides, in rounds of windows: it makes its tile of bias.
    """

    def duration(chunks: int) -> float:
        waves = -(-tiles * chunks // num_workers)
        rounds = -(-num_windows // chunks) / streams
        return waves * (setup + max(1.0, rounds))

    most = max(1, num_windows)
    choices = {max(1, min(wave * num_workers // tiles, most)) for wave in range(1, _WAVES + 1)}
    return min(sorted(choices), key=duration)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
