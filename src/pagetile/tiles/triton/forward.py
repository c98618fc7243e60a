"""Attention forward in Triton, for prefill over pages and for ragged keys.

Grid: tiles of rows × KV heads. A program computes ``TILE_M`` rows of one sequence and one KV head.
A row is a new token and one query head of the KV head's group, so every key that is loaded serves
the whole group. It visits the tiles of keys that any of its rows sees; only those at the edges need
a mask::

    keys      0    N    2N   3N   4N
    row 0     ■■■■ ■■■■ ■■■□               ■ seen  □ masked  (nothing) not visited
    row 1     ■■■■ ■■■■ ■■■■
    ...       └─ no mask ─┘└─ mask ─┘

Supports causal or not, a window, a soft cap, ALiBi, sinks, 8-bit caches with scales per head or per
token, any group, any head size by padding, any block size. A program finds its sequence by the
lengths on the device. With listed blocks (``VISIBLE``) tiles are of compact keys
(``visible_blocks``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import (
    LOG2_E,
    ROOM,
    SMALLEST,
    add_sink,
    apply_score_mods,
    exp2_of,
    finish,
    fit_queries,
    precision_of,
    scale_weights,
    update_softmax,
)
from .visible_blocks import compact_position


@triton.jit
def find_tile(cu_seqlens_q, num_seqs, tile, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """The sequence of the batch's ``tile``-th tile of rows, and the tile's number in the sequence.

    A sequence's last tiles see the most keys, so they come first, and short ones at the end.
    Returns ``num_seqs`` if there are fewer tiles.
    """
    SEQS: tl.constexpr = 128
    lanes = tl.arange(0, SEQS)
    seq = 0
    before = 0
    end = 0
    running = 0
    for start in range(0, num_seqs, SEQS):
        number = start + lanes
        is_seq = number < num_seqs
        first = tl.load(cu_seqlens_q + number, mask=is_seq, other=0)
        last = tl.load(cu_seqlens_q + number + 1, mask=is_seq, other=0)
        counts = tl.cdiv((last - first) * GROUP, TILE_M)
        ends = running + tl.cumsum(counts)
        passed = (ends <= tile) & is_seq
        seq += tl.sum(passed.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
        running = tl.max(ends)
    if seq < num_seqs:
        query_len = tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq)
        end = tl.cdiv(query_len * GROUP, TILE_M)
    return seq, end - 1 - (tile - before)


@triton.jit
def load_rows(cache, row, used, SIZE: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values ``[TILE_N, D]``; zeros where no row sees them."""
    columns = tl.arange(0, D)
    at = cache + row[:, None] + columns[None, :]
    if MASKED:
        return tl.load(at, mask=used[:, None] & (columns < SIZE)[None, :], other=0.0)
    if SIZE != D:
        return tl.load(at, mask=(columns < SIZE)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def attend_tiles(
    m, l, acc, unit, q, low, high, first_key, end_key, row_first, row_end, position, slopes,
    k_cache, v_cache, table, k_scale, v_scale,
    score_scale, soft_cap, block_size,
    k_block, k_slot, v_block, v_slot, ks_block, ks_slot, vs_block, vs_slot,
    SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    TILE_N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DOT: tl.constexpr, blocks,
    VISIBLE: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Attend to the key tiles from ``low`` to ``high``: update the rows' state.

    ``AHEAD``: whether block ids are loaded one tile ahead, so that keys and values need not wait
    for them: for few tiles, without listed blocks.
    """
    if AHEAD:
        key = low * TILE_N + tl.arange(0, TILE_N)
        next_block = tl.load(table + key // block_size, mask=key < end_key, other=0)
    for tile in range(low, high):
        key = tile * TILE_N + tl.arange(0, TILE_N)
        used = (key >= first_key) & (key < end_key)
        if PAGED:
            if BLOCK_SIZE > 0:
                index, slot = key // BLOCK_SIZE, key % BLOCK_SIZE
            else:
                index, slot = key // block_size, key % block_size
            if VISIBLE:
                index = tl.load(blocks + index, mask=used, other=0)
            if AHEAD:
                block = next_block.to(tl.int64)
                next_key = key + TILE_N
                index = next_key // (BLOCK_SIZE if BLOCK_SIZE > 0 else block_size)
                next_block = tl.load(table + index, mask=next_key < end_key, other=0)
            else:
                block = tl.load(table + index, mask=used, other=0).to(tl.int64)
            k_row, v_row = block * k_block + slot * k_slot, block * v_block + slot * v_slot
        else:
            k_row, v_row = key.to(tl.int64) * k_slot, key.to(tl.int64) * v_slot
        k = load_rows(k_cache, k_row, used, SIZE, D, MASKED)
        s = tl.dot(q, tl.trans(k.to(DOT)), input_precision=precision_of(D, V)) * score_scale
        if SCALED:
            at = k_scale + block * ks_block + slot * ks_slot
            s *= tl.load(at, mask=used, other=0.0)[None, :]
        s = apply_score_mods(
            s, key, position, slopes, soft_cap, blocks, first_key, end_key, block_size, HAS_CAP,
            HAS_ALIBI, VISIBLE,
        )  # fmt: skip
        if MASKED:
            seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_end[:, None])
            s = tl.where(seen, s, float("-inf"))
        p, decay, m, l = update_softmax(s, m, l)
        if SCALED:
            at = v_scale + block * vs_block + slot * vs_slot
            scales = tl.load(at, mask=used, other=0.0)
            p, decay, unit = scale_weights(p, decay, scales, unit)
        v = load_rows(v_cache, v_row, used, V_SIZE, V, MASKED)
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * decay[:, None], input_precision=precision_of(D, V))
    return m, l, acc, unit


@triton.jit
def forward_kernel(
    out,  # [num_tokens, num_kv_heads * GROUP, V_SIZE]
    lse,  # float32 [num_tokens, num_kv_heads * GROUP]
    q,  # [num_tokens, num_kv_heads * GROUP, SIZE]
    k_cache,  # [num_blocks, block_size, num_kv_heads, SIZE], or [num_keys, num_kv_heads, SIZE]
    v_cache,  # likewise, V_SIZE
    block_tables,  # int32 [num_seqs, ...], if PAGED
    seq_lens,  # int32 [num_seqs]; or [num_seqs + 1], where each one's keys start, if not PAGED
    cu_seqlens_q,  # int32 [num_seqs + 1]
    alibi_slopes,  # float32 [num_heads]
    sinks,  # float32 [num_heads]
    k_scale,  # float32 [num_kv_heads] or [num_blocks, block_size, num_kv_heads]
    v_scale,  # likewise
    visible_blocks,  # int32 [num_seqs, num_kv_heads, max_visible], if VISIBLE
    num_seqs, num_kv_heads,
    short,  # sequences with up to this many new tokens are left to another kernel
    softmax_scale, soft_cap, window, block_size,
    out_token, out_head, q_token, q_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    max_visible, search_steps, list_seq, list_head,
    GROUP: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr, CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, SCALES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DOT: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """See the module docstring."""
    # Which rows.
    head = tl.program_id(1)
    seq, tile = find_tile(cu_seqlens_q, num_seqs, tl.program_id(0), GROUP, TILE_M)
    if seq >= num_seqs:
        return
    first_token = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    if query_len <= short:
        return
    if PAGED:
        seq_len = tl.load(seq_lens + seq)
        table = block_tables + seq.to(tl.int64) * table_stride
    else:
        first_row = tl.load(seq_lens + seq)
        seq_len = tl.load(seq_lens + seq + 1) - first_row
        k_cache += first_row.to(tl.int64) * k_slot
        v_cache += first_row.to(tl.int64) * v_slot
        table = seq_lens
    row = tile * TILE_M + tl.arange(0, TILE_M)
    token, q_heads = row // GROUP, head * GROUP + row % GROUP
    is_row = token < query_len
    position = seq_len - query_len + token
    row_end = tl.minimum(position + 1, seq_len) if CAUSAL else seq_len + 0 * position
    row_first = tl.maximum(position - window + 1, 0)

    # Their queries.
    columns, v_columns = tl.arange(0, D), tl.arange(0, V)
    at = (first_token + token).to(tl.int64)
    q_tile = tl.load(
        q + (at * q_token + q_heads * q_head)[:, None] + columns[None, :],
        mask=is_row[:, None] & (columns < SIZE)[None, :],
        other=0.0,
    )
    q_tile, scale = fit_queries(q_tile, DOT)
    scale *= softmax_scale / soft_cap if HAS_CAP else softmax_scale * LOG2_E
    slopes = row_end.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + q_heads, mask=is_row, other=0.0) * LOG2_E
    k_cache += head.to(tl.int64) * k_head
    v_cache += head.to(tl.int64) * v_head
    v_factor = 1.0
    if SCALES == "head":
        scale *= tl.load(k_scale + head * ks_head)
        v_factor = tl.load(v_scale + head * vs_head)
    if SCALES == "token":
        k_scale += head.to(tl.int64) * ks_head
        v_scale += head.to(tl.int64) * vs_head

    # The tiles that any row sees, and those that all of them see whole.
    first_row_position = seq_len - query_len + tile * TILE_M // GROUP
    last_token = tl.minimum((tile * TILE_M + TILE_M - 1) // GROUP, query_len - 1)
    last_position = seq_len - query_len + last_token
    end_key = tl.minimum(last_position + 1, seq_len) if CAUSAL else seq_len
    first_key = tl.maximum(first_row_position - window + 1, 0)
    whole_end = tl.minimum(first_row_position + 1, seq_len) if CAUSAL else seq_len
    whole_first = last_position - window + 1
    blocks = visible_blocks
    if VISIBLE:
        blocks += seq.to(tl.int64) * list_seq + head.to(tl.int64) * list_head
        end_key = compact_position(blocks, end_key, block_size, max_visible, search_steps)
        first_key = compact_position(blocks, first_key, block_size, max_visible, search_steps)
        whole_end = compact_position(blocks, whole_end, block_size, max_visible, search_steps)
        whole_first = compact_position(blocks, whole_first, block_size, max_visible, search_steps)
        row_end = compact_position(blocks, row_end, block_size, max_visible, search_steps)
        row_first = compact_position(blocks, row_first, block_size, max_visible, search_steps)
    low, high = first_key // TILE_N, tl.cdiv(tl.maximum(end_key, 0), TILE_N)
    whole_low = tl.cdiv(tl.maximum(whole_first, 0), TILE_N)
    whole_high = tl.maximum(whole_end, 0) // TILE_N
    whole_low = tl.minimum(tl.maximum(whole_low, low), high)
    whole_high = tl.minimum(tl.maximum(whole_high, whole_low), high)

    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, V], tl.float32)
    unit = SMALLEST
    for part in tl.static_range(3):
        if part == 0:
            start, stop = low, whole_low
        elif part == 1:
            start, stop = whole_low, whole_high
        else:
            start, stop = whole_high, high
        m, l, acc, unit = attend_tiles(
            m, l, acc, unit, q_tile, start, stop, first_key, end_key, row_first, row_end, position,
            slopes, k_cache, v_cache, table, k_scale, v_scale, scale, soft_cap, block_size,
            k_block, k_slot, v_block, v_slot,
            ks_block, ks_slot, vs_block, vs_slot,
            SIZE, V_SIZE, BLOCK_SIZE, PAGED, HAS_CAP, HAS_ALIBI,
            SCALES == "token", part != 1, TILE_N, D, V, DOT, blocks, VISIBLE,
        )  # fmt: skip

    # Done.
    if SCALES == "token":
        acc *= exp2_of(unit - ROOM)
    if HAS_SINKS:
        sink = tl.load(sinks + q_heads, mask=is_row, other=0.0) * LOG2_E
        m, l, acc = add_sink(m, l, acc, sink)
    result, row_lse = finish(m, l, acc)
    tl.store(
        out + (at * out_token + q_heads * out_head)[:, None] + v_columns[None, :],
        (result * v_factor).to(out.dtype.element_ty),
        mask=is_row[:, None] & (v_columns < V_SIZE)[None, :],
    )
    tl.store(lse + at * num_kv_heads * GROUP + q_heads, row_lse, mask=is_row)
