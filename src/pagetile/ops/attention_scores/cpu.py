"""Attention scores on a CPU: a matrix product with each head's keys packed into panels once.

A work item is a head, or a chunk of its queries. Results are scaled in registers and stored
directly. 16-bit queries are first converted to float32 in scratch memory.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...shapes import Form
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import allocating, entry, inner
from ...tiles.cpu.gemm import load_rows
from ...tiles.cpu.panels import PANEL, multiply_panels, pack_panels
from ...tiles.cpu.simd import array_at, take_number
from ...tiles.cpu.threads import on_team, run_together
from .problem import Problem

_TILE = 60  # queries that are converted at once: ten blocks of rows
_MOST_PACKED = 1 << 15  # float32 elements of packed keys: 128 KiB of the L2 cache
_LEAST_ROWS = 48  # of a work item, so that packing keys is a small part of it
_SMALL = 1 << 20  # multiply-adds: fewer take one thread no longer than waking a second

ScoresCall = namedtuple(
    "ScoresCall",
    "scores q k floats scale"
    " num_heads q_len k_len head_size columns chunk num_items is_float32"
    " q_batch q_head q_row k_batch k_head k_row",
)
"""A kernel's arguments: ``floats`` is ``q`` if that is float32, ``columns`` keys are packed at a
time, and ``chunk`` queries are a work item."""


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if problem.k_len < PANEL:
        return f"k_len is {problem.k_len}; from {PANEL} on it runs"
    if problem.head_size % 8:
        return f"head_size is {problem.head_size}; multiples of 8 run"
    return refuse(device, q=problem.dtype)


@entry()
def _run(parallel, num_threads, scores, q, k, like, sizes, scale, counter):
    """Tensors are passed as addresses of elements like ``like``: NumPy arrays cost host time."""
    call = ScoresCall(
        array_at(scores, like.dtype), array_at(q, like.dtype), array_at(k, like.dtype),
        array_at(q, np.float32), np.float32(scale),
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7],
        sizes[8], sizes[9], sizes[10], sizes[11], sizes[12], sizes[13],
    )  # fmt: skip
    on_team(parallel, num_threads, _make_scratch, _take_items, (call, counter))


@allocating()
def _make_scratch(call, counter):
    """A thread's packed keys, and its queries where they are converted."""
    rows = 0 if call.is_float32 else _TILE
    width = (call.head_size + 15) // 16 * 16
    return np.empty(call.columns * call.head_size, np.float32), np.empty(rows * width, np.float32)


@inner()
def _take_items(call, counter, scratch):
    """Compute work items until none is left."""
    panels, q_tile = scratch
    chunks = (call.q_len + call.chunk - 1) // call.chunk
    while True:
        taken = take_number(counter)
        if taken >= call.num_items:
            return
        matrix, first = taken // chunks, taken % chunks * call.chunk
        batch, head = matrix // call.num_heads, matrix % call.num_heads
        q_at = batch * call.q_batch + head * call.q_head
        k_at = batch * call.k_batch + head * call.k_head
        for n in range(0, call.k_len, call.columns):
            start = min(n, call.k_len - PANEL)  # the last panel may overlap the one before
            keys = min(call.columns, call.k_len - start)
            pack_panels(panels, call.k, k_at + start * call.k_row, call.k_row, keys, call.head_size)
            to = matrix * call.q_len * call.k_len + start
            rows = min(call.chunk, call.q_len - first)
            _write_rows(call, q_at, first, rows, panels, keys, to, q_tile)


@inner()
def _write_rows(call, q_at, first, rows, panels, keys, to, q_tile):
    """Scores of some rows with the packed keys; those of row 0 and the first key are at ``to``."""
    width = (call.head_size + 15) // 16 * 16
    tile = rows if call.is_float32 else _TILE
    for m in range(first, first + rows, tile):
        some, at = min(tile, first + rows - m), q_at + m * call.q_row
        a, row = call.floats, call.q_row
        if not call.is_float32:
            load_rows(q_tile, width, call.q, at, call.q_row, some, call.head_size, some)
            a, at, row = q_tile, 0, width
        multiply_panels(
            call.scores, to + m * call.k_len, call.k_len, a, at, row, panels, some, keys,
            call.head_size, call.scale,
        )  # fmt: skip


def prepare(
    problem: Problem, q: Form, k: Form, softmax_scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes scores of any tensors of these forms."""
    shape = problem.batch, problem.num_heads, problem.q_len, problem.k_len
    dtype = problem.dtype
    work = problem.batch * problem.num_heads * problem.q_len * problem.k_len * problem.head_size
    if not work:
        return lambda q, k: q.new_empty(shape)
    like = flat(torch.empty(0, dtype=dtype, device="cpu"))
    strides = *q.strides[:3], *k.strides[:3]

    @functools.cache
    def size(num_threads: int) -> np.ndarray:
        return np.array([*_cut(problem, num_threads), *strides], np.int64)

    def run(q: Tensor, k: Tensor) -> Tensor:
        scores = q.new_empty(shape)
        num_threads = DeviceInfo.of(q.device).num_workers if work > _SMALL else 1
        run_together(
            _run, num_threads, scores.data_ptr(), q.data_ptr(), k.data_ptr(), like,
            size(num_threads), softmax_scale, np.zeros(1, np.int64),
        )  # fmt: skip
        return scores

    return run


def _cut(problem: Problem, num_threads: int) -> tuple[int, ...]:
    """Return the kernel's sizes: one work item a head, or a chunk of queries if heads are few."""
    heads, q_len, size = problem.batch * problem.num_heads, problem.q_len, problem.head_size
    columns = max(PANEL, _MOST_PACKED // size // PANEL * PANEL)
    columns = min(columns, -(-problem.k_len // PANEL) * PANEL)
    pieces = 1 if num_threads == 1 else -(-4 * num_threads // heads)
    chunk = min(q_len, max(_LEAST_ROWS, -(-q_len // pieces)))
    num_items = heads * -(-q_len // chunk)
    is_float32 = int(problem.dtype == torch.float32)
    return problem.num_heads, q_len, problem.k_len, size, columns, chunk, num_items, is_float32
