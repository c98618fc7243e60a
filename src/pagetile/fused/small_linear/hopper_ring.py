"""Linear layers on Hopper whose weights stream through shared memory by TMA.

::

    y[m, n] = epilogue(sum_k x[m, k] * weight[n, k])
    parts[p, m, n] = sum of x[m, k] * weight[n, k] over the p-th range of k

    TMA        weights of the first slots | wait | x, then x and weights as slots are released
    wgmma                                 | wait |     slot by slot, then stores

Grid: tiles of ``TILE_N`` rows of the weight (of a gated one as many of the gate and of the up
projection) × tiles of ``TILE_M`` rows of ``x`` × ``PARTS`` ranges of K. A slot of the ring holds
``BOXES`` boxes of 64 columns. A ``wgmma`` has at least 64 rows on one side, so fewer rows of ``x``
are the other side (N) of the product.

Under programmatic dependent launch the first weights are copied while the previous kernel still
runs, and the next ``AHEAD`` chunks are prefetched to L2.

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

from ...device import DeviceInfo
from ...errors import UnsupportedError
from ...tiles.hopper.gluon_launcher import GluonLauncher, align
from ...tiles.hopper.layouts import product_layout
from ...tiles.hopper.names import barrier
from ...tiles.triton.launch import POINTERS
from ..rms_norm import Norm
from .hopper import refuse
from .plan import Plan, plan_hopper_parts, plan_ring
from .problem import Problem
from .triton import finish, load_biases, row_stride

_BOX = gl.constexpr(64)  # 16-bit elements of a swizzled row of 128 bytes


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = refuse(problem, device)
    if reason is None and problem.has_norm:
        reason = "a norm comes before the product"
    return reason


@gluon.constexpr_function
def _hint(num_bytes):
    return f"cp.async.bulk.prefetch.L2.global [$1], {int(num_bytes)}; mov.u32 $0, 0;"


@gluon.jit
def _prefetch(
    weight, row, num_rows, k, K: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Prefetch ``BYTES``, a multiple of 128, of each of ``ROWS`` rows to L2."""
    # At least one piece for each thread: replicated elements would be prefetched repeatedly.
    PIECES: gl.constexpr = max(1, 32 * WARPS // ROWS)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    piece = gl.arange(0, PIECES * ROWS, lanes)
    row = gl.minimum(row + piece // PIECES, num_rows - 1)
    at = row.to(gl.int64) * K + k + piece % PIECES * (BYTES // PIECES // 2)
    gl.inline_asm_elementwise(
        _hint(BYTES // PIECES), "=r,l", [weight + at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load(
    desc, ring, full, chunk, row, next_row, start, more, STAGES: gl.constexpr, BOXES: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """Start the TMA copies of a chunk of ``TILES`` tiles of rows into its slot, if ``more``."""
    slot = chunk % STAGES
    for tile in gl.static_range(TILES):
        for box in gl.static_range(BOXES):
            tma.async_copy_global_to_shared(
                desc, [row + tile * next_row, start + (chunk * BOXES + box) * _BOX],
                full.index(slot), ring.index((slot * TILES + tile) * BOXES + box), pred=more,
            )  # fmt: skip


@gluon.jit
def _multiply(x, weight, y, IS_NARROW: gl.constexpr):
    """Add the product of two boxes; ``IS_NARROW``: the result is ``[TILE_N, TILE_M]``."""
    if IS_NARROW:
        y = warpgroup_mma(weight, x.permute((1, 0)), y, is_async=True)
    else:
        y = warpgroup_mma(x, weight.permute((1, 0)), y, is_async=True)
    return y


@gluon.jit
def ring_kernel(
    out,  # [num_rows, num_columns], or partial products: float32 [PARTS, num_rows, num_columns]
    x_desc,  # [num_rows, K] in boxes of [TILE_M, 64]
    w_desc,  # [num_columns, K] in boxes of [TILE_N, 64], of a gated product [2 * num_columns, K]
    weight,  # the same
    bias,  # [num_columns], of a gated product [2 * num_columns]
    residual,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    residual_row,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    ACTIVATION: gl.constexpr,  # or ""
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
):
    """See the module docstring."""
    dtype: gl.constexpr = x_desc.dtype
    IS_PARTIAL: gl.constexpr = out.dtype.element_ty == gl.float32
    IS_NARROW: gl.constexpr = TILE_M < 64
    GATES: gl.constexpr = 2 if ACTIVATION != "" else 1
    RANGE: gl.constexpr = K // PARTS
    CHUNK: gl.constexpr = BOXES * _BOX
    CHUNKS: gl.constexpr = (RANGE + CHUNK - 1) // CHUNK
    BYTES: gl.constexpr = (TILE_M + GATES * TILE_N) * CHUNK * 2
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES * BOXES, TILE_M, _BOX], swizzled)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES * GATES * BOXES, TILE_N, _BOX], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
    fence_async_shared()
    barrier()
    n, m, part = gl.program_id(0) * TILE_N, gl.program_id(1) * TILE_M, gl.program_id(2)
    start = part * RANGE

    # Load what does not depend on the previous kernel.
    for chunk in gl.static_range(min(STAGES, CHUNKS)):
        mbarrier.expect(full.index(chunk), BYTES)
        _load(w_desc, w_ring, full, chunk, n, num_columns, start, True, STAGES, BOXES, GATES)
    HELD: gl.constexpr = STAGES * CHUNK
    SOON: gl.constexpr = min((RANGE - HELD) // _BOX * _BOX, AHEAD * CHUNK)
    if SOON > 0:
        for gate in gl.static_range(GATES):
            _prefetch(
                weight, n + gate * num_columns, GATES * num_columns, start + HELD, K, 2 * SOON,
                TILE_N, WARPS,
            )  # fmt: skip
    gdc_launch_dependents()

    # ``of_n``: the result's axis of weight rows; the other axis is rows of x.
    COLUMNS: gl.constexpr = TILE_M if IS_NARROW else TILE_N
    of_n: gl.constexpr = 0 if IS_NARROW else 1
    sums: gl.constexpr = product_layout(COLUMNS, WARPS)
    shape: gl.constexpr = [TILE_N, TILE_M] if IS_NARROW else [TILE_M, TILE_N]
    row = m + gl.arange(0, TILE_M, gl.SliceLayout(of_n, sums))
    column = n + gl.arange(0, TILE_N, gl.SliceLayout(1 - of_n, sums))
    row, column = gl.expand_dims(row, of_n), gl.expand_dims(column, 1 - of_n)
    is_column = column < num_columns
    inside = (row < num_rows) & is_column
    none = gl.zeros([1, 1], gl.float32, sums)
    y_bias, up_bias = load_biases(bias, column, num_columns, is_column, none, ACTIVATION, HAS_BIAS)
    gdc_wait()

    for chunk in gl.static_range(min(STAGES, CHUNKS)):
        _load(x_desc, x_ring, full, chunk, m, 0, start, True, STAGES, BOXES, 1)
    if HAS_RESIDUAL:
        at = residual + row.to(gl.int64) * residual_row + column
        added = gl.load(at, mask=inside, other=0.0).to(gl.float32)
    y = gl.zeros(shape, gl.float32, sums)
    up = y
    for chunk in range(CHUNKS):
        slot = chunk % STAGES
        mbarrier.wait(full.index(slot), chunk // STAGES & 1)
        for box in gl.static_range(BOXES):
            x_box, at_box = x_ring.index(slot * BOXES + box), slot * GATES * BOXES + box
            y = _multiply(x_box, w_ring.index(at_box), y, IS_NARROW)
            if GATES == 2:
                up = _multiply(x_box, w_ring.index(at_box + BOXES), up, IS_NARROW)
        if GATES == 2:
            y, up = warpgroup_mma_wait(2 * BOXES, deps=(y, up))
        else:
            y = warpgroup_mma_wait(BOXES, deps=(y,))
        if CHUNKS > STAGES:
            # All warps have read the previous chunk's slot, so it can be filled again.
            barrier()
            following = chunk - 1 + STAGES
            more = (chunk > 0) & (following < CHUNKS)
            mbarrier.expect(full.index(following % STAGES), BYTES, pred=more)
            _load(
                w_desc, w_ring, full, following, n, num_columns, start, more, STAGES, BOXES, GATES
            )
            _load(x_desc, x_ring, full, following, m, 0, start, more, STAGES, BOXES, 1)
    if GATES == 2:
        y, up = warpgroup_mma_wait(0, deps=(y, up))
    else:
        y = warpgroup_mma_wait(0, deps=(y,))

    if IS_PARTIAL:
        out += part.to(gl.int64) * num_rows * num_columns
    else:
        # Without this addition ptxas moves the conversions before the wait, and then makes every
        # product wait for the one before.
        y, up = y + 0.0, up + 0.0
        y = finish(y, up, y_bias, up_bias, dtype, ACTIVATION, HAS_BIAS)
        if HAS_RESIDUAL:
            y += added
    at = out + row.to(gl.int64) * num_columns + column
    gl.store(at, y.to(out.dtype.element_ty), mask=inside)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    """One launch."""
    size = x.shape[-1]
    num_rows = x.numel() // size
    num_columns = weight.shape[0] // (2 if activation else 1)
    plan = plan_ring(Problem(num_rows, size, num_columns, x.dtype, bool(activation)))
    out = x.new_empty(*x.shape[:-1], num_columns)
    _launch(plan, out, x, weight, bias, activation, residual)
    return out


def run_parts(x: Tensor, weight: Tensor) -> Tensor:
    """One launch."""
    size = x.shape[-1]
    num_rows, num_columns = x.numel() // size, weight.shape[0]
    plan = plan_hopper_parts(Problem(num_rows, size, num_columns, x.dtype))
    out = x.new_empty(plan.parts, *x.shape[:-1], num_columns, dtype=torch.float32)
    _launch(plan, out, x, weight)
    return out


def _launch(
    plan: Plan,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    residual: Tensor | None = None,
) -> None:
    size, num_columns = x.shape[-1], out.shape[-1]
    num_rows = x.numel() // size
    if weight.data_ptr() % 16:  # an aligned copy might be read before it is written
        raise UnsupportedError("hopper_ring: weight does not begin at a multiple of 16 bytes")
    launcher = make_launcher(
        plan, x.dtype, size, activation, bias is not None, residual is not None,
        is_partial=out.dtype == torch.float32, is_even=num_columns % 8 == 0,
    )  # fmt: skip
    grid = -(-num_columns // plan.tile_n), -(-num_rows // plan.tile_m), plan.parts
    rows = align(x.reshape(num_rows, size))
    # Absent tensors are never read, so any address will do.
    others = (x if tensor is None else tensor for tensor in (bias, residual))
    residual_row = 0 if residual is None else row_stride(residual)
    launcher(grid, out, rows, weight, weight, *others, num_rows, num_columns, residual_row)


@functools.lru_cache(maxsize=1024)
def make_launcher(
    plan: Plan,
    dtype: torch.dtype,
    size: int,
    activation: str = "",
    has_bias: bool = False,
    has_residual: bool = False,
    *,
    is_partial: bool,
    is_even: bool,
) -> GluonLauncher:
    """The launcher for a plan and rows of ``size``; ``is_even``: columns are a multiple of 8."""
    name, box = POINTERS[dtype][1:], _BOX.value
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    types = {
        "out": "*fp32:16" if is_partial else f"*{name}:16",
        "x_desc": f"tensordesc<{name}{[plan.tile_m, box]},{layout!r}>",
        "w_desc": f"tensordesc<{name}{[plan.tile_n, box]},{layout!r}>",
        "weight": f"*{name}:16",
        "bias": f"*{name}",
        "residual": f"*{name}",
        "num_rows": "i32",
        "num_columns": "i32:8" if is_even else "i32",
        "residual_row": "i32",
    }
    constants = {
        "K": size, "PARTS": plan.parts, "ACTIVATION": activation, "HAS_BIAS": has_bias,
        "HAS_RESIDUAL": has_residual, "TILE_M": plan.tile_m, "TILE_N": plan.tile_n,
        "BOXES": plan.tile_k // box, "STAGES": plan.stages, "AHEAD": plan.ahead,
        "WARPS": plan.num_warps,
    }  # fmt: skip
    return GluonLauncher(ring_kernel, types, constants, num_warps=plan.num_warps, launch_pdl=True)
