"""The decode kernels' work queue, and the state of a head's splits: shared by Triton and Gluon.

A work tile is one key tile of one KV head, or several of them. The queue holds the work tiles of
all heads, sequence after sequence; each CTA takes an equal range of it. See ``triton_decode``.

Merging the splits of a head takes as long as reading several tiles. So if there is little work and
no long head (``choose_whole``), a head of up to ``WHOLE_TILES`` key tiles is a single work tile,
and other heads have work tiles of ``1 << SPLIT_SHIFT`` key tiles, as always with ``SPLITS_FIXED``.

An entry of the queue is a sequence with all its KV heads. With listed blocks (``VISIBLE``) heads of
a sequence have different numbers of keys, so an entry is one KV head of one sequence, and key tiles
are tiles of compact keys (``tiles.triton.visible_blocks``).

No helper here creates a tensor, so none needs a layout and ``@gluon.jit`` kernels can call them.
"""

import triton
import triton.language as tl

from ...tiles.triton.online_softmax import LN_2, LOG2_E, add_sink
from ...tiles.triton.visible_blocks import compact_position

NO_WINDOW = tl.constexpr(1 << 30)
"""The value that ``launch.window_of`` passes if there is no window."""

FEW = tl.constexpr(8)
"""Up to this many tiles per CTA, uneven ranges cost less than merging."""

LONG = tl.constexpr(4)
"""A head of more than this many times ``WHOLE_TILES`` tiles is long."""


@triton.jit
def add(a, b):
    """The operation of ``associative_scan``."""
    return a + b


@triton.jit
def _key_tiles(first_key, end_key, TILE_N: tl.constexpr):
    """The first tile that any row sees, and the one after the last."""
    first = first_key // TILE_N
    return first, tl.maximum((end_key + TILE_N - 1) // TILE_N, first)


@triton.jit
def key_range(seq_len, query_len, window, listed, seq, head, VISIBLE: tl.constexpr):
    """The keys that any row may see: the first one, and the one after the last; compact if VISIBLE.

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
def _keep_short(seq_len, query_len, MAX_TOKENS: tl.constexpr):
    """Return lengths, 0 for sequences of more than ``MAX_TOKENS`` new tokens: prefill has them."""
    is_short = query_len <= MAX_TOKENS
    return tl.where(is_short, seq_len, 0), tl.where(is_short, query_len, 0)


@triton.jit
def count_key_tiles(
    seq_lens, cu_seqlens_q, entry, num_seqs, num_kv_heads, window, listed, MAX_TOKENS: tl.constexpr,
    TILE_N: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """Each entry's first key tile, the one after its last, and its number of heads."""
    seq, head = _split_entry(entry, num_kv_heads, VISIBLE)
    is_seq = seq < num_seqs
    seq_len = tl.load(seq_lens + seq, mask=is_seq, other=0)
    start = tl.load(cu_seqlens_q + seq, mask=is_seq, other=0)
    query_len = tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0) - start
    seq_len, query_len = _keep_short(seq_len, query_len, MAX_TOKENS)
    seq = tl.where(is_seq, seq, 0) if VISIBLE else seq
    first_key, end_key = key_range(seq_len, query_len, window, listed, seq, head, VISIBLE)
    first, end = _key_tiles(first_key, end_key, TILE_N)
    return first, end, tl.where(is_seq, 1 if VISIBLE else num_kv_heads, 0)


@triton.jit
def _shift_of(whole, SPLIT_SHIFT: tl.constexpr, SPLITS_FIXED: tl.constexpr):
    """The base-2 logarithm of a work tile's number of key tiles."""
    return SPLIT_SHIFT if SPLITS_FIXED else tl.where(whole > 0, SPLIT_SHIFT, 0)


@triton.jit
def _count_splits(first, end, whole, shift):
    """Work tiles of a head; at least one, to write the result of a head without keys."""
    count = ((end + (1 << shift) - 1) >> shift) - (first >> shift)
    return tl.where(end - first <= whole, 1, tl.maximum(count, 1))


@triton.jit
def count_work_tiles(tiles, whole, SPLIT_SHIFT: tl.constexpr, SPLITS_FIXED: tl.constexpr):
    """Work tiles of each entry of the queue.

    ``tiles`` is the result of ``count_key_tiles``. Heads of up to ``whole`` key tiles are one work
    tile. With ``whole`` 0 and without ``SPLITS_FIXED`` every key tile is a work tile.
    """
    first, end, heads = tiles
    shift = _shift_of(whole, SPLIT_SHIFT, SPLITS_FIXED)
    return heads * _count_splits(first, end, whole, shift)


@triton.jit
def choose_whole(total_tiles, total_whole, longest, programs, WHOLE_TILES: tl.constexpr):
    """Choose ``whole`` (``WHOLE_TILES`` or 0), and return it with the number of work tiles.

    ``total_whole`` is that number with ``WHOLE_TILES``, and ``longest`` the most key tiles of a
    head. If a head is long, its splits have to be merged anyway, and whole heads would only make
    ranges uneven, unless there is a CTA for every tile.
    """
    is_little = (total_tiles <= programs * FEW) & (longest <= LONG * WHOLE_TILES)
    is_little = is_little | (total_tiles <= programs)
    return tl.where(is_little, WHOLE_TILES, 0), tl.where(is_little, total_whole, total_tiles)


