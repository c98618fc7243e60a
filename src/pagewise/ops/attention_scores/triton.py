"""Scores on a GPU: a product whose rows are stored in whole, aligned vectors.

::

    scores[b, h, i, j] = scale · q[b, h, i] · k[b, h, j]

A row of 343 float16 scores does not start where a 16-byte vector does, and storing it number by
number takes twice as long. But rows whose numbers differ by the elements of a vector (8 float16)
start at the same place within one. So a program takes ``TILE_M`` such rows, walks the keys from
the first whole vector on, and comes back for the rest of the two vectors that it shares::

    row 3    ┆· · · · · 0 1 2┆3 4 5 … 10┆ … ┆331 … 338┆339 340 341 342 · · · ·┆
    row 11   ┆· · · · · 0 1 2┆3 4 5 … 10┆ … ┆331 … 338┆339 340 341 342 · · · ·┆
             └── by number ──┘└───── by vector ───────┘└────── by number ─────┘

One program a (batch, head, ``TILE_M`` rows, place in a vector), places first: what lies between
a program's rows is written at the same time. Matrices with too few rows for that are stored number
by number (``VECTOR`` 1).

Supports float32, float16 and bfloat16, head sizes up to 256, any strides of q and k with a
contiguous last dimension. float32 is multiplied as float32.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import POINTERS, Launcher, refuse
from .problem import Problem

_ROWS = 16  # of a tile whose rows are stored in vectors: the fastest (lab log)
_KEY_BYTES = 16 << 10  # of a tile, of which three are under way: any GPU has room for them


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        given = str(problem.dtype).removeprefix("torch.")
        return f"q is {given}; float32, float16 and bfloat16 run"
    if problem.head_size > 256:
        return f"head_size is {problem.head_size}; up to 256 run"
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    return refuse(device)


@triton.jit
def _score(
    scores,  # [batch, num_heads, q_len, k_len], contiguous
    q,  # [batch, num_heads, q_len, HEAD_SIZE]
    k,  # [batch, num_heads, k_len, HEAD_SIZE]
    num_heads,
    q_len,
    k_len,
    scale,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    HEAD_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    PLACES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """See the module."""
    # Which rows am I?
    tiles = tl.cdiv(q_len, TILE_M * PLACES)
    place = tl.program_id(0) % PLACES
    m0 = tl.program_id(0) // PLACES % tiles * TILE_M
    matrix = (tl.program_id(0) // (PLACES * tiles)).to(tl.int64)
    rows = place + (m0 + tl.arange(0, TILE_M)) * PLACES
    column = tl.arange(0, D)
    is_row, is_column = (rows < q_len)[:, None], (column < HEAD_SIZE)[None, :]

    # Load the queries.
    q += matrix // num_heads * q_batch + matrix % num_heads * q_head
    k += matrix // num_heads * k_batch + matrix % num_heads * k_head
    q_at = q + rows.to(tl.int64)[:, None] * q_row + column[None, :]
    q_tile = tl.load(q_at, mask=is_row & is_column, other=0.0)

    # From the vector on in which a row starts, ``before`` places into it, and they all alike.
    start = (matrix * q_len + rows) * k_len
    before = ((matrix * q_len + place) * k_len % VECTOR).to(tl.int32)
    at = scores + (start // VECTOR * VECTOR)[:, None]
    first = (before + VECTOR - 1) // VECTOR * VECTOR
    last = (before + k_len) // VECTOR * VECTOR

    # The vectors that are the rows' own.
    for n in tl.range(first, last, TILE_N, num_stages=STAGES):
        to = n + tl.arange(0, TILE_N)
        key = to - before
        k_at = k + key.to(tl.int64)[:, None] * k_row + column[None, :]
        k_tile = tl.load(k_at, mask=(key < k_len)[:, None] & is_column, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        tl.store(
            at + to[None, :], s.to(scores.dtype.element_ty), mask=is_row & (to < last)[None, :]
        )

    if PLACES > 1:
        # Up to 7 numbers before them, and as many behind.
        edge = tl.arange(0, 16)
        to = tl.where(edge < 8, edge, last + edge - 8)
        key = to - before
        seen = (key >= 0) & (key < k_len) & tl.where(edge < 8, to < first, last >= first)
        k_at = k + key.to(tl.int64)[:, None] * k_row + column[None, :]
        k_tile = tl.load(k_at, mask=seen[:, None] & is_column, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        tl.store(at + to[None, :], s.to(scores.dtype.element_ty), mask=is_row & seen[None, :])


def run(problem: Problem, q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """One launch."""
    shape = problem.batch, problem.num_heads, problem.q_len, problem.k_len
    scores = torch.empty(shape, dtype=q.dtype, device=q.device)
    strides = *q.stride()[:3], *k.stride()[:3]
    unit = 16 // q.element_size()
    factor = math.gcd(unit, *strides) if all(t.data_ptr() % 16 == 0 for t in (q, k)) else 1
    places = unit // math.gcd(unit, problem.k_len)
    # Rows that all start on a vector need not be many.
    vector = unit if places == 1 or problem.q_len >= _ROWS * places else 1
    places = min(places, vector)
    launcher = make_launcher(q.dtype, problem.head_size, vector, places, factor)
    tiles = -(-problem.q_len // (launcher.constants["TILE_M"] * places))
    launcher(
        (problem.batch * problem.num_heads * tiles * places * (problem.k_len > 0), 1, 1),
        scores, q, k, problem.num_heads, problem.q_len, problem.k_len, softmax_scale, *strides,
    )  # fmt: skip
    return scores


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, head_size: int, vector: int, places: int, factor: int
) -> Launcher:  # fmt: skip
    """The kernel for one head size, whose rows start at ``places`` places within a vector."""
    width = max(16, triton.next_power_of_2(head_size))
    columns = min(128 if vector > 1 else 64, max(16, _KEY_BYTES // (width * dtype.itemsize)))
    rows = 64 if vector == 1 and columns == 64 else _ROWS
    given = POINTERS[dtype] + ":16" * (factor > 1)
    stride = f"i64:{factor}"
    types = {
        "scores": POINTERS[dtype] + ":16", "q": given, "k": given,
        "num_heads": "i32", "q_len": "i32", "k_len": "i32", "scale": "fp32",
        "q_batch": stride, "q_head": stride, "q_row": stride,
        "k_batch": stride, "k_head": stride, "k_row": stride,
    }  # fmt: skip
    constants = {
        "HEAD_SIZE": head_size, "VECTOR": vector, "PLACES": places, "TILE_M": rows,
        "TILE_N": columns, "D": width, "STAGES": 3,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    return Launcher(_score, types, constants, num_warps=4)
