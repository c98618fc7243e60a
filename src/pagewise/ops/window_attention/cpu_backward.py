"""The backward kernel on a CPU; see ``cpu`` for the walk.

Weights come back from the log-sum-exp, four rows at a time; what they add to the gradients of
keys and values stays transposed, beside these, until a window's rows are done.
"""

from __future__ import annotations

import numpy as np

from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.simd import LN_2, LOG2_E, take_number
from .cpu_forward import bias_rows, load_keys, load_regions, load_values, scores, sizes
from .cpu_tiles import (
    accumulate,
    add_outer,
    gather_rows,
    head_scale,
    inner_product,
    inverse_norm,
    mix,
    score,
    score_gradient,
    soften_again,
    turn_back,
    write_row,
)


@inner()
def _store_rows(
    dq, result, x, window, head, first, num_rows, num_heads, num_tokens, depth, scale
):  # fmt: skip
    """Write four rows of dq; returns their share in the gradient of the scale's logarithm."""
    share = np.float32(0)
    for r in range(num_rows):
        to = ((window * num_tokens + first + r) * num_heads + head) * x.size
        if x.eps < 0:
            write_row(dq, to, result, r * depth, scale, x.size)
            continue
        row = window * x.q_strides[0] + head * x.q_strides[1] + (first + r) * x.q_strides[2]
        inverse = inverse_norm(x.q, row, x.size, x.eps)
        along = np.float32(0)
        for d in range(x.size):
            along += x.q[row + d] * inverse * result[r * depth + d] * scale
        share += along
        kept = along if inverse * x.eps < 1 else np.float32(0)
        for d in range(x.size):
            unit = x.q[row + d] * inverse
            dq[to + d] = (result[r * depth + d] * scale - unit * kept) * inverse
    return share


@inner()
def _store_keys(
    dk, dv, dkeys, dvalues, keys, at, x, window, head, num_heads, num_tokens, width
):  # fmt: skip
    """Turn a window's gradients of keys and values round again."""
    token = num_heads * x.size
    first = (window * num_tokens * num_heads + head) * x.size
    turn_back(dv, first, token, dvalues, at, num_tokens, width, x.size, np.float32(1))
    if x.eps < 0:
        turn_back(dk, first, token, dkeys, at, num_tokens, width, x.size, LN_2)
        return
    for n in range(num_tokens):
        to, kept = first + n * token, np.float32(0)
        row = window * x.k_strides[0] + head * x.k_strides[1] + n * x.k_strides[2]
        inverse = inverse_norm(x.k, row, x.size, x.eps)
        if inverse * x.eps < 1:
            for d in range(x.size):
                kept += keys[at + d * width + n] * dkeys[at + d * width + n] * LN_2
        for d in range(x.size):
            here = at + d * width + n
            dk[to + d] = (dkeys[here] * LN_2 - keys[here] * kept) * inverse


@inner()
def _hand_back(dtable, dbias, x, share, first, block, width):
    """Add a block's gradient of the bias to that of the table, or of a dense bias."""
    num_tokens = len(x.offsets)
    if len(x.bias):
        for r in range(min(block, num_tokens - first)):
            at = (share * num_tokens + first + r) * num_tokens
            for n in range(num_tokens):
                dtable[at + n] += dbias[r * width + n]
    if not x.table_size:
        return
    table_at = share * x.table_size + (x.table_size - 1) // 2
    for r in range(min(block, num_tokens - first)):
        for n in range(num_tokens):
            to = table_at + x.offsets[first + r] - x.offsets[n]
            dtable[to] += dbias[r * width + n]


