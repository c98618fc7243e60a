"""Products of few rows with a large matrix on a CPU, near the bandwidth of reading the matrix.

::

    y[m, n] = bias[n] + sum_k x[m, k] * weight[n, k]

A thread takes a run of rows of the weight, which stays in L2, with up to ``BLOCK`` rows of ``x``. A
row of the weight has the layout of a key in attention and a row of ``x`` that of a query, so
``score_tile`` computes the products, four rows of one by four of the other, and prefetches the
weight's next tile. Sums are in float32, of bfloat16 pairs where the CPU multiplies these
(AVX512-BF16), and in one order: a row's bits do not depend on how many others there are.

Norm and activation are kernels of their own before and after, the residual a torch operation.
"""

from __future__ import annotations

import functools
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.blocks import WIDE
from ...tiles.cpu.compile import aligned, allocating, entry, inner
from ...tiles.cpu.microkernels import PART, pad_rows, score_in_parts, score_tile
from ...tiles.cpu.simd import add, array_at, load, load_one, store, store_one, take_number
from ...tiles.cpu.threads import on_team, run_together
from . import reference
from .problem import Problem

BLOCK = 64
"""Most rows of x that are multiplied with a run."""
_TILE = 16
"""Rows of the weight that are multiplied with a block of ``x`` at a time."""
_RUN_BYTES = 128 << 10
"""Bytes of the weight that a thread takes at a time: they stay in L2."""
_SMALL = 1 << 19
"""Multiply-adds that take as long as waking another thread."""

_CACHED = 1024 if WIDE == 16 else 1 << 62
"""Numbers of a row up to which four of ``x`` and four of the weight stay in the L1 cache. More than
twelve longer ones are multiplied in parts (with AVX-512, reading them again costs less)."""

_Call = namedtuple(
    "_Call", "out x left weight bias num_rows size num_columns run has_bias is_copied counter"
)
"""Arguments of the kernel: ``left`` is ``x`` if that needs no copy, and a thread takes ``run`` rows
of the weight at a time."""
_Scratch = namedtuple("_Scratch", "left sums rows ahead lanes part")


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if not problem.is_regular:
        return "a tensor has gaps or another type than x"
    if problem.num_rows < 1:
        return "x has no rows"
    if problem.size % 32:
        return f"a row has {problem.size} numbers; multiples of 32 run"
    return refuse(device, x=problem.dtype)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``."""
    device, (num_columns, size), x = DeviceInfo.of(x.device), weight.shape, x.contiguous()
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


run = functools.partial(reference.run, linear=_multiply, impl="cpu")


@functools.lru_cache(maxsize=4096)
def _describe(
    dtype: torch.dtype, num_rows: int, size: int, num_columns: int, has_bias: bool, bf16_dot: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return empty arrays of the types of ``x`` and of the multiplied operand, and the sizes."""
    multiplied = torch.bfloat16 if bf16_dot and dtype == torch.bfloat16 else torch.float32
    run = max(1, _RUN_BYTES // (_TILE * size * dtype.itemsize)) * _TILE
    is_copied = (num_rows > 1 and num_rows % 4 != 0) or dtype != multiplied  # taken by fours
    sizes = np.array([num_rows, size, num_columns, run, has_bias, is_copied], np.int64)
    like, left = (flat(torch.empty(0, dtype=each, device="cpu")) for each in (dtype, multiplied))
    return like, left, sizes


@entry()
def _multiply_runs(parallel, num_threads, out, x, weight, bias, like, left, sizes, counter):
    """Tensors are passed as addresses, with ``like``'s type: arrays take longer to pass."""
    call = _Call(
        array_at(out, like.dtype), array_at(x, like.dtype), array_at(x, left.dtype),
        array_at(weight, like.dtype), array_at(bias, like.dtype),
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0, counter,
    )  # fmt: skip
    on_team(parallel, num_threads, _make_scratch, _take_runs, (call,))


@allocating()
def _make_scratch(call):
    """Allocate a thread's memory: a block of ``x`` if it is padded or converted, and sums."""
    rows = min(BLOCK, pad_rows(call.num_rows))
    return _Scratch(
        np.zeros(rows * call.size if call.is_copied else 0, call.left.dtype),
        np.empty(rows * _TILE, np.float32),
        np.empty(_TILE, np.int64),
        np.empty(_TILE, np.int64),
        aligned(rows * _TILE * 16 if call.size > _CACHED else 0, np.float32),
        aligned(_TILE * PART if call.size > _CACHED else 0, np.float32),
    )


@inner()
def _take_runs(call, scratch):
    """Multiply blocks of ``x`` with runs of the weight until all are taken."""
    left = scratch.left if call.is_copied else call.left
    runs, held = (call.num_columns + call.run - 1) // call.run, -1
    while True:
        item = take_number(call.counter)
        row, first = item // runs * BLOCK, item % runs * call.run
        if row >= call.num_rows:
            return
        num_rows = min(BLOCK, call.num_rows - row)
        if call.is_copied and row != held:
            for at in range(0, num_rows * call.size, 16):
                store(left, at, load(call.x, row * call.size + at))
            held = row
        left_at = 0 if call.is_copied else row * call.size
        for column in range(first, min(call.num_columns, first + call.run), _TILE):
            for n in range(_TILE):
                scratch.rows[n] = min(column + n, call.num_columns - 1) * call.size
                scratch.ahead[n] = min(column + n + _TILE, call.num_columns - 1) * call.size
            if call.size > _CACHED and num_rows > 12:
                score_in_parts(
                    scratch.sums, scratch.lanes, scratch.part, left, left_at, pad_rows(num_rows),
                    call.weight, scratch.rows, scratch.ahead, call.size,
                )  # fmt: skip
            else:
                score_tile(
                    scratch.sums, left, left_at, call.size, pad_rows(num_rows),
                    call.weight, 0, scratch.rows, scratch.ahead, _TILE, call.size,
                )  # fmt: skip
            _store_tile(call, scratch.sums, row, num_rows, column)


@inner()
def _store_tile(call, sums, row, num_rows, column):
    """Add the bias to a tile of sums, and write the rows and columns that exist."""
    whole = column + _TILE <= call.num_columns
    for r in range(num_rows):
        to, at = (row + r) * call.num_columns + column, r * _TILE
        if whole and call.has_bias:
            store(call.out, to, add(load(sums, at), load(call.bias, column)))
        elif whole:
            store(call.out, to, load(sums, at))
        else:
            for n in range(call.num_columns - column):
                bias = load_one(call.bias, column + n) if call.has_bias else np.float32(0)
                store_one(call.out, to + n, sums[at + n] + bias)
