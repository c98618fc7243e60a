"""Shared prefixes on a GPU: attention of a group's rows over its prefix, and the tables it takes.

``prefix_kernel`` computes all rows of a group over the keys of its prefix. A work item is a tile of
rows, one KV head and a *split* of the keys, whose state ``triton_merge`` merges; CTAs take items
round-robin. Splits have at most ``split_tiles`` tiles of keys, chosen on the device so that every
CTA gets about one item::

    groups    a: 3 sequences, 8 key tiles     b: 2 sequences, 4 key tiles     split_tiles 4
    items     a tile 0  split 0 │ split 1     b tile 0  split 0               of every KV head

``lay_out`` writes lengths and block tables of both passes, one row per program::

    prefixes   row = group                     blocks of the prefix
    own        row = num_groups + sequence     blocks after the prefix
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tiles.triton.early import let_next_begin, publish, wait_for_previous, wait_now
from ...tiles.triton.forward import attend_tiles
from ...tiles.triton.launch import INTERPRETED, Launcher
from ...tiles.triton.online_softmax import LOG2_E, ROOM, SMALLEST, exp2_of, finish, fit_queries

_TILE = 256


@triton.jit
def _read(at, mask):
    """Load from L2; 0 where masked."""
    return tl.load(at, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def _pick(lanes, lane, numbers):
    """The value of one lane."""
    return tl.sum(tl.where(lanes == lane, numbers, 0))


@triton.jit
def _find_positions(token, is_row, first_seq, end_seq, seq_lens, cu_seqlens_q, search_steps):
    """The positions of tokens in their sequences, found among ``first_seq`` to ``end_seq``."""
    low, high = first_seq + 0 * token, end_seq + 0 * token
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_open = is_row & (high - low > 1)
        starts_before = tl.load(cu_seqlens_q + middle, mask=is_open, other=0) <= token
        low = tl.where(is_open & starts_before, middle, low)
        high = tl.where(is_open & (starts_before == 0), middle, high)
    seq_len = tl.load(seq_lens + low, mask=is_row, other=0)
    return seq_len + token - tl.load(cu_seqlens_q + low + 1, mask=is_row, other=0)


@triton.jit
def _prefetch(
    cache, table, key, end_key, block_size, cache_block, cache_slot, BYTES: tl.constexpr
):  # fmt: skip
    """Prefetch the rows of some keys to L2."""
    key = tl.minimum(key, end_key - 1)
    block = tl.load(table + key // block_size, cache_modifier=".cg").to(tl.int64)
    at = cache + block * cache_block + key % block_size * cache_slot
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at, 0 * key + BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefix_kernel(
    outs,  # [splits, num_tokens, num_heads, V_SIZE]: empty where lses is -inf
    lses,  # float32 [splits, num_tokens, num_heads]
    q,  # [num_tokens, num_heads, SIZE]
    k_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, SIZE]
    v_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, V_SIZE]
    block_tables,  # int32 [num_seqs, ...]
    seq_lens,  # int32 [num_seqs]
    cu_seqlens_q,  # int32 [num_seqs + 1]
    cu_group_seqs,  # int32 [num_groups + 1]
    prefix_lens,  # int32 [num_groups]
    alibi_slopes,  # float32 [num_heads]
    k_scale,  # float32 [num_kv_heads] or [num_blocks, BLOCK_SIZE, num_kv_heads]
    v_scale,  # likewise
    num_groups, num_tokens, num_kv_heads, splits, softmax_scale, soft_cap, block_size,
    q_token, q_head,
    k_block, k_slot, k_head, v_block, v_slot, v_head, table_stride,
    ks_block, ks_slot, ks_head, vs_block, vs_slot, vs_head,
    search_steps,
    GROUP: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # 0: see block_size
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, SCALES: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DOT: tl.constexpr,
    COMPILED: tl.constexpr,  # not interpreted
    EARLY: tl.constexpr,  # whether the previous kernel writes only q of what is read here
    FETCHED: tl.constexpr,  # keys of an item that are prefetched before that kernel is waited for
    GROUPS: tl.constexpr,
):  # fmt: skip
    """See the module docstring."""
    if EARLY:
        let_next_begin()
    elif COMPILED:
        wait_for_previous()
    # The items of each group. A group without a prefix has one split, which is empty.
    # .cg (in _read): L1 may hold stale values of what is read before the wait.
    lanes = tl.arange(0, GROUPS)
    is_group = lanes < num_groups
    first_seqs = _read(cu_group_seqs + lanes, is_group)
    end_seqs = _read(cu_group_seqs + lanes + 1, is_group)
    lens = _read(prefix_lens + lanes, is_group)
    first_tokens = _read(cu_seqlens_q + first_seqs, is_group)
    end_tokens = _read(cu_seqlens_q + end_seqs, is_group)
    row_tiles = tl.cdiv((end_tokens - first_tokens) * GROUP, TILE_M)
    key_tiles = tl.cdiv(lens, TILE_N)
    work = tl.sum(row_tiles.to(tl.int64) * key_tiles) * num_kv_heads
    split_tiles = tl.cdiv(work, tl.num_programs(0)).to(tl.int32)
    split_tiles = tl.maximum(tl.maximum(split_tiles, tl.cdiv(tl.max(key_tiles), splits)), 1)
    counts = tl.maximum(tl.cdiv(key_tiles, split_tiles), 1)
    items = row_tiles * counts * num_kv_heads
    ends = tl.cumsum(items)

    columns, v_columns = tl.arange(0, D), tl.arange(0, V)
    for item in range(tl.program_id(0), tl.sum(items), tl.num_programs(0)):
        # Which rows, which keys. Tiles of rows that share keys are neighbours.
        group = tl.sum((ends <= item).to(tl.int32))
        number = item - _pick(lanes, group, ends - items)
        num_tiles, count = _pick(lanes, group, row_tiles), _pick(lanes, group, counts)
        first_seq, end_seq = _pick(lanes, group, first_seqs), _pick(lanes, group, end_seqs)
        length, end_token = _pick(lanes, group, lens), _pick(lanes, group, end_tokens)
        row = number % num_tiles * TILE_M + tl.arange(0, TILE_M)
        head = number // num_tiles % num_kv_heads
        split = number // num_tiles // num_kv_heads
        token = _pick(lanes, group, first_tokens) + row // GROUP
        q_heads = head * GROUP + row % GROUP
        is_row = token < end_token
        low = split * split_tiles
        high = tl.minimum(low + split_tiles, tl.cdiv(length, TILE_N))

        table = block_tables + first_seq.to(tl.int64) * table_stride
        if EARLY:
            if FETCHED > 0:
                end_key = tl.minimum(tl.minimum(high, low + FETCHED // TILE_N) * TILE_N, length)
                # Only the first tile of rows prefetches, since all read the same keys.
                first_key = tl.where(number % num_tiles == 0, low * TILE_N, end_key)
                for key in range(first_key, end_key, 128):
                    keys = key + tl.arange(0, 128)
                    _prefetch(
                        k_cache + head.to(tl.int64) * k_head, table, keys, end_key, block_size,
                        k_block, k_slot, SIZE * k_cache.dtype.element_ty.primitive_bitwidth // 8,
                    )  # fmt: skip
                    _prefetch(
                        v_cache + head.to(tl.int64) * v_head, table, keys, end_key, block_size,
                        v_block, v_slot, V_SIZE * v_cache.dtype.element_ty.primitive_bitwidth // 8,
                    )  # fmt: skip
            wait_now()

        # Their queries.
        at = token.to(tl.int64)
        q_tile = tl.load(
            q + (at * q_token + q_heads * q_head)[:, None] + columns[None, :],
            mask=is_row[:, None] & (columns < SIZE)[None, :],
            other=0.0,
        )
        q_tile, scale = fit_queries(q_tile, DOT)
        scale *= softmax_scale / soft_cap if HAS_CAP else softmax_scale * LOG2_E
        position = row
        slopes = row.to(tl.float32)
        if HAS_ALIBI:
            position = _find_positions(
                token, is_row, first_seq, end_seq, seq_lens, cu_seqlens_q, search_steps
            )
            slopes = tl.load(alibi_slopes + q_heads, mask=is_row, other=0.0) * LOG2_E
        v_factor = 1.0
        k_scales, v_scales = k_scale, v_scale
        if SCALES == "head":
            scale *= tl.load(k_scale + head * ks_head)
            v_factor = tl.load(v_scale + head * vs_head)
        if SCALES == "token":
            k_scales += head.to(tl.int64) * ks_head
            v_scales += head.to(tl.int64) * vs_head

        m = tl.full([TILE_M], float("-inf"), tl.float32)
        l = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, V], tl.float32)
        unit = SMALLEST
        # One loop, all masked: there are few tiles, and a second loop could not load ahead.
        m, l, acc, unit = attend_tiles(
            m, l, acc, unit, q_tile, low, high, 0, length, 0 * row, 0 * row + length, position,
            slopes, k_cache + head.to(tl.int64) * k_head, v_cache + head.to(tl.int64) * v_head,
            table, k_scales, v_scales, scale, soft_cap, block_size,
            k_block, k_slot, v_block, v_slot, ks_block, ks_slot, vs_block, vs_slot,
            SIZE, V_SIZE, BLOCK_SIZE, True, HAS_CAP, HAS_ALIBI, SCALES == "token", True,
            TILE_N, D, V, DOT, table, False, True,
        )  # fmt: skip
        if SCALES == "token":
            acc *= exp2_of(unit - ROOM)
        result, row_lse = finish(m, l, acc)

        to = (split.to(tl.int64) * num_tokens + at) * num_kv_heads * GROUP + q_heads
        tl.store(
            outs + (to * V_SIZE)[:, None] + v_columns[None, :],
            (result * v_factor).to(outs.dtype.element_ty),
            mask=is_row[:, None] & (v_columns < V_SIZE)[None, :],
        )
        tl.store(lses + to, row_lse, mask=is_row)
        if split == 0:  # mark the splits that these rows do not have as empty
            for empty in range(count, splits):
                to = (num_tokens.to(tl.int64) * empty + at) * num_kv_heads * GROUP + q_heads
                tl.store(lses + to, tl.full([TILE_M], float("-inf"), tl.float32), mask=is_row)
    if EARLY:
        wait_now()  # also in CTAs without an item


class PassTables(NamedTuple):
    """Lengths and block tables of both passes; int32."""

    tables: Tensor
    """``[num_groups + num_seqs, width]``: of the prefixes, then of the rest."""
    seq_lens: Tensor
    """``[num_groups + num_seqs]``"""
    cu_seqlens_q: Tensor
    """``[num_groups + 1]``: of the prefixes."""


@triton.jit
def _lay_out_kernel(
    # outputs: see PassTables
    tables, seq_lens, prefix_starts_q,
    # inputs
    cu_group_seqs, prefix_lens,  # int32 [num_groups + 1], [num_groups]
    batch_tables, batch_lens, cu_seqlens_q,
    # scalars
    num_groups, block_size, width, table_stride,
    GROUPS: tl.constexpr, TILE: tl.constexpr, PUBLISH: tl.constexpr,
):  # fmt: skip
    """Write one row of both passes' tables."""
    row = tl.program_id(0)
    if row < num_groups:
        seq = tl.load(cu_group_seqs + row)
        start = 0
        num_keys = tl.load(prefix_lens + row)
        tl.store(prefix_starts_q + row, tl.load(cu_seqlens_q + seq))
        if row == num_groups - 1:
            last = tl.load(cu_group_seqs + num_groups)
            tl.store(prefix_starts_q + num_groups, tl.load(cu_seqlens_q + last))
    else:
        seq = row - num_groups
        number = tl.arange(0, GROUPS)
        ends = tl.load(cu_group_seqs + 1 + number, mask=number < num_groups, other=2147483647)
        group = tl.minimum(tl.sum((ends <= seq).to(tl.int32), 0), num_groups - 1)
        start = tl.load(prefix_lens + group)
        num_keys = tl.load(batch_lens + seq) - start
    tl.store(seq_lens + row, num_keys)
    first, num_blocks = start // block_size, tl.cdiv(num_keys, block_size)
    source = batch_tables + seq.to(tl.int64) * table_stride
    for column in range(0, num_blocks, TILE):
        at = column + tl.arange(0, TILE)
        mask = (at < num_blocks) & (first + at < width)
        blocks = tl.load(source + first + at, mask=mask)
        tl.store(tables + row.to(tl.int64) * width + at, blocks, mask=mask)
    if PUBLISH:
        publish()


