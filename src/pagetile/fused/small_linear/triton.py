"""Linear layers of few rows on a GPU, bound by the bandwidth of reading the weight.

::

    y[m, n] = epilogue(sum_k norm(x)[m, k] * weight[n, k])

    few    1 to 4 rows: a program reduces TILE_N whole rows of the weight in registers
    tiles  up to 64 rows: a program multiplies TILE_N rows of the weight on tensor cores

With programmatic dependent launch (``PDL``) a program loads or prefetches its rows of the weight,
and only then waits for the previous kernel: memory is not idle between two layers.

The epilogue adds a bias, computes ``activation(gate) * up`` of a weight that holds the rows of
the gate before those of the up projection, and adds a residual. It rounds to the type of ``x``
where torch's separate operations do. Supports float32 (few), float16 and bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device import DeviceInfo
from ...tiles.triton.activations import activate
from ...tiles.triton.launch import POINTERS, Launch, Launcher, begins_early, refuse
from ...tiles.triton.norms import normalise
from ..rms_norm import Norm
from .plan import MOST_FEW, MOST_ROWS, Plan, make_plan, plan_parts
from .problem import Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if not problem.is_regular:
        return "a tensor has gaps or another type than x"
    most = MOST_FEW if problem.dtype == torch.float32 or problem.has_norm else MOST_ROWS
    if not 0 < problem.num_rows <= most:
        return f"x has {problem.num_rows} rows; 1 to {most} run here"
    if problem.size * problem.dtype.itemsize % 16:
        return f"rows of {problem.size} numbers do not begin at multiples of 16 bytes"
    return refuse(device, x=problem.dtype)


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def finish(
    y, up, bias, up_bias, dtype: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Add the bias, and apply a gated product's activation; float32, rounded to ``dtype``."""
    if HAS_BIAS:
        y += bias
    y = _round(y, dtype)
    if ACTIVATION != "":
        if HAS_BIAS:
            up += up_bias
        y = _round(_round(activate(y, ACTIVATION), dtype) * _round(up, dtype), dtype)
    return y


