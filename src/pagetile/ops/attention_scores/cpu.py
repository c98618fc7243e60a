"""Scores on a CPU: tiles of queries against a head's keys, transposed in scratch memory.

An item of work is a head, or some of its queries. float32 scores that are not scaled are written
where they belong; others are made in scratch memory, scaled and converted row by row. The last
vector of a row overlaps the one before.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import allocating, entry, inner
from ...tiles.cpu.gemm import load_rows, multiply, transpose
from ...tiles.cpu.microkernels import scores_4x4, store_4x4
from ...tiles.cpu.simd import LANES, load, mul, splat, store, take_number
from ...tiles.cpu.threads import on_team, run_together
from .problem import Problem

TILE = 64
MOST_KEYS = 512  # of a tile, whose scores then stay in a second-level cache
_FIRST_LEVEL = 6144  # numbers of transposed keys that stay in a first-level cache beside others
_SMALL = 1 << 20  # multiply-adds that take a thread about as long as waking another

ScoresCall = namedtuple(
    "ScoresCall",
    "scores q k num_heads q_len k_len head_size width columns"
    " q_batch q_head q_row k_batch k_head k_row scale floats is_direct",
)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if problem.k_len < LANES:
        return f"k_len is {problem.k_len}; from {LANES} on it runs"
    if problem.head_size % 8:
        return f"head_size is {problem.head_size}; multiples of 8 run"
    return refuse(device, q=problem.dtype)


@entry()
def _run(parallel, num_threads, call, num_items, chunk, counter):
    on_team(parallel, num_threads, _make_scratch, _take_items, (call, num_items, chunk, counter))


@allocating()
def _make_scratch(call, num_items, chunk, counter):
    """A thread's queries, keys, keys by columns, scores, and rows of four keys."""
    return (
        np.empty(TILE * call.width, np.float32),
        np.empty(call.columns * call.width, np.float32),
        np.empty(call.columns * call.width, np.float32),
        np.empty(TILE * call.columns, np.float32), np.zeros(4, np.int64),
    )  # fmt: skip


@inner()
def _take_items(call, num_items, chunk, counter, scratch):
    """Take items until none is left."""
    q, k, k_turned, scores, key_rows = scratch
    chunks = (call.q_len + chunk - 1) // chunk
    while True:
        taken = take_number(counter)
        if taken >= num_items:
            return
        matrix, first = taken // chunks, taken % chunks * chunk
        batch, head = matrix // call.num_heads, matrix % call.num_heads
        q_at = batch * call.q_batch + head * call.q_head
        k_at = batch * call.k_batch + head * call.k_head
        for n in range(0, call.k_len, call.columns):
            start = min(n, call.k_len - LANES)  # a vector has to fit
            keys = min(call.columns, call.k_len - start)
            at = k_at + start * call.k_row
            if call.is_direct:
                transpose(k_turned, call.columns, call.k, call.k_row, keys, call.head_size, at)
            else:
                load_rows(k, call.width, call.k, at, call.k_row, keys, call.head_size, call.columns)
                transpose(k_turned, call.columns, k, call.width, call.columns, call.head_size)
            for m in range(first, min(first + chunk, call.q_len), TILE):
                rows = min(TILE, min(first + chunk, call.q_len) - m)
                at = q_at + m * call.q_row
                to = (matrix * call.q_len + m) * call.k_len + start
                if call.is_direct and rows >= 4:
                    _write_rows(call, at, k_at, start, k_turned, rows, keys, to, key_rows)
                else:
                    load_rows(q, call.width, call.q, at, call.q_row, rows, call.head_size, TILE)
                    multiply(
                        scores, 0, call.columns, q, 0, call.width, 1, k_turned, call.columns,
                        (rows + 3) // 4 * 4, (keys + LANES - 1) // LANES * LANES,
                        call.head_size, False,
                    )  # fmt: skip
                    _store_scores(call, scores, rows, keys, to)


