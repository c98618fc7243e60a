"""Tile sizes of linear layers of few rows, and the rules for when they are faster than torch's."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ...device import DeviceInfo, cpu_features
from ...shapes import power_of_2
from ...tiles.types import FLOATS
from .problem import Problem

MOST_FEW = 4
"""Most rows that are multiplied without tensor cores."""
MOST_ROWS = 64
MOST_RESIDENT = 16
"""Rows up to which ``hopper`` is preferred; it takes 64."""
_FEW_ELEMENTS = 8192
"""Elements of the weight that a program of ``few_kernel`` has in registers: 16 KiB in 16 bits."""

# Measured on an H100, in bfloat16 (docs/lab-log.md): the largest weights for which the kernels here
# beat cuBLAS, and the conditions for larger ones.
_MOST_BYTES_FEW = 36 << 20
_MOST_BYTES_TILES = 16 << 20
_LEAST_COLUMNS_RESIDENT = 3200
_MOST_REGISTERS = 96
"""Registers per thread that the weight of a ``resident`` program may take."""
_WIDEST_NORM = 8192
_LEAST_COLUMNS_TILES = 2048
_LEAST_COLUMNS_HEAD = 65536
_MOST_ROWS_HOPPER_PARTS = 256
_MOST_ROWS_RING = 64
_RING_BYTES = 220 << 10
"""Bytes of the slots of a program of ``hopper_ring``: all of a multiprocessor's shared memory."""
_MOST_PROGRAMS = 132
"""Multiprocessors of a Hopper GPU."""
_LEAST_PROGRAMS = 96
"""Fewest 64-column tiles of a product that is not split into parts; fewer were not measured."""
_BYTES_AHEAD = 64 << 10
"""Bytes of weights that a program of ``hopper_ring`` prefetches to L2."""


class Plan(NamedTuple):
    """Tile sizes of a kernel."""

    kind: str
    """The kernel: ``few``, ``tiles``, ``resident`` or ``ring``."""
    tile_m: int
    """Rows of ``x`` of a program."""
    tile_n: int
    """Rows of the weight of a program; of a gated one as many of the gate and of the up rows."""
    tile_k: int
    """Columns that are loaded at a time."""
    num_warps: int
    stages: int = 1
    """Tiles of ``tiles`` in flight, or slots of ``ring``."""
    parts: int = 1
    """Split-K: ranges of columns, each for programs of its own."""
    ahead: int = 0
    """Tiles after those of the first slots that are prefetched to L2."""


def make_plan(problem: Problem, *, is_small: bool = False) -> Plan:
    """Tiles for a supported problem; a small GPU has less shared memory."""
    if _is_few(problem):
        return _plan_few(problem)
    plan = _plan_tiles(problem)
    return plan._replace(stages=2) if is_small else plan


def _is_few(problem: Problem) -> bool:
    rows = problem.num_rows
    if rows > MOST_FEW:
        return False
    is_forced = rows == 1 or problem.has_norm or problem.dtype.itemsize > 2
    return is_forced or (not problem.is_gated and problem.num_columns <= problem.size)