@triton.jit
def load_biases(
    bias, n, num_columns, inside, none, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Biases of columns ``n`` and, of a gated product, of their other halves; else ``none``."""
    y_bias, up_bias = none, none
    if HAS_BIAS:
        y_bias = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            up_bias = tl.load(bias + num_columns + n, mask=inside, other=0.0).to(tl.float32)
    return y_bias, up_bias


@triton.jit
def few_kernel(
    out,  # [M, num_columns]
    x,  # [M, K]
    weight,  # [num_columns, K], of a gated product [2 * num_columns, K]
    norm_weight,  # [K]
    bias,  # [num_columns], of a gated product [2 * num_columns]
    residual,  # [M, num_columns]
    num_columns,
    x_row,
    residual_row,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,  # a kind of ``rms_norm``, or ""
    ACTIVATION: tl.constexpr,  # or ""
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,  # M, or the next power of 2
    TILE_N: tl.constexpr,
    W: tl.constexpr,  # columns that are loaded at a time
    PDL: tl.constexpr,
):
    """See the module docstring. Grid: tiles of ``TILE_N`` rows of the weight."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    column = tl.arange(0, W)
    is_row = n < num_columns
    at = weight + n.to(tl.int64)[:, None] * K + column[None, :]
    up_at = at + num_columns.to(tl.int64) * K
    inside = is_row[:, None] & (column < K)[None, :]

    # Load what does not depend on the previous kernel.
    tile = tl.load(at, mask=inside, other=0.0)
    if ACTIVATION != "":
        up_tile = tl.load(up_at, mask=inside, other=0.0)
    none = tl.zeros([TILE_N], tl.float32)
    y_bias, up_bias = load_biases(bias, n, num_columns, is_row, none, ACTIVATION, HAS_BIAS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    rows = tl.arange(0, ROWS)
    scales = tl.zeros([ROWS], tl.float32)
    if NORM != "":
        for m in tl.static_range(M):
            squares = tl.zeros([W], tl.float32)
            for start in tl.static_range(0, K, W):
                at_x = x + m * x_row + start + column
                part = tl.load(at_x, mask=start + column < K, other=0.0).to(tl.float32)
                squares += part * part
            scales = tl.where(rows == m, tl.rsqrt(tl.sum(squares) / K + eps), scales)

    y = tl.zeros([TILE_N, ROWS], tl.float32)
    up = y
    for start in tl.static_range(0, K, W):
        is_column = start + column < K
        if start > 0:
            inside = is_row[:, None] & is_column[None, :]
            tile = tl.load(at + start, mask=inside, other=0.0)
            if ACTIVATION != "":
                up_tile = tl.load(up_at + start, mask=inside, other=0.0)
        if NORM != "":
            factor = tl.load(norm_weight + start + column, mask=is_column, other=0.0)
            factor = factor.to(tl.float32)
        for m in tl.static_range(M):
            part = tl.load(x + m * x_row + start + column, mask=is_column, other=0.0)
            part = part.to(tl.float32)
            if NORM != "":
                scale = tl.sum(tl.where(rows == m, scales, 0.0))
                part = normalise(part, scale, factor, NORM, dtype)
            product = tl.sum(tile.to(tl.float32) * part[None, :], 1)
            y += tl.where(rows[None, :] == m, product[:, None], 0.0)
            if ACTIVATION != "":
                product = tl.sum(up_tile.to(tl.float32) * part[None, :], 1)
                up += tl.where(rows[None, :] == m, product[:, None], 0.0)

    inside = is_row[:, None] & (rows < M)[None, :]
    y = finish(y, up, y_bias[:, None], up_bias[:, None], dtype, ACTIVATION, HAS_BIAS)
    if HAS_RESIDUAL:
        at_x = residual + n[:, None] + rows[None, :] * residual_row
        y += tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n[:, None] + rows[None, :] * num_columns, y.to(dtype), mask=inside)


@triton.jit
def _prefetch(weight, first, end, K: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    """Prefetch parts of rows to L2, a line of 128 bytes at a time."""
    line: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = (PART + line - 1) // line
    step: tl.constexpr = 128
    for start in range(0, ROWS * lines, step):
        index = start + tl.arange(0, step)
        row = tl.minimum(first + index // lines, end - 1).to(tl.int64)
        at = weight + row * K + index % lines * line
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def tiles_kernel(
    out,  # [num_rows, num_columns]
    x,  # [num_rows, K]
    weight,  # [num_columns, K], of a gated product [2 * num_columns, K]
    bias,  # [num_columns], of a gated product [2 * num_columns]
    residual,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    x_row,
    residual_row,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # above 1: ``out`` is float32 [PARTS, num_rows, num_columns]
    ACTIVATION: tl.constexpr,  # or ""
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the module docstring. Grid: tiles of the weight's rows × tiles of x × ``PARTS``."""
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * TILE_N
    n = first + tl.arange(0, TILE_N)
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, TILE_K)
    in_n, in_m = n < num_columns, m < num_rows
    # Rows past the end repeat the last one, and are not stored.
    row = tl.where(in_n, n, num_columns - 1).to(tl.int64)
    part: tl.constexpr = K // PARTS
    if PARTS > 1:
        x += tl.program_id(2) * part
        weight += tl.program_id(2) * part
        out += tl.program_id(2).to(tl.int64) * num_rows * num_columns
    at = weight + row[:, None] * K + column[None, :]
    up_at = at + num_columns.to(tl.int64) * K
    x_at = x + m.to(tl.int64)[:, None] * x_row + column[None, :]
    none = tl.zeros([TILE_N], tl.float32)
    y_bias, up_bias = load_biases(bias, n, num_columns, in_n, none, ACTIVATION, HAS_BIAS)
    if PDL:
        end = tl.minimum(first + TILE_N, num_columns)
        _prefetch(weight, first, end, K, part, TILE_N)
        if ACTIVATION != "":
            _prefetch(weight, num_columns + first, num_columns + end, K, part, TILE_N)
        gdc_launch_dependents()
        gdc_wait()

    y = tl.zeros([TILE_M, TILE_N], tl.float32)
    up = y
    for start in tl.range(0, part, TILE_K, num_stages=STAGES):
        if part % TILE_K == 0:
            x_tile = tl.load(x_at + start, mask=in_m[:, None], other=0.0)
            tile = tl.load(at + start)
        else:
            inside = (start + column < part)[None, :]
            x_tile = tl.load(x_at + start, mask=in_m[:, None] & inside, other=0.0)
            tile = tl.load(at + start, mask=inside, other=0.0)
        y = tl.dot(x_tile, tl.trans(tile), y)
        if ACTIVATION != "":
            if part % TILE_K == 0:
                up_tile = tl.load(up_at + start)
            else:
                up_tile = tl.load(up_at + start, mask=(start + column < part)[None, :], other=0.0)
            up = tl.dot(x_tile, tl.trans(up_tile), up)

    inside = in_m[:, None] & in_n[None, :]
    if PARTS == 1:
        y = finish(y, up, y_bias[None, :], up_bias[None, :], dtype, ACTIVATION, HAS_BIAS)
    if HAS_RESIDUAL:
        at = residual + m.to(tl.int64)[:, None] * residual_row + n[None, :]
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out + m.to(tl.int64)[:, None] * num_columns + n[None, :]
    tl.store(at, y.to(dtype), mask=inside)


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
    residual_row = 0 if residual is None else row_stride(residual)
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
        (row_stride(x), residual_row),
        addresses % 16 == 0,
        DeviceInfo.of(x.device).is_small,
        begins_early(x.device),
    )
    out = x.new_empty(*x.shape[:-1], num_columns)
    tensors: list[Any] = [x, weight, *others]
    if not launch.launcher.constants.get("M"):
        del tensors[2]  # ``tiles_kernel`` has no norm
    # Absent tensors are never read, so any address will do.
    launch(out, *(x if tensor is None else tensor for tensor in tensors))
    return out


def run_parts(x: Tensor, weight: Tensor) -> Tensor:
    """One launch."""
    size = x.shape[-1]
    num_rows, num_columns = x.numel() // size, weight.shape[0]
    launch = _prepare_parts(
        Problem(num_rows, size, num_columns, x.dtype),
        row_stride(x),
        (x.data_ptr() | weight.data_ptr()) % 16 == 0,
        begins_early(x.device),
    )
    num_parts = launch.grid[2]
    out = x.new_empty(num_parts, *x.shape[:-1], num_columns, dtype=torch.float32)
    launch(out, x, weight, x, x)
    return out


@functools.lru_cache(maxsize=1024)
def _prepare_parts(problem: Problem, stride: int, is_aligned: bool, is_early: bool) -> Launch:
    plan = plan_parts(problem)
    unit = 16 // problem.dtype.itemsize
    launcher = make_launcher(
        plan, problem.dtype, problem.num_rows, problem.size,
        is_aligned=is_aligned and stride % unit == 0, is_early=is_early,
    )  # fmt: skip
    grid = -(-problem.num_columns // plan.tile_n), -(-problem.num_rows // plan.tile_m), plan.parts
    return launcher.bind(grid, problem.num_rows, problem.num_columns, stride, 0)


def row_stride(x: Tensor) -> int:
    """Elements from one row to the next."""
    return x.stride(-2) if x.dim() > 1 else x.shape[-1]


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
    is_small: bool,
    is_early: bool,
) -> Launch:
    """The launch without its tensors."""
    plan = make_plan(problem, is_small=is_small)
    unit = 16 // problem.dtype.itemsize
    launcher = make_launcher(
        plan, problem.dtype, problem.num_rows, problem.size, kind, activation, has_bias,
        has_residual, is_aligned and all(stride % unit == 0 for stride in strides), is_early,
    )  # fmt: skip
    grid = -(-problem.num_columns // plan.tile_n), -(-problem.num_rows // plan.tile_m), 1
    if plan.kind == "few":
        return launcher.bind((grid[0], 1, 1), problem.num_columns, *strides, eps)
    return launcher.bind(grid, problem.num_rows, problem.num_columns, *strides)


@functools.lru_cache(maxsize=1024)
def make_launcher(
    plan: Plan,
    dtype: torch.dtype,
    num_rows: int,
    size: int,
    kind: str = "",
    activation: str = "",
    has_bias: bool = False,
    has_residual: bool = False,
    is_aligned: bool = True,
    is_early: bool = True,
) -> Launcher:
    """The launcher for a plan and rows of ``size``."""
    given = POINTERS[dtype] + ":16" * is_aligned
    stride = f"i32:{16 // dtype.itemsize}" if is_aligned else "i32"
    names = ("x", "weight", "norm_weight", "bias", "residual")
    types = {"out": f"{POINTERS[dtype]}:16", **dict.fromkeys(names, given)}
    features = {
        "ACTIVATION": activation, "HAS_BIAS": has_bias, "HAS_RESIDUAL": has_residual,
    }  # fmt: skip
    if plan.kind == "few":
        types |= {"num_columns": "i32", "x_row": stride, "residual_row": stride, "eps": "fp32"}
        constants = {
            "M": num_rows, "K": size, "NORM": kind, **features,
            "ROWS": triton.next_power_of_2(num_rows), "TILE_N": plan.tile_n, "W": plan.tile_k,
            "PDL": is_early,
        }  # fmt: skip
        kernel = few_kernel
    else:
        del types["norm_weight"]
        types |= {"num_rows": "i32", "num_columns": "i32", "x_row": stride, "residual_row": stride}
        constants = {
            "K": size, "PARTS": plan.parts, **features, "TILE_M": plan.tile_m,
            "TILE_N": plan.tile_n,
            "TILE_K": plan.tile_k, "STAGES": plan.stages, "PDL": is_early,
        }  # fmt: skip
        kernel = tiles_kernel
        if plan.parts > 1:
            types["out"] = "*fp32:16"
    return Launcher(
        kernel, types, constants, num_warps=plan.num_warps, num_stages=plan.stages,
        launch_pdl=is_early,
    )  # fmt: skip
