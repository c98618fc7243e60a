"""Paged attention of few new tokens a sequence (decode, speculation) on a GPU: one launch.

The rows of a KV head, tokens × group, share every key that is loaded. The grid is persistent: a
work queue holds the key tiles of all sequences, head after head (``triton_work``), and is cut into
equal ranges, one per CTA, so that all multiprocessors end together however uneven lengths are::

    seq 0 head 0      head 1            seq 1 head 0 ...
    ├──┬──┬──┬──┬──┼──┬──┬──┬──┬──┼──┬──┬──┬──┬──┬──┬──┬──┤
    └── CTA 0 ────┘└── CTA 1 ────┘└── CTA 2 ────┘└─ ...

A CTA that has all tiles of a head writes ``out``. If several CTAs share a head, each stores the
state of its split, and the last one to arrive merges the states in the order of the keys, so the
bits do not depend on which CTA was last. If there is little work, short heads are not cut
(``triton_work``), and only half of the CTAs take part (``HALVING_TILES``). With ``SPLITS_FIXED``
(batch invariance) heads are cut at multiples of ``1 << SPLIT_SHIFT`` tiles instead, whatever the
batch.

Lengths are read on the device, so a captured launch can be replayed with other lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...tiles.triton.early import wait_for_previous
from ...tiles.triton.forward import load_rows
from ...tiles.triton.online_softmax import (
    LOG2_E,
    ROOM,
    SMALLEST,
    apply_score_mods,
    exp2_of,
    fit_queries,
    merge,
    merge_first,
    precision_of,
    scale_weights,
    update_softmax,
)
from .triton_work import (
    cut,
    find_block_numbers,
    find_bounds,
    find_entry,
    find_range,
    find_split,
    list_of,
    load_block_ids,
    measure_queue,
    slot_of,
    store_split,
    store_split_info,
    write_rows,
)


@triton.jit
def _prefetch(table, key, end_key, block_size):
    """Prefetch a range's block ids to L2."""
    last = (end_key - 1) // block_size
    for index in range(key // block_size, last + 1, 8 * 128):
        at = table + tl.minimum(index + 8 * tl.arange(0, 128), last)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _load_splits(
    split_accs, split_sums, start, num_splits, seq_head, first_cta, max_splits, rows, is_row,
    SPLITS_FIXED: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Load rows ``rows`` of ``AT_ONCE`` splits' states from ``start`` on; empty past the last."""
    columns = tl.arange(0, V)
    split = start + tl.arange(0, AT_ONCE)
    is_state = (split < num_splits)[:, None] & is_row[None, :]
    slot = slot_of(split, seq_head, first_cta, max_splits, SPLITS_FIXED)
    sums = split_sums + (slot * 2 * ROWS)[:, None] + rows[None, :]
    # .cg: load from L2, where other CTAs' stores are; L1 may be stale.
    ms = tl.load(sums, mask=is_state, other=float("-inf"), cache_modifier=".cg")
    ls = tl.load(sums + ROWS, mask=is_state, other=0.0, cache_modifier=".cg")
    accs = tl.load(
        split_accs + (slot * ROWS * V)[:, None, None] + (rows * V)[None, :, None]
        + columns[None, None, :],
        mask=is_state[:, :, None], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return ms, ls, accs


@triton.jit
def _merge_splits(
    split_accs, split_sums, num_splits, seq_head, first_cta, max_splits, rows, is_row,
    SPLITS_FIXED: tl.constexpr, ROWS: tl.constexpr, V: tl.constexpr, AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Merge all splits' states of rows ``rows`` of a head, in the order of their keys.

    ``AHEAD``: whether the next states are loaded during a merge, which takes twice the registers.
    """
    m = tl.full([rows.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], V], tl.float32)
    if AHEAD:
        next_ms, next_ls, next_accs = _load_splits(
            split_accs, split_sums, 0, num_splits, seq_head, first_cta, max_splits, rows, is_row,
            SPLITS_FIXED, ROWS, V, AT_ONCE,
        )  # fmt: skip
    for start in range(0, num_splits, AT_ONCE):
        if AHEAD:
            ms, ls, accs = next_ms, next_ls, next_accs
            next_ms, next_ls, next_accs = _load_splits(
                split_accs, split_sums, start + AT_ONCE, num_splits, seq_head, first_cta,
                max_splits, rows, is_row, SPLITS_FIXED, ROWS, V, AT_ONCE,
            )  # fmt: skip
        else:
            ms, ls, accs = _load_splits(
                split_accs, split_sums, start, num_splits, seq_head, first_cta, max_splits, rows,
                is_row, SPLITS_FIXED, ROWS, V, AT_ONCE,
            )  # fmt: skip
        ms, ls, accs = merge_first(ms, ls, accs)
        m, l, acc = merge(m, l, acc, ms, ls, accs)
    return m, l, acc


@triton.jit
def _finish_head(
    out, lse, split_accs, split_sums, split_info, arrivals, m, l, acc, rows, v_columns, sinks,
    factor, seq_head, head, head_start, per_head, first, count, program, programs, total,
    max_splits, first_token, query_len, num_kv_heads, out_token, out_head,
    GROUP: tl.constexpr, V_SIZE: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
):  # fmt: skip
    """Write a head with all of its keys; otherwise store the split, which is merged later.

    The last CTA to arrive merges the splits, or ``merge_kernel`` if ``MERGE_ROWS``.
    """
    V: tl.constexpr = acc.shape[1]
    if count == per_head:
        write_rows(
            out, lse, m, l, acc, rows, v_columns, sinks, factor, first_token, head, query_len,
            num_kv_heads, out_token, out_head, GROUP, V_SIZE, HAS_SINKS,
        )  # fmt: skip
        if MERGE_ROWS > 0:
            store_split_info(split_info, seq_head, 0, 1)
    else:
        split, num_splits, first_cta = find_split(
            head_start, per_head, first, program, programs, total, SPLITS_FIXED
        )
        slot = slot_of(split, seq_head, first_cta, max_splits, SPLITS_FIXED)
        is_kept = rows < (query_len * GROUP if MERGE_ROWS > 0 else ROWS)
        store_split(split_accs, split_sums, slot, rows, v_columns, m, l, acc, is_kept, ROWS)
        if MERGE_ROWS > 0:
            if first == 0:
                store_split_info(split_info, seq_head, first_cta, num_splits)
        else:
            tl.debug_barrier()  # all threads have stored before one of them counts
            arrived = tl.atomic_add(arrivals + seq_head, 1, sem="acq_rel", scope="gpu")
            if arrived == num_splits - 1:
                tl.store(arrivals + seq_head, 0)
                kept_rows = tl.arange(0, ROWS)
                all_m, all_l, all_acc = _merge_splits(
                    split_accs, split_sums, num_splits, seq_head, first_cta, max_splits,
                    kept_rows, kept_rows >= 0, SPLITS_FIXED, ROWS, V, AT_ONCE, False,
                )  # fmt: skip
                write_rows(
                    out, lse, all_m, all_l, all_acc, kept_rows, v_columns, sinks, factor,
                    first_token, head, query_len, num_kv_heads, out_token, out_head, GROUP,
                    V_SIZE, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def decode_kernel(
    out,  # [num_tokens, num_heads, V_SIZE]
    lse,  # float32 [num_tokens, num_heads]
    split_accs,  # float32 [slots, ROWS, V]: acc of splits of a head's keys
    split_sums,  # float32 [slots, 2, ROWS]: their m and l; if MERGE_ROWS, split_info comes first
    arrivals,  # int32 [num_seqs * num_kv_heads] of zeros, left as zeros
    q,  # [num_tokens, num_heads, SIZE]
    k_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, SIZE]
    v_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, V_SIZE]
    block_tables,  # int32 [num_seqs, ...]
    seq_lens,  # int32 [num_seqs]
    cu_seqlens_q,  # int32 [num_seqs + 1]
    alibi_slopes,  # float32 [num_heads]
    sinks,  # float32 [num_heads]
    k_scale,  # float32 [num_kv_heads] or [num_blocks, BLOCK_SIZE, num_kv_heads]
    v_scale,  # likewise
    visible_blocks,  # int32 [num_seqs, num_kv_heads, max_visible]
    num_seqs, num_kv_heads, max_splits, softmax_scale, soft_cap, window, block_size,
    out_token, out_head, q_token, q_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    max_visible, search_steps, list_seq, list_head,
    GROUP: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: see block_size
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr, SCALES: tl.constexpr, SPLIT_SHIFT: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, WHOLE_TILES: tl.constexpr,
    HALVING_TILES: tl.constexpr,  # use half of the CTAs if each would have fewer tiles than this
    LEAST_TILES: tl.constexpr,  # fewest tiles of a CTA; 0: no limit
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    SEQS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,  # 0: the last CTA of a head to arrive merges; else ``merge_kernel``
    DOT: tl.constexpr,
    COMPILED: tl.constexpr,  # not interpreted
    VISIBLE: tl.constexpr,
):  # fmt: skip
    """See the module docstring."""
    if COMPILED:
        wait_for_previous()
    # The length of the work queue, and this CTA's range of it.
    MAX_TOKENS: tl.constexpr = ROWS // GROUP
    listed = (visible_blocks, max_visible, search_steps, list_seq, list_head, block_size)
    heads = 1 if VISIBLE else num_kv_heads
    entries = tl.arange(0, SEQS)
    tiles, whole, total, programs = measure_queue(
        seq_lens, cu_seqlens_q, entries, num_seqs, num_kv_heads, window, listed, MAX_TOKENS, TILE_N,
        SPLIT_SHIFT, SPLITS_FIXED, WHOLE_TILES, HALVING_TILES, LEAST_TILES, VISIBLE,
    )  # fmt: skip
    program = tl.program_id(0)
    if program >= programs:
        return
    work = cut(program, programs, total)
    end_work = cut(program + 1, programs, total)
    entry, before = find_entry(
        seq_lens, cu_seqlens_q, entries, tiles, whole, work, num_seqs, num_kv_heads, window, listed,
        MAX_TOKENS, TILE_N, SPLIT_SHIFT, SPLITS_FIXED, VISIBLE,
    )  # fmt: skip

    split_info = split_sums
    if MERGE_ROWS > 0:
        split_sums += 2 * num_seqs * num_kv_heads
    rows = tl.arange(0, TILE_M)
    columns = tl.arange(0, D)
    v_columns = tl.arange(0, V)
    keys = tl.arange(0, TILE_N)
    while work < end_work:
        # Which rows, which keys.
        (
            seq, head, seq_len, first_token, query_len, head_start, per_head, first, count, low,
            high, first_key, end_key,
        ) = find_range(
            seq_lens, cu_seqlens_q, entry, before, work, end_work, num_kv_heads, window, listed,
            whole, MAX_TOKENS, TILE_N, SPLIT_SHIFT, SPLITS_FIXED, VISIBLE,
        )  # fmt: skip

        token = first_token + rows // GROUP
        q_heads = head * GROUP + rows % GROUP
        is_row = rows < query_len * GROUP
        blocks = list_of(listed, seq, head) if VISIBLE else visible_blocks
        position, row_first, row_end = find_bounds(
            rows, blocks, listed, seq_len, query_len, window, GROUP, CAUSAL, VISIBLE
        )
        q_tile = tl.load(
            q + (token.to(tl.int64) * q_token + q_heads * q_head)[:, None] + columns[None, :],
            mask=is_row[:, None] & (columns < SIZE)[None, :],
            other=0.0,
        )
        q_tile, scale = fit_queries(q_tile, DOT)
        scale *= softmax_scale / soft_cap if HAS_CAP else softmax_scale * LOG2_E
        factor = 1.0
        if SCALES == "head":
            scale *= tl.load(k_scale + head * ks_head)
            factor = tl.load(v_scale + head * vs_head)
        slopes = 0.0
        if HAS_ALIBI:
            slopes = tl.load(alibi_slopes + q_heads, mask=is_row, other=0.0) * LOG2_E

        m = tl.full([TILE_M], float("-inf"), tl.float32)
        l = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, V], tl.float32)
        unit = SMALLEST
        table = block_tables + seq.to(tl.int64) * table_stride
        if COMPILED and not VISIBLE:
            _prefetch(table, low * TILE_N, tl.minimum(high * TILE_N, seq_len), block_size)
        # Block ids are loaded one tile ahead, and listed block numbers two tiles, so that loads of
        # keys and values need not wait for them.
        key = low * TILE_N + keys
        number = find_block_numbers(
            blocks, key, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
        )
        block_ids = load_block_ids(
            table, number, key, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
        )
        number = find_block_numbers(
            blocks, key + TILE_N, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
        )
        for tile in tl.range(low, high, num_stages=STAGES):
            key = tile * TILE_N + keys
            used = (key >= first_key) & (key < end_key)
            slot = key % BLOCK_SIZE if BLOCK_SIZE > 0 else key % block_size
            block = block_ids.to(tl.int64)
            block_ids = load_block_ids(
                table, number, key + TILE_N, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
            )
            number = find_block_numbers(
                blocks, key + 2 * TILE_N, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
            )
            row = block * k_block + slot * k_slot + head * k_head
            k_tile = load_rows(k_cache, row, used, SIZE, D, True)
            row = block * v_block + slot * v_slot + head * v_head
            v_tile = load_rows(v_cache, row, used, V_SIZE, V, True)
            s = tl.dot(q_tile, tl.trans(k_tile.to(DOT)), input_precision=precision_of(D, V)) * scale
            if SCALES == "token":
                row = block * ks_block + slot * ks_slot + head * ks_head
                s *= tl.load(k_scale + row, mask=used, other=0.0)[None, :]
            s = apply_score_mods(
                s, key, position, slopes, soft_cap, blocks, first_key, end_key, block_size, HAS_CAP,
                HAS_ALIBI, VISIBLE,
            )  # fmt: skip
            seen = (key[None, :] >= row_first[:, None]) & (key[None, :] < row_end[:, None])
            s = tl.where(seen, s, float("-inf"))
            p, decay, m, l = update_softmax(s, m, l)
            if SCALES == "token":
                row = block * vs_block + slot * vs_slot + head * vs_head
                v_scales = tl.load(v_scale + row, mask=used, other=0.0)
                p, decay, unit = scale_weights(p, decay, v_scales, unit)
            acc = tl.dot(
                p.to(DOT), v_tile.to(DOT), acc * decay[:, None], input_precision=precision_of(D, V)
            )
        if SCALES == "token":
            acc *= exp2_of(unit - ROOM)

        _finish_head(
            out, lse, split_accs, split_sums, split_info, arrivals, m, l, acc, rows, v_columns,
            sinks, factor, seq * num_kv_heads + head, head, head_start, per_head, first, count,
            program, programs, total, max_splits, first_token, query_len, num_kv_heads, out_token,
            out_head, GROUP, V_SIZE, HAS_SINKS, SPLITS_FIXED, ROWS, AT_ONCE, MERGE_ROWS,
        )  # fmt: skip
        work += count
        if work == before + per_head * heads:
            before = work
            entry += 1


@triton.jit
def merge_kernel(
    out,  # [num_tokens, num_heads, V_SIZE]
    lse,  # float32 [num_tokens, num_heads]
    split_accs,  # float32 [slots, ROWS, V]
    split_sums,  # float32: split_info [num_seqs * num_kv_heads, 2], then m and l [slots, 2, ROWS]
    cu_seqlens_q,  # int32 [num_seqs + 1]
    sinks,  # float32 [num_heads]
    v_scale,  # float32 [num_kv_heads] where SCALES is "head"
    num_kv_heads, max_splits, out_token, out_head, vs_head,
    GROUP: tl.constexpr, V_SIZE: tl.constexpr, HAS_SINKS: tl.constexpr, SCALES: tl.constexpr,
    SPLITS_FIXED: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
    MERGE_ROWS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ``MERGE_ROWS`` rows of a head. Grid: (sequence, KV head) × row tiles."""
    if COMPILED:
        wait_for_previous()
    seq_head = tl.program_id(0)
    seq, head = seq_head // num_kv_heads, seq_head % num_kv_heads
    first_cta = tl.load(split_sums + 2 * seq_head, cache_modifier=".cg").to(tl.int32)
    num_splits = tl.load(split_sums + 2 * seq_head + 1, cache_modifier=".cg").to(tl.int32)
    first_token = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    # A head in one split is already written. No early return, so that all loads overlap.
    query_len = tl.where(num_splits > 1, query_len, 0)
    num_splits = tl.where(num_splits > 1, num_splits, 0)
    rows = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    factor = tl.load(v_scale + head * vs_head) if SCALES == "head" else 1.0
    m, l, acc = _merge_splits(
        split_accs, split_sums + 2 * tl.num_programs(0), num_splits, seq_head, first_cta,
        max_splits, rows, rows < query_len * GROUP, SPLITS_FIXED, ROWS, V, AT_ONCE, True,
    )  # fmt: skip
    write_rows(
        out, lse, m, l, acc, rows, tl.arange(0, V), sinks, factor, first_token, head, query_len,
        num_kv_heads, out_token, out_head, GROUP, V_SIZE, HAS_SINKS,
    )  # fmt: skip
