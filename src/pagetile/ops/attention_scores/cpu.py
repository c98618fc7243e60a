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
from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.gemm import load_rows, multiply, transpose
from ...tiles.cpu.simd import LANES, load, mul, splat, store, take_number
from ...tiles.cpu.threads import run_together
from .problem import Problem

TILE = 64
MOST_KEYS = 512  # of a tile, whose scores then stay in a second-level cache
_SMALL = 1 << 18  # scores that take a thread about as long as waking another

Call = namedtuple(
    "Call",
    "scores q k num_heads q_len k_len head_size width columns"
    " q_batch q_head q_row k_batch k_head k_row scale is_direct",
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
def _take_items(call, num_items, chunk, counter):
    """Take items until none is left. Every thread runs this once, with its own scratch."""
    _work(
        call, num_items, chunk, counter,
        np.zeros(TILE * call.width, np.float32),
        np.zeros(call.columns * call.width, np.float32),
        np.zeros(call.columns * call.width, np.float32),
        np.zeros(TILE * call.columns, np.float32),
    )  # fmt: skip


@inner()
def _work(call, num_items, chunk, counter, q, k, k_turned, scores):
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
            load_rows(
                k, call.width, call.k, k_at + start * call.k_row, call.k_row, keys,
                call.head_size, call.columns,
            )  # fmt: skip
            transpose(k_turned, call.columns, k, call.width, call.columns, call.head_size)
            for m in range(first, min(first + chunk, call.q_len), TILE):
                rows = min(TILE, min(first + chunk, call.q_len) - m)
                at = q_at + m * call.q_row
                load_rows(q, call.width, call.q, at, call.q_row, rows, call.head_size, TILE)
                to = (matrix * call.q_len + m) * call.k_len + start
                whole = rows // 4 * 4 if call.is_direct else 0
                _write_scores(call, q, k_turned, whole, keys, to)
                if whole < rows:
                    multiply(
                        scores, 0, call.columns, q, whole * call.width, call.width, 1, k_turned,
                        call.columns, (rows - whole + 3) // 4 * 4,
                        (keys + LANES - 1) // LANES * LANES, call.head_size, False,
                    )  # fmt: skip
                    _store_scores(call, scores, rows - whole, keys, to + whole * call.k_len)


@inner()
def _write_scores(call, q, k_turned, rows, keys, to):
    """Products of a multiple of four rows, straight into float32 results.

    The last vector of a row overlaps the one before, so nothing past the row is written.
    """
    whole = keys // LANES * LANES
    multiply(
        call.scores, to, call.k_len, q, 0, call.width, 1, k_turned, call.columns, rows, whole,
        call.head_size, False,
    )  # fmt: skip
    if whole < keys:
        last = keys - LANES
        multiply(
            call.scores, to + last, call.k_len, q, 0, call.width, 1, k_turned, call.columns, rows,
            LANES, call.head_size, False, last,
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
    call = Call(  # type: ignore[call-arg]
        flat(scores), flat(q), flat(k), problem.num_heads, problem.q_len, problem.k_len,
        problem.head_size, width, columns, *q.stride()[:3], *k.stride()[:3],
        np.float32(softmax_scale), q.dtype == torch.float32 and softmax_scale == 1.0,
    )  # fmt: skip
    num_threads = DeviceInfo.of(q.device).num_workers if scores.numel() > _SMALL else 1
    heads = problem.batch * problem.num_heads
    pieces = 1 if num_threads == 1 else -(-4 * num_threads // heads)
    chunk = -(-problem.q_len // (pieces * TILE)) * TILE
    num_items = heads * -(-problem.q_len // chunk)
    counter = np.zeros(1, np.int64)
    run_together(lambda: _take_items(call, num_items, chunk, counter), num_threads)
    return scores
