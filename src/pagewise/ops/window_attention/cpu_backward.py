"""The backward kernel on a CPU; see ``cpu`` for the walk.

Weights come back from the log-sum-exp, a tile of rows at a time; what they add to the gradients
of keys and values stays transposed, beside these, until a window's rows are done.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ...tiles.cpu.compile import entry, folded, inner
from ...tiles.cpu.simd import LN_2, LOG2_E, load_one, store_one, take_number
from .cpu_forward import load_keys, load_regions, load_tile, load_values, scores, sizes_of
from .cpu_rows import (
    ROWS,
    copy_rows,
    find_runs,
    gather_bias,
    head_scale,
    inverse_norm,
    scatter_bias,
    turn_back,
    turn_table,
    write_row,
)
from .cpu_tiles import (
    accumulate,
    add_outer,
    inner_products,
    mix,
    mix_rows,
    score,
    soften_again,
)

Found = namedtuple("Found", "dq dk dv dtable dscale")
Given = namedtuple("Given", "out lse dout dout_strides dlse")
Scratch = namedtuple(
    "Scratch",
    "keys values key_rows dkeys dvalues regions regions_at table runs bias s ds dbias rows back"
    " result deltas tops",
)


@folded()
def _store_rows(dq, result, x, window, head, first, num_rows, depth, scale):
    """Write a tile's rows of dq; returns their share in the gradient of the scale's logarithm."""
    share = np.float32(0)
    for r in range(num_rows):
        to = ((window * x.num_tokens + first + r) * x.num_heads + head) * x.size
        if x.eps < 0:
            write_row(dq, to, result, r * depth, scale, x.size)
            continue
        row = window * x.q_strides[0] + head * x.q_strides[1] + (first + r) * x.q_strides[2]
        inverse = inverse_norm(x.q, row, x.size, x.eps)
        along = np.float32(0)
        for d in range(x.size):
            along += load_one(x.q, row + d) * inverse * result[r * depth + d] * scale
        share += along
        kept = along if inverse * x.eps < 1 else np.float32(0)
        for d in range(x.size):
            unit = load_one(x.q, row + d) * inverse
            store_one(dq, to + d, (result[r * depth + d] * scale - unit * kept) * inverse)
    return share


@folded()
def _store_keys(dk, dv, dkeys, dvalues, keys, at, x, window, head, width):
    """Turn a window's gradients of keys and values round again."""
    token = x.num_heads * x.size
    first = (window * x.num_tokens * x.num_heads + head) * x.size
    turn_back(dv, first, token, dvalues, at, x.num_tokens, width, x.size, np.float32(1))
    if x.eps < 0:
        turn_back(dk, first, token, dkeys, at, x.num_tokens, width, x.size, LN_2)
        return
    for n in range(x.num_tokens):
        to, kept = first + n * token, np.float32(0)
        row = window * x.k_strides[0] + head * x.k_strides[1] + n * x.k_strides[2]
        inverse = inverse_norm(x.k, row, x.size, x.eps)
        if inverse * x.eps < 1:
            for d in range(x.size):
                kept += keys[at + d * width + n] * dkeys[at + d * width + n] * LN_2
        for d in range(x.size):
            here = at + d * width + n
            store_one(dk, to + d, (dkeys[here] * LN_2 - keys[here] * kept) * inverse)


@inner()
def _hand_back(dtable, dbias, x, share, first, block, width):
    """Add a block's gradient of the bias to that of the table, or of a dense bias."""
    num_rows = min(block, x.num_tokens - first)
    if len(x.bias):
        for r in range(num_rows):
            at = (share * x.num_tokens + first + r) * x.num_tokens
            for n in range(x.num_tokens):
                dtable[at + n] += dbias[r * width + n]
    at = share * x.table_size
    scatter_bias(
        dtable, at, x.table_size, dbias, x.offsets, first, num_rows if x.table_size else 0, width
    )


@folded()
def _load_window(x, z, w, window, slot, head):
    """A window's keys, both ways if they are mixed by rows, values and regions."""
    load_keys(w.keys, slot * z.depth * z.width, x, window, head, z.width, z.depth)
    load_values(w.values, slot * z.depth * z.width, x, window, head, z.width, z.depth)
    w.regions_at[slot] = load_regions(w.regions, slot * z.width, x, window, z.width)
    if z.columns:
        k_at = window * x.k_strides[0] + head * x.k_strides[1]
        copy_rows(
            w.key_rows, slot * x.num_tokens * z.columns, x.k, k_at, x.k_strides[2], x.num_tokens,
            x.size, z.columns, np.float32(1), x.eps,
        )  # fmt: skip


