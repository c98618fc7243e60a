"""Launch plans of the prefill kernels."""

from __future__ import annotations

import torch

from ....device import DeviceInfo
from ....tiles.forward_tiles import ForwardTiles, choose_forward_tiles
from ....tiles.hopper.dividing import divides_keys
from ....tiles.hopper.tiling import PACKED_FORMATS, tiling_of
from ..problem import Problem
from .gpu_plan import FEW_ROWS, GPU_SPLIT_SIZE, ROWS_OF_WARPGROUP, GpuPlan
from .unpacking import can_unpack, estimate

SHORT_ROWS = 8
"""Up to this many rows, a sequence of a mixed batch goes to the decode kernel, not to prefill. One
new token of up to 16 heads does, too. A decode kernel with room for 16 rows of every sequence is
slower, however many rows they have."""


def make_hopper_prefill_plan(
    problem: Problem,
    device: DeviceInfo,
    *,
    batch_invariant: bool = False,
    unpacks: bool | None = None,
) -> GpuPlan:
    """Return the tiles that ``tiles.hopper.forward`` is built with for a problem's heads.

    They depend on the head sizes, on whether it reads 8 bits and, for narrow heads and bfloat16
    scores with a cap, on ``divides_keys``. ``split_size`` is for the short sequences of a mixed
    batch: keys of others are not divided where a result must not depend on the batch.

    Args:
        problem: A call.
        device: A Hopper GPU.
        batch_invariant: Whether a sequence's result must not depend on its neighbours. Blocks are
            not unpacked then, which is chosen by all sequences' sizes.
        unpacks: Whether to unpack 8-bit blocks where there is room for that; None chooses.
    """
    sizes = problem.head_size, problem.v_head_size
    is_packed = problem.kv_dtype in PACKED_FORMATS
    is_capped = (
        problem.logits_soft_cap is not None and problem.q_dtype == torch.bfloat16 and not is_packed
    )
    short, wide = short_len(problem), tiling_of(*sizes, is_capped=is_capped)
    may_divide = not batch_invariant and divides_keys(
        wide,
        device.num_workers,
        num_seqs=problem.num_seqs,
        num_tokens=problem.num_tokens,
        max_query_len=problem.max_query_len,
        max_seq_len=problem.max_seq_len,
        num_heads=problem.num_heads,
        group=problem.group,
        short=short,
    )
    if unpacks is None:
        converting, unpacking = estimate(
            problem, device.num_workers, tile_m=ROWS_OF_WARPGROUP * wide.warpgroups, short=short,
            divides_keys=may_divide,
        )  # fmt: skip
        unpacks = not batch_invariant and unpacking < converting
    unpacks = unpacks and is_packed and can_unpack(problem, short)
    is_packed = is_packed and not unpacks
    tiling = tiling_of(*sizes, splits=may_divide, is_packed=is_packed, is_capped=is_capped)
    return GpuPlan(
        "prefill",
        tile_m=ROWS_OF_WARPGROUP * tiling.warpgroups,
        tile_n=tiling.tile_n,
        num_warps=4 * tiling.warpgroups,
        num_stages=tiling.stages,
        num_programs=device.num_workers,
        split_size=GPU_SPLIT_SIZE if batch_invariant else 0,
        max_registers=tiling.registers,
        divides_keys=may_divide,
        unpacks=unpacks,
    )


def make_triton_prefill_plan(
    problem: Problem, device: DeviceInfo, *, batch_invariant: bool
) -> GpuPlan:
    """Return the plan of Triton's prefill; ``split_size`` is for short sequences."""
    split_size = GPU_SPLIT_SIZE if batch_invariant else 0
    tiles = choose_prefill_tiles(problem, device)
    return GpuPlan("prefill", *tiles, num_programs=0, split_size=split_size)


def choose_prefill_tiles(problem: Problem, device: DeviceInfo) -> ForwardTiles:
    """Return the tiles of Triton's prefill."""
    return choose_forward_tiles(
        problem.width,
        is_float32=problem.multiplies_float32,
        is_8_bit=problem.kv_dtype.itemsize == 1,
        is_small=device.is_small,
    )


def short_len(problem: Problem) -> int:
    """Return the most new tokens of a sequence that goes to decode in a mixed batch; 0: none does.

    A prefill tile of so few rows would be nearly empty, and one CTA would read all its keys.
    """
    is_mixed = problem.num_tokens < problem.num_seqs * problem.max_query_len
    rows = SHORT_ROWS if problem.group <= SHORT_ROWS else FEW_ROWS
    return rows // problem.group if is_mixed else 0
