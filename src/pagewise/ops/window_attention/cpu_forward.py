"""The forward kernel on a CPU, and what the backward one does alike; see ``cpu`` for the walk."""

from __future__ import annotations

import numpy as np

from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.simd import LN_2, LOG2_E, take_number
from .cpu_tiles import (
    add_bias_and_mask,
    add_dense,
    copy_rows,
    gather_bias,
    gather_rows,
    head_scale,
    mix,
    mix_rows,
    number_regions,
    score,
    soften,
    transpose,
    write_row,
)

_GROUP_FLOATS = 65536
"""Room for a group's keys and values (and their gradients): a quarter of a 1 MiB cache."""
_BIAS_FLOATS = 8192
"""Room for a block's bias, in a first-level cache or near it."""


@inner()
def sizes(x, num_tokens, arrays):
    """Padded sizes, rows of a block, and windows of a group: one, if a block has all rows."""
    width, depth = (num_tokens + 31) // 32 * 32, (x.size + 3) // 4 * 4
    block = max(4, min((num_tokens + 3) // 4 * 4, _BIAS_FLOATS // width // 4 * 4))
    group = max(1, _GROUP_FLOATS // (arrays * width * depth)) if block < num_tokens else 1
    return width, depth, block, group


@inner()
def _columns(x, num_tokens, width):
    """Columns that values are padded to where they are mixed by rows; 0 where by columns.

    By rows, a vector holds sixteen columns, by columns sixteen tokens. The one pays for heads that
    are no multiple of 16, the other for adding up lanes, as much as 60 tokens more cost.
    """
    columns = (x.size + 15) // 16 * 16
    return columns if columns * num_tokens <= x.size * (width + 60) else 0


@inner()
def bias_rows(bias, x, head, first, num_rows, width):
    """Rows of a head's bias in powers of two, -inf past the last key."""
    if x.table_size:
        gather_bias(bias, x.table, x.table_size, head, x.offsets, first, num_rows, width)
        return
    for r in range((num_rows + 3) // 4 * 4):
        bias[r * width : r * width + len(x.offsets)] = 0
        bias[r * width + len(x.offsets) : (r + 1) * width] = -np.inf


@inner()
def load_regions(regions, at, x, window, num_tokens, width):
    """Number a window's regions; where, or -1 if it has but one."""
    if not len(x.regions):
        return -1
    first = window % x.num_masks * num_tokens
    regions[at + num_tokens : at + width] = 0
    return at if number_regions(regions, at, x.regions, first, num_tokens) > 1 else -1


@inner()
def load_keys(keys, at, x, window, head, num_tokens, width, depth):
    """A window's keys (normalised, if queries are), transposed."""
    k_at = window * x.k_strides[0] + head * x.k_strides[1]
    transpose(keys, at, x.k, k_at, x.k_strides[2], num_tokens, width, x.size, depth, x.eps)


@inner()
def load_values(values, at, x, window, head, num_tokens, width, depth):
    """A window's values, transposed."""
    v_at, plain = window * x.v_strides[0] + head * x.v_strides[1], np.float32(-1)
    transpose(values, at, x.v, v_at, x.v_strides[2], num_tokens, width, x.size, depth, plain)


@inner()
def scores(
    s, rows, x, keys, at, bias, bias_at, regions, regions_at, window, head, first, num_rows, width,
    depth, scale,
):  # fmt: skip
    """Four rows of scores in powers of two; leaves the rows of q times ``scale`` in ``rows``."""
    q_at = window * x.q_strides[0] + head * x.q_strides[1]
    gather_rows(rows, x.q, q_at, x.q_strides[2], first, num_rows, x.size, depth, scale, x.eps)
    score(s, rows, keys, at, width, depth)
    add_bias_and_mask(s, bias, bias_at, regions, regions_at, first, num_rows, width, x.mask_value)
    num_tokens = len(x.offsets)
    if len(x.bias):
        add_dense(s, x.bias, (head * num_tokens + first) * num_tokens, num_rows, num_tokens, width)
    if len(x.mask):
        row = window % x.num_masks * num_tokens + first
        add_dense(s, x.mask, row * num_tokens, num_rows, num_tokens, width)


@inner()
def _soften_rows(s, sums, lse, window, head, first, num_rows, width):
    """Four rows of scores into weights; leaves their ``sums``, and writes their log-sum-exp."""
    for r in range(4):
        m, total = soften(s, r * width, width)
        sums[r] = total
        if r < num_rows:
            seen = total != 0
            row_lse = (m + np.log2(total)) * LN_2 if seen else np.float32(-np.inf)
            lse[window, head, first + r] = row_lse


@inner()
def _finish(out, lse, x, rows, result, window, head, first, num_rows, depth):
    """Divide four rows by their sums, which lie in ``rows``, and write them."""
    _, num_heads, num_tokens = lse.shape
    for r in range(num_rows):
        to = ((window * num_tokens + first + r) * num_heads + head) * x.size
        factor = np.float32(1) / rows[r] if rows[r] != 0 else np.float32(0)
        write_row(out, to, result, r * depth, factor, x.size)


@inner()
def _attend_part(
    item, out, lse, x, keys, values, regions, regions_at, bias, s, rows, result, width, depth,
    columns, block, group,
):  # fmt: skip
    """One head of one part of the windows."""
    num_windows, num_heads, num_tokens = lse.shape
    head, part = item % num_heads, item // num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head) * LOG2_E
    held = -1  # the block whose bias is there
    end = num_windows * (part + 1) // x.parts
    for start in range(num_windows * part // x.parts, end, group):
        stop = min(end, start + group)
        for window in range(start, stop):
            at = (window - start) * depth * width
            load_keys(keys, at, x, window, head, num_tokens, width, depth)
            slot = window - start
            regions_at[slot] = load_regions(regions, slot * width, x, window, num_tokens, width)
            if columns:
                to = (window - start) * num_tokens * columns
                v_at = window * x.v_strides[0] + head * x.v_strides[1]
                copy_rows(values, to, x.v, v_at, x.v_strides[2], num_tokens, x.size, columns)
            else:
                load_values(values, at, x, window, head, num_tokens, width, depth)
        for first_row in range(0, num_tokens, block):
            last_row = min(num_tokens, first_row + block)
            if first_row != held:
                bias_rows(bias, x, head, first_row, last_row - first_row, width)
                held = first_row
            for window in range(start, stop):
                at = (window - start) * depth * width
                for first in range(first_row, last_row, 4):
                    num_rows = min(4, last_row - first)
                    scores(
                        s, rows, x, keys, at, bias, (first - first_row) * width, regions,
                        regions_at[window - start], window, head, first, num_rows, width, depth,
                        scale,
                    )  # fmt: skip
                    _soften_rows(s, rows, lse, window, head, first, num_rows, width)
                    if columns:
                        values_at = (window - start) * num_tokens * columns
                        mix_rows(result, s, values, values_at, num_tokens, width, columns)
                    else:
                        mix(result, s, values, at, width, depth)
                    _finish(
                        out, lse, x, rows, result, window, head, first, num_rows, columns or depth
                    )


@entry()
def attend(out, lse, x):
    """The parts that this thread gets hold of."""
    _, num_heads, num_tokens = lse.shape
    width, depth, block, group = sizes(x, num_tokens, 2)
    columns = _columns(x, num_tokens, width)
    keys = np.empty(group * depth * width, np.float32)
    values = np.empty(group * max(depth * width, columns * num_tokens), np.float32)
    regions, regions_at = np.empty(group * width, np.float32), np.empty(group, np.int64)
    bias, s = np.empty(block * width, np.float32), np.empty(4 * width, np.float32)
    rows, result = np.empty(4 * depth, np.float32), np.empty(4 * (depth + 16), np.float32)
    while True:
        item = take_number(x.counter)
        if item >= num_heads * x.parts:
            return
        _attend_part(
            item, out, lse, x, keys, values, regions, regions_at, bias, s, rows, result, width,
            depth, columns, block, group,
        )  # fmt: skip
