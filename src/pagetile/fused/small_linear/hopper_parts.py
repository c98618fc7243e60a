"""Partial products of some dozens to hundreds of rows, whose weights are asked for before the wait.

::

    parts[p, m, n] = sum of x[m, k] * weight[n, k] over the p-th range of k

    copies     weights of the first slots | wait | x, then x and weights as slots fall free
    products                              | wait |     of one slot after the other, then stores

A program has ``TILE_M`` rows of ``x``, ``TILE_N`` rows of the weight and one of ``PARTS`` ranges.
A slot holds ``BOXES`` boxes of 64 numbers of each row. Copies are made by the tensor memory
accelerator, products by ``wgmma`` from shared memory. Copies of weights into the first slots start
while the previous kernel runs, and a hint brings the rest of them to the second-level cache.

Products of one plan accumulate in the same order whatever the number of rows is. Supports float16
and bfloat16, any number of rows, on Hopper GPUs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...errors import UnsupportedError
from ...tiles.hopper.gluon_launcher import GluonLauncher, align
from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.triton.launch import POINTERS
from .hopper import refuse
from .plan import Plan, plan_hopper_parts
from .problem import Problem

supports = refuse

_BOX = gl.constexpr(64)  # numbers of a row that a swizzled line of 128 bytes holds


@gluon.constexpr_function
def _hint(num_bytes):
    return f"cp.async.bulk.prefetch.L2.global [$1], {int(num_bytes)}; mov.u32 $0, 0;"


@gluon.jit
def _prefetch(
    weight, row, num_rows, k, K: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Bring ``BYTES`` of each of ``ROWS`` rows to the second-level cache."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.minimum(row + gl.arange(0, ROWS, lanes), num_rows - 1)
    gl.inline_asm_elementwise(
        _hint(BYTES), "=r,l", [weight + row.to(gl.int64) * K + k],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load(
    desc, ring, full, chunk, row, start, more, STAGES: gl.constexpr, BOXES: gl.constexpr
):  # fmt: skip
    """Start the copies of a chunk of rows into its slot, if there is one more."""
    slot = chunk % STAGES
    for box in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(
            desc, [row, start + (chunk * BOXES + box) * _BOX], full.index(slot),
            ring.index(slot * BOXES + box), pred=more,
        )  # fmt: skip


@gluon.jit
def parts_kernel(
    out,  # float32 [PARTS, num_rows, num_columns]
    x_desc,  # [num_rows, K] in boxes of [TILE_M, 64]
    w_desc,  # [num_columns, K] in boxes of [TILE_N, 64]
    weight,  # the same
    num_rows,
    num_columns,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """See the module. Grid: tiles of columns × tiles of rows × parts."""
    dtype: gl.constexpr = x_desc.dtype
    RANGE: gl.constexpr = K // PARTS
    CHUNK: gl.constexpr = BOXES * _BOX
    CHUNKS: gl.constexpr = (RANGE + CHUNK - 1) // CHUNK
    BYTES: gl.constexpr = (TILE_M + TILE_N) * CHUNK * 2
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * BOXES, TILE_M, _BOX], swizzled)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES * BOXES, TILE_N, _BOX], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
    fence_async_shared()
    barrier()
    n, m, part = gl.program_id(0) * TILE_N, gl.program_id(1) * TILE_M, gl.program_id(2)
    start = part * RANGE

    # What the previous kernel does not write.
    for chunk in gl.static_range(min(STAGES, CHUNKS)):
        mbarrier.expect(full.index(chunk), BYTES)
        _load(w_desc, w_ring, full, chunk, n, start, True, STAGES, BOXES)
    if CHUNKS > STAGES:
        HELD: gl.constexpr = STAGES * CHUNK
        _prefetch(weight, n, num_columns, start + HELD, K, 2 * (RANGE - HELD), TILE_N, WARPS)
    gdc_launch_dependents()
    gdc_wait()

    for chunk in gl.static_range(min(STAGES, CHUNKS)):
        _load(x_desc, x_ring, full, chunk, m, start, True, STAGES, BOXES)
    sums: gl.constexpr = product_layout(TILE_N, WARPS)
    y = gl.zeros([TILE_M, TILE_N], gl.float32, sums)
    for chunk in range(CHUNKS):
        slot = chunk % STAGES
        mbarrier.wait(full.index(slot), chunk // STAGES & 1)
        for box in gl.static_range(BOXES):
            tile = w_ring.index(slot * BOXES + box).permute((1, 0))
            y = warpgroup_mma(x_ring.index(slot * BOXES + box), tile, y, is_async=True)
        y = warpgroup_mma_wait(BOXES, deps=(y,))
        if CHUNKS > STAGES:
            # All warps have read the slot of the chunk before: it gets another one.
            barrier()
            following = chunk - 1 + STAGES
            more = (chunk > 0) & (following < CHUNKS)
            mbarrier.expect(full.index(following % STAGES), BYTES, pred=more)
            _load(x_desc, x_ring, full, following, m, start, more, STAGES, BOXES)
            _load(w_desc, w_ring, full, following, n, start, more, STAGES, BOXES)
    y = warpgroup_mma_wait(0, deps=(y,))

    row = m + gl.arange(0, TILE_M, gl.SliceLayout(1, sums))
    column = n + gl.arange(0, TILE_N, gl.SliceLayout(0, sums))
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    out += part.to(gl.int64) * num_rows * num_columns
    gl.store(out + row.to(gl.int64)[:, None] * num_columns + column[None, :], y, mask=inside)


def run_parts(x: Tensor, weight: Tensor) -> Tensor:
    """One launch."""
    size = x.shape[-1]
    num_rows, num_columns = x.numel() // size, weight.shape[0]
    plan = plan_hopper_parts(Problem(num_rows, size, num_columns, x.dtype))
    out = x.new_empty(plan.parts, *x.shape[:-1], num_columns, dtype=torch.float32)
    launcher = make_launcher(plan, x.dtype, size, is_even=num_columns % 8 == 0)
    grid = -(-num_columns // plan.tile_n), -(-num_rows // plan.tile_m), plan.parts
    if weight.data_ptr() % 16:  # the kernel would read a copy before it is made
        raise UnsupportedError("hopper_parts: weight does not begin at a multiple of 16 bytes")
    rows = align(x.reshape(num_rows, size))
    launcher(grid, out, rows, weight, weight, num_rows, num_columns)
    return out


@functools.lru_cache(maxsize=1024)
def make_launcher(plan: Plan, dtype: torch.dtype, size: int, *, is_even: bool) -> GluonLauncher:
    """The kernel for a plan and rows of ``size``; ``is_even``: columns are a multiple of 8."""
    name, box = POINTERS[dtype][1:], _BOX.value
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    types = {
        "out": "*fp32:16",
        "x_desc": f"tensordesc<{name}{[plan.tile_m, box]},{layout!r}>",
        "w_desc": f"tensordesc<{name}{[plan.tile_n, box]},{layout!r}>",
        "weight": f"*{name}:16",
        "num_rows": "i32",
        "num_columns": "i32:8" if is_even else "i32",
    }
    constants = {
        "K": size, "PARTS": plan.parts, "TILE_M": plan.tile_m, "TILE_N": plan.tile_n,
        "BOXES": plan.tile_k // box, "STAGES": plan.stages, "WARPS": plan.num_warps,
    }  # fmt: skip
    return GluonLauncher(parts_kernel, types, constants, num_warps=plan.num_warps, launch_pdl=True)
