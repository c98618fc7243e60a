"""Paged attention of few new tokens a sequence (decode) on Hopper, with warp specialisation.

The grid, the work queue and each CTA's range of it are those of ``triton_decode``. Four warps load
and four compute, with a ring of tiles in shared memory between them. The loading warps run ahead
across the ends of heads and sequences, so memory is not idle while a head is finished::

    load     K0 V0  K1 V1  K2 V2 │ K0 V0  K1 ...          │ = the next head
    ring     ▓▓▓▓▓  ▓▓▓▓▓  ▓▓▓▓▓   ▓▓▓▓▓
    compute         0      1       2  finish  0 ...

A tile may hold several neighbouring KV heads (``HEADS``). Two heads of an 8-bit cache share a
softmax, and 256 neighbouring bytes are read faster than twice 128. Others share sectors, since
memory is read 64 bytes at a time::

    bytes read at once  ├──── 64 ────┼──── 64 ────┼──── 64 ────┼──── 64 ────┼──── 64 ────┤
    heads of 80         ├─────────── head 0 ──────────┼─────────── head 1 ──────────┤

With ``EARLY`` (``PagedBatch.allows_early_reads``) the kernel waits for the previous one only before
it loads queries, and tiles with keys of new tokens. With ``INDEPENDENT`` one CTA waits, at its end:
the previous kernel is the prefill of the same call, and they share no scratch memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_attend import attend_role
from .hopper_fetch import FETCH_WARPS, fetch_role
from .triton_work import cut, find_entry, measure_queue


@gluon.jit
def decode_kernel(
    out,  # [num_tokens, num_heads, V_SIZE]
    lse,  # float32 [num_tokens, num_heads]
    split_accs,  # float32 [slots, ROWS, V]: acc of splits of a head's keys
    split_sums,  # float32 [slots, 2, ROWS]: their m and l; if MERGE_ROWS, split_info comes first
    arrivals,  # int32 [num_seqs * num_kv_heads + slots] of zeros, left as zeros
    q,  # [num_tokens, num_heads, SIZE]
    k_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, WIDTH]: elements, or int16 pairs of 8 bits
    v_cache,  # likewise
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
    GROUP: gl.constexpr, SIZE: gl.constexpr, V_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    PACKED: gl.constexpr, CAUSAL: gl.constexpr, HAS_CAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    HAS_SINKS: gl.constexpr, SCALES: gl.constexpr, SPLIT_SHIFT: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, WHOLE_TILES: gl.constexpr,
    HALVING_TILES: gl.constexpr, LEAST_TILES: gl.constexpr,  # see ``triton_decode``
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, D: gl.constexpr, V: gl.constexpr, SEQS: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr, LANES: gl.constexpr,
    MOST_MERGED: gl.constexpr, MERGE_GROUP: gl.constexpr, MERGE_ROWS: gl.constexpr,
    DOT: gl.constexpr, FETCH_REGS: gl.constexpr, VISIBLE: gl.constexpr, EARLY: gl.constexpr,
    INDEPENDENT: gl.constexpr,  # whether the previous kernel writes nothing that is read here
    HEADS: gl.constexpr,  # KV heads of the caches that are joined into one of ``num_kv_heads``
    SCALE_UNIT: gl.constexpr,  # neighbouring tokens whose scales are loaded at once
    SAME_PLACES: gl.constexpr,  # whether values have the strides of keys
):  # fmt: skip
    """See the module docstring."""
    gdc_launch_dependents()
    if not EARLY and not INDEPENDENT:
        gdc_wait()
    # The length of the work queue, and this CTA's range of it. Up to 256 entries are counted by
    # every warp, so that no warp waits for another.
    flat: gl.constexpr = gl.BlockedLayout([min(SEQS // 32, 8)], [32], [gl.num_warps()], [0])
    listed = (visible_blocks, max_visible, search_steps, list_seq, list_head, block_size)
    entries = gl.arange(0, SEQS, layout=flat)
    MAX_TOKENS: gl.constexpr = ROWS // GROUP
    tiles, whole, total, programs = measure_queue(
        seq_lens, cu_seqlens_q, entries, num_seqs, num_kv_heads, window, listed, MAX_TOKENS, TILE_N,
        SPLIT_SHIFT, SPLITS_FIXED, WHOLE_TILES, HALVING_TILES, LEAST_TILES, VISIBLE,
    )  # fmt: skip
    program = gl.program_id(0)
    if program < programs:
        work = cut(program, programs, total)
        end_work = cut(program + 1, programs, total)
        entry, before = find_entry(
            seq_lens, cu_seqlens_q, entries, tiles, whole, work, num_seqs, num_kv_heads, window,
            listed, MAX_TOKENS, TILE_N, SPLIT_SHIFT, SPLITS_FIXED, VISIBLE,
        )  # fmt: skip

        PAIRED: gl.constexpr = PACKED != "none"
        KEPT: gl.constexpr = gl.int16 if PAIRED else k_cache.dtype.element_ty
        PER: gl.constexpr = 2 if PAIRED else 1
        WGMMA: gl.constexpr = TILE_M == 64
        for_wgmma: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        k_tiles: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, D // PER // 8), [1, 0])
        v_tiles: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, V // PER // 8), [1, 0])
        unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        k_kept: gl.constexpr = for_wgmma if WGMMA else k_tiles
        v_kept: gl.constexpr = for_wgmma if WGMMA else v_tiles
        k_ring = gl.allocate_shared_memory(KEPT, [STAGES * HEADS, TILE_N, D // PER], k_kept)
        v_ring = gl.allocate_shared_memory(KEPT, [STAGES * HEADS, TILE_N, V // PER], v_kept)
        SCALED: gl.constexpr = TILE_N if SCALES == "token" else 1
        ks_ring = gl.allocate_shared_memory(gl.float32, [STAGES * HEADS, SCALED], unswizzled)
        vs_ring = gl.allocate_shared_memory(gl.float32, [STAGES * HEADS, SCALED], unswizzled)
        queries = gl.allocate_shared_memory(DOT, [TILE_M, D // PER], k_kept)
        p_tiles: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, TILE_N // 8), [1, 0])
        WEIGHTS: gl.constexpr = 16 if WGMMA else TILE_M  # wgmma reads them from registers
        weights = gl.allocate_shared_memory(DOT, [WEIGHTS, TILE_N], p_tiles)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=32 * FETCH_WARPS)
            mbarrier.init(empty.index(stage), count=1)
        split_info = split_sums
        if MERGE_ROWS > 0:
            split_sums += 2 * num_seqs * num_kv_heads
        rings = (k_ring, v_ring, ks_ring, vs_ring)
        bars = (full, empty)
        gl.warp_specialize(
            [
                (attend_role, (
                    rings, bars, queries, weights,
                    out, lse, split_accs, split_sums, split_info, arrivals, q, seq_lens,
                    cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale,
                    entry, before, work, end_work, whole, program, programs, total,
                    num_seqs, num_kv_heads, max_splits, softmax_scale, soft_cap, window, listed,
                    out_token, out_head, q_token, q_head, ks_head, vs_head,
                    GROUP, SIZE // PER, V_SIZE, PACKED, CAUSAL, HAS_CAP, HAS_ALIBI, HAS_SINKS,
                    SCALES, SPLIT_SHIFT, SPLITS_FIXED, TILE_M, ROWS, AT_ONCE, LANES, MOST_MERGED,
                    MERGE_GROUP, MERGE_ROWS, VISIBLE, EARLY, HEADS,
                )),
                (fetch_role, (
                    rings, bars, k_cache, v_cache, k_scale, v_scale, block_tables, seq_lens,
                    cu_seqlens_q,
                    entry, before, work, end_work, whole, num_kv_heads, window, block_size, listed,
                    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
                    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
                    SIZE // PER, V_SIZE // PER, BLOCK_SIZE, SCALES, MAX_TOKENS, SPLIT_SHIFT,
                    SPLITS_FIXED, VISIBLE, EARLY, HEADS, SCALE_UNIT, SAME_PLACES,
                )),
            ],
            worker_num_warps=[FETCH_WARPS],
            worker_num_regs=[FETCH_REGS],
        )  # fmt: skip
    # A kernel that waits for this one must also wait for the previous one. One CTA suffices; others
    # leave their multiprocessor to CTAs that have not started.
    if INDEPENDENT and program == 0:
        gdc_wait()
