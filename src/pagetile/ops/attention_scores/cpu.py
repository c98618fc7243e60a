"""Scores on a CPU: tiles of queries against a head's keys, which lie turned in scratch memory.

An item of work is a head, or some of its queries. Scores are made in scratch memory and go out row
by row, in whole vectors; the last one of a row overlaps the one before.
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
    " q_batch q_head q_row k_batch k_head k_row scale",
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
                multiply(
                    scores, 0, call.columns, q, 0, call.width, 1, k_turned, call.columns,
                    (rows + 3) // 4 * 4, (keys + LANES - 1) // LANES * LANES, call.head_size, False,
                )  # fmt: skip
                to = (matrix * call.q_len + m) * call.k_len + start
                _store_scores(call, scores, rows, keys, to)


@inner()
def _store_scores(call, scores, rows, keys, to):
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
        np.float32(softmax_scale),
    )  # fmt: skip
    num_threads = DeviceInfo.of(q.device).num_workers if scores.numel() > _SMALL else 1
    heads = problem.batch * problem.num_heads
    pieces = 1 if num_threads == 1 else -(-4 * num_threads // heads)
    chunk = -(-problem.q_len // (pieces * TILE)) * TILE
    num_items = heads * -(-problem.q_len // chunk)
    counter = np.zeros(1, np.int64)
    run_together(lambda: _take_items(call, num_items, chunk, counter), num_threads)
    return scores
