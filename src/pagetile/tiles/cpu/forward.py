"""Attention forward on a CPU: an online softmax over key tiles, with Numba vectors and threads.

::

    out[r] = Σ_n p[r, n] v[n] / l[r],  p[r, n] = 2 ** (s[r, n] - m[r]),  s = q · k · scale · log2 e

A work item is a chunk of one sequence's new tokens, some of its KV heads and a range of its keys.
The rows of a KV head, tokens × group, share every key that is loaded::

    keys   0        64       128  ...  512      576
           ┌────────┬────────┬─  ... ──╥────────┬─ ...
    rows   │ tile   │ tile   │         ║ tile   │
           └────────┴────────┴─  ... ──╨────────┴─ ...
           └──── one split: m, l, acc ─┘└─ next split ──

A sequence's keys are always split at multiples of ``split_size``, partial states are always
merged from left to right, and tiles start at multiples of ``TILE_N``. So a row's bits do not depend
on the number of threads or on the rest of the batch.

With few rows (decode) keys and values are read directly from the pages and converted in registers,
if heads fill whole vectors. With many rows (prefill) a tile is first gathered into contiguous
scratch memory and converted once. Both sum in the same order, so in ``paged_attention`` a row's
bits do not depend on the number of new tokens either.

``attention`` may transpose keys: for a sequence of more than ``FEW_ROWS`` rows a tile is gathered
as float32 columns for ``score_transposed``, which is faster and sums in another order, so a row's
bits depend on the number of rows. bfloat16 that is multiplied without conversion is not transposed.

Where matrix units multiply bfloat16 (``Plan.bf16_tiles``), every tile is multiplied by them, with
few rows and with many, in one order.

Only slots of visible keys are read. The scales of an 8-bit cache are applied in ``forward_tile``.
Contiguous keys are treated as one block per sequence, of any length.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch

from .arrays import flat
from .block_mask import mask_fields, sees_keys
from .blocks import PADDING
from .compile import aligned, allocating, entry, folded, inner
from .forward_tile import FEW_ROWS, attend_tile, find_rows
from .matrix_units import TILE_ROWS, configure_tiles, release_tiles
from .microkernels import pad_rows
from .online_softmax import TILE_N, State, exp2_scalar, make_state, merge_states, start_state
from .products import pack_queries
from .simd import LN_2, LOG2_E, load, load_half, mul, splat, store, store_half, take_number
from .threads import on_team, run_together

_ALL = 1 << 62
_ONE = np.ones(1, np.float32)  # stands for a missing scale
_NONE = np.empty(0, np.float32)

# Numba reads named tuples by field, which keeps signatures short.
ForwardCall = namedtuple(
    "ForwardCall",
    "out lse q k_cache v_cache block_tables seq_lens cu_seqlens_q alibi_slopes sinks"
    " group head_size v_head_size width v_width block_size split_size"
    " q_token q_head k_block k_slot k_head v_block v_slot v_head out_token out_head table_stride"
    " k_scale v_scale per_token k_scale_block k_scale_slot k_scale_head"
    " v_scale_block v_scale_slot v_scale_head"
    " softmax_scale soft_cap causal window transposed tile packed"
    " block_mask mask_seq mask_head mask_row block_q block_k",
)
ForwardScratch = namedtuple(
    "ForwardScratch",
    "state total q first_key end_key scores weights decay"
    " k_rows v_rows k_scale_rows v_scale_rows k_scales v_scales lanes"
    " tile_rows tile packed columns sums",
)
ForwardItem = namedtuple(
    "ForwardItem", "seq first_token num_tokens first_head num_heads first_key end_key part"
)


@entry()
def _make_items(
    cu_seqlens_q, seq_lens, num_kv_heads, group, causal, tile_m, decode_heads, split_size, item_keys
):
    """Divide a batch into rows of ``ForwardItem`` fields; count the rows of partial states.

    An item with only a range of its rows' keys stores the states of its splits from row ``part``
    on; for others ``part`` is -1.
    """
    count = num_parts = 0
    for filling in (False, True):  # count first, then fill
        items = np.empty((count, 8), np.int64)
        count = num_parts = 0
        for seq in range(len(seq_lens)):
            query_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]
            few = query_len * group <= FEW_ROWS
            heads = decode_heads if few else 1
            tokens = max(1, tile_m // group)
            # The last tokens see the most keys, so long items are taken first.
            for first in range((query_len - 1) // tokens * tokens, -1, -tokens):
                num_tokens = min(tokens, query_len - first)
                end = seq_lens[seq]
                if causal:
                    end = max(0, end - query_len + first + num_tokens)
                step = item_keys if few and end > item_keys else _ALL
                for head in range(0, num_kv_heads, heads):
                    num_heads = min(heads, num_kv_heads - head)
                    for key in range(0, max(1, end), step):
                        key_end = min(end, key + step)
                        part = num_parts if step != _ALL else -1
                        if step != _ALL:
                            num_splits = -(-(key_end - key) // split_size)
                            num_parts += num_splits * num_heads * pad_rows(num_tokens * group)
                        if filling:
                            item = seq, first, num_tokens, head, num_heads, key, key_end, part
                            for field in range(8):  # Numba takes seconds to compile slices
                                items[count, field] = item[field]
                        count += 1
    return items, num_parts


@allocating()
def _make_scratch(call, items, counter, parts):
    most = tile = heads = 1
    for i in range(len(items)):
        rows = pad_rows(items[i, 2] * call.group)
        tile = max(tile, items[i, 4] if rows == 1 else rows)
        most = max(most, rows * items[i, 4])
        heads = max(heads, items[i, 4])
    widest = max(call.width, call.v_width)
    return ForwardScratch(
        make_state(most, call.v_width),
        make_state(most, call.v_width),
        aligned((most + TILE_ROWS) * call.width, call.tile.dtype),
        np.zeros(tile, np.int64),
        np.zeros(tile, np.int64),
        aligned((tile + TILE_ROWS) * TILE_N, np.float32),
        aligned((tile + TILE_ROWS) * TILE_N, call.tile.dtype),
        np.empty(tile, np.float32),
        np.zeros((2, TILE_N), np.int64),
        np.zeros((2, TILE_N), np.int64),
        np.zeros((2, TILE_N), np.int64),
        np.zeros((2, TILE_N), np.int64),
        np.zeros(TILE_N, np.float32),
        np.zeros(TILE_N, np.float32),
        np.zeros(16, np.float32),
        np.zeros(TILE_N, np.int64),
        aligned((TILE_N + PADDING) * (widest + PADDING), call.tile.dtype),
        aligned(TILE_N // 2 * widest, call.packed.dtype),
        aligned(heads * TILE_ROWS * call.width // 2, call.packed.dtype),
        aligned(TILE_ROWS * max(TILE_N, call.v_width), np.float32),
    )


@entry()
def _attend(parallel, num_threads, call, items, counter, parts):
    on_team(parallel, num_threads, _make_scratch, _take_items, (call, items, counter, parts))


@inner()
def _take_items(call, items, counter, parts, scratch):
    """Compute work items until none is left."""
    configure_tiles(call.packed)
    while True:
        taken = take_number(counter)
        if taken >= len(items):
            release_tiles(call.packed)
            return
        row = items[taken]
        item = ForwardItem(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])
        state = _attend_item(call, scratch, item, parts)
        if item.part < 0:
            _finish(call, state, 0, item)


@folded()
def _attend_item(call, scratch, item, parts):
    """Compute the state of an item's rows over its keys; store those of splits in ``parts``."""
    rows = pad_rows(item.num_tokens * call.group)
    all_rows = item.num_heads * rows
    if item.part >= 0:
        start_state(parts, item.part, _num_splits(call, item) * all_rows, call.v_width)
    low, high = _visible_keys(call, scratch, item)
    _load_queries(call, scratch, item, rows)
    start_state(scratch.total, 0, all_rows, call.v_width)
    first_split = low // call.split_size * call.split_size
    first_tile = low // TILE_N
    find_rows(call, scratch, first_tile % 2, item, first_tile * TILE_N, low, high)
    for split in range(first_split, high, call.split_size):
        split_high = min(high, split + call.split_size)
        start_state(scratch.state, 0, all_rows, call.v_width)
        for tile in range(max(split, first_tile * TILE_N), split_high, TILE_N):
            side = tile // TILE_N % 2  # two buffers, so that the next tile's rows can be prefetched
            find_rows(call, scratch, 1 - side, item, tile + TILE_N, low, high)
            num_keys = min(TILE_N, high - tile)
            first = max(tile, low)
            if call.block_q == 0 or sees_keys(call, item, first, tile + num_keys - first):
                attend_tile(call, scratch, side, item, rows, tile, num_keys)
        if item.part >= 0:
            at = item.part + (split - item.first_key) // call.split_size * all_rows
            merge_states(parts, at, scratch.state, 0, all_rows, call.v_width)
        elif first_split + call.split_size >= high:
            return scratch.state
        else:
            merge_states(scratch.total, 0, scratch.state, 0, all_rows, call.v_width)
    return scratch.total