def lay_out(
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_group_seqs: Tensor,
    prefix_lens: Tensor,
    *,
    block_size: int,
) -> PassTables:
    """Return lengths and block tables of both passes of a batch with shared prefixes.

    Args:
        block_tables: int32 ``[num_seqs, width]``, as the batch's other tensors.
        seq_lens: int32 ``[num_seqs]``
        cu_seqlens_q: int32 ``[num_seqs + 1]``
        cu_group_seqs: int32 ``[num_groups + 1]``
        prefix_lens: int32 ``[num_groups]``
        block_size: Tokens of a block.
    """
    (num_seqs, width), num_groups = block_tables.shape, len(prefix_lens)
    rows = num_groups + num_seqs
    new = functools.partial(torch.empty, dtype=torch.int32, device=block_tables.device)
    # Entries past a sequence's end are never read.
    layout = PassTables(new(rows, width), new(rows), new(num_groups + 1))
    _make_launcher(triton.next_power_of_2(num_groups))(
        (rows, 1, 1), *layout, cu_group_seqs, prefix_lens, block_tables, seq_lens, cu_seqlens_q,
        num_groups, block_size, width, block_tables.stride(0),
    )  # fmt: skip
    return layout


@functools.lru_cache(maxsize=64)
def _make_launcher(groups: int) -> Launcher:
    names = (
        "tables seq_lens prefix_starts_q cu_group_seqs prefix_lens batch_tables batch_lens "
        "cu_seqlens_q"
    )
    numbers = "num_groups block_size width table_stride"
    types = {**dict.fromkeys(names.split(), "*i32"), **dict.fromkeys(numbers.split(), "i32")}
    constants = {"GROUPS": groups, "TILE": _TILE, "PUBLISH": not INTERPRETED}
    return Launcher(_lay_out_kernel, types, constants, num_warps=1)