@inner()
def _write_rows(call, at, k_at, start, k_turned, rows, keys, to, key_rows):
    """Products of at least four rows, straight into float32 results.

    Where rows are no multiple of four, and columns none of sixteen, the last block overlaps the one
    before, so nothing is written outside. One to four columns more are products row by row.
    """
    whole, few = rows // 4 * 4, keys % LANES
    _write_columns(call, at, k_turned, whole, keys, to)
    if whole < rows:
        above = rows - 4
        _write_columns(call, at + above * call.q_row, k_turned, 4, keys, to + above * call.k_len)
    if 0 < few <= 4 and call.head_size % LANES == 0:
        last = keys - 4
        for i in range(4):
            key_rows[i] = k_at + (start + last + i) * call.k_row
        for block in range(0, rows, 4):
            r = min(block, rows - 4)
            s = scores_4x4(
                call.floats, at + r * call.q_row, call.q_row, call.k, 0, key_rows, key_rows, 0,
                call.head_size,
            )  # fmt: skip
            store_4x4(call.scores, to + r * call.k_len + last, call.k_len, s)


@inner()
def _write_columns(call, at, k_turned, rows, keys, to):
    """Products of a multiple of four rows with all keys but the few that go row by row."""
    whole, few = keys // LANES * LANES, keys % LANES
    # Where all keys fit in a first-level cache, results are written in their order.
    step = 8 if whole * call.head_size <= _FIRST_LEVEL else rows
    for r in range(0, rows, step):
        multiply(
            call.scores, to + r * call.k_len, call.k_len, call.q, at + r * call.q_row, call.q_row,
            1, k_turned, call.columns, min(step, rows - r), whole, call.head_size, False,
        )  # fmt: skip
    if few > 4 or (few > 0 and call.head_size % LANES > 0):
        last = keys - LANES
        multiply(
            call.scores, to + last, call.k_len, call.q, at, call.q_row, 1, k_turned, call.columns,
            rows, LANES, call.head_size, False, last,
        )  # fmt: skip


@inner()
def _store_scores(call, scores, rows, keys, to):
    """Scale rows of scratch memory and store them in the results' type."""
    scale = splat(call.scale)
    for r in range(rows):
        at, row = to + r * call.k_len, r * call.columns
        for n in range(0, keys - LANES + 1, LANES):
            store(call.scores, at + n, mul(scale, load(scores, row + n)))
        last = keys - LANES
        store(call.scores, at + last, mul(scale, load(scores, row + last)))


def run(problem, q, k, softmax_scale):
    """Cut the heads into items, or their queries if there are few heads."""
    shape = problem.batch, problem.num_heads, problem.q_len, problem.k_len
    scores = torch.empty(shape, dtype=q.dtype)
    if not scores.numel():
        return scores
    width = -(-problem.head_size // LANES) * LANES
    columns = min(MOST_KEYS, -(-problem.k_len // LANES) * LANES)
    is_direct = q.dtype == torch.float32 and softmax_scale == 1.0
    call = ScoresCall(  # type: ignore[call-arg]
        flat(scores), flat(q), flat(k), problem.num_heads, problem.q_len, problem.k_len,
        problem.head_size, width, columns, *q.stride()[:3], *k.stride()[:3],
        np.float32(softmax_scale), flat(q) if is_direct else np.empty(0, np.float32), is_direct,
    )  # fmt: skip
    work = scores.numel() * problem.head_size
    num_threads = DeviceInfo.of(q.device).num_workers if work > _SMALL else 1
    heads = problem.batch * problem.num_heads
    pieces = 1 if num_threads == 1 else -(-4 * num_threads // heads)
    chunk = -(-problem.q_len // (pieces * TILE)) * TILE
    num_items = heads * -(-problem.q_len // chunk)
    counter = np.zeros(1, np.int64)
    run_together(_run, num_threads, call, num_items, chunk, counter)
    return scores
