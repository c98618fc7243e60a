"""Linear layers of few rows on Hopper whose weights are loaded before the previous kernel ends.

::

    y[m, n] = epilogue(sum_k norm(x)[m, k] * weight[n, k])

    previous kernel   |=====================|
    this kernel             load the weight | load x, norm, product, sum over warps, epilogue

Grid: tiles of ``TILE_N`` rows of the weight (of a gated product as many of the gate and of the up
projection) × tiles of ``TILE_M`` rows of ``x``. The warps of a program split K: of every
``WARPS * TILE_K`` elements of a row, warp ``s`` loads range ``s`` into registers, in the layout of
a tensor core operand. After the wait for the previous kernel (programmatic dependent launch) only
``x`` is loaded, from L2.

Products accumulate in the same order whatever the number of rows is, so a row's result does not
depend on it. Supports float16 and bfloat16, up to 64 rows, on Hopper GPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import GluonLauncher
from ...tiles.triton.launch import INTERPRETED, POINTERS, Launch
from ...tiles.triton.norms import normalise
from ..rms_norm import Norm
from .plan import MOST_ROWS, Plan, plan_resident
from .problem import Problem
from .triton import finish, load_biases, row_stride

_MOST_NUMBERS = (1 << 31) - 1
"""Elements of a weight, at most: the kernel's offsets have 32 bits."""


def refuse(problem: Problem, device: DeviceInfo) -> str | None:
    """Why no kernel for Hopper can run, or None."""
    if device.kind != "cuda" or device.capability[0] != 9 or INTERPRETED:
        return "it runs on GPUs of compute capability 9"
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if not problem.is_regular:
        return "a tensor has gaps or another type than x"
    if problem.dtype.itemsize != 2:
        return f"the type is {problem.dtype}; float16 and bfloat16 run here"
    if problem.num_rows == 0:
        return "x has no rows"
    if problem.size % 8:
        return f"rows of {problem.size} numbers do not begin at multiples of 16 bytes"
    return None


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = refuse(problem, device)
    if reason is not None:
        return reason
    if problem.num_rows > MOST_ROWS:
        return f"x has {problem.num_rows} rows; 1 to {MOST_ROWS} run here"
    if (1 + problem.is_gated) * problem.num_columns * problem.size > _MOST_NUMBERS:
        return f"the weight has more than {_MOST_NUMBERS} numbers"
    if plan_resident(problem) is None:
        return f"rows of {problem.size} numbers do not fit into registers"
    return None


@gluon.jit
def _load(pointer, at, k, K: gl.constexpr, STEP: gl.constexpr):
    """Load rows of ``K`` elements as a tuple of chunks of ``STEP``, zeros past the end."""
    chunks = ()
    for start in gl.static_range(0, K, STEP):
        if start + STEP <= K:
            part = gl.load(pointer + start + at)
        else:
            part = gl.load(pointer + start + at, mask=start + k < K, other=0.0)
        chunks += (part,)  # type: ignore[assignment]
    return chunks


