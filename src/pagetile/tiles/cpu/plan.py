"""Plans of the CPU forward pass, from host integers and the device only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from ...device import DeviceInfo

SPLIT_SIZE = 512
"""Keys of one split. Every sequence is split at its multiples, whatever the batch, so it affects
the result's bits; merging costs about 1 / SPLIT_SIZE of the work."""

_SMALL = 1 << 19  # multiply-adds: fewer take one thread no longer than waking a second


_TILE_BYTES = 8192
"""Most bytes of keys and values of one position of a tile: a tile of 64 positions and the next one,
which is prefetched, then just fill a 1 MiB L2 cache."""


HEADS_BY_KEY = 16
"""With a multiple of this many KV heads of one row each, all heads are computed key by key."""


class Shape(Protocol):
    """Properties of a problem, paged or not, that a plan depends on."""

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""

    @property
    def num_tokens(self) -> int:
        """Number of queries of all sequences."""

    @property
    def max_seq_len(self) -> int:
        """Upper bound of a sequence's keys."""

    @property
    def num_heads(self) -> int:
        """Number of query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""

    @property
    def head_size(self) -> int:
        """Head size of queries and keys."""

    @property
    def v_head_size(self) -> int:
        """Head size of values."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Element type of keys and values."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""


@dataclass(frozen=True)
class Plan:
    """Work division of a call. Only ``split_size`` and the last two affect a result's bits.

    So do key tiles that ``attention`` transposes, which depends on the rows of a sequence only.
    """

    tile_m: int
    """Query rows (tokens × group) of a prefill work item."""
    decode_heads: int
    """KV heads of a decode work item."""
    split_size: int
    """Keys of a split."""
    parallel_splits: bool
    """Whether different threads compute the splits of a decoding sequence."""
    item_splits: int
    """Adjacent splits of a work item in that case."""
    num_threads: int
    bf16_dot: bool
    """Whether bfloat16 (and 8-bit values as bfloat16) are multiplied without conversion to float32.
    It affects the result's bits."""
    bf16_tiles: bool
    """Whether matrix units then multiply (AMX): in every step of a model or in none, so that chunks
    of a prompt get the same bits. It affects the result's bits."""


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Shape, device: DeviceInfo) -> Plan:
    """Choose how to divide a problem for the CPU path.

    A decode work item has all KV heads of its keys, because a page's heads are adjacent in memory.
    If that leaves threads without work, its splits become items, and if there are too few of those
    (short sequences), its heads as well.

    Examples:
        >>> from pagetile.ops.paged_attention import Problem
        >>> problem = Problem(1, 1, 1, 32768, 32, 8, 128, 128, 16, torch.float32, torch.float32)
        >>> make_plan(problem, DeviceInfo("cpu", 2)).parallel_splits
        True
    """
    work = problem.num_tokens * problem.num_heads * problem.max_seq_len
    work *= problem.head_size + problem.v_head_size
    num_threads = device.num_workers if work > _SMALL else 1
    # Four items per thread, so that the last one does not run alone for long.
    wanted = 4 * num_threads if num_threads > 1 else 1
    num_splits = -(-max(problem.max_seq_len, 1) // SPLIT_SIZE)
    parallel_splits = problem.num_seqs < wanted and num_splits > 1
    all_splits = problem.num_seqs * num_splits
    item_splits = max(1, all_splits // (2 * wanted)) if parallel_splits else 1
    items = all_splits // item_splits if parallel_splits else problem.num_seqs
    tile_m, rows = 256, problem.num_tokens * problem.group
    while tile_m > 64 and rows * problem.num_kv_heads < wanted * tile_m:
        tile_m //= 2
    decode_heads = min(problem.num_kv_heads, max(1, _TILE_BYTES // _bytes_per_key(problem)))
    has_one_row = problem.group == 1 and problem.num_tokens <= problem.num_seqs
    if has_one_row and problem.num_kv_heads % HEADS_BY_KEY == 0:
        decode_heads = problem.num_kv_heads  # then no tile has to stay in cache
    while items * -(-problem.num_kv_heads // decode_heads) < wanted and decode_heads > 1:
        decode_heads = -(-decode_heads // 2)
    return Plan(
        tile_m=tile_m,
        decode_heads=decode_heads,
        split_size=SPLIT_SIZE,
        parallel_splits=parallel_splits,
        item_splits=item_splits,
        num_threads=num_threads,
        bf16_dot=device.bf16_dot,
        bf16_tiles=device.bf16_tiles and not _reads_by_key(problem),
    )


def _reads_by_key(problem: Shape) -> bool:
    """Whether a decode step reads all heads of a key, then the next key's.

    Matrix units take sixteen keys of a head instead. Every head and key then begins another page
    of memory, and a step with 32 heads takes 1.6 times as long.
    """
    is_whole = problem.head_size % 32 == 0 and problem.v_head_size % 32 == 0
    return problem.group == 1 and problem.num_kv_heads % HEADS_BY_KEY == 0 and is_whole


def _bytes_per_key(problem: Shape) -> int:
    return (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