@inner()
def _differentiate_part(
    item,
    dq,
    dk,
    dv,
    dtable,
    dscale,
    out,
    lse,
    dout,
    dout_strides,
    dlse,
    x,
    keys,
    values,
    dkeys,
    dvalues,
    regions,
    regions_at,
    bias,
    s,
    ds,
    dbias,
    rows,
    back,
    result,
    width,
    depth,
    block,
    group,
):
    """One head of one part of the windows: its gradients, its share of the table's or bias's."""
    num_windows, num_heads, num_tokens = lse.shape
    head, part = item % num_heads, item // num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head)
    held = -1  # the block whose bias is there, and its gradient
    end = num_windows * (part + 1) // x.parts
    for start in range(num_windows * part // x.parts, end, group):
        stop = min(end, start + group)
        for window in range(start, stop):
            at = (window - start) * depth * width
            load_keys(keys, at, x, window, head, num_tokens, width, depth)
            load_values(values, at, x, window, head, num_tokens, width, depth)
            slot = window - start
            regions_at[slot] = load_regions(regions, slot * width, x, window, num_tokens, width)
        dkeys[:] = 0
        dvalues[:] = 0
        for first_row in range(0, num_tokens, block):
            last_row = min(num_tokens, first_row + block)
            if first_row != held:
                if held >= 0:
                    _hand_back(dtable, dbias, x, part * num_heads + head, held, block, width)
                bias_rows(bias, x, head, first_row, last_row - first_row, width)
                dbias[:] = 0
                held = first_row
            for window in range(start, stop):
                at = (window - start) * depth * width
                for first in range(first_row, last_row, 4):
                    bias_at = (first - first_row) * width
                    num_rows = min(4, last_row - first)
                    scores(
                        s, rows, x, keys, at, bias, bias_at, regions, regions_at[window - start],
                        window, head, first, num_rows, width, depth, scale * LOG2_E,
                    )  # fmt: skip
                    back_at = window * dout_strides[0] + head * dout_strides[1]
                    gather_rows(
                        back, dout, back_at, dout_strides[2], first, num_rows, x.size, depth,
                        np.float32(1), np.float32(-1),
                    )  # fmt: skip
                    score(ds, back, values, at, width, depth)
                    for r in range(4):
                        if r >= num_rows:
                            s[r * width : (r + 1) * width] = 0
                            ds[r * width : (r + 1) * width] = 0
                            continue
                        row = ((window * num_tokens + first + r) * num_heads + head) * x.size
                        delta = inner_product(back, r * depth, out, row, x.size)
                        if len(dlse):
                            delta -= dlse[window, head, first + r]
                        soften_again(s, r * width, width, lse[window, head, first + r] * LOG2_E)
                        score_gradient(ds, s, r * width, width, delta)
                    mix(result, ds, keys, at, width, depth)
                    add_outer(dkeys, at, ds, rows, width, depth)
                    add_outer(dvalues, at, s, back, width, depth)
                    accumulate(dbias, bias_at, ds, 4 * width)
                    along = _store_rows(
                        dq, result, x, window, head, first, num_rows, num_heads, num_tokens,
                        depth, scale,
                    )  # fmt: skip
                    dscale[part * num_heads + head] += along
        for window in range(start, stop):
            at = (window - start) * depth * width
            _store_keys(
                dk, dv, dkeys, dvalues, keys, at, x, window, head, num_heads, num_tokens, width
            )
    if held >= 0:
        _hand_back(dtable, dbias, x, part * num_heads + head, held, block, width)


@entry()
def differentiate(dq, dk, dv, dtable, dscale, out, lse, dout, dout_strides, dlse, x):
    """All gradients of the parts that this thread gets hold of."""
    _, num_heads, num_tokens = lse.shape
    width, depth, block, group = sizes(x, num_tokens, 4)
    keys = np.empty(group * depth * width, np.float32)
    values, dkeys, dvalues = np.empty_like(keys), np.empty_like(keys), np.empty_like(keys)
    regions, regions_at = np.empty(group * width, np.float32), np.empty(group, np.int64)
    bias, s = np.empty(block * width, np.float32), np.empty(4 * width, np.float32)
    ds, dbias = np.empty_like(s), np.empty_like(bias)
    rows = np.empty(4 * depth, np.float32)
    back, result = np.empty_like(rows), np.empty_like(rows)
    while True:
        item = take_number(x.counter)
        if item >= num_heads * x.parts:
            return
        _differentiate_part(
            item,
            dq,
            dk,
            dv,
            dtable,
            dscale,
            out,
            lse,
            dout,
            dout_strides,
            dlse,
            x,
            keys,
            values,
            dkeys,
            dvalues,
            regions,
            regions_at,
            bias,
            s,
            ds,
            dbias,
            rows,
            back,
            result,
            width,
            depth,
            block,
            group,
        )
