"""The lower bound of decode's time: a kernel that only reads the same pages in the same order.

One short program reads a tile of keys and values of one head. Of the ways to read random pages that
were tried none is faster by more than one percent (lab log). Scales are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagetile import PagedBatch

_WORDS = 8192  # 32-bit words of a tile's keys and values together


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def _read(
    out,  # int32 [1], written only for one improbable value, so that the loads are not removed
    k_cache,  # int32 [num_blocks, BLOCK_SIZE, HEADS, WORDS]
    v_cache,
    block_tables,
    num_tiles,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,  # WORDS, rounded up to a power of two
    TILE: tl.constexpr,
):
    """Read one tile of one head. Grid: ``num_seqs · num_tiles · HEADS``, heads fastest."""
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
    """A call that reads the keys and values that decode reads, for sequences of one length.

    Raises:
        ValueError: The length is not a multiple of a tile.
    """
    k_words, v_words = k_cache.view(torch.int32), v_cache.view(torch.int32)
    _, block_size, num_heads, width = k_words.shape
    columns, tile = _tile_of(width)
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


class Reader(NamedTuple):
    """A call that reads pages."""

    call: Callable[[], object]
    num_bytes: int
    """The bytes that it reads: whole tiles only, so a little less than decode does."""


def make_readers(k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> dict[str, Reader]:
    """Two ways to read the pages that decode reads, for sequences of one length.

    By heads, as decode does: where a row's words are not a power of two, lanes idle. By pages: each
    as one row, in pieces of a power of two words, so that no lane idles.
    """
    block_size = k_cache.shape[1]
    width = k_cache.view(torch.int32).shape[-1]
    keys = _whole_tiles(batch.max_seq_len, _tile_of(width)[1])
    blocks = _whole_tiles(batch.max_seq_len // block_size, _tile_of(_piece(k_cache))[1])
    readers = {
        "reading by heads": (k_cache, v_cache, keys, keys),
        "reading by pages": (_as_rows(k_cache), _as_rows(v_cache), blocks, blocks * block_size),
    }
    key_bytes = sum(cache[0, 0].numel() * cache.element_size() for cache in (k_cache, v_cache))
    return {
        name: Reader(
            make_reader(keys_in, values_in, replace(batch, max_seq_len=length)),
            len(batch.seq_lens) * num_keys * key_bytes,
        )
        for name, (keys_in, values_in, length, num_keys) in readers.items()
        if length
    }


def _tile_of(width: int) -> tuple[int, int]:
    """A row's words rounded up to a power of two, and rows of a tile."""
    columns = triton.next_power_of_2(width)
    return columns, _WORDS // (2 * columns)


def _whole_tiles(length: int, tile: int) -> int:
    return length // tile * tile


def _piece(cache: Tensor) -> int:
    """Words of an equal part of a page: a power of two, so that a tile has no masked columns."""
    words = cache[0].numel() * cache.element_size() // 4
    return min(words & -words, _WORDS // 2)


def _as_rows(cache: Tensor) -> Tensor:
    """A cache whose pages are one row of pieces: a page in place of a key, a piece of a head."""
    return cache.view(torch.int32).view(len(cache), 1, -1, _piece(cache))
