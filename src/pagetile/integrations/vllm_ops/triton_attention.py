"""Decode over an x-packed cache on a GPU, in one launch: ``out = softmax(q · Kᵀ · scale) · V``.

One program computes one partition (``split_tiles`` tiles of keys) of one sequence for all query
heads of one KV head, so a key is read once for all heads that share it. The cache::

    k_cache[block, head]  [SIZE / X, BLOCK_SIZE, X]     X elements of a key are 16 bytes
    v_cache[block, head]  [SIZE, BLOCK_SIZE]            the tokens of a column lie side by side

A tile of keys is loaded as ``[SIZE / X, TILE_N, X]``, a tile of values as ``[SIZE, TILE_N]``:
layouts from which ``ldmatrix`` reads the products' operands, without conversion.

A sequence of one partition is written to ``out``. Otherwise every program stores the state of its
keys in float32, and the last one to arrive merges them in the order of the keys: the result does
not depend on which one is last. ``paged_attention_v2`` also fills ``exp_sum``, ``max_logits`` and
``tmp_out``.

Grid: ``num_seqs · num_kv_heads · row tiles · max_parts``, partitions fastest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...tiles.triton.online_softmax import (
    LN_2,
    LOG2_E,
    finish,
    fit_queries,
    merge,
    merge_first,
    precision_of,
)


@triton.jit
def _rows_that_see(key, seq_len, q_heads, kv_head, num_heads, num_kv_heads, tp_rank,
                   local_blocks, vert_stride, sparse_size, sliding_step,
                   BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Block-sparse visibility ``[M, N]``: the last blocks, and every ``vert_stride``-th one.

    The first token of a cache block decides for the whole block, as in vLLM's kernels. A negative
    step shifts the pattern from KV head to KV head, others from query head to query head.
    """
    k_block = (key // BLOCK_SIZE * BLOCK_SIZE) // sparse_size
    last = (seq_len - 1) // sparse_size
    by_query = (tp_rank * num_heads + q_heads) * sliding_step + 1
    by_kv = (tp_rank * num_kv_heads + kv_head) * -sliding_step + 1
    offset = tl.where(sliding_step >= 0, by_query, by_kv)
    is_remote = (k_block[None, :] + offset[:, None]) % vert_stride == 0
    return is_remote | (k_block > last - local_blocks)[None, :]


@triton.jit
def _fetch_blocks(table, key, seq_len, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """The blocks of some keys; 0 past the sequence's end, where entries may be anything."""
    index = key // BLOCK_SIZE
    blocks = tl.load(table + index, mask=index * BLOCK_SIZE < seq_len, other=0)
    return tl.max_constancy(blocks, ALIGNED)


@triton.jit
def _attend_tile(
    m, sums, acc, blocks, tile, q_tile, scale, slopes, k_head, v_head, seq_len, q_heads, kv_head,
    num_heads, num_kv_heads, tp_rank, local_blocks, vert_stride, sparse_size, sliding_step,
    k_block, v_block,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, X: tl.constexpr, ALIGNED: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SPARSE: tl.constexpr, IS_LAST: tl.constexpr, TILE_N: tl.constexpr,
    D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the rows' softmax state; ``IS_LAST``: some are past the end."""
    CHUNKS: tl.constexpr = D // X
    key = tile * TILE_N + tl.arange(0, TILE_N)
    chunk, element = tl.arange(0, CHUNKS), tl.arange(0, X)
    column = tl.arange(0, D)
    block, slot = blocks.to(tl.int64), key % BLOCK_SIZE
    k_at = (
        (chunk * (BLOCK_SIZE * X))[:, None, None]
        + (block * k_block + slot * X)[None, :, None]
        + element[None, None, :]
    )
    # Triton 3.6 orders dimensions by how many elements follow each other, the first one first among
    # equals. A warp should read the chunks of neighbouring tokens: say that tokens come next.
    k_at = tl.max_contiguous(k_at, (1, 2, X))
    v_at = (column * BLOCK_SIZE)[:, None] + (block * v_block)[None, :] + slot[None, :]
    if SPARSE:
        sees = _rows_that_see(
            key, seq_len, q_heads, kv_head, num_heads, num_kv_heads, tp_rank, local_blocks,
            vert_stride, sparse_size, sliding_step, BLOCK_SIZE,
        )  # fmt: skip
        used = tl.max_constancy(tl.max(sees.to(tl.int32), 0), ALIGNED) > 0
        if IS_LAST:
            used &= key // BLOCK_SIZE * BLOCK_SIZE < seq_len
        k_tile = tl.load(
            k_head + k_at, mask=(chunk * X < SIZE)[:, None, None] & used[None, :, None], other=0.0
        )
        v_tile = tl.load(v_head + v_at, mask=(column < SIZE)[:, None] & used[None, :], other=0.0)
    elif IS_LAST:
        used = key // BLOCK_SIZE * BLOCK_SIZE < seq_len
        k_tile = tl.load(
            k_head + k_at, mask=(chunk * X < SIZE)[:, None, None] & used[None, :, None], other=0.0
        )
        v_tile = tl.load(v_head + v_at, mask=(column < SIZE)[:, None] & used[None, :], other=0.0)
    elif SIZE == D:
        k_tile = tl.load(k_head + k_at)
        v_tile = tl.load(v_head + v_at)
    else:
        k_tile = tl.load(k_head + k_at, mask=(chunk * X < SIZE)[:, None, None], other=0.0)
        v_tile = tl.load(v_head + v_at, mask=(column < SIZE)[:, None], other=0.0)
    if IS_LAST:  # whatever lies behind the end, NaN included, may not be multiplied by 0
        v_tile = tl.where((key < seq_len)[None, :], v_tile.to(DOT), 0.0)
    k_tile = tl.reshape(tl.permute(k_tile, (1, 0, 2)), (TILE_N, D)).to(DOT)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision_of(D)) * scale
    if HAS_ALIBI:
        s += slopes[:, None] * (key - seq_len + 1)[None, :]
    if SPARSE:
        s = tl.where(sees, s, float("-inf"))
    if IS_LAST:
        s = tl.where((key < seq_len)[None, :], s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    pivot = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(s - pivot[:, None])
    decay = tl.exp2(m - pivot)
    # Each warp sums its own columns until the end: no exchange between warps here.
    sums = sums * decay[:, None] + p
    acc = tl.dot(
        p.to(DOT), tl.trans(v_tile.to(DOT)), acc * decay[:, None], input_precision=precision_of(D)
    )
    return new_m, sums, acc


@triton.jit
def paged_attention_kernel(
    out,  # [num_seqs, num_heads, SIZE]
    exp_sum,  # float32 [num_seqs, num_heads, max_num_partitions]
    max_logits,  # likewise
    tmp_out,  # [num_seqs, num_heads, max_num_partitions, SIZE]
    parts,  # float32 [pairs, max_parts, ROWS, D]: acc of a partition's keys
    part_sums,  # float32 [pairs, max_parts, 2, ROWS]: their m and l
    arrivals,  # int32 [pairs] of zeros, left as zeros
    q,  # [num_seqs, num_heads, SIZE]
    k_cache,  # [num_blocks, num_kv_heads, SIZE / X, BLOCK_SIZE, X]
    v_cache,  # [num_blocks, num_kv_heads, SIZE, BLOCK_SIZE]
    block_tables,  # int32 [num_seqs, ...]
    seq_lens,  # int32 [num_seqs]
    alibi_slopes,  # float32 [num_heads]
    k_scale,  # float32 [1]
    v_scale,  # float32 [1]
    num_heads, num_kv_heads, max_parts, split_tiles, softmax_scale,
    tp_rank, local_blocks, vert_stride, sparse_size, sliding_step,
    out_seq, out_head, sum_seq, sum_head, tmp_seq, tmp_head, tmp_part, q_seq, q_head,
    k_block, k_head, v_block, v_head, table_stride,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, X: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SCALES: tl.constexpr,
    SPARSE: tl.constexpr, WRITES_PARTITIONS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module docstring."""
    # Which keys of which heads.
    ROW_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    part = tl.program_id(0) % max_parts
    pair = tl.program_id(0) // max_parts
    row_tile = pair % ROW_TILES
    kv_head = pair // ROW_TILES % num_kv_heads
    seq = (pair // ROW_TILES // num_kv_heads).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    end_tile = tl.cdiv(seq_len, TILE_N)
    num_parts = tl.maximum(tl.cdiv(end_tile, split_tiles), 1)
    if part >= num_parts:
        return
    low = part * split_tiles
    high = tl.minimum(low + split_tiles, end_tile)
    full = tl.maximum(tl.minimum(high, seq_len // TILE_N), low)

    # The heads of the group.
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, D)
    is_row = (rows < ROWS) & (row_tile * ROWS + rows < GROUP)
    q_heads = kv_head * GROUP + row_tile * ROWS + rows
    q_tile = tl.load(
        q + seq * q_seq + (q_heads * q_head)[:, None] + columns[None, :],
        mask=is_row[:, None] & (columns < SIZE)[None, :],
        other=0.0,
    )
    q_tile, scale = fit_queries(q_tile, DOT)
    scale *= softmax_scale * LOG2_E
    factor = 1.0
    if HAS_SCALES:
        scale *= tl.load(k_scale)
        factor = tl.load(v_scale)
    slopes = tl.zeros([TILE_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + q_heads, mask=is_row, other=0.0) * LOG2_E

    m = tl.full([TILE_M], float("-inf"), tl.float32)
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    acc = tl.zeros([TILE_M, D], tl.float32)
    table = block_tables + seq * table_stride
    k_of_head = k_cache + kv_head.to(tl.int64) * k_head
    v_of_head = v_cache + kv_head.to(tl.int64) * v_head
    keys = tl.arange(0, TILE_N)

    # Block ids are fetched a tile ahead: keys and values need not wait for them.
    blocks = _fetch_blocks(table, low * TILE_N + keys, seq_len, BLOCK_SIZE, ALIGNED)
    for tile in tl.range(low, full, num_stages=STAGES):
        here = blocks
        next_key = (tile + 1) * TILE_N + keys
        blocks = _fetch_blocks(table, next_key, seq_len, BLOCK_SIZE, ALIGNED)
        m, sums, acc = _attend_tile(
            m, sums, acc, here, tile, q_tile, scale, slopes, k_of_head, v_of_head, seq_len, q_heads,
            kv_head, num_heads, num_kv_heads, tp_rank, local_blocks, vert_stride, sparse_size,
            sliding_step, k_block, v_block,
            SIZE, BLOCK_SIZE, X, ALIGNED, HAS_ALIBI, SPARSE, False, TILE_N, D, DOT,
        )  # fmt: skip
    if full < high:
        m, sums, acc = _attend_tile(
            m, sums, acc, blocks, full, q_tile, scale, slopes, k_of_head, v_of_head, seq_len,
            q_heads, kv_head, num_heads, num_kv_heads, tp_rank, local_blocks, vert_stride,
            sparse_size, sliding_step, k_block, v_block,
            SIZE, BLOCK_SIZE, X, ALIGNED, HAS_ALIBI, SPARSE, True, TILE_N, D, DOT,
        )  # fmt: skip

    l = tl.sum(sums, 1)
    result, _ = finish(m, l, acc)
    is_kept = is_row[:, None] & (columns < SIZE)[None, :]
    if WRITES_PARTITIONS:  # noqa: SIM102 (the compiler knows it)
        if seq_len > 0:
            at = seq * sum_seq + q_heads * sum_head + part
            tl.store(max_logits + at, m * LN_2, mask=is_row)
            tl.store(exp_sum + at, l, mask=is_row)
            at = seq * tmp_seq + q_heads * tmp_head + part * tmp_part
            tl.store(
                tmp_out + at[:, None] + columns[None, :],
                (result * factor).to(tmp_out.dtype.element_ty),
                mask=is_kept,
            )
    if num_parts > 1:
        # Some of the keys: the last program to arrive merges.
        slot = pair.to(tl.int64) * max_parts + part
        own = rows < ROWS
        tl.store(part_sums + slot * 2 * ROWS + rows, m, mask=own)
        tl.store(part_sums + slot * 2 * ROWS + ROWS + rows, l, mask=own)
        tl.store(
            parts + slot * ROWS * D + (rows * D)[:, None] + columns[None, :], acc,
            mask=own[:, None],
        )  # fmt: skip
        tl.debug_barrier()  # every thread's stores come before the one thread's count
        arrived = tl.atomic_add(arrivals + pair, 1, sem="acq_rel", scope="gpu")
        if arrived == num_parts - 1:
            tl.store(arrivals + pair, 0)
            _merge_parts(
                out, parts, part_sums, pair.to(tl.int64) * max_parts, num_parts, factor,
                seq, kv_head * GROUP + row_tile * ROWS, GROUP - row_tile * ROWS,
                out_seq, out_head, SIZE, ROWS, D, PARTS,
            )  # fmt: skip
    else:
        tl.store(
            out + seq * out_seq + (q_heads * out_head)[:, None] + columns[None, :],
            (result * factor).to(out.dtype.element_ty),
            mask=is_kept,
        )


@triton.jit
def _merge_parts(
    out, parts, part_sums, first_slot, num_parts, factor, seq, first_head, num_rows,
    out_seq, out_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the states of all partitions, in the order of their keys, and write ``out``."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(0, num_parts, PARTS, num_stages=3):
        part = start + tl.arange(0, PARTS)
        is_part = part < num_parts
        slot = first_slot + part
        at = part_sums + (slot * 2 * ROWS)[:, None] + rows[None, :]
        # .cg: from L2, since L1 may not have the other programs' stores.
        ms = tl.load(at, mask=is_part[:, None], other=float("-inf"), cache_modifier=".cg")
        ls = tl.load(at + ROWS, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
        accs = tl.load(
            parts + (slot * ROWS * D)[:, None, None] + (rows * D)[None, :, None]
            + columns[None, None, :],
            mask=is_part[:, None, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        ms, ls, accs = merge_first(ms, ls, accs)
        m, l, acc = merge(m, l, acc, ms, ls, accs)
    result, _ = finish(m, l, acc)
    tl.store(
        out + seq * out_seq + ((first_head + rows) * out_head)[:, None] + columns[None, :],
        (result * factor).to(out.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (columns < SIZE)[None, :],
    )
