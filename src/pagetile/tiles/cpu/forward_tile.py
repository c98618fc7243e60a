"""Attention over one tile of keys on a CPU: addresses, scores, softmax, values.

::

    s[n] = q · keys[n] * scale * k_scale[n]     p[n] = 2 ** (s[n] - m)     l += Σ p[n]
    acc += Σ (p[n] * v_scale[n]) * values[n]

Per-token scales of an 8-bit cache multiply scores and weights. Per-head scales are instead part of
``scale``, and of the division by the softmax's sum at the end.
"""

from __future__ import annotations

import numpy as np

from .block_mask import hidden_end, repeat_visible
from .blocks import PADDING
from .compile import folded, inner
from .head_products import mix_heads, score_heads
from .matrix_units import TILE_ROWS
from .microkernels import score_tile
from .online_softmax import (
    TILE_N,
    add_alibi,
    cap_row,
    mask_row,
    multiply_row,
    scale_row,
    update_softmax_row,
)
from .plan import HEADS_BY_KEY
from .products import (
    KEY_ROW,
    has_matrix_units,
    is_bfloat16,
    mix_gathered,
    mix_values,
    score_few,
    score_many,
    score_transposed,
)
from .simd import (
    LOG2_E,
    load,
    load_half,
    maximum,
    prefetch,
    store,
    store_half,
    store_transposed,
    zeros,
)
from .simd_pairs import copy_as, size_of

FEW_ROWS = 16
"""Up to this many rows of an item, keys and values are converted for every four rows; with more,
only once. For a sequence with more rows, keys may be transposed, which changes its bits."""


@inner()
def find_rows(call, scratch, side, item, tile, low, high):
    """Compute the offsets of a tile's keys, values and scales at the item's first head.

    Keys before ``low`` or from ``high`` on may be in undefined blocks: their offsets repeat the
    nearest visible key's, and they are masked.
    """
    first, last = max(tile, low), min(tile + TILE_N, high)
    index, slot = first // call.block_size, first % call.block_size
    table = item.seq * call.table_stride
    k_row = v_row = k_scale_row = v_scale_row = 0
    for n in range(first - tile, TILE_N):
        if tile + n < last:
            block = np.int64(call.block_tables[table + index])
            k_row = block * call.k_block + slot * call.k_slot + item.first_head * call.k_head
            v_row = block * call.v_block + slot * call.v_slot + item.first_head * call.v_head
            if call.per_token:
                k_scale_row = block * call.k_scale_block + slot * call.k_scale_slot
                v_scale_row = block * call.v_scale_block + slot * call.v_scale_slot
                prefetch(call.k_scale, k_scale_row + item.first_head * call.k_scale_head)
                prefetch(call.v_scale, v_scale_row + item.first_head * call.v_scale_head)
            slot += 1
            if slot == call.block_size:
                index, slot = index + 1, 0
        scratch.k_rows[side, n], scratch.v_rows[side, n] = k_row, v_row
        scratch.k_scale_rows[side, n], scratch.v_scale_rows[side, n] = k_scale_row, v_scale_row
    for n in range(first - tile):
        scratch.k_rows[side, n] = scratch.k_rows[side, first - tile]
        scratch.v_rows[side, n] = scratch.v_rows[side, first - tile]
        scratch.k_scale_rows[side, n] = scratch.k_scale_rows[side, first - tile]
        scratch.v_scale_rows[side, n] = scratch.v_scale_rows[side, first - tile]
    if call.block_q > 0:
        repeat_visible(call, scratch, side, item, tile, first, last)


@folded()
def attend_tile(call, scratch, side, item, rows, tile, num_keys):
    """An item's rows over one tile of keys: scores, softmax, values."""
    is_whole = call.head_size == call.width and call.v_head_size == call.v_width
    by_key = rows == 1 and item.num_heads % HEADS_BY_KEY == 0 and is_whole
    if by_key and not has_matrix_units(call.packed):
        _attend_by_key(call, scratch, side, item, tile, num_keys)
        return
    for head in range(item.num_heads):
        _attend_by_head(call, scratch, side, item, head, rows, tile, num_keys)


@inner()
def _attend_by_key(call, scratch, side, item, tile, num_keys):
    """Heads of one row each: scores of all heads, their softmaxes, then values of all heads."""
    score_heads(
        scratch.scores, scratch.lanes, scratch.q, item.num_heads, call.k_cache, call.k_head,
        scratch.k_rows[side], scratch.k_rows[1 - side], TILE_N, call.width,
    )  # fmt: skip
    for head in range(item.num_heads):
        if call.per_token:
            _fetch_scales(call, scratch, side, item.first_head + head)
        _softmax_tile(call, scratch, item, head, 1, tile, head)
    mix_heads(
        scratch.state.acc, scratch.decay, item.num_heads, scratch.weights, TILE_N, call.v_cache,
        call.v_head, scratch.v_rows[side], scratch.v_rows[1 - side], num_keys, call.v_width,
    )  # fmt: skip


