"""Window attention backward on a CPU; the package's docstring has the loop nest.

Weights are recomputed from the log-sum-exp, a block of rows at a time. Gradients of keys and values
are accumulated transposed, as keys and values are stored, until all rows of a window are done.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ....tiles.cpu.compile import allocating, entry, folded, inner
from ....tiles.cpu.simd import LOG2_E, take_number
from ....tiles.cpu.threads import on_team
from ..problem import MOST_TOP
from .forward_kernel import (
    load_bias,
    load_keys,
    load_regions,
    load_values,
    scores,
    sizes_of,
)
from .operands import load_block, load_rows, other_array, recompute_weights
from .rows import (
    NO_NORM,
    clamped_inverse,
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
    add_outer,
    inner_products,
    mix_window,
    score,
    subtract_maximum,
    subtract_row,
)

GradientArrays = namedtuple("GradientArrays", "dq dk dv dtable dscale")
SavedForward = namedtuple("SavedForward", "out lse dout dout_strides dlse")
Scratch = namedtuple(
    "Scratch",
    "keys values key_rows staging dkeys dvalues inverses regions regions_at table runs bias s"
    " weights ds ds_rows zipped_ds dbias rows zipped_rows back zipped_back result deltas tops"
    " along",
)


@folded()
def _store_rows(dq, x, w, depth, columns, window, head, first, num_rows, scale):
    """Write a block's rows of dq; return their term of the gradient of log(scale)."""
    to = ((window * x.num_tokens + first) * x.num_heads + head) * x.size
    if x.eps < 0:
        for r in range(num_rows):
            write_row(dq, to + r * x.num_heads * x.size, w.result, r * columns, scale, x.size)
        return np.float32(0)
    share = np.float32(0)
    # ``w.rows`` holds the normalised rows of q.
    inner_products(w.along, w.rows, depth, w.result, 0, columns, num_rows, x.size)
    for r in range(num_rows):
        row = window * x.q_strides[0] + head * x.q_strides[1] + (first + r) * x.q_strides[2]
        inverse = inverse_norm(x.q, row, x.size, x.eps)
        along = w.along[r] * scale
        share += along
        kept = along if inverse < clamped_inverse(x.eps) else np.float32(0)
        subtract_row(w.result, r * columns, w.rows, r * depth, scale, kept, x.size)
        write_row(dq, to + r * x.num_heads * x.size, w.result, r * columns, inverse, x.size)
    return share


@folded()
def _store_keys(gradients, x, z, w, slot, window, head, scale):
    """Write a window's dK and dV, transposing them back."""
    at, token = slot * z.depth * z.width, x.num_heads * x.size
    to = (window * x.num_tokens * x.num_heads + head) * x.size
    transpose_back(
        gradients.dv, to, token, w.dvalues, at, x.num_tokens, z.width, x.size, np.float32(1)
    )
    if x.eps >= 0:
        normalise_gradient(w.dkeys, w.keys, at, w.inverses, slot * z.width, z.width, x.size, x.eps)
    transpose_back(gradients.dk, to, token, w.dkeys, at, x.num_tokens, z.width, x.size, scale)


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
    load_keys(w, slot, x, z, window, head)
    load_values(w, slot, x, z, window, head)
    w.regions_at[slot] = load_regions(w.regions, slot * z.width, x, window, z.width)
    if z.columns:
        k_at = window * x.k_strides[0] + head * x.k_strides[1]
        load_rows(
            w.key_rows, slot, w.staging, x.k, k_at, x.k_strides[2], x.num_tokens, z, x.size, x.eps
        )


@folded()
def _weights_and_gradients(x, z, w, saved, window, slot, head, first, num_rows):
    """Turn scores into weights and score gradients, with zeros past the last row."""
    token = saved.dout_strides[2]
    at = window * saved.dout_strides[0] + head * saved.dout_strides[1] + first * token
    load_block(w.back, w.zipped_back, saved.dout, at, token, num_rows, x.size, z.row, NO_NORM)
    score(w.ds, w.back, num_rows, w.values, slot, z, x.size)
    at = ((window * x.num_tokens + first) * x.num_heads + head) * x.size
    inner_products(w.deltas, w.back, z.row, saved.out, at, x.num_heads * x.size, num_rows, x.size)
    at = (window * x.num_heads + head) * x.num_tokens + first
    for r in range(num_rows):
        top = saved.lse[at + r] * LOG2_E
        if MOST_TOP < abs(top) < np.inf:
            top = subtract_maximum(w.s, r * z.width, z.width)
        w.tops[r] = top if top != -np.inf else np.float32(0)  # NaN stays NaN
        if len(saved.dlse):
            w.deltas[r] -= saved.dlse[at + r]
    recompute_weights(x.element, w, num_rows, z.width)


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
                slot, num_rows = window - start, last - block
                scores(x, z, w, w.zipped_rows, window, slot, head, block, num_rows, scale * LOG2_E)
                _weights_and_gradients(x, z, w, saved, window, slot, head, block, num_rows)
                mix_window(w.result, w.ds_rows, w.key_rows, w.keys, slot, x, z, num_rows)
                add_outer(w.dkeys, slot, w.zipped_ds, w.zipped_rows, z, num_rows)
                add_outer(w.dvalues, slot, w.weights, w.zipped_back, z, num_rows)
                gradients.dscale[item] += _store_rows(
                    gradients.dq, x, w, z.row, z.columns or z.depth, window, head, block, num_rows,
                    scale,
                )  # fmt: skip
        for window in range(start, stop):
            _store_keys(gradients, x, z, w, window - start, window, head, scale)
    if held >= 0:
        _scatter_bias_gradient(gradients.dtable, w.dbias, x, item, held, z.block, z.width)


@allocating()
def _make_scratch(gradients, saved, x):
    """The sizes of blocks, and a thread's scratch arrays."""
    z = sizes_of(x, 4)
    element, room = x.element.dtype, z.group * z.depth * z.width
    scores, rows = z.block * z.width, z.block * z.row + 16
    runs = np.empty(x.num_tokens + 1, np.int64)
    s, ds = np.empty(scores, np.float32), np.empty(scores, np.float32)
    q, back = np.zeros(rows, element), np.zeros(rows, element)
    w = Scratch(
        np.empty(z.group * z.slot, element),
        np.empty(z.group * z.slot, element),
        np.empty(z.group * z.columns * z.tokens, element),
        np.zeros(z.width * z.staged + 16, element),
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group * z.width, np.float32),
        np.empty(z.group, np.int64),
        np.empty(x.table_size + 16, np.float32),
        runs[: find_runs(runs, x.offsets) + 1],
        np.empty(z.block * z.width + 16, np.float32),
        s,
        other_array(x.element, s, scores),
        ds,
        other_array(x.element, ds, scores),
        other_array(x.element, ds, scores),
        np.empty(z.block * z.width, np.float32),
        q,
        other_array(x.element, q, rows),
        back,
        other_array(x.element, back, rows),
        np.empty(z.block * (z.depth + 16), np.float32),
        np.empty(z.block + 16, np.float32),
        np.empty(z.block + 16, np.float32),
        np.empty(z.block + 16, np.float32),
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
