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
def _place_of(block, block_stride, rest, UNIT: gl.constexpr):
    """``block * block_stride + rest`` in 64 bits, of multiples of ``UNIT``.

    Of a plain product the compiler would widen a 32-bit stride before the loop, and then multiply
    64 bits, which takes four instructions instead of one.
    """
    stride = block_stride // UNIT
    if block_stride.dtype == gl.int32:
        product = gl.inline_asm_elementwise(
            "mul.wide.s32 $0, $1, $2;", "=l,r,r", [block, stride + 0 * block],
            dtype=gl.int64, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = block.to(gl.int64) * stride
    return UNIT * (product + rest // UNIT)


@gluon.jit
def _slot_of(tile, keys, block_size, BLOCK_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """Slots of a tile's ``keys`` in their blocks; they are the same in every tile, if possible."""
    if BLOCK_SIZE == 0:
        slot = (tile * TILE_N + keys) % block_size
    elif TILE_N % BLOCK_SIZE == 0:
        slot = keys % BLOCK_SIZE
    else:
        slot = (tile * TILE_N + keys) % BLOCK_SIZE
    return slot


@gluon.jit
def _look_up(
    blocks, table, number, key, first_key, end_key, block_size, BLOCK_SIZE: gl.constexpr,
    TILE_N: gl.constexpr, VISIBLE: gl.constexpr,
):  # fmt: skip
    """Block ids of a tile's keys and, if VISIBLE, listed block numbers of the next tile's.

    ``number`` has this tile's, loaded one tile before.
    """
    ids = load_block_ids(table, number, key, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE)
    number = find_block_numbers(
        blocks, key + TILE_N, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
    )
    return ids, number


@gluon.jit
def _copy_scales(
    target, scale, block, block_stride, slot, slot_stride, of_head, in_unit, used
):  # fmt: skip
    """Copy the scales of a tile's tokens, in units whose tokens lie together."""
    UNIT: gl.constexpr = in_unit.shape[1]
    at = _place_of(block, block_stride, slot * slot_stride + of_head, UNIT)
    async_copy.async_copy_global_to_shared(target, scale + at[:, None] + in_unit, mask=used)


@gluon.jit
def fetch_role(
    rings, bars, k_cache, v_cache, k_scale, v_scale, block_tables, seq_lens, cu_seqlens_q,
    entry, before, work, end_work, whole, num_kv_heads, window, block_size, listed,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    WIDTH: gl.constexpr, V_WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SCALES: gl.constexpr, MAX_TOKENS: gl.constexpr, SPLIT_SHIFT: gl.constexpr,
    SPLITS_FIXED: gl.constexpr, VISIBLE: gl.constexpr, EARLY: gl.constexpr,
    HEADS: gl.constexpr, SCALE_UNIT: gl.constexpr, SAME_PLACES: gl.constexpr,
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
    by_unit: gl.constexpr = gl.BlockedLayout([1, SCALE_UNIT], [32, 1], [FETCH_WARPS, 1], [1, 0])
    in_units: gl.constexpr = gl.SwizzledSharedLayout(SCALE_UNIT, 1, 1, [1, 0])
    UNITS: gl.constexpr = TILE_N // SCALE_UNIT
    unit_keys = SCALE_UNIT * gl.arange(0, UNITS, layout=gl.SliceLayout(1, by_unit))
    in_unit = gl.arange(0, SCALE_UNIT, layout=gl.SliceLayout(0, by_unit))[None, :]
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
            whole, MAX_TOKENS, TILE_N, SPLIT_SHIFT, SPLITS_FIXED, VISIBLE,
        )  # fmt: skip
        blocks = list_of(listed, seq, head) if VISIBLE else block_tables
        table = block_tables + seq.to(gl.int64) * table_stride
        # Block ids are loaded one tile ahead, and listed block numbers two tiles, so that loads of
        # keys and values need not wait for them.
        first_unit = first_key // SCALE_UNIT * SCALE_UNIT
        key = low * TILE_N + keys
        number = find_block_numbers(
            blocks, key, first_key, end_key, block_size, BLOCK_SIZE, VISIBLE
        )
        block_ids, number = _look_up(
            blocks, table, number, key, first_key, end_key, block_size, BLOCK_SIZE, TILE_N, VISIBLE
        )
        if SCALES == "token":
            unit_key = low * TILE_N + unit_keys
            unit_number = find_block_numbers(
                blocks, unit_key, first_unit, end_key, block_size, BLOCK_SIZE, VISIBLE
            )
            unit_ids, unit_number = _look_up(
                blocks, table, unit_number, unit_key, first_unit, end_key, block_size, BLOCK_SIZE,
                TILE_N, VISIBLE,
            )  # fmt: skip
        for tile in range(low, high):
            stage = step % STAGES
            key = tile * TILE_N + keys
            used = (key >= first_key) & (key < end_key)
            slot = _slot_of(tile, keys, block_size, BLOCK_SIZE, TILE_N)
            block = block_ids
            block_ids, number = _look_up(
                blocks, table, number, key + TILE_N, first_key, end_key, block_size, BLOCK_SIZE,
                TILE_N, VISIBLE,
            )  # fmt: skip
            row = _place_of(block, k_block, slot * k_slot + head * HEADS * k_head, 8)
            v_row = row
            if not SAME_PLACES:
                v_row = _place_of(block, v_block, slot * v_slot + head * HEADS * v_head, 8)
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
                unit_key = tile * TILE_N + unit_keys
                unit_used = (unit_key >= first_unit) & (unit_key < end_key)
                slot = _slot_of(tile, unit_keys, block_size, BLOCK_SIZE, TILE_N)
                block = unit_ids
                unit_ids, unit_number = _look_up(
                    blocks, table, unit_number, unit_key + TILE_N, first_unit, end_key, block_size,
                    BLOCK_SIZE, TILE_N, VISIBLE,
                )  # fmt: skip
                unit_used = unit_used[:, None] & (in_unit < SCALE_UNIT)  # of every token
                for other in gl.static_range(HEADS):
                    ks = ks_ring.index(stage * HEADS + other)
                    vs = vs_ring.index(stage * HEADS + other)
                    of_head = head * HEADS + other
                    _copy_scales(
                        ks._reinterpret(gl.float32, [UNITS, SCALE_UNIT], in_units), k_scale, block,
                        ks_block, slot, ks_slot, of_head * ks_head, in_unit, unit_used,
                    )  # fmt: skip
                    _copy_scales(
                        vs._reinterpret(gl.float32, [UNITS, SCALE_UNIT], in_units), v_scale, block,
                        vs_block, slot, vs_slot, of_head * vs_head, in_unit, unit_used,
                    )  # fmt: skip
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1
        work += count
        if work == before + per_head * (1 if VISIBLE else num_kv_heads):
            before = work
            entry += 1
    async_copy.wait_group(0)
