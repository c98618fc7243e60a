"""From a checked call to one launch of ``triton_attention``'s kernel."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...errors import UnsupportedError
from ...shapes import power_of_2
from ...tiles.triton.launch import POINTERS, PRODUCTS, Launcher
from ...tiles.triton.quantise import refuse_cache
from ...tiles.triton.workspace import borrow
from .checks import PARTITION_SIZE, BlockSparse, Problem
from .triton_attention import paged_attention_kernel

_MOST_ROWS = 32
"""Query heads of one program; a larger group is split, and each part reads the keys again."""
_NARROW = 1 << 31
"""Offsets up to here are computed in 32 bits."""
_MERGED_AT_ONCE = 4096
"""Elements of partial results that a merging program holds at a time."""


class Tiles(NamedTuple):
    """How a program walks its keys."""

    tile_n: int
    """Keys of a tile: a divisor of 512."""
    num_warps: int
    num_stages: int
    max_registers: int = 0
    """A cap a thread, so that one more program fits on a multiprocessor; 0: none."""


def refuse_device(device: torch.device, kv_dtype: torch.dtype) -> None:
    """Raise UnsupportedError where Triton's kernels cannot run."""
    reason = refuse_cache(DeviceInfo.of(device), kv_dtype)
    if reason is not None:
        raise UnsupportedError(reason)


