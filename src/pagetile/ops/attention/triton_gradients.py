"""Attention backward in Triton: one kernel for dK and dV, one for dQ; both recompute the scores.

::

    P = exp(S - lse)    dS = P ∘ (dout Vᵀ - delta)    delta = Σ dout ∘ out - dlse, one a row

    key gradients                            query gradients
              queries  0   M   2M   3M                 keys  0   N   2N   3N
    keys ┌─────┐      ┌───┬───┬───┬───┐      queries ┌───┐  ┌───┬───┬───┬───┐
         │dK dV│  ←   │ · │ / │ ■ │ ■ │              │dQ │← │ ■ │ ■ │ / │ · │
         └─────┘      └───┴───┴───┴───┘              └───┘  └───┴───┴───┴───┘
                  · not visible, skipped   / masked   ■ without a mask

A program of the first kernel owns a tile of keys and values of one KV head and visits the queries
of all heads of its group; one of the second owns a tile of queries of one head. So every sum has a
fixed order without atomics, and two runs give the same bits. A third kernel before both computes
``delta`` and ``lse2``, the log-sum-exp in base 2.

Supports float32, float16 and bfloat16, head sizes up to 256, every option of ``attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...tiles.triton.online_softmax import LOG2_E, tanh
from .triton_block_sparse import find_record, load_blocks
from .triton_rows import describe, find_sequence, load_tile, store_tile


@triton.jit
def differentiate(
    s, dp, lse2, delta, position, key, end, scale, cap, slope2, window,
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``P`` and ``dS`` of a tile from ``q · k`` (``s``) and ``dout · v`` (``dp``).

    Works for either orientation: ``lse2``, ``delta`` and ``position`` broadcast along the queries'
    dimension and ``key`` along the keys'. Keys from ``end`` on do not exist.
    """
    slope_of_cap = 1.0
    if HAS_CAP:
        tanh_s = tanh(s * (scale / cap))
        s = tanh_s * (cap * LOG2_E)
        slope_of_cap = 1.0 - tanh_s * tanh_s
    else:
        s = s * (scale * LOG2_E)
    if HAS_ALIBI:
        s += slope2 * (key - position).to(tl.float32)
    p = tl.exp2(s - lse2)
    if MASKED:
        visible = (key < end) & (key > position - window)
        if CAUSAL:
            visible = visible & (key <= position)
        p = tl.where(visible, p, 0.0)
    ds = p * (dp - delta)
    if HAS_CAP:
        ds = ds * slope_of_cap
    return p, ds


