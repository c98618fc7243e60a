"""Attention scores on a GPU: a matrix product that is stored in whole lines of memory.

::

    scores[b, h, i, j] = scale · q[b, h, i] · k[b, h, j]

The kernel is bound by its stores. A row of 343 float16 scores may begin anywhere in a line of 128
bytes, so a program stages ``TILE_M`` consecutive rows in shared memory at the same alignment as in
global memory, and stores them as one piece; on Hopper by a bulk copy (``triton_staging``). Only the
elements before the first 16-byte vector of the piece and after its last are stored one by one::

    row 0           row 1           row 2
    ┆· · · 0 1 2 3 4┆5 6 0 1 2 3 4 5┆6 0 1 2 3 4 5 6┆· · · · · · · ·┆
           └single─┘ └───────── vectors ───────────┘

Grid: (tiles of ``TILE_M`` rows × parts of ``COLUMNS`` keys, heads, batch). If whole rows do not fit
in shared memory (``IS_LONG``), a program takes ``COLUMNS`` keys, and each of its rows is a piece.

Programs are short and wait for their loads, so several tiles of keys are in flight, and from Hopper
on a program prefetches to L2 what the program ``ahead`` in the batch will read (``PREFETCH``).

Supports float32, float16 and bfloat16, head sizes up to 256, any strides of q and k with a
contiguous last dimension. float32 is multiplied as float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...shapes import Form
from ...tiles.triton.launch import POINTERS, Launcher, refuse
from ...tiles.triton.online_softmax import precision_of
from .problem import Problem
from .triton_staging import (
    bulk_store,
    column_order,
    copy_numbers,
    copy_vectors,
    fence_staging,
    prefetch,
    split_eights,
    staging_address,
    store_eights,
    store_some_eights,
    wait_bulk_stores,
)

_STAGING = 45 << 10  # bytes of a program's rows at most
_TILES = 44 << 10  # bytes of its tiles under way: any GPU has room for both
_ALIGN = 128  # bytes of a line of memory
_ROWS_AT_ONCE = 192  # rows that the programs of a multiprocessor compute at a time, about
_MOST = 1 << 15  # batch entries of a launch: a grid's axis has up to 65535; results stay aligned


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.head_size > 256:
        return f"head_size is {problem.head_size}; up to 256 run"
    if problem.num_heads > _MOST:
        return f"num_heads is {problem.num_heads}; up to {_MOST} run"
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    return refuse(device, q=problem.dtype) or _refuse_interpreter(device)


def _refuse_interpreter(device: DeviceInfo) -> str | None:
    if device.kind == "cpu":
        return "its staging in shared memory is PTX, which is not interpreted"
    return None


@triton.jit
def _score(
    scores,  # [batch, num_heads, q_len, k_len], contiguous
    q,  # [batch, num_heads, q_len, HEAD_SIZE]
    k,  # [batch, num_heads, k_len, HEAD_SIZE]
    q_len,
    k_len,
    more_shared,
    ahead,
    scale,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    HEAD_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    WHOLE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_LONG: tl.constexpr,
    BULK: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """See the module docstring."""
    BITS: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth
    SIZE: tl.constexpr = BITS // 8
    ALIGN: tl.constexpr = 128 // SIZE
    PITCH: tl.constexpr = COLUMNS + ALIGN

    # Which rows and keys.
    tile, n0 = tl.program_id(0), 0
    if IS_LONG:
        parts = tl.cdiv(k_len, COLUMNS)
        tile, n0 = tile // parts, tile % parts * COLUMNS
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    m0 = tile * TILE_M
    num_rows, num_keys = tl.minimum(TILE_M, q_len - m0), k_len - n0
    if IS_LONG:
        num_keys = tl.minimum(COLUMNS, num_keys)
    row, column = tl.arange(0, TILE_M), tl.arange(0, D)
    is_column = (column < HEAD_SIZE)[None, :]

    # Their addresses. Keys are permuted so that a thread holds scores of neighbouring keys.
    q += batch * q_batch + head * q_head + m0.to(tl.int64) * q_row
    k += batch * k_batch + head * k_head + n0 * k_row
    if PREFETCH:
        is_there = batch + ahead < tl.num_programs(2)
        rows, keys = q + ahead * q_batch, k + ahead * k_batch + m0.to(tl.int64) * k_row
        num_there = tl.minimum(TILE_M, k_len - m0)
        _prefetch(rows, is_there * num_rows, q_row, q_head, head, HEAD_SIZE)
        _prefetch(keys, is_there * num_there, k_row, k_head, head, HEAD_SIZE)
    key = column_order(TILE_N, T)
    q_at = q + row.to(tl.int64)[:, None] * q_row + column[None, :]
    k_at = k + key.to(tl.int64)[:, None] * k_row + column[None, :]

    # Staging: a piece has the same offset within 128 bytes as in global memory.
    matrix = batch * tl.num_programs(1) + head
    start = (matrix * q_len + m0) * k_len + n0
    if IS_LONG:
        place = ((start + row.to(tl.int64) * k_len) % ALIGN).to(tl.int32) + row * PITCH
    else:
        place = (start % ALIGN).to(tl.int32) + row * k_len
    staging = staging_address(more_shared)
    chunk = 8 * T * tl.arange(0, TILE_N // (8 * T))[:, None] + 8 * tl.arange(0, T)[None, :]
    at = staging + (place[:, None, None] + chunk[None, :, :]) * SIZE

    # With constant counts the loop is unrolled and its pipeline loads nothing past the end.
    key_tiles = TILES if TILES > 0 else tl.cdiv(num_keys, TILE_N)
    whole_tiles = WHOLE if TILES > 0 else num_keys // TILE_N
    for i in tl.range(0, key_tiles, num_stages=STAGES):
        n = i * TILE_N
        q_tile = tl.load(q_at, mask=(row < num_rows)[:, None] & is_column, other=0.0)
        is_key = (key < num_keys - n)[:, None]
        k_tile = tl.load(k_at + n * k_row, mask=is_key & is_column, other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision_of(D))
        if IS_SCALED:
            s *= scale
        x0, x1, x2, x3, x4, x5, x6, x7 = split_eights(s.to(scores.dtype.element_ty), T)
        if i < whole_tiles:
            store_eights(at + n * SIZE, x0, x1, x2, x3, x4, x5, x6, x7, IS_ALIGNED)
        else:
            to, count = tl.broadcast(at + n * SIZE, (num_keys - n - chunk)[None, :, :])
            store_some_eights(to, x0, x1, x2, x3, x4, x5, x6, x7, count, IS_ALIGNED)
    fence_staging(BULK)

    for piece in range(num_rows if IS_LONG else 1):
        start = (matrix * q_len + m0 + piece) * k_len + n0
        begin = (start % ALIGN).to(tl.int32)
        end = begin + (num_keys if IS_LONG else num_rows * k_len)
        _write(staging + piece * (PITCH * SIZE), scores, start - begin, begin, end, BITS, BULK)
    if BULK:
        wait_bulk_stores()


@triton.jit
def _prefetch(rows, count, row, head_stride, head, HEAD_SIZE: tl.constexpr):
    """Prefetch a head's rows; if other heads lie between them, the first head prefetches all."""
    if (count > 0) & ((head == 0) | (head_stride >= row)):
        SIZE: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
        prefetch(rows.to(tl.int64), (((count - 1) * row + HEAD_SIZE) * SIZE).to(tl.int32))


