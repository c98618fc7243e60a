"""From a problem and a device to a plan for the forward pass: a pure function of integers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from ...device import DeviceInfo

SPLIT_SIZE = 512
"""Keys of one partial state. Every sequence is cut at its multiples, whatever the batch, so the
number is part of the result's bits; merging costs about 1 / SPLIT_SIZE of the work."""

_SMALL = 1 << 19  # multiply-adds that take a thread about as long as waking another one


_TILE_BYTES = 8192
"""Bytes of keys and values that one position of a tile may take: a tile of 64 positions and the
one that is fetched ahead of it then just fill a 1 MiB second-level cache."""


HEADS_BY_KEY = 16
"""A multiple of so many heads of one row each is walked key by key, all heads of a key at once."""


class Shape(Protocol):
    """What a plan asks of a problem, paged or not."""

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""

    @property
    def num_tokens(self) -> int:
        """Queries of all of them."""

    @property
    def max_seq_len(self) -> int:
        """At least the most keys of one."""

    @property
    def num_heads(self) -> int:
        """Of queries."""

    @property
    def num_kv_heads(self) -> int:
        """Of keys and values."""

    @property
    def head_size(self) -> int:
        """Of queries and keys."""

    @property
    def v_head_size(self) -> int:
        """Of values."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of keys and values."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""


@dataclass(frozen=True)
class Plan:
    """How a problem is cut up. Only ``split_size`` and ``bf16_dot`` show in a result's bits.

    Keys that ``attention`` turns into columns show as well, but no plan says so: how many rows a
    sequence has decides.
    """

    tile_m: int
    """Query rows (tokens × group) of one item of prefill work."""
    decode_heads: int
    """KV heads of one item of decode work."""
    split_size: int
    """Keys of one partial state."""
    parallel_splits: bool
    """Whether the splits of a decoding sequence go to different threads."""
    item_splits: int
    """Splits of one item then: neighbours in memory, walked without a pause."""
    num_threads: int
    bf16_dot: bool
    """Whether bfloat16, and 8 bits as bfloat16, are multiplied as they are; float32 otherwise.
    Part of the bits, too."""


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Shape, device: DeviceInfo) -> Plan:
    """Choose how to cut a problem for the CPU path.

    A decode item walks all KV heads of its keys, because a page's heads lie side by side in
    memory. When that leaves threads without work, its splits become items, and if there are too
    few of those (short sequences) its heads as well.

    Example:
        >>> from pagetile.ops.paged_attention import Problem
        >>> problem = Problem(1, 1, 1, 32768, 32, 8, 128, 128, 16, torch.float32, torch.float32)
        >>> make_plan(problem, DeviceInfo("cpu", 2)).parallel_splits
        True
    """
    work = problem.num_tokens * problem.num_heads * problem.max_seq_len
    work *= problem.head_size + problem.v_head_size
    num_threads = device.num_workers if work > _SMALL else 1
    # Four items a thread keep the last one from working alone for long.
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
        decode_heads = problem.num_kv_heads  # no tile waits in a cache then
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
    )


def _bytes_per_key(problem: Shape) -> int:
    return (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
