"""Window attention forward on a CPU, and helpers that the backward kernel shares."""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ....tiles.cpu.compile import allocating, entry, folded, inner
from ....tiles.cpu.simd import LN_2, LOG2_E, add, load, log2, mul, splat, store, take_number
from ....tiles.cpu.simd_pairs import keys_of
from ....tiles.cpu.threads import on_team
from .operands import load_block, load_columns, load_rows, other_array
from .rows import (
    NO_NORM,
    find_runs,
    gather_bias,
    head_scale,
    normalise,
    number_regions,
    reverse_table,
    write_row,
)
from .tiles import add_bias_and_mask, add_dense, mix_window, score, softmax_rows

_GROUP_FLOATS = 65536
"""Floats of a group's keys and values (and their gradients): a quarter of a 1 MiB L2 cache."""
_BLOCK_FLOATS = 8192
"""Floats of a block of scores, and of its bias: 32 KiB, which stay in the L2 cache."""

Sizes = namedtuple("Sizes", "width depth columns row slot tokens staged block group")
Scratch = namedtuple(
    "Scratch",
    "keys values staging inverses regions regions_at table runs bias s weights rows result maxima"
    " sums",
)


@inner()
def sizes_of(x, arrays):
    """Choose the sizes of blocks and groups; ``arrays`` of keys' size are kept of a group.

    ``width`` and ``depth`` are the numbers of keys and head columns, padded; ``row`` is the length
    of a row of q and ``slot`` the size of a window's transposed keys. Pairs are zipped and
    transposed from ``tokens`` rows of length ``staged``. The bias of a ``block`` of rows is reused
    for a ``group`` of windows; a block of all rows has a group of one.

    Values are multiplied by rows (a vector is sixteen columns of a token), or by columns (a vector
    is sixteen tokens), where ``columns`` is 0; otherwise it is the padded row length. By rows,
    lanes are wasted unless the head size is a multiple of 16; by columns, the sums over lanes cost
    as much as 60 tokens. Pairs are multiplied by rows.
    """
    width, depth = (x.num_tokens + 31) // 32 * 32, (x.size + 3) // 4 * 4
    columns, staged = (x.size + 15) // 16 * 16, (x.size + 31) // 32 * 32
    row, slot = columns, staged * width
    if keys_of(x.element) == 1:
        row, slot = depth, depth * width
        if columns * x.num_tokens > x.size * (width + 60):
            columns = 0
    all_rows = (x.num_tokens + 7) // 8 * 8
    block = max(8, min(all_rows, _BLOCK_FLOATS // width // 8 * 8))
    group = max(1, _GROUP_FLOATS // (arrays * width * depth)) if block < x.num_tokens else 1
    tokens = (x.num_tokens + 1) // 2 * 2
    return Sizes(width, depth, columns, row, slot, tokens, staged, block, group)


@inner()
def load_regions(regions, at, x, window, width):
    """Number a window's regions from 0; return their offset, or -1 if there is only one."""
    if not len(x.regions):
        return -1
    first = window % x.num_masks * x.num_tokens
    regions[at + x.num_tokens : at + width] = 0
    return at if number_regions(regions, at, x.regions, first, x.num_tokens) > 1 else -1


@inner()
def load_keys(w, slot, x, z, window, head):
    """Load a window's keys, transposed, and normalised for cosine attention."""
    k_at = window * x.k_strides[0] + head * x.k_strides[1]
    load_columns(w.keys, slot, w.staging, x.k, k_at, x.k_strides[2], x.num_tokens, z, x.size)
    if x.eps >= 0:
        normalise(
            w.keys, slot * z.slot, w.inverses, slot * z.width, x.num_tokens, z.width, x.size, x.eps
        )


@inner()
def load_values(w, slot, x, z, window, head):
    """Load a window's values, transposed."""
    v_at = window * x.v_strides[0] + head * x.v_strides[1]
    load_columns(w.values, slot, w.staging, x.v, v_at, x.v_strides[2], x.num_tokens, z, x.size)


@folded()
def load_bias(x, z, w, block, last):
    """Gather the bias of a block's rows for the head whose table is in ``w.table``."""
    num_rows = last - block
    gather_bias(w.bias, w.table, x.table_size, x.offsets, w.runs, block, num_rows, z.width)


@folded()
def scores(x, z, w, zipped, window, slot, head, first, num_rows, scale):
    """Compute a block of scores in powers of two; ``w.rows`` gets the rows of q, ``zipped`` too."""
    q_at = window * x.q_strides[0] + head * x.q_strides[1] + first * x.q_strides[2]
    load_block(w.rows, zipped, x.q, q_at, x.q_strides[2], num_rows, x.size, z.row, x.eps)
    score(w.s, w.rows, num_rows, w.keys, slot, z, x.size)
    add_bias_and_mask(
        w.s, scale, w.bias, w.regions, w.regions_at[slot], first, num_rows, z.width,
        x.mask_value,
    )  # fmt: skip
    if len(x.bias):
        row = head * x.num_tokens + first
        add_dense(w.s, x.bias, row * x.num_tokens, num_rows, x.num_tokens, z.width)
    if len(x.mask):
        row = window % x.num_masks * x.num_tokens + first
        add_dense(w.s, x.mask, row * x.num_tokens, num_rows, x.num_tokens, z.width)


@folded()
def _finish(out, lse, x, w, depth, window, head, first, num_rows):
    """Divide a block's rows by their sums, and write them and their log-sum-exp."""
    for r in range(0, num_rows, 16):
        logarithms = add(load(w.maxima, r), log2(load(w.sums, r)))
        store(w.maxima, r, mul(logarithms, splat(LN_2)))
    for r in range(num_rows):
        lse[(window * x.num_heads + head) * x.num_tokens + first + r] = w.maxima[r]
        to = ((window * x.num_tokens + first + r) * x.num_heads + head) * x.size
        factor = np.float32(1) / w.sums[r] if w.sums[r] != 0 else np.float32(0)
        write_row(out, to, w.result, r * depth, factor, x.size)


@folded()
def _load_window(x, z, w, window, slot, head):
    """Load a window's keys, values and regions."""
    load_keys(w, slot, x, z, window, head)
    w.regions_at[slot] = load_regions(w.regions, slot * z.width, x, window, z.width)
    if z.columns:
        v_at = window * x.v_strides[0] + head * x.v_strides[1]
        load_rows(
            w.values, slot, w.staging, x.v, v_at, x.v_strides[2], x.num_tokens, z, x.size, NO_NORM
        )
    else:
        load_values(w, slot, x, z, window, head)


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
                slot, num_rows = window - start, last - block
                scores(x, z, w, x.element, window, slot, head, block, num_rows, scale)
                softmax_rows(w.weights, w.s, num_rows, w.maxima, w.sums, z.width)
                mix_window(w.result, w.weights, w.values, w.values, slot, x, z, num_rows)
                _finish(out, lse, x, w, z.columns or z.depth, window, head, block, num_rows)


@allocating()
def _make_scratch(out, lse, x):
    """The sizes of blocks, and a thread's scratch arrays."""
    z = sizes_of(x, 2)
    runs = np.empty(x.num_tokens + 1, np.int64)
    element, s = x.element.dtype, np.zeros(z.block * z.width, np.float32)
    w = Scratch(
        np.empty(z.group * z.slot, element),
        np.empty(z.group * max(z.slot, z.columns * z.tokens), element),
        np.zeros(z.width * z.staged + 16, element),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group, np.int64),
        np.empty(x.table_size + 16, np.float32),
        runs[: find_runs(runs, x.offsets) + 1],
        np.empty(z.block * z.width + 16, np.float32),
        s,
        other_array(x.element, s, z.block * z.width),
        np.zeros(z.block * z.row + 16, element),
        np.empty(z.block * (z.depth + 16), np.float32),
        np.ones(z.block + 16, np.float32),
        np.ones(z.block + 16, np.float32),
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