@triton.jit
def cut(program, programs, total):
    """``program * total // programs``, in 32 bits."""
    return program * (total // programs) + program * (total % programs) // programs


@triton.jit
def measure_queue(
    seq_lens, cu_seqlens_q, entries, num_seqs, num_kv_heads, window, listed,
    MAX_TOKENS: tl.constexpr, TILE_N: tl.constexpr, SPLIT_SHIFT: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, WHOLE_TILES: tl.constexpr, HALVING_TILES: tl.constexpr,
    LEAST_TILES: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """The length of the work queue, and how many CTAs share it.

    ``entries`` is 0, 1, 2 ...: so many entries are counted at a time. Only half of the CTAs take
    part if each would have fewer than ``HALVING_TILES`` key tiles, and each has at least
    ``LEAST_TILES``.

    Returns ``(tiles, whole, total, programs)``: ``count_key_tiles`` of the first entries, the
    result of ``choose_whole``, all work tiles, and the number of CTAs.
    """
    SEQS: tl.constexpr = entries.shape[0]
    num_entries = num_seqs * num_kv_heads if VISIBLE else num_seqs
    tiles = count_key_tiles(
        seq_lens, cu_seqlens_q, entries, num_seqs, num_kv_heads, window, listed, MAX_TOKENS, TILE_N,
        VISIBLE,
    )  # fmt: skip
    total_tiles = tl.sum(count_work_tiles(tiles, 0, SPLIT_SHIFT, SPLITS_FIXED), 0)
    total = tl.sum(count_work_tiles(tiles, WHOLE_TILES, SPLIT_SHIFT, SPLITS_FIXED), 0)
    longest = tl.max(tiles[1] - tiles[0], 0)
    for start in tl.range(SEQS, num_entries, SEQS, num_stages=1):
        more = count_key_tiles(
            seq_lens, cu_seqlens_q, start + entries, num_seqs, num_kv_heads, window, listed,
            MAX_TOKENS, TILE_N, VISIBLE,
        )  # fmt: skip
        total_tiles += tl.sum(count_work_tiles(more, 0, SPLIT_SHIFT, SPLITS_FIXED), 0)
        total += tl.sum(count_work_tiles(more, WHOLE_TILES, SPLIT_SHIFT, SPLITS_FIXED), 0)
        longest = tl.maximum(longest, tl.max(more[1] - more[0], 0))
    whole, total = choose_whole(total_tiles, total, longest, tl.num_programs(0), WHOLE_TILES)
    programs = tl.minimum(tl.num_programs(0), total)
    if total_tiles < HALVING_TILES * tl.num_programs(0):
        programs = tl.minimum(programs, (tl.num_programs(0) + 1) // 2)
    if LEAST_TILES > 0:
        programs = tl.minimum(programs, tl.maximum(total_tiles // LEAST_TILES, 1))
    return tiles, whole, total, programs


@triton.jit
def find_entry(
    seq_lens, cu_seqlens_q, entries, tiles, whole, work, num_seqs, num_kv_heads, window, listed,
    MAX_TOKENS: tl.constexpr, TILE_N: tl.constexpr, SPLIT_SHIFT: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """The entry of the queue that work tile ``work`` belongs to, and the work tiles before it.

    ``entries`` and ``tiles`` are those of ``measure_queue``.
    """
    SEQS: tl.constexpr = entries.shape[0]
    num_entries = num_seqs * num_kv_heads if VISIBLE else num_seqs
    ends = tl.associative_scan(count_work_tiles(tiles, whole, SPLIT_SHIFT, SPLITS_FIXED), 0, add)
    passed = ends <= work
    entry = tl.sum((passed & (entries < num_entries)).to(tl.int32), 0)
    before = tl.max(tl.where(passed, ends, 0), 0)
    running = tl.max(ends, 0)
    for start in tl.range(SEQS, num_entries, SEQS, num_stages=1):
        more = count_key_tiles(
            seq_lens, cu_seqlens_q, start + entries, num_seqs, num_kv_heads, window, listed,
            MAX_TOKENS, TILE_N, VISIBLE,
        )  # fmt: skip
        ends = running + tl.associative_scan(
            count_work_tiles(more, whole, SPLIT_SHIFT, SPLITS_FIXED), 0, add
        )
        passed = ends <= work
        entry += tl.sum((passed & (start + entries < num_entries)).to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        running = tl.max(ends, 0)
    return entry, before


@triton.jit
def _split_entry(entry, num_kv_heads, VISIBLE: tl.constexpr):
    """The sequence of an entry of the queue, and its first KV head."""
    if VISIBLE:
        return entry // num_kv_heads, entry % num_kv_heads
    return entry, 0 * entry


@triton.jit
def find_range(
    seq_lens, cu_seqlens_q, entry, before, work, end_work, num_kv_heads, window, listed,
    whole, MAX_TOKENS: tl.constexpr, TILE_N: tl.constexpr, SPLIT_SHIFT: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """The work of one KV head that begins at work tile ``work`` of the queue.

    ``before`` is the number of work tiles before the entry. Returns ``(seq, head, seq_len,
    first_token, query_len, head_start, per_head, first, count, low, high, first_key, end_key)``:
    the head's work tiles are ``head_start`` to ``head_start + per_head`` of the queue; this CTA has
    ``count`` of them from the head's number ``first`` on, key tiles ``low`` to ``high``; rows see
    keys from ``first_key`` up to ``end_key``.
    """
    seq, first_head = _split_entry(entry, num_kv_heads, VISIBLE)
    seq_len = tl.load(seq_lens + seq)
    first_token = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len, query_len = _keep_short(seq_len, query_len, MAX_TOKENS)
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
def find_bounds(
    row, blocks, listed, seq_len, query_len, window, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    VISIBLE: tl.constexpr,
):  # fmt: skip
    """Positions of rows, their first keys, and the ends of their keys; compact if VISIBLE."""
    position = seq_len - query_len + row // GROUP
    end = tl.minimum(position + 1, seq_len) if CAUSAL else seq_len + 0 * position
    first = position - window + 1
    if VISIBLE:
        end = compact_position(blocks, end, listed[5], listed[1], listed[2])
        first = compact_position(blocks, first, listed[5], listed[1], listed[2])
    return position, first, end


@triton.jit
def find_block_numbers(
    blocks, key, first_key, end_key, block_size, BLOCK_SIZE: tl.constexpr, VISIBLE: tl.constexpr
):
    """If VISIBLE, load the listed block numbers of compact keys, for ``load_block_ids``."""
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
    """Block ids of some keys; 0 for keys that no row sees, whose table entries are undefined."""
    used = (key >= first_key) & (key < end_key)
    if VISIBLE:
        used = used & (number >= 0)
    else:
        number = key // (BLOCK_SIZE if BLOCK_SIZE > 0 else block_size)
    return tl.load(table + number, mask=used, other=0)


@triton.jit
def slot_of(split, seq_head, first_cta, max_splits, SPLITS_FIXED: tl.constexpr):
    """The slot of scratch memory for the state of a head's ``split``-th split.

    With balanced ranges a CTA stores at most two states: of the head that its range starts inside,
    and of the head that its range ends inside.
    """
    if SPLITS_FIXED:
        slot = seq_head * max_splits + split
    else:
        slot = tl.where(split == 0, 2 * first_cta + 1, 2 * (first_cta + split))
    return slot.to(tl.int64)


@triton.jit
def find_split(head_start, per_head, first, program, programs, total, SPLITS_FIXED: tl.constexpr):
    """Which of a head's splits a CTA has, how many there are, and the first CTA with one."""
    start = head_start.to(tl.int64)
    first_cta = (((start + 1) * programs - 1) // total).to(tl.int32)
    last_cta = (((start + per_head) * programs - 1) // total).to(tl.int32)
    split = first if SPLITS_FIXED else program - first_cta
    num_splits = per_head if SPLITS_FIXED else last_cta - first_cta + 1
    return split, num_splits, first_cta


@triton.jit
def store_split(split_accs, split_sums, slot, row, column, m, l, acc, is_kept, ROWS: tl.constexpr):
    """Store the state of a split's rows."""
    V: tl.constexpr = acc.shape[1]
    tl.store(split_sums + slot * 2 * ROWS + row, m, mask=is_kept)
    tl.store(split_sums + slot * 2 * ROWS + ROWS + row, l, mask=is_kept)
    place = split_accs + slot * ROWS * V + (row * V)[:, None] + column[None, :]
    tl.store(place, acc, mask=is_kept[:, None])


@triton.jit
def store_split_info(split_info, seq_head, first_cta, num_splits):
    """Store a head's first CTA and number of splits for ``merge_kernel``, as exact floats."""
    tl.store(split_info + 2 * seq_head, first_cta)
    tl.store(split_info + 2 * seq_head + 1, num_splits)


@triton.jit
def write_rows(
    out, lse, m, l, acc, row, column, sinks, factor, first_token, head, query_len, num_kv_heads,
    out_token, out_head, GROUP: tl.constexpr, V_SIZE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Add the sinks, divide, and write a KV head's rows of ``out`` and ``lse``.

    ``row`` and ``column`` are the indices of the rows and columns of ``acc``, in its layout.
    """
    is_row = row < query_len * GROUP
    token = (first_token + row // GROUP).to(tl.int64)
    q_head = head * GROUP + row % GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + q_head, mask=is_row, other=0.0) * LOG2_E
        m, l, acc = add_sink(m, l, acc, sink)
    seen = l != 0  # true for NaN, so that it propagates
    divisor = tl.where(seen, l, 1.0)
    result = acc * (factor / divisor)[:, None]
    tl.store(
        out + (token * out_token + q_head * out_head)[:, None] + column[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & (column < V_SIZE)[None, :],
    )
    row_lse = tl.where(seen, (m + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(lse + token * num_kv_heads * GROUP + q_head, row_lse, mask=is_row)
