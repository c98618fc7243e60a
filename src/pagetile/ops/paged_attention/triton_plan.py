"""How the GPU kernels cut a problem: a pure function of host integers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...device import DeviceInfo
from ...tiles.forward_tiles import choose_forward_tiles
from .problem import Problem
from .triton_tiles import choose_tiles, is_float32

__all__ = [
    "GpuPlan",
    "make_gpu_plan",
    "power_of_2",
    "refuse_hopper",
    "refuse_unaligned",
    "short_len",
]

_HALVES = (torch.float16, torch.bfloat16)

DECODE_ROWS = 64
"""Up to so many rows (new tokens × group) of a sequence its keys are shared out over programs."""

HOPPER_ROWS = 16
"""Up to here by ``hopper_decode``."""

SHORT_ROWS = 16
"""Up to so many rows a sequence of a mixed batch is decode's, and no tile of prefill's."""

SPLIT_SIZE = 1024
"""Keys of one partial state where a result must not depend on the batch."""

MERGED_AT_ONCE = 16
"""Partial states that a merge has in registers, of few rows; half of them are on their way."""

_MANY_SHARES = 32


@dataclass(frozen=True)
class GpuPlan:
    """Tiles, and how a decoding sequence's keys are shared out.

    With ``split_size`` 0 every program gets as many tiles as the others, wherever that cuts a
    sequence: the fastest, and the same bits on every call with the same batch. Otherwise keys are
    cut at its multiples, and a sequence's result does not depend on its neighbours in the batch,
    as long as all batches have the same ``max_query_len``, which chooses kernels and tiles.
    """

    path: str
    """``"decode"`` or ``"prefill"``."""
    tile_m: int
    """Rows of a tile."""
    tile_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles on their way from memory at a time."""
    num_programs: int
    """Of a decode launch; a prefill launch has one a tile of rows."""
    joins_short_shares: bool = False
    """Whether half the programs take part where their shares would be short."""
    split_size: int = 0
    max_registers: int = 0
    """Of a thread; 0 leaves it to the compiler."""
    fetch_registers: int = 0
    """Of a thread that only fetches."""


def refuse_hopper(problem: Problem) -> str | None:
    """Why ``hopper_decode`` cannot run ``problem``, or None if it can."""
    q, kv = (str(dtype)[6:] for dtype in (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _HALVES:
        return f"q is {q}; float16 and bfloat16 run"
    if problem.kv_dtype != problem.q_dtype and problem.kv_dtype.itemsize != 1:
        return f"q is {q} but k_cache is {kv}: equal types, and 8 bits, run"
    if problem.rows > HOPPER_ROWS:
        return f"{problem.rows} rows of a sequence share a KV head; up to {HOPPER_ROWS} run"
    if problem.width > 256:
        return f"a head of {problem.width} is wider than 256"
    return refuse_unaligned(problem)


def refuse_unaligned(problem: Problem) -> str | None:
    """Why rows of the caches cannot be copied 16 bytes at a time, or None if they can."""
    unit = 16 // problem.kv_dtype.itemsize
    if problem.head_size % unit or problem.v_head_size % unit or not problem.is_aligned:
        return "rows of the caches do not begin at multiples of 16 bytes"
    return None


@functools.lru_cache(maxsize=4096)
def make_gpu_plan(
    problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False, hopper: bool = False
) -> GpuPlan:
    """Choose tiles and shares for a kernel.

    Args:
        problem: A call.
        device: A GPU, or a CPU that interprets.
        batch_invariant: Whether a sequence's result must not depend on its neighbours.
        hopper: Whether the plan is for ``hopper_decode``.

    Example:
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> make_gpu_plan(problem, DeviceInfo("cuda", 132, "NVIDIA H200")).path
        'decode'
    """
    if problem.rows > (16 if _is_bulky(problem) else DECODE_ROWS):
        return _plan_prefill(problem, device, batch_invariant)
    tiles = choose_tiles(problem, device, hopper)
    pairs = problem.num_seqs * problem.num_kv_heads
    num_programs = _align(tiles.programs * device.num_workers, pairs)
    # Many short shares of a head take longer to merge than to read: one on a multiprocessor then.
    merges_many = hopper and tiles.programs == 2 and pairs * _MANY_SHARES <= num_programs
    return GpuPlan(
        "decode",
        tile_m=max(16, power_of_2(problem.rows)),
        tile_n=tiles.tile_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        num_programs=num_programs,
        joins_short_shares=merges_many and not batch_invariant,
        split_size=SPLIT_SIZE if batch_invariant else 0,
        max_registers=tiles.max_registers,
        fetch_registers=tiles.fetch_registers,
    )


def _is_bulky(problem: Problem) -> bool:
    """Whether many rows of a decode tile leave no room for keys, or for their own results."""
    return problem.width > (128 if is_float32(problem) else 256)


def _align(programs: int, pairs: int) -> int:
    """Nearly as many programs, but so that shares end where heads do if all lengths are equal.

    ``pairs`` of a sequence and a KV head are the heads' number in a batch. A share that ends
    within a head costs a state that is stored and merged, and one more than a merge fetches at
    once costs as much as many.
    """
    if pairs < programs:
        shares = programs // max(1, pairs)
        fetched = MERGED_AT_ONCE // 2
        whole = shares // fetched * fetched
        fitting = (whole if whole >= 0.95 * shares else shares) * pairs
    else:
        fitting = next(n for n in range(programs, 0, -1) if pairs % n == 0)
    # With many heads a share few of them are cut, and every multiprocessor counts.
    return fitting if fitting >= 0.9 * programs and pairs <= 4 * programs else programs


def short_len(problem: Problem) -> int:
    """New tokens up to which a sequence of a prefill is left to decode; 0: all have as many.

    A tile of prefill's would be nearly empty, and one program would walk all keys.
    """
    is_mixed = problem.num_tokens < problem.num_seqs * problem.max_query_len
    return SHORT_ROWS // problem.group if is_mixed else 0


def _plan_prefill(problem: Problem, device: DeviceInfo, batch_invariant: bool) -> GpuPlan:
    tiles = choose_forward_tiles(
        problem.width,
        is_float32=is_float32(problem),
        is_8_bit=problem.kv_dtype.itemsize == 1,
        is_small=device.is_small,
    )
    split_size = SPLIT_SIZE if batch_invariant else 0  # of short sequences
    return GpuPlan("prefill", *tiles, num_programs=0, split_size=split_size)


def power_of_2(size: int) -> int:
    """The smallest that is not less than ``size``."""
    return 1 << max(0, size - 1).bit_length()
