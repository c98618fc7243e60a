"""Window attention forward on a CPU, and helpers that the backward kernel shares."""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ....tiles.cpu.compile import allocating, entry, folded, inner
from ....tiles.cpu.simd import LN_2, LOG2_E, add, load, log2, mul, splat, store, take_number
from ....tiles.cpu.threads import on_team
from .rows import (
    NO_NORM,
    ROWS,
    copy_rows,
    find_runs,
    gather_bias,
    head_scale,
    normalise,
    number_regions,
    reverse_table,
    transpose,
    write_row,
)
from .tiles import add_bias_and_mask, add_dense, mix_window, score, softmax_rows

_GROUP_FLOATS = 65536
"""Floats of a group's keys and values (and their gradients): a quarter of a 1 MiB L2 cache."""
_BIAS_FLOATS = 8192
"""Floats of a block's bias: an L1 cache of 32 KiB."""


Sizes = namedtuple("Sizes", "width depth columns block group")
Scratch = namedtuple(
    "Scratch", "keys values inverses regions regions_at table runs bias s rows result stats"
)


@inner()
def sizes_of(x, arrays):
    """Choose the sizes of tiles, blocks and groups; ``arrays`` of keys' size are kept of a group.

    ``width`` and ``depth`` are the numbers of keys and head columns, padded. A ``block`` of rows
    of bias is reused for a ``group`` of windows; a block of all rows has a group of one.

    Values are multiplied by rows (a vector is sixteen columns of a token), or by columns (a vector
    is sixteen tokens), where ``columns`` is 0; otherwise it is the padded row length. By rows,
    lanes are wasted unless the head size is a multiple of 32; by columns, the sums over lanes cost
    as much as 60 tokens.
    """
    width, depth = (x.num_tokens + 31) // 32 * 32, (x.size + 3) // 4 * 4
    columns = (x.size + 15) // 16 * 16
    cost = (
        columns + columns % 32 // 3
    )  # an odd group of sixteen columns has too few independent sums
    if cost * x.num_tokens > x.size * (width + 60):
        columns = 0
    all_rows = (x.num_tokens + ROWS - 1) // ROWS * ROWS
    block = max(ROWS, min(all_rows, _BIAS_FLOATS // width // ROWS * ROWS))
    group = max(1, _GROUP_FLOATS // (arrays * width * depth)) if block < x.num_tokens else 1
    return Sizes(width, depth, columns, block, group)


@inner()
def load_regions(regions, at, x, window, width):
    """Number a window's regions from 0; return their offset, or -1 if there is only one."""
    if not len(x.regions):
        return -1
    first = window % x.num_masks * x.num_tokens
    regions[at + x.num_tokens : at + width] = 0
    return at if number_regions(regions, at, x.regions, first, x.num_tokens) > 1 else -1


@inner()
def load_keys(keys, inverses, slot, x, z, window, head):
    """Load a window's keys, transposed, and normalised for cosine attention."""
    at, k_at = slot * z.depth * z.width, window * x.k_strides[0] + head * x.k_strides[1]
    transpose(keys, at, x.k, k_at, x.k_strides[2], x.num_tokens, z.width, x.size, z.depth)
    if x.eps >= 0:
        normalise(keys, at, inverses, slot * z.width, x.num_tokens, z.width, x.size, x.eps)


@inner()
def load_values(values, slot, x, z, window, head):
    """Load a window's values, transposed."""
    at, v_at = slot * z.depth * z.width, window * x.v_strides[0] + head * x.v_strides[1]
    transpose(values, at, x.v, v_at, x.v_strides[2], x.num_tokens, z.width, x.size, z.depth)


@folded()
def load_bias(x, z, w, block, last):
    """Gather the bias of a block's rows for the head whose table is in ``w.table``."""
    num_rows = last - block
    gather_bias(w.bias, w.table, x.table_size, x.offsets, w.runs, block, num_rows, z.width)


@inner()
def load_tile(rows, x, x_at, x_token, first, num_rows, size, depth, scale, eps):
    """Load a tile's rows from token ``first`` on, with zeros past the last."""
    copy_rows(rows, 0, x, x_at + first * x_token, x_token, num_rows, size, depth, scale, eps)
    if num_rows < ROWS:
        rows[num_rows * depth :] = 0


@folded()
def scores(x, z, w, window, slot, head, first, num_rows, bias_at, scale):
    """Compute a tile of scores in powers of two; ``w.rows`` gets the rows of q times ``scale``."""
    q_at = window * x.q_strides[0] + head * x.q_strides[1]
    load_tile(w.rows, x.q, q_at, x.q_strides[2], first, num_rows, x.size, z.depth, scale, x.eps)
    score(w.s, w.rows, num_rows, w.keys, slot * z.depth * z.width, z.width, z.depth)
    add_bias_and_mask(
        w.s, w.bias, bias_at, w.regions, w.regions_at[slot], first, num_rows, z.width, x.mask_value
    )
    if len(x.bias):
        row = head * x.num_tokens + first
        add_dense(w.s, x.bias, row * x.num_tokens, num_rows, x.num_tokens, z.width)
    if len(x.mask):
        row = window % x.num_masks * x.num_tokens + first
        add_dense(w.s, x.mask, row * x.num_tokens, num_rows, x.num_tokens, z.width)


@folded()
def _finish(out, lse, x, stats, result, depth, window, head, first, num_rows):
    """Divide a tile's rows by their sums, and write them and their log-sum-exp."""
    store(stats, 32, mul(add(load(stats, 0), log2(load(stats, 16))), splat(LN_2)))
    for r in range(num_rows):
        lse[(window * x.num_heads + head) * x.num_tokens + first + r] = stats[32 + r]
        to = ((window * x.num_tokens + first + r) * x.num_heads + head) * x.size
        total = stats[16 + r]
        factor = np.float32(1) / total if total != 0 else np.float32(0)
        write_row(out, to, result, r * depth, factor, x.size)


@folded()
def _load_window(x, z, w, window, slot, head):
    """Load a window's keys, values and regions."""
    load_keys(w.keys, w.inverses, slot, x, z, window, head)
    w.regions_at[slot] = load_regions(w.regions, slot * z.width, x, window, z.width)
    if z.columns:
        v_at = window * x.v_strides[0] + head * x.v_strides[1]
        copy_rows(
            w.values, slot * x.num_tokens * z.columns, x.v, v_at, x.v_strides[2], x.num_tokens,
            x.size, z.columns, np.float32(1), NO_NORM,
        )  # fmt: skip
    else:
        load_values(w.values, slot, x, z, window, head)


@folded()
def _attend_part(item, out, lse, x, z, w):
    """Compute the output of a work item: one head of one part of the windows."""
    head, part = item % x.num_heads, item // x.num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head) * LOG2_E
    reverse_table(w.table, x.table, x.table_size, head)
    held = -1  # the block whose bias is in scratch memory
    end = x.num_windows * (part + 1) // x.parts
    for start in range(x.num_windows * part // x.parts, end, z.group):
        stop = min(end, start + z.group)
        for window in range(start, stop):
            _load_window(x, z, w, window, window - start, head)
        for block in range(0, x.num_tokens, z.block):
            last = min(x.num_tokens, block + z.block)
            if block != held:
                load_bias(x, z, w, block, last)
                held = block
            for window in range(start, stop):
                for first in range(block, last, ROWS):
                    num_rows, bias_at = min(ROWS, last - first), (first - block) * z.width
                    scores(x, z, w, window, window - start, head, first, num_rows, bias_at, scale)
                    softmax_rows(w.s, num_rows, w.stats, z.width)
                    mix_window(w.result, w.s, w.values, w.values, window - start, x, z, num_rows)
                    depth = z.columns or z.depth
                    _finish(out, lse, x, w.stats, w.result, depth, window, head, first, num_rows)


@allocating()
def _make_scratch(out, lse, x):
    """The sizes of tiles and blocks, and a thread's scratch arrays."""
    z = sizes_of(x, 2)
    runs = np.empty(x.num_tokens + 1, np.int64)
    w = Scratch(
        np.empty(z.group * z.depth * z.width, np.float32),
        np.empty(z.group * max(z.depth * z.width, z.columns * x.num_tokens), np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group, np.int64),
        np.empty(x.table_size + 16, np.float32),
        runs[: find_runs(runs, x.offsets) + 1],
        np.empty(z.block * z.width + 16, np.float32),
        np.zeros(ROWS * z.width, np.float32),
        np.empty(ROWS * z.depth, np.float32),
        np.empty(ROWS * (z.depth + 16), np.float32),
        np.ones(48, np.float32),
    )
    return z, w


@inner()
def _attend_parts(out, lse, x, scratch):
    """Compute work items until none is left."""
    z, w = scratch
    while True:
        item = take_number(x.counter)
        if item >= x.num_heads * x.parts:
            return
        _attend_part(item, out, lse, x, z, w)


@entry()
def attend(parallel, num_threads, out, lse, x):
    """Compute all work items, on a team of threads."""
    on_team(parallel, num_threads, _make_scratch, _attend_parts, (out, lse, x))
