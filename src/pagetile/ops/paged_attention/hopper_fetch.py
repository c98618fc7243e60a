"""The loading warps of ``hopper_decode``: they load the tiles of a CTA's range into the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from .triton_work import find_block_numbers, find_range, list_of, load_block_ids

FETCH_WARPS = gl.constexpr(4)


@gluon.jit
def _prefetch(cache, row, used, WIDTH: gl.constexpr, D: gl.constexpr):
    """Prefetch the ``used`` rows to L2, in the layout of the copies."""
    LANES: gl.constexpr = min(32, D // 8)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [FETCH_WARPS, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    column = 8 * gl.arange(0, D // 8, layout=gl.SliceLayout(0, layout))
    row = gl.convert_layout(row, by_row, assert_trivial=True)
    used = gl.convert_layout(used, by_row, assert_trivial=True)
    at = cache + row[:, None] + column[None, :]
    used = used[:, None] & (column < WIDTH)[None, :]
    gl.inline_asm_elementwise(
        """{
        .reg .pred used;
        setp.ne.s32 used, $2, 0;
        @used prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [at, used.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fetch_role(
    rings, bars, k_cache, v_cache, k_scale, v_scale, block_tables, seq_lens, cu_seqlens_q,
    entry, before, work, end_work, whole, num_kv_heads, window, block_size, listed,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SCALES: gl.constexpr, MOST: gl.constexpr, SPLIT_SHIFT: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, VISIBLE: gl.constexpr, EARLY: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of every tile of the range into the ring, in order.

    A stage of the ring holds the tiles of ``HEADS`` neighbouring KV heads.

    With ``EARLY``, tiles without keys of new tokens are loaded while the previous kernel still
    runs. The first tile with such keys, and the first one beyond the ring, are prefetched to L2.
    """
    k_ring, v_ring, ks_ring, vs_ring = rings
    full, empty = bars
    STAGES: gl.constexpr = k_ring.shape[0] // HEADS
    TILE_N: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    V: gl.constexpr = v_ring.shape[2]
    K_LANES: gl.constexpr = min(32, D // 8)
    V_LANES: gl.constexpr = min(32, V // 8)
    k_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // K_LANES, K_LANES], [FETCH_WARPS, 1], [1, 0]
    )
    v_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // V_LANES, V_LANES], [FETCH_WARPS, 1], [1, 0]
    )
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [FETCH_WARPS], [0])
    keys = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, k_layout))
    v_keys = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, v_layout))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, k_layout))
    v_columns = gl.arange(0, V, layout=gl.SliceLayout(0, v_layout))
    step = 0
    while work < end_work:
        (
            seq, head, seq_len, _, query_len, _, per_head, _, count, low, high, first_key, end_key,
        ) = find_range(
            seq_lens, cu_seqlens_q, entry, before, work, end_work, num_kv_heads, window, listed,
            whole, MOST, TILE_N, SPLIT_SHIFT, SPLITS_FIXED, VISIBLE,
        )  # fmt: skip
        blocks = list_of(listed, seq, head) if VISIBLE else block_tables
        table = block_tables + seq.to(gl.int64) * table_stride
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
        for tile in range(low, high):
            stage = step % STAGES
            key = tile * TILE_N + keys
            used = (key >= first_key) & (key < end_key)
            slot = key % (BLOCK_SIZE if BLOCK_SIZE > 0 else block_size)
            block = block_ids.to(gl.int64)
            key += TILE_N
            block_ids = load_block_ids(
                table, number, key, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
            )
            number = find_block_numbers(
                blocks, key + TILE_N, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
            )
            row = block * k_block + slot * k_slot + head * HEADS * k_head
            v_row = block * v_block + slot * v_slot + head * HEADS * v_head
            v_row = gl.convert_layout(v_row, gl.SliceLayout(1, v_layout))
            v_key = tile * TILE_N + v_keys
            v_used = (v_key >= first_key) & (v_key < end_key)
            has_new_keys = (tile + 1) * TILE_N > seq_len - query_len
            if EARLY and step <= STAGES and (has_new_keys or step == STAGES):
                for other in gl.static_range(HEADS):
                    _prefetch(k_cache, row + other * k_head, used, WIDTH, D)
                    _prefetch(v_cache, v_row + other * v_head, v_used, V_WIDTH, V)
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if EARLY and has_new_keys:
                gdc_wait()  # later waits return at once
            for other in gl.static_range(HEADS):
                async_copy.async_copy_global_to_shared(
                    k_ring.index(stage * HEADS + other),
                    k_cache + (row + other * k_head)[:, None] + columns[None, :],
                    mask=used[:, None] & (columns < WIDTH)[None, :],
                )
            for other in gl.static_range(HEADS):
                async_copy.async_copy_global_to_shared(
                    v_ring.index(stage * HEADS + other),
                    v_cache + (v_row + other * v_head)[:, None] + v_columns[None, :],
                    mask=v_used[:, None] & (v_columns < V_WIDTH)[None, :],
                )
            if SCALES == "token":
                row = block * ks_block + slot * ks_slot + head * ks_head
                at = gl.convert_layout(row, flat)
                is_used = gl.convert_layout(used, flat)
                async_copy.async_copy_global_to_shared(
                    ks_ring.index(stage), k_scale + at, mask=is_used
                )
                row = block * vs_block + slot * vs_slot + head * vs_head
                at = gl.convert_layout(row, flat)
                async_copy.async_copy_global_to_shared(
                    vs_ring.index(stage), v_scale + at, mask=is_used
                )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1
        work += count
        if work == before + per_head * (1 if VISIBLE else num_kv_heads):
            before = work
            entry += 1
    async_copy.wait_group(0)
