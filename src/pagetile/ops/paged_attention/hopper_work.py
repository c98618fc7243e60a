"""What work a batch of decoding sequences is: items on a line, and a share's piece of it.

An item is a tile of keys of one KV head, or a split of several; those of a head lie together, heads
of a sequence one after the other, sequences in the batch's order. See ``triton_decode``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["add", "count_items", "segment"]


@gluon.jit
def _key_tiles(seq_len, query_len, window, TILE_N: gl.constexpr):
    """The first tile that any row sees, and the one after the last."""
    first = gl.maximum(seq_len - query_len - window + 1, 0) // TILE_N
    return first, gl.maximum((seq_len + TILE_N - 1) // TILE_N, first)


@gluon.jit
def _keep_short(seq_len, query_len, MOST: gl.constexpr):
    """A sequence with more new tokens is not ours: it has none, and no keys."""
    return gl.where(query_len <= MOST, seq_len, 0), gl.where(query_len <= MOST, query_len, 0)


@gluon.jit
def count_items(
    seq_lens, cu_seqlens_q, seq, num_seqs, window, MOST: gl.constexpr, TILE_N: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
):  # fmt: skip
    """Pieces of work of one KV head of each sequence: tiles, or splits. At least one: it writes."""
    is_seq = seq < num_seqs
    seq_len = gl.load(seq_lens + seq, mask=is_seq, other=0)
    start = gl.load(cu_seqlens_q + seq, mask=is_seq, other=0)
    query_len = gl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0) - start
    seq_len, query_len = _keep_short(seq_len, query_len, MOST)
    first, end = _key_tiles(seq_len, query_len, window, TILE_N)
    count = (end + SPLIT_TILES - 1) // SPLIT_TILES - first // SPLIT_TILES
    return gl.where(is_seq, gl.maximum(count, 1), 0)


@gluon.jit
def add(a, b):
    """For a scan."""
    return a + b


@gluon.jit
def segment(
    seq_lens, cu_seqlens_q, seq, before, item, end_item, window, MOST: gl.constexpr,
    TILE_N: gl.constexpr, SPLIT_TILES: gl.constexpr, SPLITS_FIXED: gl.constexpr,
):  # fmt: skip
    """The piece of one KV head that comes next on the line."""
    seq_len = gl.load(seq_lens + seq)
    first_token = gl.load(cu_seqlens_q + seq)
    query_len = gl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len, query_len = _keep_short(seq_len, query_len, MOST)
    first_tile, end_tile = _key_tiles(seq_len, query_len, window, TILE_N)
    first_split = first_tile // SPLIT_TILES
    items = gl.maximum((end_tile + SPLIT_TILES - 1) // SPLIT_TILES - first_split, 1)
    head = (item - before) // items
    first = item - before - head * items
    count = gl.minimum(end_item - item, 1 if SPLITS_FIXED else items - first)
    low = gl.maximum((first_split + first) * SPLIT_TILES, first_tile)
    high = gl.minimum((first_split + first + count) * SPLIT_TILES, end_tile)
    return seq_len, first_token, query_len, items, head, first, count, low, high