def choose_tiles(problem: Problem, is_sparse: bool = False) -> Tiles:
    """Tiles of 8 to 16 KiB of keys and as many of values, with two or more loads in flight.

    Two warps wait for each other less than four: as fast where memory is busy, and up to a quarter
    faster where a multiprocessor has one or two programs (measured on an H100; heads of 256 spill
    200 bytes a thread with two, and are a tenth faster all the same). More registers than two warps
    have are needed for more than 16 rows and for block-sparse calls.
    """
    width = power_of_2(problem.head_size) * problem.kv_dtype.itemsize
    tile_n = max(16, min(128, 16384 // width))
    if problem.q_dtype == torch.float32:  # three products of TF32 take many registers
        return Tiles(min(tile_n, 16 if width > 256 else 32), 4, 3)
    num_warps = 4 if is_sparse or problem.group > 16 else 2
    if width <= 128:  # also caches of 8 bits, up to heads of 128
        return Tiles(64, num_warps, 5)
    if problem.kv_dtype.itemsize == 1:
        return Tiles(tile_n // 2, num_warps, 5)
    return Tiles(tile_n, num_warps, 3)


def choose_split(problem: Problem, longest: int, tile_n: int, num_workers: int) -> int:
    """Keys of a partition of ``paged_attention_v1``: few enough that all multiprocessors have work.

    With few heads in all, two programs a multiprocessor, since merging takes time; with many,
    eight, so that they end at about the same time. Partitions below 512 keys cost more to merge
    than they save.
    """
    row_tiles = -(-problem.group // _rows_of(problem))
    pairs = problem.num_seqs * problem.num_kv_heads * row_tiles
    num_programs = (2 if pairs < num_workers else 8) * num_workers
    parts = max(1, -(-num_programs // pairs))
    return max(512, -(-longest // (parts * tile_n)) * tile_n)


def run(
    problem: Problem,
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sparse: BlockSparse,
    partitions: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Launch on the current stream; nothing is checked."""
    tiles = choose_tiles(problem, sparse.is_on)
    longest = max(1, min(max_seq_len, block_tables.shape[1] * problem.block_size))
    split = PARTITION_SIZE
    if partitions is None:
        workers = DeviceInfo.of(query.device).num_workers
        split = choose_split(problem, longest, tiles.tile_n, workers)
    exp_sum, max_logits, tmp_out = partitions or (out, out, out)  # absent: never written
    sums: tuple[int, ...] = (0, 0)
    tmp: tuple[int, ...] = (0, 0, 0)
    if partitions is not None:
        sums, tmp = exp_sum.stride()[:2], tmp_out.stride()[:3]
        if max_logits.stride() != exp_sum.stride():
            raise UnsupportedError("max_logits lies otherwise than exp_sum: allocate both alike")
    pages = (*key_cache.stride()[:2], *value_cache.stride()[:2])
    wide = (*out.stride()[:2], *tmp, *query.stride()[:2], *pages)
    strides = (*out.stride()[:2], *sums, *tmp, *query.stride()[:2], *pages)
    addresses = (tensor.data_ptr() for tensor in (out, tmp_out, query, key_cache, value_cache))
    is_aligned = not any(at % 16 for at in (*addresses, *wide))
    # Strides are multiplied by a head, and tmp_out's by a partition, in 32 bits; others in 64.
    by_head = max(out.stride(1), query.stride(1), sums[1], tmp[1]) * problem.num_heads
    by_partition = tmp[2] * -(-longest // split)
    is_narrow = max(*strides, block_tables.stride(0), by_head, by_partition) < _NARROW
    launcher = make_launcher(
        problem.kernel_sizes, tiles, alibi_slopes is not None, sparse.is_on,
        partitions is not None, is_aligned, is_narrow,
    )  # fmt: skip
    rows, width = launcher.constants["ROWS"], launcher.constants["D"]
    pairs = problem.num_seqs * problem.num_kv_heads * -(-problem.group // rows)
    max_parts = -(-longest // split)
    slots = pairs * max_parts if max_parts > 1 else 1
    scratch = borrow(query.get_device(), (slots * rows * width, slots * 2 * rows, pairs))
    launcher(
        (pairs * max_parts, 1, 1),
        out, exp_sum, max_logits, tmp_out, *scratch, query, key_cache, value_cache, block_tables,
        seq_lens, _or(alibi_slopes, seq_lens), _or(k_scale, seq_lens), _or(v_scale, seq_lens),
        problem.num_heads, problem.num_kv_heads, max_parts, split // tiles.tile_n, scale,
        sparse.tp_rank, sparse.local_blocks, sparse.vert_stride, sparse.block_size,
        sparse.head_sliding_step, *strides, block_tables.stride(0),
    )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


@functools.lru_cache(maxsize=1024)
def make_launcher(
    sizes: tuple[int, int, int, torch.dtype, torch.dtype],
    tiles: Tiles,
    has_alibi: bool,
    is_sparse: bool,
    writes_partitions: bool,
    is_aligned: bool,
    is_narrow: bool = True,
) -> Launcher:
    """The kernel for calls of one kind.

    Args:
        sizes: Group, head size, block size, the query's type and the cache's.
        tiles: How keys are walked.
        has_alibi: Whether there are slopes.
        is_sparse: Whether blocks are left out.
        writes_partitions: Whether each partition's result is written.
        is_aligned: Whether every row and page begins at a multiple of 16 bytes, at least.
        is_narrow: Whether strides fit in 32 bits, which saves registers.
    """
    group, head_size, block_size, q_dtype, kv_dtype = sizes
    rows = min(_MOST_ROWS, power_of_2(group))
    width = max(16, power_of_2(head_size))
    aligned = ":16" * is_aligned
    near, far = POINTERS[q_dtype] + aligned, POINTERS[kv_dtype] + aligned
    dot = PRODUCTS[q_dtype] if kv_dtype.itemsize > 1 or q_dtype == torch.float32 else tl.float16
    constants: dict[str, Any] = {
        "GROUP": group,
        "SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "X": 16 // kv_dtype.itemsize,
        "ALIGNED": min(block_size, tiles.tile_n),
        "HAS_ALIBI": has_alibi,
        "HAS_SCALES": kv_dtype.itemsize == 1,
        "SPARSE": is_sparse,
        "WRITES_PARTITIONS": writes_partitions,
        "TILE_M": max(16, rows),
        "TILE_N": tiles.tile_n,
        "D": width,
        "ROWS": rows,
        "PARTS": max(1, min(8, _MERGED_AT_ONCE // (rows * width))),
        "DOT": dot,
        "STAGES": tiles.num_stages,
    }
    plain = "i32" if is_narrow else "i64"
    stride = plain + ":16" * is_aligned
    types = {
        **dict.fromkeys(("out", "tmp_out", "q"), near),
        **dict.fromkeys(("k_cache", "v_cache"), far),
        **dict.fromkeys(("parts", "part_sums"), "*fp32:16"),
        **dict.fromkeys(("exp_sum", "max_logits", "alibi_slopes", "k_scale", "v_scale"), "*fp32"),
        **dict.fromkeys(("arrivals", "block_tables", "seq_lens"), "*i32"),
        **dict.fromkeys(("sum_seq", "sum_head", "table_stride"), plain),
        **dict.fromkeys(("out_seq", "out_head", "tmp_seq", "tmp_head", "tmp_part"), stride),
        **dict.fromkeys(("q_seq", "q_head", "k_block", "k_head", "v_block", "v_head"), stride),
        "softmax_scale": "fp32",
    }
    names = [name for name in paged_attention_kernel.arg_names if name not in constants]
    types = {name: types.get(name, "i32") for name in names}
    options = {"num_warps": tiles.num_warps}
    if tiles.max_registers:
        options["maxnreg"] = tiles.max_registers
    return Launcher(paged_attention_kernel, types, constants, **options)


def _rows_of(problem: Problem) -> int:
    return min(_MOST_ROWS, power_of_2(problem.group))
