"""The backward kernel on a CPU; see ``cpu`` for the walk.

Weights come back from the log-sum-exp, a tile of rows at a time; what they add to the gradients
of keys and values stays transposed, beside these, until a window's rows are done.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ...tiles.cpu.compile import entry, folded, inner
from ...tiles.cpu.simd import LN_2, LOG2_E, take_number
from .cpu_forward import (
    load_bias,
    load_keys,
    load_regions,
    load_tile,
    load_values,
    scores,
    sizes_of,
)
from .cpu_rows import (
    AS_THEY_ARE,
    ROWS,
    copy_rows,
    find_runs,
    head_scale,
    inverse_norm,
    largest_inverse,
    normalise_gradient,
    scatter_bias,
    turn_back,
    turn_table,
    write_row,
)
from .cpu_tiles import (
    accumulate,
    add_outer,
    inner_products,
    mix_window,
    score,
    soften_again,
    subtract_row,
)

Found = namedtuple("Found", "dq dk dv dtable dscale")
Given = namedtuple("Given", "out lse dout dout_strides dlse")
Scratch = namedtuple(
    "Scratch",
    "keys values key_rows dkeys dvalues inverses regions regions_at table runs bias s ds dbias rows"
    " back result deltas tops along",
)


@folded()
def _store_rows(dq, x, w, depth, columns, window, head, first, num_rows, scale):
    """Write a tile's rows of dq; returns their share in the gradient of the scale's logarithm."""
    to = ((window * x.num_tokens + first) * x.num_heads + head) * x.size
    if x.eps < 0:
        for r in range(num_rows):
            write_row(dq, to + r * x.num_heads * x.size, w.result, r * columns, scale, x.size)
        return np.float32(0)
    share = np.float32(0)
    # Rows of q lie in ``w.rows`` as units times the scale and log2 e.
    inner_products(w.along, w.rows, depth, w.result, 0, columns, num_rows, x.size)
    for r in range(num_rows):
        row = window * x.q_strides[0] + head * x.q_strides[1] + (first + r) * x.q_strides[2]
        inverse = inverse_norm(x.q, row, x.size, x.eps)
        along = w.along[r] * LN_2
        share += along
        is_kept = inverse < largest_inverse(x.eps) and scale != 0
        kept = along * LN_2 / scale if is_kept else np.float32(0)
        subtract_row(w.result, r * columns, w.rows, r * depth, scale, kept, x.size)
        write_row(dq, to + r * x.num_heads * x.size, w.result, r * columns, inverse, x.size)
    return share


@folded()
def _store_keys(found, x, z, w, slot, window, head):
    """Turn a window's gradients of keys and values round again."""
    at, token = slot * z.depth * z.width, x.num_heads * x.size
    to = (window * x.num_tokens * x.num_heads + head) * x.size
    turn_back(found.dv, to, token, w.dvalues, at, x.num_tokens, z.width, x.size, np.float32(1))
    if x.eps >= 0:
        normalise_gradient(w.dkeys, w.keys, at, w.inverses, slot * z.width, z.width, x.size, x.eps)
    turn_back(found.dk, to, token, w.dkeys, at, x.num_tokens, z.width, x.size, LN_2)


@inner()
def _hand_back(dtable, dbias, x, share, first, block, width):
    """Add a block's gradient of the bias to that of the table, or of a dense bias."""
    num_rows = min(block, x.num_tokens - first)
    if len(x.bias):
        for r in range(num_rows):
            at = (share * x.num_tokens + first + r) * x.num_tokens
            for n in range(x.num_tokens):
                dtable[at + n] += dbias[r * width + n]
    if x.table_size:
        at = share * x.table_size
        scatter_bias(dtable, at, x.table_size, dbias, x.offsets, first, num_rows, width)


@folded()
def _load_window(x, z, w, window, slot, head):
    """A window's keys, both ways if they are mixed by rows, values and regions."""
    load_keys(w.keys, w.inverses, slot, x, z, window, head)
    load_values(w.values, slot, x, z, window, head)
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
        np.float32(1), AS_THEY_ARE,
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
def _differentiate_part(item, found, given, x, z, w):
    """One head of one part of the windows: its gradients, its share of the table's or bias's."""
    head, part = item % x.num_heads, item // x.num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head)
    turn_table(w.table, x.table, x.table_size, head)
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
                    _hand_back(found.dtable, w.dbias, x, item, held, z.block, z.width)
                load_bias(x, z, w, block, last)
                w.dbias[:] = 0
                held = block
            for window in range(start, stop):
                slot = window - start
                for first in range(block, last, ROWS):
                    num_rows, bias_at = min(ROWS, last - first), (first - block) * z.width
                    scores(x, z, w, window, slot, head, first, num_rows, bias_at, scale * LOG2_E)
                    _weigh(x, z, w, given, window, slot, head, first, num_rows)
                    mix_window(w.result, w.ds, w.key_rows, w.keys, slot, x, z, num_rows)
                    add_outer(w.dkeys, slot * z.depth * z.width, w.ds, w.rows, z.width, z.depth)
                    add_outer(w.dvalues, slot * z.depth * z.width, w.s, w.back, z.width, z.depth)
                    accumulate(w.dbias, bias_at, w.ds, num_rows * z.width)
                    found.dscale[item] += _store_rows(
                        found.dq, x, w, z.depth, z.columns or z.depth, window, head, first,
                        num_rows, scale,
                    )  # fmt: skip
        for window in range(start, stop):
            _store_keys(found, x, z, w, window - start, window, head)
    if held >= 0:
        _hand_back(found.dtable, w.dbias, x, item, held, z.block, z.width)


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
    runs = np.empty(x.num_tokens + 1, np.int64)
    w = Scratch(
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(z.group * z.columns * x.num_tokens, np.float32),
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group, np.int64),
        np.empty(x.table_size + 16, np.float32),
        runs[: find_runs(runs, x.offsets) + 1],
        np.empty(z.block * z.width + 16, np.float32),
        np.empty(ROWS * z.width, np.float32),
        np.empty(ROWS * z.width, np.float32),
        np.empty(z.block * z.width, np.float32),
        np.empty(ROWS * z.depth, np.float32),
        np.empty(ROWS * z.depth, np.float32),
        np.empty(ROWS * (z.depth + 16), np.float32),
        np.empty(16, np.float32),
        np.empty(ROWS, np.float32),
        np.empty(16, np.float32),
    )
    _differentiate_parts(found, given, x, z, w)