@folded()
def _weigh(x, z, w, given, window, slot, head, first, num_rows):
    """Scores to weights, and to their gradients; zeros below a tile that is not full."""
    at = window * given.dout_strides[0] + head * given.dout_strides[1]
    load_tile(
        w.back, given.dout, at, given.dout_strides[2], first, num_rows, x.size, z.depth,
        np.float32(1), np.float32(-1),
    )  # fmt: skip
    score(w.ds, w.back, num_rows, w.values, slot * z.depth * z.width, z.width, z.depth)
    at = ((window * x.num_tokens + first) * x.num_heads + head) * x.size
    inner_products(w.deltas, w.back, z.depth, given.out, at, x.num_heads * x.size, num_rows, x.size)
    at = (window * x.num_heads + head) * x.num_tokens + first
    for r in range(num_rows):
        w.tops[r] = given.lse[at + r] * LOG2_E
        if len(given.dlse):
            w.deltas[r] -= given.dlse[at + r]
    soften_again(w.s, w.ds, w.tops, w.deltas, num_rows, z.width)
    w.s[num_rows * z.width :] = 0
    w.ds[num_rows * z.width :] = 0


@folded()
def _mix(x, z, w, slot, num_rows):
    """A tile's gradients of scores times a window's keys."""
    if z.columns:
        at = slot * x.num_tokens * z.columns
        mix_rows(w.result, w.ds, num_rows, w.key_rows, at, x.num_tokens, z.width, z.columns)
    else:
        mix(w.result, w.ds, num_rows, w.keys, slot * z.depth * z.width, z.width, z.depth)


@folded()
def _differentiate_part(item, found, given, x, z, w):
    """One head of one part of the windows: its gradients, its share of the table's or bias's."""
    head, share = item % x.num_heads, item
    part = item // x.num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head)
    turn_table(w.table, x.table, x.table_size, head)
    num_runs = find_runs(w.runs, x.offsets)
    held = -1  # the block whose bias is there, and its gradient
    end = x.num_windows * (part + 1) // x.parts
    for start in range(x.num_windows * part // x.parts, end, z.group):
        stop = min(end, start + z.group)
        for window in range(start, stop):
            _load_window(x, z, w, window, window - start, head)
        w.dkeys[:] = 0
        w.dvalues[:] = 0
        for block in range(0, x.num_tokens, z.block):
            last = min(x.num_tokens, block + z.block)
            if block != held:
                if held >= 0:
                    _hand_back(found.dtable, w.dbias, x, share, held, z.block, z.width)
                gather_bias(
                    w.bias, w.table, x.table_size, x.offsets, w.runs, num_runs, block,
                    last - block, z.width,
                )  # fmt: skip
                w.dbias[:] = 0
                held = block
            for window in range(start, stop):
                slot = window - start
                for first in range(block, last, ROWS):
                    num_rows, bias_at = min(ROWS, last - first), (first - block) * z.width
                    scores(x, z, w, window, slot, head, first, num_rows, bias_at, scale * LOG2_E)
                    _weigh(x, z, w, given, window, slot, head, first, num_rows)
                    _mix(x, z, w, slot, num_rows)
                    add_outer(w.dkeys, slot * z.depth * z.width, w.ds, w.rows, z.width, z.depth)
                    add_outer(w.dvalues, slot * z.depth * z.width, w.s, w.back, z.width, z.depth)
                    accumulate(w.dbias, bias_at, w.ds, num_rows * z.width)
                    depth = z.columns or z.depth
                    found.dscale[share] += _store_rows(
                        found.dq, w.result, x, window, head, first, num_rows, depth, scale
                    )
        for window in range(start, stop):
            at = (window - start) * z.depth * z.width
            _store_keys(
                found.dk, found.dv, w.dkeys, w.dvalues, w.keys, at, x, window, head, z.width
            )
    if held >= 0:
        _hand_back(found.dtable, w.dbias, x, share, held, z.block, z.width)


@inner()
def _differentiate_parts(found, given, x, z, w):
    while True:
        item = take_number(x.counter)
        if item >= x.num_heads * x.parts:
            return
        _differentiate_part(item, found, given, x, z, w)


@entry()
def differentiate(found, given, x):
    """All gradients of the parts that this thread gets hold of."""
    z = sizes_of(x, 4)
    room = z.group * z.depth * z.width
    w = Scratch(
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(z.group * z.columns * x.num_tokens, np.float32),
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group, np.int64),
        np.empty(x.table_size + 16, np.float32),
        np.empty(x.num_tokens + 1, np.int64),
        np.empty(z.block * z.width + 16, np.float32),
        np.empty(ROWS * z.width, np.float32),
        np.empty(ROWS * z.width, np.float32),
        np.empty(z.block * z.width, np.float32),
        np.empty(ROWS * z.depth, np.float32),
        np.empty(ROWS * z.depth, np.float32),
        np.empty(ROWS * (z.depth + 16), np.float32),
        np.empty(16, np.float32),
        np.empty(ROWS, np.float32),
    )
    _differentiate_parts(found, given, x, z, w)
