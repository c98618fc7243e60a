"""The loading warps of decode: every tile of a CTA's range, as far ahead as the ring has room."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...tiles.hopper.layouts import part_start
from .triton_work import find_block_numbers, find_range, list_of, load_block_ids

__all__ = ["FETCH_WARPS", "fetch_role"]

FETCH_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _copying(columns, known_columns, tile_n):
    """How threads copy rows of a part, 16 bytes each.

    ``known_columns`` are those of the part whose rows' places the threads know. Where this one is
    narrower, lanes that knew the same rows copy different ones of them: each warp's rows are the
    same, so places pass from lane to lane and not through shared memory.
    """
    columns, known_columns, tile_n = int(columns), int(known_columns), int(tile_n)
    lanes, known = (min(32, n // 8) for n in (columns, known_columns))
    if lanes >= known:
        return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [int(FETCH_WARPS), 1], [1, 0])

    def powers(first, end):
        return [1 << i for i in range(first.bit_length() - 1, end.bit_length() - 1)]

    rows_of_lanes = powers(1, 32 // known)
    rows_of_warps = powers(32 // known, 32 // known * int(FETCH_WARPS))
    others = powers(32 // known * int(FETCH_WARPS), tile_n)
    spread = others[: (known // lanes).bit_length() - 1]
    spread += [0] * ((known // lanes).bit_length() - 1 - len(spread))
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *[[row, 0] for row in others[len(spread) :]]],
        lane_bases=[
            *[[0, 8 * n] for n in powers(1, lanes)],
            *[[row, 0] for row in (*spread, *rows_of_lanes)],
        ],
        warp_bases=[[row, 0] for row in rows_of_warps],
        block_bases=[],
        shape=[tile_n, columns],
    )


@gluon.jit
def _copy_rows(rings, stage, cache, row, seen, KNOWN: gl.constexpr, WIDTH: gl.constexpr):
    """Start the copies of a tile's rows; ``row`` is where each begins in the cache."""
    for i in gl.static_range(len(rings)):
        _copy_part(rings[i].index(stage), cache, row, seen, KNOWN, WIDTH, part_start(WIDTH, i))


@gluon.jit
def _copy_part(
    tile, cache, row, seen, KNOWN: gl.constexpr, WIDTH: gl.constexpr, START: gl.constexpr
):
    TILE_N: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = _copying(COLUMNS, KNOWN, TILE_N)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    first, first_key, end_key = seen
    key = first + gl.arange(0, TILE_N, layout=by_row)
    column = START + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    used = (key >= first_key) & (key < end_key)
    async_copy.async_copy_global_to_shared(
        tile,
        cache + gl.convert_layout(row, by_row)[:, None] + column[None, :],
        mask=used[:, None] & (column < WIDTH)[None, :],
    )


@gluon.jit
def fetch_role(
    rings, bars, k_cache, v_cache, k_scale, v_scale, block_tables, seq_lens, cu_seqlens_q,
    entry, before, work, end_work, num_kv_heads, window, block_size, listed,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SCALES: gl.constexpr, MOST: gl.constexpr, SPLIT_TILES: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, VISIBLE: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of every tile of the range into the ring, in order."""
    k_rings, v_rings, ks_ring, vs_ring = rings
    full, empty = bars
    STAGES: gl.constexpr = k_rings[0].shape[0]
    TILE_N: gl.constexpr = k_rings[0].shape[1]
    k_layout: gl.constexpr = _copying(k_rings[0].shape[2], k_rings[0].shape[2], TILE_N)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [FETCH_WARPS], [0])
    keys = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, k_layout))
    step = 0
    while work < end_work:
        seq, head, _, _, _, _, per_head, _, count, low, high, first_key, end_key = find_range(
            seq_lens, cu_seqlens_q, entry, before, work, end_work, num_kv_heads, window, listed,
            MOST, TILE_N, SPLIT_TILES, SPLITS_FIXED, VISIBLE,
        )  # fmt: skip
        blocks = list_of(listed, seq, head) if VISIBLE else block_tables
        table = block_tables + seq.to(gl.int64) * table_stride
        # Block ids are loaded a tile ahead, their numbers in the list two tiles: keys and values
        # need not wait for them.
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
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            row = block * k_block + slot * k_slot + head * k_head
            seen = (tile * TILE_N, first_key, end_key)
            _copy_rows(k_rings, stage, k_cache, row, seen, k_rings[0].shape[2], WIDTH)
            row = block * v_block + slot * v_slot + head * v_head
            _copy_rows(v_rings, stage, v_cache, row, seen, k_rings[0].shape[2], V_WIDTH)
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
