"""Launch plans of the decode kernels: tiles, and how the keys of sequences are split."""

from __future__ import annotations

from dataclasses import replace

from ....device import DeviceInfo
from ....shapes import power_of_2
from ..problem import Problem
from .decode_tiles import DecodeTiles, choose_decode_tiles
from .gpu_plan import FEW_ROWS, GPU_SPLIT_SIZE, ROWS_OF_WARPGROUP, GpuPlan

MERGING_CTAS = 4
"""Most CTAs of a merge per multiprocessor: more are slower than more rows of each."""

WIDE_MERGING_CTAS = 14
"""The same if most heads have several wide splits, of which few rows are loaded at once."""

LEAST_SIZE = 128
"""Fewest keys of a CTA that make up for storing and merging the state of many rows."""

MERGED_AT_ONCE = 16
"""Partial states that a merge holds in registers; half of them are still being loaded."""

MOST_MERGED = 32
"""Up to this many splits one CTA merges all; more may be merged in groups first, which takes
another round of stores, counting and loads (2 µs)."""

WHOLE_SIZE = 256
"""Keys that a CTA reads in the time that merging two splits takes."""

_MANY_SPLITS = 8
"""CTAs per KV head of a sequence from which on its splits are many."""

_BUSY_BYTES = 60 << 10
"""Bytes in flight of a CTA alone on its multiprocessor, without the tile being computed."""


def make_decode_plan(
    problem: Problem, device: DeviceInfo, *, batch_invariant: bool, hopper: bool
) -> GpuPlan:
    """Return the plan of a decode kernel: see ``make_gpu_plan``."""
    # For a batch-invariant result, choose the tiles of one sequence.
    asked = replace(problem, num_seqs=1) if batch_invariant else problem
    tiles = choose_decode_tiles(asked, device, hopper)
    problem = problem.join_kv_heads(tiles.tile_heads)
    pairs = problem.num_seqs * problem.num_kv_heads
    is_many = problem.rows > FEW_ROWS
    is_wide = hopper and is_many and 64 < problem.width <= 128 and pairs <= device.num_workers
    # If wide heads are split, one CTA keeps the memory busy, and there are half as many states to
    # store and merge.
    programs = 1 if is_wide else tiles.programs
    num_programs = _align(programs * device.num_workers, pairs)
    plan = GpuPlan(
        "decode",
        tile_m=ROWS_OF_WARPGROUP if hopper and is_many else max(FEW_ROWS, power_of_2(problem.rows)),
        tile_n=tiles.tile_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        num_programs=num_programs,
        max_registers=tiles.max_registers,
        fetch_registers=tiles.fetch_registers,
        tile_heads=tiles.tile_heads,
    )
    if batch_invariant:
        return replace(plan, split_size=GPU_SPLIT_SIZE, merge_rows=8 if is_many else 0)
    has_many_splits = pairs * _MANY_SPLITS <= num_programs * tiles.programs // programs
    plan = replace(
        plan,
        whole_size=WHOLE_SIZE if has_many_splits else 2 * WHOLE_SIZE,
        short_split_size=0 if has_many_splits else WHOLE_SIZE,
    )
    if is_many:
        return replace(
            plan,
            halving_size=4 * tiles.tile_n if programs == 2 else 0,
            least_size=LEAST_SIZE,
            merge_rows=_choose_merge_rows(problem, device, is_wide),
        )
    if hopper and tiles.programs == 2 and has_many_splits:
        return replace(plan, halving_size=_choose_halving_size(problem, tiles))
    return plan


def _choose_halving_size(problem: Problem, tiles: DecodeTiles) -> int:
    """Return with how few keys a CTA a multiprocessor gets one CTA instead of two.

    Merging many short splits of a head takes longer than reading them, and so does waiting until a
    second CTA fits beside the previous kernel's. One CTA is enough if its tiles in flight keep the
    memory busy.
    """
    row_bytes = (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
    keys = tiles.num_stages * tiles.tile_n * tiles.tile_heads
    return 768 if keys * row_bytes >= _BUSY_BYTES else tiles.tile_n


def fit_to_prefill(
    plan: GpuPlan, prefill: GpuPlan, problem: Problem, device: DeviceInfo
) -> GpuPlan:
    """Return the plan of a decode that overlaps a prefill, with a suitable number of CTAs.

    A CTA of the prefill occupies a multiprocessor. If few have tiles, decode gets the others, so
    that none of its CTAs waits. If all have several, CTAs of decode start one after the other, and
    smaller ones end at about the same time.

    Args:
        plan: The plan of the short sequences of a mixed batch.
        prefill: The plan of the others.
        problem: The call.
        device: A Hopper GPU.
    """
    rows = max(0, problem.num_tokens - problem.num_seqs) * problem.group
    tiles = -(-rows // prefill.tile_m) * problem.num_kv_heads
    num_programs = plan.num_programs
    if 2 * tiles <= device.num_workers:
        num_programs -= num_programs * tiles // device.num_workers
    elif tiles >= 4 * device.num_workers:
        num_programs *= 2
    return replace(plan, num_programs=num_programs)


def _choose_merge_rows(problem: Problem, device: DeviceInfo, is_wide: bool) -> int:
    """Return how many rows of a head a CTA merges: as few as let all CTAs run at once."""
    ctas = WIDE_MERGING_CTAS if is_wide else MERGING_CTAS
    pairs, rows = max(1, problem.num_seqs * problem.num_kv_heads), 1
    while rows < problem.rows and pairs * -(-problem.rows // rows) > ctas * device.num_workers:
        rows *= 2
    return rows


def _align(programs: int, pairs: int) -> int:
    """Return nearly as many CTAs, so that CTA ranges end where heads do if lengths are equal.

    ``pairs`` is the number of (sequence, KV head) pairs of a batch. A range that ends within a
    head costs a state that is stored and merged, and one state more than a merge loads at once
    costs as much as many.
    """
    if pairs < programs:
        splits = programs // max(1, pairs)
        loaded = MERGED_AT_ONCE // 2
        whole = splits // loaded * loaded
        fitting = (whole if whole >= 0.95 * splits else splits) * pairs
    else:
        fitting = next(n for n in range(programs, 0, -1) if pairs % n == 0)
    # With many heads per CTA few of them are cut, so using every multiprocessor matters more.
    # With unequal lengths, ranges end within heads anyway.
    return fitting if fitting >= 0.95 * programs and pairs <= 4 * programs else programs
