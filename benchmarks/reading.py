"""The floor of decoding: the same pages in the same order, read by a kernel that drops them.

One short program a tile of keys of a head, as many as there are: of the ways to read random pages
that were tried none is faster by more than one percent (lab log). Scales are not read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagetile import PagedBatch

__all__ = ["make_reader"]

_WORDS = 8192  # of a tile's keys and values together


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _read(
    out,  # int32 [1], never written but for an improbable sum
    k_cache,  # int32 [num_blocks, BLOCK_SIZE, HEADS, WORDS]
    v_cache,
    block_tables,
    num_tiles,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two that holds them
    TILE: tl.constexpr,
):
    """One tile of one head."""
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % num_tiles
    seq = tl.program_id(0) // (HEADS * num_tiles)
    keys = tile * TILE + tl.arange(0, TILE)
    blocks = tl.load(block_tables + seq * table_stride + keys // BLOCK_SIZE).to(tl.int64)
    rows = ((blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * HEADS + head) * WORDS
    columns = tl.arange(0, COLUMNS)[None, :]
    at, inside = rows[:, None] + columns, columns < WORDS
    words = tl.load(k_cache + at, inside, other=0) ^ tl.load(v_cache + at, inside, other=0)
    total = tl.reduce(tl.reduce(words, 1, _xor), 0, _xor)
    if total == 123_456_789:
        tl.store(out, total)


def make_reader(k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> Callable[[], object]:
    """A call that reads the keys and values that decoding reads of sequences of one length.

    Raises:
        ValueError: The length is no multiple of a tile.
    """
    k_words, v_words = k_cache.view(torch.int32), v_cache.view(torch.int32)
    _, block_size, num_heads, width = k_words.shape
    columns = triton.next_power_of_2(width)
    tile = _WORDS // (2 * columns)
    if batch.max_seq_len % tile:
        raise ValueError(f"{batch.max_seq_len} keys of {width} words: not in tiles of {tile}")
    num_seqs, num_tiles = len(batch.seq_lens), batch.max_seq_len // tile
    out = torch.zeros(1, dtype=torch.int32, device=k_cache.device)

    def read() -> None:
        _read[(num_seqs * num_tiles * num_heads,)](
            out, k_words, v_words, batch.block_tables, num_tiles, batch.block_tables.stride(0),
            block_size, num_heads, width, columns, tile, num_warps=4,
        )  # fmt: skip

    return read
