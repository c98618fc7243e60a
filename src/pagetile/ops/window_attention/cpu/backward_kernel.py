"""Window attention backward on a CPU; the package's docstring has the loop nest.

Weights are recomputed from the log-sum-exp, a tile of rows at a time. Gradients of keys and values
are accumulated transposed, as keys and values are stored, until all rows of a window are done.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ....tiles.cpu.compile import allocating, entry, folded, inner
from ....tiles.cpu.simd import LN_2, LOG2_E, take_number
from ....tiles.cpu.threads import on_team
from .forward_kernel import (
    load_bias,
    load_keys,
    load_regions,
    load_tile,
    load_values,
    scores,
    sizes_of,
)
from .rows import (
    NO_NORM,
    ROWS,
    clamped_inverse,
    copy_rows,
    find_runs,
    head_scale,
    inverse_norm,
    normalise_gradient,
    reverse_table,
    scatter_bias,
    transpose_back,
    write_row,
)
from .tiles import (
    accumulate,
    add_outer,
    inner_products,
    mix_window,
    recompute_weights,
    score,
    subtract_row,
)

GradientArrays = namedtuple("GradientArrays", "dq dk dv dtable dscale")
SavedForward = namedtuple("SavedForward", "out lse dout dout_strides dlse")
Scratch = namedtuple(
    "Scratch",
    "keys values key_rows dkeys dvalues inverses regions regions_at table runs bias s ds dbias rows"
    " back result deltas tops along",
)


@folded()
def _store_rows(dq, x, w, depth, columns, window, head, first, num_rows, scale):
    """Write a tile's rows of dq; return their term of the gradient of log(scale)."""
    to = ((window * x.num_tokens + first) * x.num_heads + head) * x.size
    if x.eps < 0:
        for r in range(num_rows):
            write_row(dq, to + r * x.num_heads * x.size, w.result, r * columns, scale, x.size)
        return np.float32(0)
    share = np.float32(0)
    # ``w.rows`` holds the normalised rows of q times the scale and log2 e.
    inner_products(w.along, w.rows, depth, w.result, 0, columns, num_rows, x.size)
    for r in range(num_rows):
        row = window * x.q_strides[0] + head * x.q_strides[1] + (first + r) * x.q_strides[2]
        inverse = inverse_norm(x.q, row, x.size, x.eps)
        along = w.along[r] * LN_2
        share += along
        is_kept = inverse < clamped_inverse(x.eps) and scale != 0
        kept = along * LN_2 / scale if is_kept else np.float32(0)
        subtract_row(w.result, r * columns, w.rows, r * depth, scale, kept, x.size)
        write_row(dq, to + r * x.num_heads * x.size, w.result, r * columns, inverse, x.size)
    return share


@folded()
def _store_keys(gradients, x, z, w, slot, window, head):
    """Write a window's dK and dV, transposing them back."""
    at, token = slot * z.depth * z.width, x.num_heads * x.size
    to = (window * x.num_tokens * x.num_heads + head) * x.size
    transpose_back(
        gradients.dv, to, token, w.dvalues, at, x.num_tokens, z.width, x.size, np.float32(1)
    )
    if x.eps >= 0:
        normalise_gradient(w.dkeys, w.keys, at, w.inverses, slot * z.width, z.width, x.size, x.eps)
    transpose_back(gradients.dk, to, token, w.dkeys, at, x.num_tokens, z.width, x.size, LN_2)


@inner()
def _scatter_bias_gradient(dtable, dbias, x, share, first, block, width):
    """Add a block's bias gradient to the gradient of the table, or of a dense bias."""
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
    """Load a window's keys, values and regions; keys by rows as well where ``z.columns``."""
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
def _weights_and_gradients(x, z, w, saved, window, slot, head, first, num_rows):
    """Turn scores into weights and score gradients, with zeros past the last row."""
    at = window * saved.dout_strides[0] + head * saved.dout_strides[1]
    load_tile(
        w.back, saved.dout, at, saved.dout_strides[2], first, num_rows, x.size, z.depth,
        np.float32(1), NO_NORM,
    )  # fmt: skip
    score(w.ds, w.back, num_rows, w.values, slot * z.depth * z.width, z.width, z.depth)
    at = ((window * x.num_tokens + first) * x.num_heads + head) * x.size
    inner_products(w.deltas, w.back, z.depth, saved.out, at, x.num_heads * x.size, num_rows, x.size)
    at = (window * x.num_heads + head) * x.num_tokens + first
    for r in range(num_rows):
        w.tops[r] = saved.lse[at + r] * LOG2_E
        if len(saved.dlse):
            w.deltas[r] -= saved.dlse[at + r]
    recompute_weights(w.s, w.ds, w.tops, w.deltas, num_rows, z.width)
    w.s[num_rows * z.width :] = 0
    w.ds[num_rows * z.width :] = 0


@folded()
def _differentiate_part(item, gradients, saved, x, z, w):
    """Compute the gradients of a work item: one head of one part of the windows."""
    head, part = item % x.num_heads, item // x.num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head)
    reverse_table(w.table, x.table, x.table_size, head)
    held = -1  # the block whose bias and bias gradient are in scratch memory
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
                    _scatter_bias_gradient(
                        gradients.dtable, w.dbias, x, item, held, z.block, z.width
                    )
                load_bias(x, z, w, block, last)
                w.dbias[:] = 0
                held = block
            for window in range(start, stop):
                slot = window - start
                for first in range(block, last, ROWS):
                    num_rows, bias_at = min(ROWS, last - first), (first - block) * z.width
                    scores(x, z, w, window, slot, head, first, num_rows, bias_at, scale * LOG2_E)
                    _weights_and_gradients(x, z, w, saved, window, slot, head, first, num_rows)
                    mix_window(w.result, w.ds, w.key_rows, w.keys, slot, x, z, num_rows)
                    add_outer(w.dkeys, slot * z.depth * z.width, w.ds, w.rows, z.width, z.depth)
                    add_outer(w.dvalues, slot * z.depth * z.width, w.s, w.back, z.width, z.depth)
                    accumulate(w.dbias, bias_at, w.ds, num_rows * z.width)
                    gradients.dscale[item] += _store_rows(
                        gradients.dq, x, w, z.depth, z.columns or z.depth, window, head, first,
                        num_rows, scale,
                    )  # fmt: skip
        for window in range(start, stop):
            _store_keys(gradients, x, z, w, window - start, window, head)
    if held >= 0:
        _scatter_bias_gradient(gradients.dtable, w.dbias, x, item, held, z.block, z.width)


@allocating()
def _make_scratch(gradients, saved, x):
    """The sizes of tiles and blocks, and a thread's scratch arrays."""
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
    return z, w


@inner()
def _differentiate_parts(gradients, saved, x, scratch):
    """Compute the gradients of work items until none is left."""
    z, w = scratch
    while True:
        item = take_number(x.counter)
        if item >= x.num_heads * x.parts:
            return
        _differentiate_part(item, gradients, saved, x, z, w)


@entry()
def differentiate(parallel, num_threads, gradients, saved, x):
    """Compute the gradients of all work items, on a team of threads."""
    on_team(parallel, num_threads, _make_scratch, _differentiate_parts, (gradients, saved, x))