def _plan_few(problem: Problem) -> Plan:
    size = problem.size
    # One pass over whole rows, or passes of 2048 columns if that divides them.
    width = power_of_2(size)
    if width > 4096 or (size == 4096 and problem.num_rows == 1):
        width = 2048 if size % 2048 == 0 or size > 8192 else 4096
    elements = _FEW_ELEMENTS if width >= size else _FEW_ELEMENTS // 2 * (1 + problem.is_gated)
    tile_n = max(1, min(16, elements // (width * (1 + problem.is_gated))))
    return Plan("few", problem.num_rows, tile_n, width, num_warps=4)


def _plan_tiles(problem: Problem) -> Plan:
    is_wide = problem.num_columns >= _LEAST_COLUMNS_HEAD
    tile_m = 32 if is_wide and 16 < problem.num_rows <= 32 else _rows_of_tile(problem)
    tile_n = 64 if is_wide and tile_m == 64 else 32
    if (is_wide and tile_m < 64) or problem.num_columns < _LEAST_COLUMNS_TILES:
        tile_n = 16
    tile_k = 256 if tile_m == 16 else 128
    while tile_k > 32 and tile_k >= 2 * problem.size:
        tile_k //= 2
    num_warps = 2 if tile_m == 16 and not problem.is_gated else 4
    return Plan("tiles", tile_m, tile_n, tile_k, num_warps, stages=5)


def plan_resident(problem: Problem) -> Plan | None:
    """Tiles of ``resident_kernel``; ``None`` if the weight does not fit in registers."""
    tile_m = 8 if problem.num_rows <= 8 else 16  # more do not fit into registers
    num_warps, tile_k = 8, 128 if problem.size % 1024 == 0 else 64
    tile_n = 16 if problem.is_gated or problem.num_columns < _LEAST_COLUMNS_RESIDENT else 32
    chunks = -(-problem.size // (num_warps * tile_k))
    registers = (1 + problem.is_gated) * tile_n * chunks * tile_k // 64
    if registers > _MOST_REGISTERS:
        return None
    return Plan("resident", tile_m, tile_n, tile_k, num_warps)


@functools.lru_cache(maxsize=4096)
def is_resident(problem: Problem, device: DeviceInfo) -> bool:
    """Whether ``hopper`` is faster than a product, norm and residual in separate launches."""
    return (
        0 < problem.num_rows <= MOST_RESIDENT
        and problem.dtype.itemsize == 2
        and problem.size % 8 == 0
        and _is_hopper(device)
        and problem.num_bytes <= _MOST_BYTES_TILES
        and plan_resident(problem) is not None
    )


def _rows_of_tile(problem: Problem) -> int:
    """16 rows, or 64 as of ``wgmma``; with 32 a layer takes 1.5 times as long as with 64 (H200)."""
    return 16 if problem.num_rows <= 16 else 64


def plan_parts(problem: Problem) -> Plan:
    """Tiles of a split-K product, whose parts the next kernel sums."""
    tile_m = _rows_of_tile(problem)
    tile_k = 128
    while problem.size % tile_k:
        tile_k //= 2
    parts = 1
    programs = -(-problem.num_columns // 32)
    while parts < 8 and programs * parts < 200 and problem.size % (2 * parts * tile_k) == 0:
        parts *= 2
    return Plan("tiles", tile_m, 32, tile_k, num_warps=4, stages=4, parts=parts)


def plan_hopper_parts(problem: Problem) -> Plan:
    """Tiles of a split-K product by ``ring_kernel``.

    With up to 64 rows all of a program's operands are in flight at once if they fit, and two
    programs fit on a multiprocessor. With more rows one program with six slots is enough. A large
    weight is streamed, in as many parts as give most multiprocessors a program.
    """
    if problem.num_bytes > _MOST_BYTES_TILES and problem.num_rows <= _MOST_ROWS_RING:
        parts, programs = 1, -(-problem.num_columns // 64)
        while 2 * parts * programs <= _MOST_PROGRAMS and problem.size % (256 * parts) == 0:
            parts *= 2
        return _plan_stream(problem, 64, parts)
    is_tall = problem.num_rows > 64
    tile_n, tile_k, most, stages = (128, 64, 4, 6) if is_tall else (64, 128, 8, 3)
    parts = 1
    while parts < most and problem.size % (2 * parts * tile_k) == 0:
        parts *= 2
    chunks = -(-problem.size // (parts * tile_k))
    return Plan("ring", 64, tile_n, tile_k, 4, stages=min(chunks, stages), parts=parts,
                ahead=chunks)  # fmt: skip


def plan_ring(problem: Problem) -> Plan:
    """Tiles of ``ring_kernel``.

    A program computes 128 columns if tiles of 64 would be more than multiprocessors, except for a
    gated product of more than 32 rows, which would have only five slots.
    """
    is_tall = problem.is_gated and problem.num_rows > 32
    is_wide = -(-problem.num_columns // 64) > _MOST_PROGRAMS and not is_tall
    return _plan_stream(problem, 128 if is_wide else 64, 1)


def _plan_stream(problem: Problem, tile_n: int, parts: int) -> Plan:
    """Slots of at most 32 KiB of the weight, as many as fit in shared memory.

    If a multiprocessor gets many programs, as for an output head, two share it: one loads its
    first weights while the other ends.
    """
    tile_m = next(rows for rows in (8, 16, 32, 64) if problem.num_rows <= rows or rows == 64)
    rows = tile_n * (1 + problem.is_gated)
    tile_k = 128 if rows <= 64 else 64
    slot = (rows + tile_m) * tile_k * problem.dtype.itemsize
    chunks = -(-problem.size // (parts * tile_k))
    sharing = 2 if -(-problem.num_columns // tile_n) * parts > 4 * _MOST_PROGRAMS else 1
    ahead = 0 if sharing > 1 else _BYTES_AHEAD // (rows * tile_k * problem.dtype.itemsize)
    stages = min(chunks, _RING_BYTES // sharing // slot)
    return Plan("ring", tile_m, tile_n, tile_k, 4, stages, parts, ahead)


@functools.lru_cache(maxsize=4096)
def is_faster_in_parts_on_hopper(problem: Problem, device: DeviceInfo) -> bool:
    """Whether ``partial_products`` by ``hopper_ring`` is faster than other implementations."""
    if not _is_hopper(device) or problem.dtype.itemsize != 2:
        return False
    if problem.num_bytes > _MOST_BYTES_TILES:
        is_taken = -(-problem.num_columns // 64) < _LEAST_PROGRAMS and _is_streamed(problem, device)
    else:
        is_taken = (
            MOST_RESIDENT < problem.num_rows <= _MOST_ROWS_HOPPER_PARTS
            and problem.num_columns < _LEAST_COLUMNS_TILES
        )
    return is_taken and plan_hopper_parts(problem).parts > 1


@functools.lru_cache(maxsize=4096)
def is_faster_in_ring(problem: Problem, device: DeviceInfo) -> bool:
    """Whether ``hopper_ring`` is faster than torch's product and a separate activation."""
    return -(-problem.num_columns // 64) >= _LEAST_PROGRAMS and _is_streamed(problem, device)


def _is_hopper(device: DeviceInfo) -> bool:
    return device.kind == "cuda" and device.capability[0] == 9


def _is_streamed(problem: Problem, device: DeviceInfo) -> bool:
    """Whether the weight is too large to stay on the chip and the rows are few."""
    return (
        _is_hopper(device)
        and problem.dtype.itemsize == 2
        and problem.size % 8 == 0
        and 1 < problem.num_rows <= _MOST_ROWS_RING
        and problem.num_bytes > _MOST_BYTES_TILES
    )


@functools.lru_cache(maxsize=4096)
def is_faster_in_parts(problem: Problem) -> bool:
    """Whether ``partial_products`` is faster than a product without split-K."""
    return (
        MOST_FEW < problem.num_rows <= MOST_ROWS
        and problem.dtype.itemsize == 2
        and problem.size % 64 == 0
        and problem.num_columns < _LEAST_COLUMNS_TILES
        and problem.num_bytes <= _MOST_BYTES_TILES
        and plan_parts(problem).parts > 1
    )


_MOST_ROWS_CPU = 64
_MOST_ROWS_WITH = {torch.bfloat16: ("amx-bf16", 4), torch.float16: ("avx512fp16", 16)}
"""By type: instructions that torch uses where the CPU has them, and the rows up to which it is
slower even so (measured on a Xeon, weights 4096 x 4096)."""
_LEAST_BYTES_CPU = {4: 1 << 18, 2: 1 << 16}
"""Bytes of a weight, by element size: below that, the call takes longer than the product."""


@functools.lru_cache(maxsize=4096)
def is_faster_on_cpu(problem: Problem) -> bool:
    """Whether ``cpu`` takes less time than torch's product (measured on two cores of a Zen 4)."""
    dtype, rows = problem.dtype, problem.num_rows
    if dtype not in FLOATS or problem.size % 32 or rows < 1:
        return False
    is_one_of_float32 = rows == 1 and dtype == torch.float32  # where torch is at its best
    least = _LEAST_BYTES_CPU[dtype.itemsize] * (4 if is_one_of_float32 else 1)
    return rows <= _most_rows_on_cpu(dtype) and problem.num_bytes >= least


def _most_rows_on_cpu(dtype: torch.dtype) -> float:
    """Up to how many rows ``cpu`` is faster.

    On x86 torch multiplies float16, and without AVX-512 bfloat16, number by number: any number of
    rows is faster here.
    """
    features = cpu_features()
    unit, most = _MOST_ROWS_WITH.get(dtype, ("", 0))
    if unit in features:
        return most
    is_slow = dtype == torch.float16 or (dtype == torch.bfloat16 and "avx512bw" not in features)
    return math.inf if is_slow and "sse2" in features else _MOST_ROWS_CPU


@functools.lru_cache(maxsize=4096)
def is_faster(problem: Problem) -> bool:
    """Whether ``triton`` is faster than torch's product, norm and epilogue."""
    num_rows, size, num_columns, dtype = problem[:4]
    if not 0 < num_rows <= MOST_ROWS or dtype == torch.float64 or size * dtype.itemsize % 16:
        return False
    num_bytes = problem.num_bytes
    if problem.has_norm:
        most = 2 if num_bytes <= _MOST_BYTES_FEW else 1
        return num_rows <= most and size <= _WIDEST_NORM
    if num_rows == 1:
        return True
    if num_rows <= MOST_FEW and num_bytes <= _MOST_BYTES_FEW:
        return True
    if dtype.itemsize > 2:
        return False
    if num_columns >= _LEAST_COLUMNS_HEAD:
        return num_rows <= 32
    return num_bytes <= _MOST_BYTES_TILES and num_columns >= _LEAST_COLUMNS_TILES
