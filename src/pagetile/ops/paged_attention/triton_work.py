"""The decode kernels' work queue, and the state of a head's splits: shared by Triton and Gluon.

A work tile is a tile of keys of one KV head. The queue holds the work tiles of a head side by
side, heads of a sequence one after the other, sequences in the batch's order; each CTA takes an
equal range of it. See ``triton_decode``.

Merging the splits of a head takes as long as reading several tiles. Where there is little work
and no long head (``choose_whole``), all keys of a head are therefore one work tile if they are up
to ``WHOLE`` tiles, and of other heads ``1 << SPLIT_SHIFT`` tiles are one, as always with
``SPLITS_FIXED``.

Where blocks are listed (``VISIBLE``) heads of a sequence have different numbers of keys. Then an
entry of the queue is one KV head of one sequence, otherwise a sequence with all its KV heads
(``heads``), and tiles count compact keys (``tiles.triton.visible_blocks``).

No helper here creates a tensor, so none needs a layout: ``@gluon.jit`` kernels call them as they
are (compiled for sm_90 under Triton 3.6 and 3.7.1).
"""

import triton
import triton.language as tl

from ...tiles.triton.online_softmax import LN_2, LOG2_E, add_sink
from ...tiles.triton.visible_blocks import compact_position

NO_WINDOW = tl.constexpr(1 << 30)
"""What ``launch.window_of`` passes where there is no window."""

FEW = tl.constexpr(8)
"""Up to this many tiles a CTA, dividing the work less evenly costs less than merging."""

LONG = tl.constexpr(4)
"""A head of more than this many times ``WHOLE`` tiles is long: its splits are merged anyway."""


@triton.jit
def add(a, b):
    """The operation of a scan."""
    return a + b