@gluon.jit
def _zero_after_loads():
    """Return 0 by a barrier that follows the loads, as the initial accumulator.

    Otherwise ptxas issues some loads after products that wait for others, and the latencies add up.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.u32 p, 0, 0; bar.red.popc.u32 $0, 0, p;}", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _row_layout(warps, tile_m):
    """Layout of sums ``[warps, tile_m]``: a thread holds all warps' sums of its rows of ``x``.

    These are rows ``lane // 4`` and every eighth after it, as of an operand of ``mma``.
    """
    registers, at = [], 1
    while at < warps:
        registers.append([at, 0])
        at *= 2
    at = 8
    while at < tile_m:
        registers.append([0, at])
        at *= 2
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    at, copies = 1, []
    while at < warps:
        copies.append([0, 0])
        at *= 2
    return gl.DistributedLinearLayout(registers, lanes, copies, [], [warps, tile_m])


@gluon.jit
def resident_kernel(
    out,  # [num_rows, num_columns]
    x,  # [num_rows, K]
    weight,  # [num_columns, K], of a gated product [2 * num_columns, K]
    norm_weight,  # [K]
    bias,  # [num_columns], of a gated product [2 * num_columns]
    residual,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    x_row,
    residual_row,
    eps,
    K: gl.constexpr,
    NORM: gl.constexpr,  # a kind of ``rms_norm``, or ""
    ACTIVATION: gl.constexpr,  # or ""
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    TILE_K: gl.constexpr,
    WARPS: gl.constexpr,
):
    """See the module docstring."""
    dtype: gl.constexpr = out.dtype.element_ty
    STEP: gl.constexpr = WARPS * TILE_K
    CHUNKS: gl.constexpr = (K + STEP - 1) // STEP
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 8)  # the weight, [WARPS, TILE_N, TILE_K]
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 8)  # x, [WARPS, TILE_K, TILE_M]
    # Rows of gate and up alternate in a tile. A thread holds both of a result, and the partial sums
    # of all warps.
    GATES: gl.constexpr = 1 if ACTIVATION == "" else 2
    TILE_W: gl.constexpr = GATES * TILE_N
    partial: gl.constexpr = gl.BlockedLayout(
        [WARPS, GATES, 1], [1, TILE_N, 32 // TILE_N], [1, 1, WARPS], [1, 2, 0]
    )
    result: gl.constexpr = gl.BlockedLayout(  # [TILE_N, TILE_M]
        [1, 1], [TILE_N, 32 // TILE_N], [1, WARPS], [0, 1]
    )
    first = gl.program_id(0) * TILE_N

    # Load what does not depend on the previous kernel.
    row = gl.arange(0, TILE_W, gl.SliceLayout(0, gl.SliceLayout(2, left)))
    # Rows past the end repeat the last one.
    row = gl.minimum(row // GATES, num_columns - 1 - first) + row % GATES * num_columns
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, left)))
    k = gl.arange(0, TILE_K, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    k = warp[:, None, None] * TILE_K + k[None, None, :]
    at = row[None, :, None] * K + k
    weight += first.to(gl.int64) * K
    tiles = _load(weight, at, k, K, STEP)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    k = gl.arange(0, TILE_K, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    k = warp[:, None, None] * TILE_K + k[None, :, None]
    if NORM != "":
        factors = _load(norm_weight, k, k, K, STEP)
    n = first + gl.arange(0, TILE_N, gl.SliceLayout(1, result))
    is_column = n < num_columns
    none = gl.zeros([TILE_N], gl.float32, gl.SliceLayout(1, result))
    y_bias, up_bias = load_biases(bias, n, num_columns, is_column, none, ACTIVATION, HAS_BIAS)
    gdc_launch_dependents()
    gdc_wait()

    m = gl.program_id(1) * TILE_M
    row = m + gl.arange(0, TILE_M, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    row = gl.minimum(row, num_rows - 1)  # rows past the end repeat the last one
    at = row[None, None, :] * x_row + k
    rows = _load(x, at, k, K, STEP)
    m += gl.arange(0, TILE_M, gl.SliceLayout(0, result))
    inside = is_column[:, None] & (m < num_rows)[None, :]
    added = gl.zeros([TILE_N, TILE_M], gl.float32, result)
    if HAS_RESIDUAL:
        at = n[:, None] + m[None, :] * residual_row
        added = gl.load(residual + at, mask=inside, other=0.0).to(gl.float32)
    y = gl.zeros([WARPS, TILE_W, TILE_M], gl.float32, sums)
    if NORM == "":
        zero = gl.full([WARPS, TILE_W, TILE_M], _zero_after_loads(), gl.int32, sums)
        y = zero.to(gl.float32, bitcast=True)
    else:
        squares = gl.zeros([WARPS, TILE_M], gl.float32, gl.SliceLayout(1, right))
        for chunk in gl.static_range(CHUNKS):
            wide = rows[chunk].to(gl.float32)
            squares += gl.sum(wide * wide, 1)
        squares = gl.convert_layout(squares, _row_layout(WARPS, TILE_M))
        scale = gl.rsqrt(gl.sum(squares, 0) / K + eps)
        of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, right))
        scale = gl.convert_layout(scale, of_rows, assert_trivial=True)[None, None, :]

    for chunk in gl.static_range(CHUNKS):
        part = rows[chunk]
        if NORM != "":
            factor = factors[chunk].to(gl.float32)
            part = normalise(part.to(gl.float32), scale, factor, NORM, dtype).to(dtype)
        y = mma_v2(tiles[chunk], part, y)
    y = gl.sum(gl.convert_layout(y, partial), 0)
    up = y
    if ACTIVATION != "":
        y, up = gl.split(gl.permute(gl.reshape(y, [TILE_N, 2, TILE_M]), (0, 2, 1)))
        up = gl.convert_layout(up, result, assert_trivial=True)
    y = gl.convert_layout(y, result, assert_trivial=True)
    y = finish(y, up, y_bias[:, None], up_bias[:, None], dtype, ACTIVATION, HAS_BIAS) + added
    gl.store(out + n[:, None] + m[None, :] * num_columns, y.to(dtype), mask=inside)


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
    others = (None if norm is None else norm.weight, bias, residual)
    addresses = functools.reduce(
        int.__or__, (t.data_ptr() for t in (x, weight, *others) if t is not None)
    )
    launch = _prepare(
        Problem(num_rows, size, num_columns, x.dtype, bool(activation), norm is not None),
        "" if norm is None else norm.kind,
        0.0 if norm is None else norm.eps,
        activation,
        bias is not None,
        residual is not None,
        (row_stride(x), 0 if residual is None else row_stride(residual)),
        addresses % 16 == 0,
    )
    out = x.new_empty(*x.shape[:-1], num_columns)
    tensors: list[Any] = [x, weight, *others]
    # Absent tensors are never read, so any address will do.
    launch(out, *(x if tensor is None else tensor for tensor in tensors))
    return out


@functools.lru_cache(maxsize=1024)
def _prepare(
    problem: Problem,
    kind: str,
    eps: float,
    activation: str,
    has_bias: bool,
    has_residual: bool,
    strides: tuple[int, int],
    is_aligned: bool,
) -> Launch:
    """The launch without its tensors."""
    plan = plan_resident(problem)
    assert plan is not None
    launcher = make_launcher(
        plan, problem.dtype, problem.size, kind, activation, has_bias, has_residual,
        is_aligned and all(stride % 8 == 0 for stride in strides),
    )  # fmt: skip
    grid = -(-problem.num_columns // plan.tile_n), -(-problem.num_rows // plan.tile_m), 1
    return launcher.bind(grid, problem.num_rows, problem.num_columns, *strides, eps)


@functools.lru_cache(maxsize=1024)
def make_launcher(
    plan: Plan,
    dtype: torch.dtype,
    size: int,
    kind: str = "",
    activation: str = "",
    has_bias: bool = False,
    has_residual: bool = False,
    is_aligned: bool = True,
) -> GluonLauncher:
    """The launcher for a plan and rows of ``size``."""
    given = POINTERS[dtype] + ":16" * is_aligned
    stride = "i32:8" if is_aligned else "i32"
    names = ("x", "weight", "norm_weight", "bias", "residual")
    types = {"out": f"{POINTERS[dtype]}:16", **dict.fromkeys(names, given)}
    types |= {"num_rows": "i32", "num_columns": "i32", "x_row": stride, "residual_row": stride}
    types |= {"eps": "fp32"}
    constants = {
        "K": size, "NORM": kind, "ACTIVATION": activation, "HAS_BIAS": has_bias,
        "HAS_RESIDUAL": has_residual, "TILE_M": plan.tile_m, "TILE_N": plan.tile_n,
        "TILE_K": plan.tile_k, "WARPS": plan.num_warps,
    }  # fmt: skip
    return GluonLauncher(
        resident_kernel, types, constants, num_warps=plan.num_warps, launch_pdl=True
    )