@inner()
def _attend_by_head(call, scratch, side, item, head, rows, tile, num_keys):
    """One head's rows, which share each key and value that is read."""
    at = head * rows
    width, v_width = call.width, call.v_width
    k_base, v_base = head * call.k_head, head * call.v_head
    k_rows, v_rows = scratch.k_rows[side], scratch.v_rows[side]
    k_ahead, v_ahead = scratch.k_rows[1 - side], scratch.v_rows[1 - side]
    tile_rows = scratch.tile_rows
    query_len = call.cu_seqlens_q[item.seq + 1] - call.cu_seqlens_q[item.seq]
    # By the sequence's rows, not the item's, so that bits do not depend on the division into items.
    if call.transposed and query_len * call.group > FEW_ROWS:
        _gather_transposed(scratch.tile, call.k_cache, k_base, k_rows, num_keys, call.head_size)
        score_transposed(scratch.scores, scratch.q, at * width, rows, scratch.tile, num_keys, width)
    elif has_matrix_units(call.packed):
        _score_by_tiles(call, scratch, head, rows, k_base, k_rows, k_ahead, num_keys)
    elif rows > FEW_ROWS or call.head_size != width:
        _gather(
            scratch.tile, tile_rows, call.k_cache, k_base, k_rows, k_ahead, num_keys,
            call.head_size, width,
        )  # fmt: skip
        score_tile(
            scratch.scores, scratch.q, at * width, width, rows,
            scratch.tile, 0, tile_rows, tile_rows, TILE_N, width,
        )  # fmt: skip
    else:
        score_tile(
            scratch.scores, scratch.q, at * width, width, rows,
            call.k_cache, k_base, k_rows, k_ahead, TILE_N, width,
        )  # fmt: skip
    if call.per_token:
        _fetch_scales(call, scratch, side, item.first_head + head)
    _softmax_tile(call, scratch, item, head, rows, tile, 0)
    converts_once = rows > FEW_ROWS and not has_matrix_units(call.packed)
    if converts_once or call.v_head_size != v_width:
        _gather(
            scratch.tile, tile_rows, call.v_cache, v_base, v_rows, v_ahead, num_keys,
            call.v_head_size, v_width,
        )  # fmt: skip
        if PADDING and rows > 1:
            mix_gathered(
                scratch.state.acc, at * v_width, scratch.decay, rows, scratch.weights,
                scratch.tile, num_keys, v_width,
            )  # fmt: skip
            return
        mix_values(
            scratch.state.acc, at * v_width, scratch.decay, rows, scratch.weights, TILE_N,
            scratch.tile, 0, tile_rows, tile_rows, num_keys, scratch.packed, scratch.sums, v_width,
        )  # fmt: skip
    else:
        mix_values(
            scratch.state.acc, at * v_width, scratch.decay, rows, scratch.weights, TILE_N,
            call.v_cache, v_base, v_rows, v_ahead, num_keys, scratch.packed, scratch.sums, v_width,
        )  # fmt: skip


@inner()
def _score_by_tiles(call, scratch, head, rows, base, k_rows, ahead, num_keys):
    """Scores of one head by matrix units; keys of few rows are read from the cache if possible."""
    width, columns_at = call.width, head * TILE_ROWS * call.width // 2
    if rows <= TILE_ROWS and _are_tiles_of_keys(call, k_rows):
        score_few(
            scratch.scores, scratch.columns, columns_at, call.k_cache, base, k_rows, call.k_slot,
            ahead, scratch.sums, width,
        )  # fmt: skip
        return
    _gather(
        scratch.tile, scratch.tile_rows, call.k_cache, base, k_rows, ahead, num_keys,
        call.head_size, width,
    )  # fmt: skip
    if rows <= TILE_ROWS:
        score_few(
            scratch.scores, scratch.columns, columns_at, scratch.tile, 0, scratch.tile_rows, width,
            scratch.tile_rows, scratch.sums, width,
        )  # fmt: skip
    else:
        score_many(
            scratch.scores, scratch.q, head * rows * width, rows, scratch.tile, scratch.packed,
            width,
        )  # fmt: skip


@inner()
def _are_tiles_of_keys(call, rows):
    """Whether every sixteen keys are whole rows of bfloat16 at equal distances in the cache."""
    are = is_bfloat16(call.k_cache) and call.head_size == call.width and call.block_size % 16 == 0
    for n in range(0, TILE_N, 16):  # rows of keys that are not visible repeat others
        are = are and rows[n + 15] - rows[n] == 15 * call.k_slot
    return are