@triton.jit
def prepare_kernel(
    delta,  # float32 [num_heads, num_rows]
    lse2,  # float32 [num_heads, num_rows]
    out,  # [num_seqs, query_len, num_heads, V_HEAD_SIZE]
    d_out,  # [num_seqs, query_len, num_heads, V_HEAD_SIZE]
    lse,  # float32 [num_seqs, query_len, num_heads]
    d_lse,  # float32 [num_seqs, query_len, num_heads]
    num_rows,
    query_len,
    pitch,  # rows from one sequence to the next; those beyond query_len have no weights
    num_heads,
    o_token, o_head,
    do_seq, do_token, do_head,
    dlse_seq, dlse_token, dlse_head,
    HAS_D_LSE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """``delta`` and ``lse2`` of ``TILE_M`` rows of one head. Grid: tiles of rows × heads."""
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DV)
    seq, token = row // pitch, row % pitch
    inside = (row < num_rows) & (token < query_len)
    wanted = inside[:, None] & (column < V_HEAD_SIZE)[None, :]
    source = seq * query_len + token

    o_at = out + source * o_token + head * o_head
    do_at = d_out + seq * do_seq + token * do_token + head * do_head
    o = tl.load(o_at[:, None] + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    do = tl.load(do_at[:, None] + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    total = tl.sum(o * do, 1)
    if HAS_D_LSE:
        dlse_at = d_lse + seq * dlse_seq + token * dlse_token + head * dlse_head
        total -= tl.load(dlse_at, mask=inside, other=0.0)
    row_lse2 = tl.load(lse + source * num_heads + head, mask=inside, other=float("-inf")) * LOG2_E
    # A row without a visible key gets weights of 0: 2 ** (s - inf).
    row_lse2 = tl.where(row_lse2 == float("-inf"), float("inf"), row_lse2)
    tl.store(delta + head * num_rows + row, total, mask=row < num_rows)
    tl.store(lse2 + head * num_rows + row, row_lse2, mask=row < num_rows)


@triton.jit
def _walk_queries(
    dk, dv, k_tile, v_tile, q, d_out, lse2, delta, first, num_tiles, skip_at, skipped, n0,
    query_len, seq_len, scale, cap, slope2, window, q_token, do_token, tiles, mask, mask_row,
    block_q, block_k,
    HEAD_SIZE: tl.constexpr, V_HEAD_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
    SPARSE: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the terms of ``num_tiles`` tiles of queries from row ``first`` on.

    From tile number ``skip_at`` on, ``skipped`` rows that need no mask are left out. If SPARSE, the
    tiles are those that ``tiles`` lists.
    """
    key = n0 + tl.arange(0, TILE_N)[:, None]
    rows = tl.arange(0, TILE_M)
    for i in tl.range(0, num_tiles, num_stages=1 if MASKED else STAGES):
        m = tl.load(tiles + i) * TILE_M if SPARSE else first + i * TILE_M
        if MASKED:
            if not SPARSE:
                m += tl.where(i >= skip_at, skipped, 0)
            inside = m + rows < query_len
            row_lse2 = tl.load(lse2 + m + rows, mask=inside, other=float("inf"))[None, :]
            row_delta = tl.load(delta + m + rows, mask=inside, other=0.0)[None, :]
        else:
            row_lse2 = tl.load(lse2 + m + rows)[None, :]
            row_delta = tl.load(delta + m + rows)[None, :]
        q_tile = load_tile(q, m, q_token, query_len, TILE_M, D, HEAD_SIZE, TMA)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision="tf32x3")
        do_tile = load_tile(d_out, m, do_token, query_len, TILE_M, DV, V_HEAD_SIZE, TMA)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="tf32x3")
        position = m + rows[None, :] + seq_len - query_len
        p, ds = differentiate(
            s, dp, row_lse2, row_delta, position, key, seq_len, scale, cap, slope2, window,
            CAUSAL, HAS_CAP, HAS_ALIBI, MASKED,
        )  # fmt: skip
        if MASKED and HAS_BLOCKS:
            seen = load_blocks(
                mask, m + rows[None, :], key, query_len, seq_len, mask_row, block_q, block_k
            )
            p, ds = tl.where(seen, p, 0.0), tl.where(seen, ds, 0.0)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="tf32x3")
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="tf32x3")
    return dk, dv


@triton.jit
def key_gradients_kernel(
    d_k,  # [num_seqs, seq_len, num_kv_heads, HEAD_SIZE]; without num_seqs if RAGGED, as below
    d_v,  # [num_seqs, seq_len, num_kv_heads, V_HEAD_SIZE]
    q,  # [num_seqs, query_len, num_heads, HEAD_SIZE]
    k,  # as d_k
    v,  # as d_v
    d_out,  # [num_seqs, query_len, num_heads, V_HEAD_SIZE]
    lse2,  # float32 [num_heads, num_rows]
    delta,  # float32 [num_heads, num_rows]
    cu_seqlens_q,  # int32 [num_seqs + 1], if RAGGED
    cu_seqlens_k,  # int32 [num_seqs + 1], if RAGGED
    alibi_slopes,  # float32 [num_heads], if HAS_ALIBI
    lists,  # int32 [num_seqs or 1, num_heads or 1, tiles, pitch], if SPARSE
    mask,  # uint8 [num_seqs or 1, num_heads or 1, q_blocks, k_blocks], if SPARSE
    num_rows,
    query_len,
    seq_len,
    num_kv_heads,
    pitch, block_q, block_k,
    scale, cap, window,
    q_seq, q_token, q_head,
    k_seq, k_token, k_head,
    v_seq, v_token, v_head,
    do_seq, do_token, do_head,
    dk_seq, dk_token, dk_head,
    dv_seq, dv_token, dv_head,
    list_seq, list_head, mask_seq, mask_head, mask_row,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """``dK`` and ``dV`` of one tile of keys. Grid: tiles of keys × KV heads × sequences."""
    # Which tile am I?
    tiles = tl.cdiv(seq_len, TILE_N)
    n0 = tl.program_id(0) % tiles * TILE_N
    pair = tl.program_id(0) // tiles
    seq, kv_head = pair.to(tl.int64) // num_kv_heads, pair % num_kv_heads
    first_key, seq_len = find_sequence(cu_seqlens_k, seq, seq_len, RAGGED)
    first_row, query_len = find_sequence(cu_seqlens_q, seq, query_len, RAGGED)
    if n0 >= seq_len:
        return

    # Load the keys and values.
    k += seq * k_seq + first_key * k_token + kv_head * k_head
    v += seq * v_seq + first_key * v_token + kv_head * v_head
    k = describe(k, k_token, seq_len, TILE_N, D, HEAD_SIZE, TMA)
    v = describe(v, v_token, seq_len, TILE_N, DV, V_HEAD_SIZE, TMA)
    k_tile = load_tile(k, n0, k_token, seq_len, TILE_N, D, HEAD_SIZE, TMA)
    v_tile = load_tile(v, n0, v_token, seq_len, TILE_N, DV, V_HEAD_SIZE, TMA)
    dk = tl.zeros([TILE_N, D], tl.float32)
    dv = tl.zeros([TILE_N, DV], tl.float32)

    # Queries that see any of the keys: from start to end. Those that see all of them: from
    # full_start to full_end.
    shift = seq_len - query_len
    last = tl.minimum(n0 + TILE_N, seq_len) - 1
    start, full_start = 0, 0
    if CAUSAL:
        start = tl.maximum(n0 - shift, 0) // TILE_M * TILE_M
        full_start = tl.cdiv(tl.maximum(last - shift, 0), TILE_M) * TILE_M
    end = tl.cdiv(tl.maximum(tl.minimum(query_len, last + window - shift), 0), TILE_M) * TILE_M
    full_end = tl.maximum(tl.minimum(query_len, n0 + window - shift), 0) // TILE_M * TILE_M
    full_start = tl.minimum(full_start, end)
    full_end = tl.minimum(tl.maximum(full_end, full_start), end)
    first_masked = tl.maximum(full_start - start, 0) // TILE_M
    num_masked = first_masked + (end - full_end) // TILE_M

    for g in range(GROUP):
        head = (kv_head * GROUP + g).to(tl.int64)
        q_head_at = q + seq * q_seq + first_row * q_token + head * q_head
        q_head_at = describe(q_head_at, q_token, query_len, TILE_M, D, HEAD_SIZE, TMA)
        do_head_at = d_out + seq * do_seq + first_row * do_token + head * do_head
        do_head_at = describe(do_head_at, do_token, query_len, TILE_M, DV, V_HEAD_SIZE, TMA)
        row_at = head * num_rows + first_row + (0 if RAGGED else seq * query_len)
        slope2 = 0.0
        if HAS_ALIBI:
            slope2 = tl.load(alibi_slopes + head) * LOG2_E
        # Tiles without a mask; then those with one, before and after them.
        full, num_full = full_start, (full_end - full_start) // TILE_M
        partial, num_partial = start, num_masked
        skip_at, skipped = first_masked, full_end - full_start
        partial_tiles, full_tiles, head_mask = lists, lists, mask
        if SPARSE:
            full, partial, skip_at, skipped = 0, 0, 0, 0
            _, num_partial, num_full, partial_tiles = find_record(
                lists, n0 // TILE_N, seq, head, pitch, list_seq, list_head
            )
            full_tiles = partial_tiles + num_partial
            head_mask = mask + seq * mask_seq + head * mask_head
        dk, dv = _walk_queries(
            dk, dv, k_tile, v_tile, q_head_at, do_head_at, lse2 + row_at, delta + row_at,
            full, num_full, 0, 0, n0, query_len, seq_len, scale, cap, slope2, window, q_token,
            do_token, full_tiles, head_mask, mask_row, block_q, block_k,
            HEAD_SIZE, V_HEAD_SIZE, CAUSAL, HAS_CAP, HAS_ALIBI, False, SPARSE, HAS_BLOCKS,
            TILE_M, TILE_N, D, DV, STAGES, TMA,
        )  # fmt: skip
        dk, dv = _walk_queries(
            dk, dv, k_tile, v_tile, q_head_at, do_head_at, lse2 + row_at, delta + row_at,
            partial, num_partial, skip_at, skipped, n0, query_len, seq_len, scale, cap, slope2,
            window, q_token, do_token, partial_tiles, head_mask, mask_row, block_q, block_k,
            HEAD_SIZE, V_HEAD_SIZE, CAUSAL, HAS_CAP, HAS_ALIBI, True, SPARSE, HAS_BLOCKS,
            TILE_M, TILE_N, D, DV, STAGES, TMA,
        )  # fmt: skip

    # Store.
    d_k += seq * dk_seq + first_key * dk_token + kv_head * dk_head
    d_v += seq * dv_seq + first_key * dv_token + kv_head * dv_head
    store_tile(d_k, dk * scale, n0, dk_token, seq_len, TILE_N, D, HEAD_SIZE)
    store_tile(d_v, dv, n0, dv_token, seq_len, TILE_N, DV, V_HEAD_SIZE)


@triton.jit
def _walk_keys(
    dq, q_tile, do_tile, row_lse2, row_delta, k, v, first, num_tiles, skip_at, skipped, m0,
    query_len, seq_len, scale, cap, slope2, window, k_token, v_token, tiles, mask, mask_row,
    block_q, block_k,
    HEAD_SIZE: tl.constexpr, V_HEAD_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr,
    SPARSE: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the terms of ``num_tiles`` tiles of keys from key ``first`` on; see ``_walk_queries``."""
    row = m0 + tl.arange(0, TILE_M)[:, None]
    position = row + seq_len - query_len
    for i in tl.range(0, num_tiles, num_stages=1 if MASKED else STAGES):
        n = tl.load(tiles + i) * TILE_N if SPARSE else first + i * TILE_N
        if MASKED and not SPARSE:
            n += tl.where(i >= skip_at, skipped, 0)
        k_tile = load_tile(k, n, k_token, seq_len, TILE_N, D, HEAD_SIZE, TMA)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision="tf32x3")
        v_tile = load_tile(v, n, v_token, seq_len, TILE_N, DV, V_HEAD_SIZE, TMA)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="tf32x3")
        key = n + tl.arange(0, TILE_N)[None, :]
        _, ds = differentiate(
            s, dp, row_lse2, row_delta, position, key, seq_len, scale, cap, slope2, window,
            CAUSAL, HAS_CAP, HAS_ALIBI, MASKED,
        )  # fmt: skip
        if MASKED and HAS_BLOCKS:
            seen = load_blocks(mask, row, key, query_len, seq_len, mask_row, block_q, block_k)
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="tf32x3")
    return dq