@inner()
def _num_splits(call, item):
    return -(-(item.end_key - item.first_key) // call.split_size)


@inner()
def _visible_keys(call, scratch, item):
    """Find each row's range of visible keys, and the item's range."""
    query_len = call.cu_seqlens_q[item.seq + 1] - call.cu_seqlens_q[item.seq]
    seq_len = call.seq_lens[item.seq]
    low, high = seq_len, 0
    scratch.first_key[:] = 0
    scratch.end_key[:] = 0
    for token in range(item.num_tokens):
        position = seq_len - query_len + item.first_token + token
        first, end = 0, seq_len
        if call.causal:
            end = max(0, position + 1)
        if call.window > 0:
            first = max(0, position - call.window + 1)
        first, end = max(first, item.first_key), min(end, item.end_key)
        if first < end:
            low, high = min(low, first), max(high, end)
            for g in range(call.group):
                scratch.first_key[token * call.group + g] = first
                scratch.end_key[token * call.group + g] = end
    return min(low, high), high


@inner()
def _load_queries(call, scratch, item, rows):
    """Copy an item's queries, one KV head's rows after another's, padded with zeros."""
    token0 = call.cu_seqlens_q[item.seq] + item.first_token
    scratch.q[: item.num_heads * rows * call.width] = 0
    for head in range(item.num_heads):
        for token in range(item.num_tokens):
            for g in range(call.group):
                q_head = (item.first_head + head) * call.group + g
                source = (token0 + token) * call.q_token + q_head * call.q_head
                to = (head * rows + token * call.group + g) * call.width
                whole = call.head_size // 16 * 16
                for d in range(0, whole, 16):
                    store(scratch.q, to + d, load(call.q, source + d))
                if whole < call.head_size:
                    store(scratch.q, to + whole, load_half(call.q, source + whole))
        at = head * rows * call.width
        pack_queries(
            scratch.columns, head * TILE_ROWS * call.width // 2, scratch.q, at, rows, call.width
        )


@inner()
def _finish(call, state, at, item):
    """Add the sinks, divide, and write an item's rows of ``out`` and ``lse``."""
    rows = pad_rows(item.num_tokens * call.group)
    token0 = call.cu_seqlens_q[item.seq] + item.first_token
    for head in range(item.num_heads):
        v_scale = np.float32(1)
        if not call.per_token:
            v_scale = call.v_scale[(item.first_head + head) * call.v_scale_head]
        for r in range(item.num_tokens * call.group):
            row = at + head * rows + r
            token, q_head = (
                token0 + r // call.group,
                (item.first_head + head) * call.group + r % call.group,
            )
            m, l, scale = state.m[row], state.l[row], np.float32(1)
            sink = call.sinks[q_head] * LOG2_E if len(call.sinks) > 0 else np.float32(-np.inf)
            if sink != -np.inf:
                top = max(m, sink)
                scale = exp2_scalar(m - top)
                m, l = top, l * scale + exp2_scalar(sink - top)
            call.lse[token, q_head] = (m + np.log2(l)) * LN_2 if l != 0 else -np.inf
            factor = splat(scale / l * v_scale if l != 0 else np.float32(0))
            to = token * call.out_token + q_head * call.out_head
            _write_row(call.out, to, state.acc, row * call.v_width, factor, call.v_head_size)


@inner()
def _write_row(out, to, acc, at, factor, size):
    whole = size // 16 * 16
    for d in range(0, whole, 16):
        store(out, to + d, mul(factor, load(acc, at + d)))
    if whole < size:
        store_half(out, to + whole, mul(factor, load(acc, at + whole)))


@entry()
def _merge_parts(call, items, parts):
    """Merge the partial states of rows in the order of their keys."""
    first = 0
    for i in range(len(items)):
        row, before = items[i], items[first]
        if row[7] < 0 or row[5] == 0:
            first = i
            before = row
        if row[7] < 0:
            continue
        item = ForwardItem(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])
        rows = item.num_heads * pad_rows(item.num_tokens * call.group)
        for part in range(item.part, item.part + _num_splits(call, item) * rows, rows):
            if part != before[7]:
                merge_states(parts, before[7], parts, part, rows, call.v_width)
        last_of_rows = i + 1 == len(items) or items[i + 1, 5] == 0
        if last_of_rows:
            _finish(call, parts, before[7], item)


