"""Launch plans of the kernel for shared prefixes."""

from __future__ import annotations

from ....device import DeviceInfo
from ....shapes import power_of_2
from ..problem import Problem
from .decode import MERGED_AT_ONCE
from .gpu_plan import FEW_ROWS, GpuPlan
from .prefill import choose_prefill_tiles

PREFIX_ROWS = 64
"""Most rows of a tile of the kernel for shared prefixes: with 64, two CTAs fit a multiprocessor."""

MOST_PREFIX_SPLITS = 32
"""Most splits of a shared prefix; for every token the merge reads the state of each."""


def make_prefix_plan(problem: Problem, device: DeviceInfo, num_rows: int) -> GpuPlan:
    """Choose the tiles of the kernel for shared prefixes.

    Two CTAs on a multiprocessor hide each other's loads where both fit.

    Args:
        problem: A call.
        device: A GPU, or a CPU that interprets.
        num_rows: At least the most rows (new tokens × group) of sequences that share a prefix.
    """
    tiles = choose_prefill_tiles(problem, device)
    most = min(tiles.tile_m, PREFIX_ROWS)
    tile_m = min(most, max(FEW_ROWS, power_of_2(num_rows)))
    tile_n, num_stages = tiles.tile_n, tiles.num_stages
    if tile_m == PREFIX_ROWS and problem.width <= 128 and tile_n == 64:
        # There are free registers, and splits become more equal.
        tile_n, num_stages = 32, 4
    return GpuPlan(
        "prefix",
        tile_m=tile_m,
        tile_n=tile_n,
        num_warps=tiles.num_warps if most == tiles.tile_m else 4,
        num_stages=num_stages,
        num_programs=device.num_workers * (2 if problem.width <= 128 else 1),
    )


def choose_prefix_splits(problem: Problem, plan: GpuPlan, num_keys: int) -> int:
    """Return the most splits of a prefix, of which the kernel chooses a number.

    Enough to give every CTA one split if all tokens belong to one group; twice as many up to 16,
    which a merge loads at once, since other tokens may belong to no group.

    Args:
        problem: A call.
        plan: The plan of ``make_prefix_plan``.
        num_keys: At least the longest prefix.
    """
    tiles = -(-problem.num_tokens * problem.group // plan.tile_m) * problem.num_kv_heads
    fitting = plan.num_programs // max(1, tiles)
    most = max(fitting, min(2 * fitting, MERGED_AT_ONCE))
    return max(1, min(most, -(-num_keys // plan.tile_n), MOST_PREFIX_SPLITS))