@triton.jit
def _write(staging, scores, offset, begin, end, BITS: tl.constexpr, BULK: tl.constexpr):
    """Store elements ``begin`` to ``end`` of a piece, whose element 0 goes to ``scores + offset``.

    ``scores + offset`` is a multiple of 128 bytes, and vectors are counted from there, so that a
    warp writes whole lines.
    """
    SIZE: tl.constexpr = BITS // 8
    WIDTH: tl.constexpr = 16 // SIZE
    VECTORS: tl.constexpr = 256
    to = scores.to(tl.int64) + offset * SIZE
    first, last = (begin + WIDTH - 1) // WIDTH, end // WIDTH
    if BULK:
        if last > first:
            bulk_store(staging + first * 16, to + first * 16, (last - first) * 16)
    else:
        for v in range(0, last, VECTORS):
            vector = v + tl.arange(0, VECTORS)
            is_whole = (vector >= first) & (vector < last)
            copy_vectors(staging + vector * 16, to + vector * 16, is_whole)
    edge = tl.arange(0, 2 * WIDTH)
    number = tl.where(edge < WIDTH, begin // WIDTH * WIDTH, (last - 1) * WIDTH) + edge
    is_one = (number >= begin) & (number < end)
    copy_numbers(staging + number * SIZE, to + number * SIZE, is_one, BITS)


def prepare(
    problem: Problem, q: Form, k: Form, softmax_scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes scores of any tensors of these forms."""
    return functools.partial(run, problem, softmax_scale=softmax_scale)


def run(problem: Problem, q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """One launch, or more of a batch beyond ``_MOST``."""
    shape = problem.batch, problem.num_heads, problem.q_len, problem.k_len
    scores = torch.empty(shape, dtype=q.dtype, device=q.device)
    strides = *q.stride()[:3], *k.stride()[:3]
    unit = 16 // q.element_size()
    is_aligned = all(t.data_ptr() % 16 == 0 for t in (q, k))
    factor = math.gcd(unit, *strides) if is_aligned else 1
    device = DeviceInfo.of(q.device)
    k_len, long = problem.k_len, _STAGING // (16 * q.element_size())  # most keys of 16 staged rows
    if k_len > long:  # longer rows share a kernel if they have the same alignment
        k_len = long + (1 if k_len % unit else unit)
    is_dense = max(strides[2], strides[5]) <= problem.num_heads * problem.head_size
    launcher = make_launcher(
        q.dtype, problem.head_size, k_len, factor, device.capability, softmax_scale != 1, is_dense
    )
    tiles = -(-problem.q_len // launcher.constants["TILE_M"])
    parts = -(-problem.k_len // launcher.constants["COLUMNS"])
    ahead = device.num_workers * _ROWS_AT_ONCE // max(1, problem.num_heads * problem.q_len) + 1
    for first in range(0, problem.batch, _MOST):
        count = min(_MOST, problem.batch - first)
        some: tuple[Tensor, ...] = (scores, q, k)
        if count < problem.batch:
            some = tuple(t[first : first + count] for t in some)
        launcher(
            (tiles * parts, problem.num_heads, count), *some,
            problem.q_len, problem.k_len, launcher.more_shared, ahead, softmax_scale, *strides,
        )  # fmt: skip
    return scores


@functools.lru_cache(maxsize=1024)
def make_launcher(
    dtype: torch.dtype,
    head_size: int,
    k_len: int,
    factor: int,
    capability: tuple[int, int],
    is_scaled: bool = False,
    is_dense: bool = True,
) -> Launcher:
    """The launcher for heads of one size and rows of ``k_len`` keys.

    Args:
        dtype: Element type of all tensors.
        head_size: Width of a head.
        k_len: Keys of a row. For rows that are too long to stage whole, only whether they are
            multiples of 16 bytes matters.
        factor: Divides every stride, in elements, and both addresses; 1: unaligned.
        capability: Compute capability of the GPU; 9.0 and later have bulk copies.
        is_scaled: Whether products are multiplied by a scale other than 1.
        is_dense: Whether only other heads lie between rows.
    """
    size, width = dtype.itemsize, max(16, triton.next_power_of_2(head_size))
    has_bulk, is_tall = capability >= (9, 0), _is_tall(width * size, k_len, dtype, capability)
    rows, warps, tile_n, stages = _tile(width * size, k_len, is_tall)
    columns, staging = _STAGING // (rows * size), rows * k_len * size
    if is_long := k_len > columns:
        columns -= _ALIGN // size
        columns -= columns % tile_n
        staging = _STAGING
    # A single tile is only loaded asynchronously if the loop is not unrolled.
    tiles = 0 if is_long or (k_len <= tile_n and not is_tall) else -(-k_len // tile_n)
    has_sixteens = factor * size == 16 and head_size * size % 16 == 0
    given = POINTERS[dtype] + ":16" * (factor > 1)
    stride = f"i64:{factor}"
    types = {
        "scores": POINTERS[dtype] + ":16", "q": given, "k": given,
        **dict.fromkeys(("q_len", "k_len", "more_shared", "ahead"), "i32"),
        "scale": "fp32",
        "q_batch": stride, "q_head": stride, "q_row": stride,
        "k_batch": stride, "k_head": stride, "k_row": stride,
    }  # fmt: skip
    constants = {
        "HEAD_SIZE": head_size, "TILE_M": rows, "TILE_N": tile_n, "D": width, "T": tile_n // 8,
        "COLUMNS": columns,
        "TILES": tiles, "WHOLE": k_len // tile_n if tiles else 0,
        "IS_ALIGNED": k_len * size % 16 == 0, "IS_SCALED": is_scaled, "IS_LONG": is_long,
        "BULK": has_bulk,
        "PREFETCH": has_bulk and has_sixteens and is_dense and not is_long, "STAGES": stages,
    }  # fmt: skip
    more = staging + 2 * _ALIGN - 1  # to align the staging memory, and the piece within it
    return Launcher(_score, types, constants, more_shared=more, num_warps=warps)


def _is_tall(head_bytes: int, k_len: int, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether tiles have 64 rows, as ``wgmma`` has."""
    is_narrow = dtype.itemsize == 2 and head_bytes <= 64
    return capability[0] == 9 and is_narrow and 64 * k_len * dtype.itemsize <= _STAGING


def _tile(head_bytes: int, k_len: int, is_tall: bool) -> tuple[int, int, int, int]:
    """Rows, warps, keys and stages of a tile: the fastest measured (lab log).

    With fewer rows keys are read too often; with more, too few programs fit.
    """
    is_short = k_len <= 64
    if is_tall:
        return (64, 4, 64, 2) if is_short else (64, 4, 128, 4)
    rows = 32 if head_bytes < 1024 else 16
    warps, stages = (2, 2) if is_short else (4, 4)
    while warps > 1 and (rows + 32 * warps) * head_bytes > _TILES:
        warps //= 2
    stages = min(stages, 1 + _TILES // ((rows + 32 * warps) * head_bytes))
    return rows, warps, 32 * warps, stages
