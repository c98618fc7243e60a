"""The forward kernel on a CPU, and what the backward one does alike; see ``cpu`` for the walk."""

from __future__ import annotations

import numpy as np

from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.simd import take_number
from .cpu_tiles import (
    add_bias_and_mask,
    gather_bias,
    gather_rows,
    head_scale,
    mix,
    score,
    soften,
    transpose,
)

_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_GROUP_FLOATS = 65536
"""Room for a group's keys and values (and their gradients): a quarter of a 1 MiB cache."""


@inner()
def sizes(x, num_tokens, arrays):
    """Padded sizes, and windows of a group."""
    width, depth = (num_tokens + 31) // 32 * 32, (x.size + 3) // 4 * 4
    return width, depth, max(1, _GROUP_FLOATS // (arrays * width * depth))


@inner()
def bias_rows(bias, x, head, first, num_rows, width):
    """Four rows of a head's bias in powers of two, -inf past the last key."""
    if x.table_size:
        at, centre = head * x.table_size, (x.table_size - 1) // 2
        gather_bias(bias, x.table, at, x.offsets, first, num_rows, width, centre)
        return
    for r in range(4):
        bias[r * width : r * width + len(x.offsets)] = 0
        bias[r * width + len(x.offsets) : (r + 1) * width] = -np.inf


@inner()
def _regions_at(x, window, width):
    """Where a window's regions are; -1 if it has but one."""
    num_masks = len(x.mixed)
    if num_masks and x.mixed[window % num_masks]:
        return window % num_masks * width
    return -1


@inner()
def load_keys(keys, values, at, x, window, head, num_tokens, width, depth):
    """A window's keys (normalised, if queries are) and values, transposed."""
    k_at = window * x.k_strides[0] + head * x.k_strides[1]
    v_at = window * x.v_strides[0] + head * x.v_strides[1]
    transpose(keys, at, x.k, k_at, x.k_strides[2], num_tokens, width, x.size, depth, x.eps)
    plain = np.float32(-1)
    transpose(values, at, x.v, v_at, x.v_strides[2], num_tokens, width, x.size, depth, plain)


@inner()
def scores(s, rows, x, keys, at, bias, window, head, first, num_rows, width, depth, scale):
    """Four rows of scores in powers of two; leaves the rows of q times ``scale`` in ``rows``."""
    q_at = window * x.q_strides[0] + head * x.q_strides[1]
    gather_rows(rows, x.q, q_at, x.q_strides[2], first, num_rows, x.size, depth, scale, x.eps)
    score(s, rows, keys, at, width, depth)
    regions_at = _regions_at(x, window, width)
    add_bias_and_mask(s, bias, x.regions, regions_at, first, num_rows, width, x.mask_value)


@inner()
def _attend_part(item, out, lse, x, keys, values, bias, s, rows, result, width, depth, group):
    """One head of one part of the windows."""
    num_windows, num_heads, num_tokens = lse.shape
    head, part = item % num_heads, item // num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head) * _LOG2_E
    end = num_windows * (part + 1) // x.parts
    for start in range(num_windows * part // x.parts, end, group):
        stop = min(end, start + group)
        for window in range(start, stop):
            at = (window - start) * depth * width
            load_keys(keys, values, at, x, window, head, num_tokens, width, depth)
        for first in range(0, num_tokens, 4):
            num_rows = min(4, num_tokens - first)
            bias_rows(bias, x, head, first, num_rows, width)
            for window in range(start, stop):
                at = (window - start) * depth * width
                scores(
                    s, rows, x, keys, at, bias, window, head, first, num_rows, width, depth,
                    scale,
                )  # fmt: skip
                for r in range(4):
                    m, total = soften(s, r * width, width)
                    rows[r] = total
                    if r < num_rows:
                        seen = total != 0
                        row_lse = (m + np.log2(total)) * _LN_2 if seen else np.float32(-np.inf)
                        lse[window, head, first + r] = row_lse
                mix(result, s, values, at, width, depth)
                for r in range(num_rows):
                    factor = np.float32(1) / rows[r] if rows[r] != 0 else np.float32(0)
                    to = ((window * num_tokens + first + r) * num_heads + head) * x.size
                    for d in range(x.size):
                        out[to + d] = result[r * depth + d] * factor


@entry()
def attend(out, lse, x):
    """The parts that this thread gets hold of."""
    _, num_heads, num_tokens = lse.shape
    width, depth, group = sizes(x, num_tokens, 2)
    keys = np.empty(group * depth * width, np.float32)
    values, bias = np.empty_like(keys), np.empty(4 * width, np.float32)
    s, rows = np.empty_like(bias), np.empty(4 * depth, np.float32)
    result = np.empty_like(rows)
    while True:
        item = take_number(x.counter)
        if item >= num_heads * x.parts:
            return
        _attend_part(item, out, lse, x, keys, values, bias, s, rows, result, width, depth, group)