@triton.jit
def query_gradients_kernel(
    d_q,  # [num_seqs, query_len, num_heads, HEAD_SIZE]; without num_seqs if RAGGED, as below
    q,  # as d_q
    k,  # [num_seqs, seq_len, num_kv_heads, HEAD_SIZE]
    v,  # [num_seqs, seq_len, num_kv_heads, V_HEAD_SIZE]
    d_out,  # [num_seqs, query_len, num_heads, V_HEAD_SIZE]
    lse2,  # float32 [num_heads, num_rows]
    delta,  # float32 [num_heads, num_rows]
    cu_seqlens_q,  # int32 [num_seqs + 1], if RAGGED
    cu_seqlens_k,  # int32 [num_seqs + 1], if RAGGED
    alibi_slopes,  # float32 [num_heads], if HAS_ALIBI
    lists,  # int32 [num_seqs or 1, num_heads or 1, tiles, pitch], if SPARSE
    mask,  # uint8 [num_seqs or 1, num_heads or 1, q_blocks, k_blocks], if SPARSE
    num_rows,
    query_len,
    seq_len,
    num_heads,
    pitch, block_q, block_k,
    scale, cap, window,
    q_seq, q_token, q_head,
    k_seq, k_token, k_head,
    v_seq, v_token, v_head,
    do_seq, do_token, do_head,
    dq_seq, dq_token, dq_head,
    list_seq, list_head, mask_seq, mask_head, mask_row,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SPARSE: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """``dQ`` of one tile of queries. Grid: tiles of queries × heads × sequences."""
    # Which tile am I? The last ones see the most keys, so they start first.
    tiles = tl.cdiv(query_len, TILE_M)
    rank = tl.program_id(0) % tiles
    m0 = (tiles - 1 - rank) * TILE_M
    pair = tl.program_id(0) // tiles
    seq, head = pair.to(tl.int64) // num_heads, pair % num_heads
    if SPARSE:
        tile, num_listed, num_full_listed, listed = find_record(
            lists, rank, seq, head.to(tl.int64), pitch, list_seq, list_head
        )
        m0 = tile * TILE_M
    first_key, seq_len = find_sequence(cu_seqlens_k, seq, seq_len, RAGGED)
    first_row, query_len = find_sequence(cu_seqlens_q, seq, query_len, RAGGED)
    if m0 >= query_len:
        return

    # Load the queries.
    kv_head = (head // GROUP).to(tl.int64)
    head = head.to(tl.int64)
    q += seq * q_seq + first_row * q_token + head * q_head
    d_out += seq * do_seq + first_row * do_token + head * do_head
    d_q += seq * dq_seq + first_row * dq_token + head * dq_head
    row = m0 + tl.arange(0, TILE_M)
    row_at = head * num_rows + first_row + (0 if RAGGED else seq * query_len) + row
    q = describe(q, q_token, query_len, TILE_M, D, HEAD_SIZE, TMA)
    d_out = describe(d_out, do_token, query_len, TILE_M, DV, V_HEAD_SIZE, TMA)
    q_tile = load_tile(q, m0, q_token, query_len, TILE_M, D, HEAD_SIZE, TMA)
    do_tile = load_tile(d_out, m0, do_token, query_len, TILE_M, DV, V_HEAD_SIZE, TMA)
    row_lse2 = tl.load(lse2 + row_at, mask=row < query_len, other=float("inf"))[:, None]
    row_delta = tl.load(delta + row_at, mask=row < query_len, other=0.0)[:, None]
    slope2 = 0.0
    if HAS_ALIBI:
        slope2 = tl.load(alibi_slopes + head) * LOG2_E
    dq = tl.zeros([TILE_M, D], tl.float32)

    # Keys that any of the queries sees: from start to end. Those that all see: from full_start to
    # full_end.
    shift = seq_len - query_len
    last = tl.minimum(m0 + TILE_M, query_len) - 1 + shift
    hi, full_end = seq_len, seq_len
    if CAUSAL:
        hi = tl.maximum(tl.minimum(hi, last + 1), 0)
        full_end = tl.maximum(tl.minimum(full_end, m0 + shift + 1), 0)
    start = tl.maximum(m0 + shift - window + 1, 0) // TILE_N * TILE_N
    end = tl.maximum(tl.cdiv(hi, TILE_N) * TILE_N, start)
    full_start = tl.minimum(tl.cdiv(tl.maximum(last - window + 1, 0), TILE_N) * TILE_N, end)
    full_end = tl.maximum(full_end // TILE_N * TILE_N, full_start)
    first_masked = (full_start - start) // TILE_N
    num_masked = first_masked + (end - full_end) // TILE_N

    # Tiles without a mask; then those with one, before and after them.
    k += seq * k_seq + first_key * k_token + kv_head * k_head
    v += seq * v_seq + first_key * v_token + kv_head * v_head
    k = describe(k, k_token, seq_len, TILE_N, D, HEAD_SIZE, TMA)
    v = describe(v, v_token, seq_len, TILE_N, DV, V_HEAD_SIZE, TMA)
    full, num_full = full_start, (full_end - full_start) // TILE_N
    partial, num_partial = start, num_masked
    skip_at, skipped = first_masked, full_end - full_start
    partial_tiles, full_tiles = lists, lists
    if SPARSE:
        full, num_full = 0, num_full_listed
        partial, num_partial, skip_at, skipped = 0, num_listed, 0, 0
        partial_tiles, full_tiles = listed, listed + num_listed
        mask += seq * mask_seq + head * mask_head
    dq = _walk_keys(
        dq, q_tile, do_tile, row_lse2, row_delta, k, v, full, num_full, 0, 0, m0, query_len,
        seq_len, scale, cap, slope2, window, k_token, v_token, full_tiles, mask, mask_row,
        block_q, block_k,
        HEAD_SIZE, V_HEAD_SIZE, CAUSAL, HAS_CAP, HAS_ALIBI, False, SPARSE, HAS_BLOCKS,
        TILE_M, TILE_N, D, DV, STAGES, TMA,
    )  # fmt: skip
    dq = _walk_keys(
        dq, q_tile, do_tile, row_lse2, row_delta, k, v, partial, num_partial, skip_at, skipped, m0,
        query_len, seq_len, scale, cap, slope2, window, k_token, v_token, partial_tiles, mask,
        mask_row, block_q,
        block_k,
        HEAD_SIZE, V_HEAD_SIZE, CAUSAL, HAS_CAP, HAS_ALIBI, True, SPARSE, HAS_BLOCKS,
        TILE_M, TILE_N, D, DV, STAGES, TMA,
    )  # fmt: skip

    # Store.
    store_tile(d_q, dq * scale, m0, dq_token, query_len, TILE_M, D, HEAD_SIZE)