@inner()
def _gather(tile, tile_rows, cache, base, rows, ahead, num_keys, size, width):
    """Copy a tile's rows, as the products' type, into contiguous memory; pad them with zeros.

    Prefetches the rows at ``ahead``.
    """
    step, row = size_of(tile), width + PADDING
    whole = size // step * step
    for n in range(TILE_N):
        tile_rows[n] = n * row
    for n in range(num_keys):
        source, later = base + rows[n], base + ahead[n]
        for d in range(0, whole, step):
            prefetch(cache, later + d)
            copy_as(tile, n * row + d, cache, source + d)
        for d in range(whole, size // 16 * 16, 16):
            store(tile, n * row + d, load(cache, source + d))
        if size % 16:
            store_half(tile, n * row + size // 16 * 16, load_half(cache, source + size // 16 * 16))
        for d in range(n * row + size, (n + 1) * row - PADDING, 8):
            store_half(tile, d, zeros())
    # Keys are multiplied by twos or more, and the weights of the last ones are 0.
    tile[num_keys * row : TILE_N * row] = 0


@inner()
def _gather_transposed(tile, cache, base, rows, num_keys, size):
    """Copy a tile's rows as float32 columns, sixteen keys at a time, and zeros below them."""
    for n in range(0, num_keys, 16):
        for d in range(0, size, 16):
            at, left = base + d, size - d
            columns = (
                _sixteen(cache, at + rows[n], left),
                _sixteen(cache, at + rows[n + 1], left),
                _sixteen(cache, at + rows[n + 2], left),
                _sixteen(cache, at + rows[n + 3], left),
                _sixteen(cache, at + rows[n + 4], left),
                _sixteen(cache, at + rows[n + 5], left),
                _sixteen(cache, at + rows[n + 6], left),
                _sixteen(cache, at + rows[n + 7], left),
                _sixteen(cache, at + rows[n + 8], left),
                _sixteen(cache, at + rows[n + 9], left),
                _sixteen(cache, at + rows[n + 10], left),
                _sixteen(cache, at + rows[n + 11], left),
                _sixteen(cache, at + rows[n + 12], left),
                _sixteen(cache, at + rows[n + 13], left),
                _sixteen(cache, at + rows[n + 14], left),
                _sixteen(cache, at + rows[n + 15], left),
            )
            store_transposed(tile, d * KEY_ROW + n, KEY_ROW, columns)


@inner()
def _sixteen(x, at, left):
    """Load sixteen elements, or the last eight."""
    return load(x, at) if left >= 16 else load_half(x, at)


@inner()
def _fetch_scales(call, scratch, side, kv_head):
    """Load the scales of a tile's keys and values in one KV head."""
    for n in range(TILE_N):
        row = scratch.k_scale_rows[side, n] + kv_head * call.k_scale_head
        scratch.k_scales[n] = call.k_scale[row]
        row = scratch.v_scale_rows[side, n] + kv_head * call.v_scale_head
        scratch.v_scales[n] = call.v_scale[row]


@inner()
def _softmax_tile(call, scratch, item, head, rows, tile, place):
    """Turn scores into weights, from row ``place`` on; update each row's maximum, sum and decay."""
    s = scratch.scores
    scale = call.softmax_scale / call.soft_cap if call.soft_cap > 0 else call.softmax_scale * LOG2_E
    if not call.per_token:
        scale = scale * call.k_scale[(item.first_head + head) * call.k_scale_head]
    scale = np.float32(scale)
    first_head = (item.first_head + head) * call.group
    query_len = call.cu_seqlens_q[item.seq + 1] - call.cu_seqlens_q[item.seq]
    first_position = call.seq_lens[item.seq] - query_len + item.first_token
    for r in range(rows):
        at = (place + r) * TILE_N
        if call.per_token:
            multiply_row(s, at, s, scratch.k_scales)
        highest = scale_row(s, at, scale)
        if call.soft_cap > 0:
            highest = cap_row(s, at, np.float32(call.soft_cap * LOG2_E))
        if len(call.alibi_slopes) > 0 and r < item.num_tokens * call.group:
            slope = np.float32(call.alibi_slopes[first_head + r % call.group] * LOG2_E)
            highest = add_alibi(s, at, slope, tile - (first_position + r // call.group))
        first, end = scratch.first_key[r] - tile, scratch.end_key[r] - tile
        if first > 0 or end < TILE_N:
            highest = mask_row(s, at, np.float32(first), np.float32(end))
        if call.block_q > 0 and first < TILE_N and end > 0:
            highest = _mask_blocks(
                call, s, at, item.seq, first_head + r % call.group,
                item.first_token + r // call.group, tile, tile + max(first, 0),
                tile + min(end, TILE_N), highest,
            )  # fmt: skip
        row = head * rows + r
        if call.per_token:
            decay = update_softmax_row(scratch.state, row, s, s, at, highest)
            multiply_row(scratch.weights, at, s, scratch.v_scales)
        else:
            decay = update_softmax_row(scratch.state, row, s, scratch.weights, at, highest)
        scratch.decay[place + r] = decay


@inner()
def _mask_blocks(call, s, at, seq, head, row, tile, key, end, highest):
    """Mask a row's keys by the block mask; return the row's maxima by lane."""
    is_any_masked = False
    while key < end:
        hidden = hidden_end(call, seq, head, row, key, end)
        for n in range(key, hidden):
            s[at + n - tile] = -np.inf
            is_any_masked = True
        key = hidden if hidden > key else (key // call.block_k + 1) * call.block_k
    if not is_any_masked:
        return highest
    highest = load(s, at)
    for n in range(at + 16, at + TILE_N, 16):
        highest = maximum(load(s, n), highest)
    return highest
