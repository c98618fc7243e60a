"""Products of few rows with a large matrix on a CPU, near the bandwidth of reading the matrix.

::

    y[m, n] = bias[n] + sum_k x[m, k] * weight[n, k]        m: 1 to MOST_ROWS_CPU rows

Threads take runs of rows of the weight. A row of the weight lies like a key of attention and a row
of ``x`` like a query, so the products are ``score_tile``'s: four rows of ``x`` with four of the
weight at a time, which is read once from memory and asked for a tile ahead. Sums are taken in
float32, of bfloat16 in pairs where the CPU multiplies these (AVX512-BF16), and in one order for any
number of rows: a row's bits do not depend on the rows beside it.

What comes before and after the product is torch's.
"""

from __future__ import annotations

import functools
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import allocating, entry, inner
from ...tiles.cpu.microkernels import score_tile
from ...tiles.cpu.simd import add, array_at, load, load_one, store, store_one, take_number
from ...tiles.cpu.threads import on_team, run_together
from ..gated_activation import gated_activation
from ..rms_norm import Norm, rms_norm
from .plan import MOST_ROWS_CPU
from .problem import Problem

_TILE = 16
"""Rows of the weight that are multiplied with all rows of x before the next."""
_RUN_BYTES = 128 << 10
"""Of the weight, that a thread takes at a time: it stays in a second-level cache."""
_SMALL = 1 << 19
"""Multiply-adds that take as long as waking another thread."""

_Call = namedtuple(
    "_Call",
    "out x left weight bias num_rows padded_rows size num_columns run has_bias is_copied counter",
)
"""What a kernel is given: ``left`` is ``x`` where that can be multiplied as it lies, and ``run``
rows of the weight are taken at a time."""
_Scratch = namedtuple("_Scratch", "left sums rows ahead")


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if not problem.is_regular:
        return "a tensor has gaps or another type than x"
    if not 0 < problem.num_rows <= MOST_ROWS_CPU:
        return f"x has {problem.num_rows} rows; 1 to {MOST_ROWS_CPU} run here"
    if problem.size % 32:
        return f"a row has {problem.size} numbers; multiples of 32 run"
    return refuse(device, x=problem.dtype)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    """``[..., num_columns]``."""
    if norm is not None:
        x = rms_norm(x, norm.weight, eps=norm.eps, kind=norm.kind, impl="reference")
    y = _multiply(x.contiguous(), weight, bias)
    if activation:
        y = gated_activation(y, activation, impl="reference")
    return y if residual is None else residual + y


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    device, (num_columns, size) = DeviceInfo.of(x.device), weight.shape
    out = x.new_empty(*x.shape[:-1], num_columns)
    num_rows = x.numel() // size
    like, left, sizes = _describe(
        x.dtype, num_rows, size, num_columns, bias is not None, device.bf16_dot
    )
    run_together(
        _multiply_runs, device.num_workers if num_rows * size * num_columns > _SMALL else 1,
        out.data_ptr(), x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        like, left, sizes, np.zeros(1, np.int64),
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=4096)
def _describe(
    dtype: torch.dtype, num_rows: int, size: int, num_columns: int, has_bias: bool, bf16_dot: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays of the types of ``x`` and of what is multiplied, and a call's sizes."""
    multiplied = torch.bfloat16 if bf16_dot and dtype == torch.bfloat16 else torch.float32
    padded = 1 if num_rows == 1 else -(-num_rows // 4) * 4  # several are taken by fours
    run = max(1, _RUN_BYTES // (_TILE * size * dtype.itemsize)) * _TILE
    is_copied = padded > num_rows or dtype != multiplied
    sizes = np.array([num_rows, padded, size, num_columns, run, has_bias, is_copied], np.int64)
    like, left = (flat(torch.empty(0, dtype=each)) for each in (dtype, multiplied))
    return like, left, sizes


@entry()
def _multiply_runs(parallel, num_threads, out, x, weight, bias, like, left, sizes, counter):
    """Tensors come as addresses of numbers like ``like``: arrays take more of the host's time."""
    call = _Call(
        array_at(out, like.dtype), array_at(x, like.dtype), array_at(x, left.dtype),
        array_at(weight, like.dtype), array_at(bias, like.dtype),
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5] != 0, sizes[6] != 0, counter,
    )  # fmt: skip
    on_team(parallel, num_threads, _make_scratch, _take_runs, (call,))


@allocating()
def _make_scratch(call):
    """A thread's memory, with a copy of ``x`` where that is not multiplied as it lies."""
    left = np.zeros(call.padded_rows * call.size if call.is_copied else 0, call.left.dtype)
    if call.is_copied:
        for at in range(0, call.num_rows * call.size, 16):
            store(left, at, load(call.x, at))
    return _Scratch(
        left,
        np.empty(call.padded_rows * _TILE, np.float32),
        np.empty(_TILE, np.int64),
        np.empty(_TILE, np.int64),
    )


@inner()
def _take_runs(call, scratch):
    """Multiply runs of the weight's rows until none is left."""
    left = scratch.left if call.is_copied else call.left
    while True:
        first = take_number(call.counter) * call.run
        if first >= call.num_columns:
            return
        for column in range(first, min(call.num_columns, first + call.run), _TILE):
            for n in range(_TILE):
                scratch.rows[n] = min(column + n, call.num_columns - 1) * call.size
                scratch.ahead[n] = min(column + n + _TILE, call.num_columns - 1) * call.size
            score_tile(
                scratch.sums, left, 0, call.size, call.padded_rows,
                call.weight, 0, scratch.rows, scratch.ahead, _TILE, call.size,
            )  # fmt: skip
            _store_tile(call, scratch.sums, column)


@inner()
def _store_tile(call, sums, column):
    """Add the bias to a tile of sums, and write what lies within ``out``."""
    whole = column + _TILE <= call.num_columns
    for r in range(call.num_rows):
        to, at = r * call.num_columns + column, r * _TILE
        if whole and call.has_bias:
            store(call.out, to, add(load(sums, at), load(call.bias, column)))
        elif whole:
            store(call.out, to, load(sums, at))
        else:
            for n in range(call.num_columns - column):
                bias = load_one(call.bias, column + n) if call.has_bias else np.float32(0)
                store_one(call.out, to + n, sums[at + n] + bias)