@triton.jit
def _key_tiles(first_key, end_key, TILE_N: tl.constexpr):
    """The first tile that any row sees, and the one after the last."""
    first = first_key // TILE_N
    return first, tl.maximum((end_key + TILE_N - 1) // TILE_N, first)


@triton.jit
def key_range(seq_len, query_len, window, listed, seq, head, VISIBLE: tl.constexpr):
    """The keys that any row may see: the first one, and the one after the last; compact ones.

    ``listed`` is ``(visible_blocks, max_visible, search_steps, seq_stride, head_stride,
    block_size)``.
    """
    first = tl.maximum(seq_len - query_len - window + 1, 0)
    end = seq_len
    if VISIBLE:
        blocks = list_of(listed, seq, head)
        end = compact_position(blocks, end, listed[5], listed[1], listed[2])
        if window < NO_WINDOW:
            first = compact_position(blocks, first, listed[5], listed[1], listed[2])
    return first, end


@triton.jit
def list_of(listed, seq, head):
    """Pointer to the list of visible blocks of a sequence's KV head."""
    return listed[0] + seq.to(tl.int64) * listed[3] + head.to(tl.int64) * listed[4]


@triton.jit
def _keep_short(seq_len, query_len, MOST: tl.constexpr):
    """Lengths, or 0 for a sequence of more new tokens than ``MOST``: another launch computes it."""
    return tl.where(query_len <= MOST, seq_len, 0), tl.where(query_len <= MOST, query_len, 0)


@triton.jit
def count_key_tiles(
    seq_lens, cu_seqlens_q, entry, num_seqs, num_kv_heads, window, listed, MOST: tl.constexpr,
    TILE_N: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """Tiles of keys of entries of the queue: the first, the one after the last, the heads."""
    seq, head = _split_entry(entry, num_kv_heads, VISIBLE)
    is_seq = seq < num_seqs
    seq_len = tl.load(seq_lens + seq, mask=is_seq, other=0)
    start = tl.load(cu_seqlens_q + seq, mask=is_seq, other=0)
    query_len = tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0) - start
    seq_len, query_len = _keep_short(seq_len, query_len, MOST)
    seq = tl.where(is_seq, seq, 0) if VISIBLE else seq
    first_key, end_key = key_range(seq_len, query_len, window, listed, seq, head, VISIBLE)
    first, end = _key_tiles(first_key, end_key, TILE_N)
    return first, end, tl.where(is_seq, 1 if VISIBLE else num_kv_heads, 0)


@triton.jit
def _shift_of(whole, SPLIT_SHIFT: tl.constexpr, SPLITS_FIXED: tl.constexpr):
    """The logarithm of a work tile's tiles."""
    return SPLIT_SHIFT if SPLITS_FIXED else tl.where(whole > 0, SPLIT_SHIFT, 0)


@triton.jit
def _count_splits(first, end, whole, shift):
    """Work tiles of a head: at least one, which writes the result."""
    count = ((end + (1 << shift) - 1) >> shift) - (first >> shift)
    return tl.where(end - first <= whole, 1, tl.maximum(count, 1))


@triton.jit
def count_work_tiles(tiles, whole, SPLIT_SHIFT: tl.constexpr, SPLITS_FIXED: tl.constexpr):
    """Work tiles of each entry of the queue.

    ``tiles`` is what ``count_key_tiles`` returned; heads of up to ``whole`` tiles are one work
    tile. With 0 they are not, and without ``SPLITS_FIXED`` each tile is one.
    """
    first, end, heads = tiles
    shift = _shift_of(whole, SPLIT_SHIFT, SPLITS_FIXED)
    return heads * _count_splits(first, end, whole, shift)


@triton.jit
def choose_whole(total_tiles, total_whole, longest, programs, WHOLE: tl.constexpr):
    """The queue's ``whole``, and its work tiles: ``total_whole`` with ``WHOLE``, or all tiles.

    ``longest`` is the most tiles of a head. Beside a long head, short ones are left whole only
    where there are CTAs for all tiles: elsewhere they make ranges uneven and save no time.
    """
    is_little = (total_tiles <= programs * FEW) & (longest <= LONG * WHOLE)
    is_little = is_little | (total_tiles <= programs)
    return tl.where(is_little, WHOLE, 0), tl.where(is_little, total_whole, total_tiles)


@triton.jit
def cut(program, programs, total):
    """``program * total // programs``, in 32 bits."""
    return program * (total // programs) + program * (total % programs) // programs


@triton.jit
def _split_entry(entry, num_kv_heads, VISIBLE: tl.constexpr):
    """The sequence of an entry of the queue, and its first KV head."""
    if VISIBLE:
        return entry // num_kv_heads, entry % num_kv_heads
    return entry, 0 * entry


@triton.jit
def find_range(
    seq_lens, cu_seqlens_q, entry, before, work, end_work, num_kv_heads, window, listed,
    whole, MOST: tl.constexpr, TILE_N: tl.constexpr, SPLIT_SHIFT: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """The part of one KV head's keys that begins at work tile ``work`` of the queue.

    ``before`` is the number of work tiles ahead of the entry. Returns the sequence, its KV head,
    its lengths and first token; the head's first work tile in the queue and their number; the
    part's first work tile in the head and their number; its tiles of keys from ``low`` to
    ``high``, and the range of keys that any row may see.
    """
    seq, first_head = _split_entry(entry, num_kv_heads, VISIBLE)
    seq_len = tl.load(seq_lens + seq)
    first_token = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len, query_len = _keep_short(seq_len, query_len, MOST)
    first_key, end_key = key_range(seq_len, query_len, window, listed, seq, first_head, VISIBLE)
    first_tile, end_tile = _key_tiles(first_key, end_key, TILE_N)
    shift = _shift_of(whole, SPLIT_SHIFT, SPLITS_FIXED)
    first_split = first_tile >> shift
    per_head = _count_splits(first_tile, end_tile, whole, shift)
    heads_passed = (work - before) // per_head
    head_start = before + heads_passed * per_head
    head = first_head + heads_passed
    first = work - head_start
    count = tl.minimum(end_work - work, 1 if SPLITS_FIXED else per_head - first)
    low = tl.maximum((first_split + first) << shift, first_tile)
    high = tl.where(first + count == per_head, end_tile, (first_split + first + count) << shift)
    return (
        seq, head, seq_len, first_token, query_len, head_start, per_head, first, count, low, high,
        first_key, end_key,
    )  # fmt: skip


@triton.jit
def find_block_numbers(
    blocks, key, first_key, end_key, block_size, BLOCK_SIZE: tl.constexpr, VISIBLE: tl.constexpr
):
    """Load the logical block numbers of compact keys from the list; others are computed later."""
    if VISIBLE:
        size = BLOCK_SIZE if BLOCK_SIZE > 0 else block_size
        used = (key >= first_key) & (key < end_key)
        return tl.load(blocks + key // size, mask=used, other=0)
    return key


@triton.jit
def load_block_ids(
    table, number, key, first_key, end_key, block_size, BLOCK_SIZE: tl.constexpr,
    VISIBLE: tl.constexpr,
):  # fmt: skip
    """The blocks of some keys; 0 for keys that no row sees, whose entries may hold anything."""
    used = (key >= first_key) & (key < end_key)
    if VISIBLE:
        used = used & (number >= 0)
    else:
        number = key // (BLOCK_SIZE if BLOCK_SIZE > 0 else block_size)
    return tl.load(table + number, mask=used, other=0)


@triton.jit
def slot_of(split, seq_head, first_cta, max_splits, SPLITS_FIXED: tl.constexpr):
    """Where the state of a head's ``split``-th split is kept.

    A CTA of the balanced plan stores at most two states: of the head that its range begins within,
    and of the one that it begins and does not end.
    """
    if SPLITS_FIXED:
        slot = seq_head * max_splits + split
    else:
        slot = tl.where(split == 0, 2 * first_cta + 1, 2 * (first_cta + split))
    return slot.to(tl.int64)


@triton.jit
def store_split_info(split_info, seq_head, first_cta, num_splits):
    """Tell ``triton_decode.merge_kernel`` where a head's states are: integers, exact as floats."""
    tl.store(split_info + 2 * seq_head, first_cta)
    tl.store(split_info + 2 * seq_head + 1, num_splits)


@triton.jit
def write_rows(
    out, lse, m, l, acc, row, column, sinks, factor, first_token, head, query_len, num_kv_heads,
    out_token, out_head, GROUP: tl.constexpr, V_SIZE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Add the sinks, divide, and write a KV head's rows of ``out`` and ``lse``.

    ``row`` and ``column`` are the numbers of the rows and columns of ``acc``, in its layout.
    """
    is_row = row < query_len * GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    q_head = head * GROUP + row % GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + q_head, mask=is_row, other=0.0) * LOG2_E
        m, l, acc = add_sink(m, l, acc, sink)
    seen = l != 0  # NaN counts as seen: it has to show
    divisor = tl.where(seen, l, 1.0)
    result = acc * (factor / divisor)[:, None]
    tl.store(
        out + (token * out_token + q_head * out_head)[:, None] + column[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (column < V_SIZE)[None, :],
    )
    row_lse = tl.where(seen, (m + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(lse + token * num_kv_heads * GROUP + q_head, row_lse, mask=is_row)