def make_call(
    q,
    k_cache,
    v_cache,
    out,
    lse,
    options,
    plan,
    *,
    block_tables,
    seq_lens,
    cu_seqlens_q,
    block_size,
    k_strides,
    v_strides,
    k_scale=None,
    v_scale=None,
    per_token=False,
    transposed=False,
    block_mask=None,
):
    """Return the arguments of the kernels.

    Args:
        q: ``[num_tokens, num_heads, head_size]``.
        k_cache: Keys ``[…, num_kv_heads, head_size]`` with ``k_strides``.
        v_cache: Values with ``v_strides``.
        out: ``[num_tokens, num_heads, v_head_size]``, to be written.
        lse: float32 ``[num_tokens, num_heads]``, contiguous, to be written.
        options: Has ``softmax_scale``, ``causal`` and the other options of ``paged_attention``.
        plan: Has ``split_size``, ``bf16_dot`` and ``bf16_tiles``.
        block_tables: int32 ``[num_seqs, …]``.
        seq_lens: int32 ``[num_seqs]``.
        cu_seqlens_q: int32 ``[num_seqs + 1]``.
        block_size: Slots of a block.
        k_strides: Strides of block, slot and head.
        v_strides: Strides of block, slot and head.
        k_scale: float32 ``[num_blocks, block_size, num_kv_heads]`` with any strides, or None.
        v_scale: Like ``k_scale``.
        per_token: Whether the scales differ within a head.
        transposed: Whether tiles of float32 keys may be transposed, which is faster for many rows,
            but gives other bits than a single row gets.
        block_mask: A ``BlockMask`` as for ``attention``, or None.
    """
    slopes, sinks = options.alibi_slopes, options.sinks
    # bfloat16 holds 8-bit values exactly.
    is_bf16 = k_cache.dtype == torch.bfloat16 or k_scale is not None
    pairs = plan.bf16_dot and q.dtype == torch.bfloat16 and is_bf16
    left = np.uint16 if pairs else np.float32  # the type of queries and weights in products
    lanes, sizes = (32 if pairs else 16), (q.shape[-1], v_cache.shape[-1])
    scales = [(_ONE, (0, 0, 0)) if s is None else (flat(s), s.stride()) for s in (k_scale, v_scale)]
    (k_scales, k_scale_strides), (v_scales, v_scale_strides) = scales
    return ForwardCall(  # type: ignore[call-arg]
        flat(out), lse.numpy(), flat(q), flat(k_cache), flat(v_cache),
        flat(block_tables), seq_lens.contiguous().numpy(), cu_seqlens_q.contiguous().numpy(),
        _NONE if slopes is None else slopes.detach().float().contiguous().numpy(),
        _NONE if sinks is None else sinks.detach().float().contiguous().numpy(),
        q.shape[1] // k_cache.shape[-2], *sizes, *(-(-size // lanes) * lanes for size in sizes),
        block_size, plan.split_size,
        *q.stride()[:2], *k_strides, *v_strides, *out.stride()[:2], block_tables.stride(0),
        k_scales, v_scales, per_token, *k_scale_strides, *v_scale_strides,
        float(options.softmax_scale), float(options.logits_soft_cap or 0.0),
        bool(options.causal), int(options.sliding_window or 0), transposed and not pairs,
        np.empty(0, left), np.empty(0, np.uint32 if pairs and plan.bf16_tiles else left),
        *mask_fields(block_mask),
    )  # fmt: skip


def attend(call, num_kv_heads, plan):
    """Divide a call into work items, and fill its ``out`` and ``lse``."""
    item_keys = plan.split_size * plan.item_splits if plan.parallel_splits else _ALL
    items, num_parts = _make_items(
        call.cu_seqlens_q, call.seq_lens, num_kv_heads, call.group, call.causal,
        plan.tile_m, plan.decode_heads, plan.split_size, item_keys,
    )  # fmt: skip
    parts = State(
        np.empty(num_parts * call.v_width, np.float32),
        np.empty(num_parts, np.float32),
        np.empty(num_parts, np.float32),
    )
    counter = np.zeros(1, np.int64)
    run_together(_attend, plan.num_threads, call, items, counter, parts)
    if num_parts:
        # Without what it does not read: one kernel for each type of ``out`` is compiled, and not
        # one for each combination of types of queries and caches.
        merged = call._replace(q=_NONE, k_cache=_NONE, v_cache=_NONE, tile=_NONE)
        _merge_parts(merged, items, parts)
