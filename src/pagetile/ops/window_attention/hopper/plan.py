"""Tile sizes, stages and work split of window attention on Hopper: pure functions of integers."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ....device import DeviceInfo
from ....shapes import power_of_2
from ..problem import Problem
from .constants import ONE_HOT_COLUMNS, ONE_TILE_TOKENS, PIECE, Q_STAGES

_LEAST_COLUMNS = 32  # of a matrix product
_SHARED_BYTES = 232_448  # shared memory that one program may allocate
_RESERVED_BYTES = 1024  # shared memory that the driver reserves for each program
_SM_SHARED_BYTES = _SHARED_BYTES + _RESERVED_BYTES
_SMALL_BYTES = 2048  # ones, barriers and warp-specialization state; more than the identity matrix
# (warps of a stream, streams, registers of a thread, products of a piece), fastest first (lab log).
# More warps hide more latency, but all of them share one multiprocessor's registers.
_FORWARD_TILINGS = ((8, 3, 80, 2), (8, 3, 80, 1), (4, 4, 112, 1), (4, 3, 160, 1), (4, 2, 232, 1))
_COLUMN_TILINGS = ((8, 3, 80, 1), (4, 3, 160, 1), (4, 2, 232, 1))
_NARROW = 16  # widest head whose column gradients fit into the registers of the first tiling
# (warpgroups, keys of each, registers of a thread), fewest keys first. With heads wider than 32,
# shared memory holds at most 64 keys for each of three warpgroups.
_ROW_TILINGS = (
    *((3, 32, 160), (4, 32, 112)),
    *((3, 64, 160), (4, 64, 112), (3, 96, 160), (3, 128, 160)),
)
_MOST_WASTED = 1.1  # padded rows of tiles of 128, relative to tiles of 64
_WAVES = 4
_ROWS_SETUP = 5.0  # start-up time of a row program in windows: it also writes its sums
# Programs of a multiprocessor where a window is one tile (measured): fewer programs leave each
# more registers, which is faster where a window has more to compute.
_FORWARD_PROGRAMS = 5
_GRADIENT_PROGRAMS = ((48, 3), (ONE_TILE_TOKENS, 2))  # (most tokens, programs)


@dataclass(frozen=True)
class Plan:
    """Tiling of the forward or the column kernel, and how many programs share the windows."""

    warps: int
    """Warps of a stream, which computes 16 rows for each of them."""
    streams: int
    stages: int
    """Pieces of a stream that are in shared memory at once."""
    q_stages: int
    piece: int
    """Columns that one copy fetches."""
    full_pieces: int
    last_piece: int
    """Columns after the full pieces."""
    tile: int
    """Columns whose scores are computed at once on the fast path."""
    registers: int
    chunks: int
    """Programs that share the windows of a row tile."""

    @property
    def rows(self) -> int:
        """Tokens of a program's row tile."""
        return 16 * self.warps

    @property
    def loading_registers(self) -> int:
        """Registers of a thread of the loading warp."""
        return _loading_registers(self.streams * self.warps // 4, self.registers)


@dataclass(frozen=True)
class RowsPlan:
    """How warpgroups split the keys, and programs the windows, in the row kernel."""

    launches: int
    """Each launch covers the next ``splits * keys`` keys."""
    splits: int
    keys: int
    """Keys of a split."""
    stages: int
    buffers: int
    """Buffers for the splits' partial results of a window."""
    registers: int
    chunks: int

    @property
    def box(self) -> int:
        """Keys of one copy, a power of two."""
        return self.keys & -self.keys

    @property
    def loading_registers(self) -> int:
        """Registers of a thread of the loading warp."""
        return _loading_registers(self.splits, self.registers)


@dataclass(frozen=True)
class OneTilePlan:
    """How programs share windows of one tile."""

    programs: int
    """Programs of a multiprocessor."""
    stages: int
    """Windows of a program that are in shared memory at once."""
    chunks: int

    @property
    def registers(self) -> int:
        """Register cap per thread for programs of four warps; allocated in units of eight."""
        return min(255, 65536 // self.programs // 128 // 8 * 8)


@functools.lru_cache(maxsize=1024)
def make_one_tile_plan(problem: Problem, device: DeviceInfo, is_backward: bool) -> OneTilePlan:
    """Choose programs and stages where a window is one tile, forward or backward.

    Examples:
        >>> import torch
        >>> problem = Problem(4096, 3, 49, 32, torch.float16)
        >>> make_one_tile_plan(problem, DeviceInfo("cuda", 132), is_backward=False)
        OneTilePlan(programs=5, stages=2, chunks=216)
    """
    tile = 2 * PIECE * padded_head_size(problem.head_size)
    square = 2 * PIECE * PIECE  # weights, their gradients, or the bias
    operands, working = (3, 2 * tile) if not is_backward else (4, 2 * square)
    if is_backward and 3 * tile > working:  # the results need memory of their own
        working += 3 * tile
    fixed = square + working + 256 + _RESERVED_BYTES
    most = _FORWARD_PROGRAMS
    if is_backward:
        most = next(most for tokens, most in _GRADIENT_PROGRAMS if problem.num_tokens <= tokens)
    for programs in range(most, 0, -1):
        stages = min(3, (_SM_SHARED_BYTES // programs - fixed) // (operands * tile))
        if stages >= 2:
            break
    slots = max(1, programs * device.num_workers // problem.num_heads)
    rounds = max(1, -(-problem.num_windows // slots))
    return OneTilePlan(programs, stages, max(1, -(-problem.num_windows // rounds)))


def _loading_registers(warpgroups: int, registers: int) -> int:
    """Registers that computing warpgroups leave of 65 536, in units of eight for each thread."""
    even = 65536 // (warpgroups + 1) // 128 // 8 * 8
    return (warpgroups + 1) * even - warpgroups * registers


@functools.lru_cache(maxsize=1024)
def make_plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """Choose the tiling of the forward kernel; None where the bias leaves no room for keys.

    Examples:
        >>> import torch
        >>> plan = make_plan(Problem(343, 6, 343, 16, torch.float16), DeviceInfo("cuda", 132))
        >>> plan.warps, plan.streams, plan.piece, plan.full_pieces, plan.last_piece, plan.chunks
        (8, 3, 128, 2, 96, 7)
    """
    width = padded_head_size(problem.head_size)
    one_hot = ONE_HOT_COLUMNS if problem.has_regions else 0
    row_bytes, piece_bytes = 2 * (width + one_hot), 2 * (2 * width + one_hot)
    return _fit_plan(problem, device, _FORWARD_TILINGS, row_bytes, piece_bytes)


@functools.lru_cache(maxsize=1024)
def make_columns_plan(problem: Problem, device: DeviceInfo) -> Plan | None:
    """Choose the tiling of the column kernel, whose row tiles are keys."""
    width = padded_head_size(problem.head_size)
    row_bytes = 2 * (2 * width + (ONE_HOT_COLUMNS if problem.has_regions else 0))
    tilings = _COLUMN_TILINGS if width <= _NARROW else _COLUMN_TILINGS[1:]
    return _fit_plan(problem, device, tilings, row_bytes, row_bytes + 8)


@functools.lru_cache(maxsize=1024)
def make_rows_plan(problem: Problem, device: DeviceInfo) -> RowsPlan | None:
    """Choose the tiling of the row kernel, whose bias gradient has to fit into registers.

    Takes the fewest launches, and among those tilings the one with the fewest keys.

    Examples:
        >>> import torch
        >>> plan = make_rows_plan(Problem(256, 4, 576, 32, torch.float16), DeviceInfo("cuda", 132))
        >>> plan.launches, plan.splits, plan.keys
        (2, 3, 96)
    """
    splits, keys, _ = _ROW_TILINGS[0]
    most = -(-problem.num_tokens // (splits * keys))
    for launches, (splits, keys, registers) in itertools.product(range(1, most + 1), _ROW_TILINGS):
        if problem.num_tokens <= launches * splits * keys:
            plan = _fit_rows_plan(problem, device, launches, splits, keys, registers)
            if plan is not None:
                return plan
    return None


def _fit_rows_plan(
    problem: Problem, device: DeviceInfo, launches: int, splits: int, keys: int, registers: int
) -> RowsPlan | None:
    """Use as many stages and buffers as fit into shared memory; None if fewer than needed do."""
    width = padded_head_size(problem.head_size)
    row_bytes = 2 * (2 * width + (ONE_HOT_COLUMNS if problem.has_regions else 0))
    fixed = 2 * PIECE * splits * keys + Q_STAGES * PIECE * (row_bytes + 8) + 2 * _SMALL_BYTES
    stage, buffer = splits * keys * row_bytes, splits * PIECE * width * 4
    free = _SHARED_BYTES - fixed - 2 * stage - buffer
    if free < 0:
        return None
    buffers = 1 + (free >= buffer)
    stages = min(4, 2 + (free - (buffers - 1) * buffer) // stage)
    tiles = -(-problem.num_tokens // PIECE) * problem.num_heads
    chunks = _choose_chunks(tiles, problem.num_windows, 1, device.num_workers, _ROWS_SETUP)
    return RowsPlan(launches, splits, keys, stages, buffers, registers, chunks)


def _fit_plan(
    problem: Problem,
    device: DeviceInfo,
    tilings: tuple[tuple[int, int, int, int], ...],
    row_bytes: int,
    piece_bytes: int,
) -> Plan | None:
    """The first tiling that fits into shared memory.

    Args:
        problem: What is to be computed.
        device: Where.
        tilings: Candidates, the fastest first.
        row_bytes: Bytes of a token of the row tile.
        piece_bytes: Bytes of a token of a piece.
    """
    num_tokens = problem.num_tokens
    columns = _round_up(num_tokens, _LEAST_COLUMNS)
    for warps, streams, registers, tiles in tilings:
        rows, piece = 16 * warps, PIECE * tiles
        if _round_up(num_tokens, rows) > _MOST_WASTED * _round_up(num_tokens, 64):
            continue
        fixed = rows * (2 * columns + streams * (Q_STAGES * row_bytes + 4)) + _SMALL_BYTES
        stages = (_SHARED_BYTES - fixed) // (streams * piece * piece_bytes)
        if stages >= 2:
            row_tiles = _round_up(num_tokens, rows) // rows * problem.num_heads
            chunks = _choose_chunks(row_tiles, problem.num_windows, streams, device.num_workers)
            has_few_registers = registers < 112 and problem.dtype != torch.float16
            tile = _LEAST_COLUMNS if has_few_registers else PIECE
            return Plan(
                warps, streams, min(4, stages), Q_STAGES, piece, *divmod(columns, piece),
                tile, registers, chunks,
            )  # fmt: skip
    return None


def padded_head_size(head_size: int) -> int:
    """Columns of a tile of queries, keys or values.

    Examples:
        >>> padded_head_size(8), padded_head_size(24)
        (16, 32)
    """
    return max(16, power_of_2(head_size))


def _choose_chunks(
    tiles: int, num_windows: int, streams: int, num_workers: int, setup: float = 1.0
) -> int:
    """How many programs share the windows of a tile, so that the last wave is nearly full.

    ``setup``: the start-up time of a program, mostly its tile of bias, in rounds of windows.
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
