"""Window attention on a CPU, forward and backward: windows in groups that share rows of bias.

::

    for each head and part of the windows (work for a thread):
        for each group of windows:        keys and values transposed, into the cache
            for each four rows:           their bias gathered from the table, once a group
                for each window:          score, add, soften, mix — or the gradients of these

Keys and values of a group fit a second-level cache, four rows of bias and scores a first-level
one, and nothing larger is made. A part's share in the gradient of the table is summed in the
order of its windows, the parts' in theirs, and what the parts are depends on shapes alone: two
runs give the same bits on any number of threads.

Computes in float32; float16 and bfloat16 are converted. Dense biases and masks are left to the
reference.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch
from numba import njit

from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.simd import take_number
from ...tiles.cpu.threads import run_together
from ...tiles.state import AttentionOutput
from .cpu_tiles import (
    accumulate,
    add_bias_and_mask,
    add_outer,
    gather_bias,
    gather_rows,
    head_scale,
    inverse_norm,
    mix,
    score,
    score_gradient,
    soften,
    soften_again,
    transpose,
)
from .problem import MAX_LOGIT_SCALE, Gradients
from .reference import saturate

_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_GROUP_FLOATS = 65536
"""Room for a group's keys and values (and their gradients): a quarter of a 1 MiB cache."""
_PARTS = 32
"""Parts of the windows, at most: so many shares in the gradient of a head's table are kept."""

# One kernel call's arguments that both directions have.
_Inputs = namedtuple(
    "_Inputs",
    "q k v q_strides k_strides v_strides table table_size offsets regions mixed logit_scale "
    "softmax_scale mask_value eps size parts counter",
)


def supports(problem, device):
    """Why this cannot run, or None if it can."""
    if problem.num_biases or (problem.num_masks and not problem.has_regions):
        return "a dense bias or mask is left to the reference"
    if torch.float64 in problem.learned_dtypes:
        return "a float64 table or logit_scale is left to the reference"
    return refuse(device, q=problem.dtype)


@njit
def _sizes(x, num_tokens, arrays):
    """Padded sizes, and windows of a group."""
    width, depth = (num_tokens + 31) // 32 * 32, (x.size + 3) // 4 * 4
    return width, depth, max(1, _GROUP_FLOATS // (arrays * width * depth))


@inner()
def _bias_rows(bias, x, head, first, num_rows, width):
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
def _load_keys(keys, values, at, x, window, head, num_tokens, width, depth):
    k_at = window * x.k_strides[0] + head * x.k_strides[1]
    v_at = window * x.v_strides[0] + head * x.v_strides[1]
    transpose(keys, at, x.k, k_at, x.k_strides[2], num_tokens, width, x.size, depth, x.eps)
    plain = np.float32(-1)
    transpose(values, at, x.v, v_at, x.v_strides[2], num_tokens, width, x.size, depth, plain)


@inner()
def _scores(s, rows, x, keys, at, bias, window, head, first, num_rows, width, depth, scale):
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
            _load_keys(keys, values, at, x, window, head, num_tokens, width, depth)
        for first in range(0, num_tokens, 4):
            num_rows = min(4, num_tokens - first)
            _bias_rows(bias, x, head, first, num_rows, width)
            for window in range(start, stop):
                at = (window - start) * depth * width
                _scores(
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
def _forward(out, lse, x):
    _, num_heads, num_tokens = lse.shape
    width, depth, group = _sizes(x, num_tokens, 2)
    keys = np.empty(group * depth * width, np.float32)
    values, bias = np.empty_like(keys), np.empty(4 * width, np.float32)
    s, rows = np.empty_like(bias), np.empty(4 * depth, np.float32)
    result = np.empty_like(rows)
    while True:
        item = take_number(x.counter)
        if item >= num_heads * x.parts:
            return
        _attend_part(item, out, lse, x, keys, values, bias, s, rows, result, width, depth, group)


@inner()
def _store_rows(
    dq, result, x, window, head, first, num_rows, num_heads, num_tokens, depth, scale
):  # fmt: skip
    """Write four rows of dq; returns their share in the gradient of the scale's logarithm."""
    share = np.float32(0)
    for r in range(num_rows):
        to = ((window * num_tokens + first + r) * num_heads + head) * x.size
        if x.eps < 0:
            for d in range(x.size):
                dq[to + d] = result[r * depth + d] * scale
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
    for n in range(num_tokens):
        to = ((window * num_tokens + n) * num_heads + head) * x.size
        inverse, kept = np.float32(1), np.float32(0)
        if x.eps >= 0:
            row = window * x.k_strides[0] + head * x.k_strides[1] + n * x.k_strides[2]
            inverse = inverse_norm(x.k, row, x.size, x.eps)
            if inverse * x.eps < 1:
                for d in range(x.size):
                    kept += keys[at + d * width + n] * dkeys[at + d * width + n] * _LN_2
        for d in range(x.size):
            here = at + d * width + n
            dk[to + d] = (dkeys[here] * _LN_2 - keys[here] * kept) * inverse
            dv[to + d] = dvalues[here]


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
    bias,
    s,
    ds,
    dbias,
    rows,
    back,
    result,
    width,
    depth,
    group,
):
    """One head of one part of the windows: its gradients, and its share of the table's."""
    num_windows, num_heads, num_tokens = lse.shape
    head, part = item % num_heads, item // num_heads
    scale = head_scale(x.logit_scale, x.softmax_scale, head)
    end = num_windows * (part + 1) // x.parts
    for start in range(num_windows * part // x.parts, end, group):
        stop = min(end, start + group)
        for window in range(start, stop):
            at = (window - start) * depth * width
            _load_keys(keys, values, at, x, window, head, num_tokens, width, depth)
        dkeys[:] = 0
        dvalues[:] = 0
        for first in range(0, num_tokens, 4):
            num_rows = min(4, num_tokens - first)
            _bias_rows(bias, x, head, first, num_rows, width)
            dbias[:] = 0
            for window in range(start, stop):
                at = (window - start) * depth * width
                _scores(
                    s, rows, x, keys, at, bias, window, head, first, num_rows, width, depth,
                    scale * _LOG2_E,
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
                    delta = np.float32(0)
                    for d in range(x.size):
                        delta += back[r * depth + d] * out[row + d]
                    if len(dlse):
                        delta -= dlse[window, head, first + r]
                    soften_again(s, r * width, width, lse[window, head, first + r] * _LOG2_E)
                    score_gradient(ds, s, r * width, width, delta)
                mix(result, ds, keys, at, width, depth)
                add_outer(dkeys, at, ds, rows, width, depth)
                add_outer(dvalues, at, s, back, width, depth)
                accumulate(dbias, ds, 4 * width)
                along = _store_rows(
                    dq, result, x, window, head, first, num_rows, num_heads, num_tokens, depth,
                    scale,
                )  # fmt: skip
                dscale[part * num_heads + head] += along
            if x.table_size:
                centre = (x.table_size - 1) // 2
                table_at = (part * num_heads + head) * x.table_size + centre
                for r in range(num_rows):
                    for n in range(num_tokens):
                        to = table_at + x.offsets[first + r] - x.offsets[n]
                        dtable[to] += dbias[r * width + n]
        for window in range(start, stop):
            at = (window - start) * depth * width
            _store_keys(
                dk, dv, dkeys, dvalues, keys, at, x, window, head, num_heads, num_tokens, width
            )


@entry()
def _backward(dq, dk, dv, dtable, dscale, out, lse, dout, dout_strides, dlse, x):
    _, num_heads, num_tokens = lse.shape
    width, depth, group = _sizes(x, num_tokens, 4)
    keys = np.empty(group * depth * width, np.float32)
    values, dkeys, dvalues = np.empty_like(keys), np.empty_like(keys), np.empty_like(keys)
    bias = np.empty(4 * width, np.float32)
    s, ds, dbias = np.empty_like(bias), np.empty_like(bias), np.empty_like(bias)
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
            bias,
            s,
            ds,
            dbias,
            rows,
            back,
            result,
            width,
            depth,
            group,
        )


def forward(problem, x):
    """Convert, cut the windows into parts, and share the parts out."""
    inputs, num_threads = _prepare(problem, x)
    out = _empty_rows(problem)
    lse = torch.empty(x.q.shape[:3], dtype=torch.float32)
    arrays = flat(out), lse.numpy()
    run_together(lambda: _forward(*arrays, inputs), num_threads)
    return AttentionOutput(out.transpose(1, 2).to(problem.dtype), lse)


def backward(problem, x, out, lse, dout, dlse):
    """Likewise, and add up what the parts found for the table and the scale."""
    inputs, num_threads = _prepare(problem, x)
    dq, dk, dv = (_empty_rows(problem) for _ in range(3))
    table_shape = (inputs.parts, problem.num_heads, inputs.table_size)
    dtable, dscale = torch.zeros(table_shape), torch.zeros(table_shape[:2])
    dout = dout.detach().float()
    dlse = torch.empty(0, 0, 0) if dlse is None else dlse.detach().float().contiguous()
    arrays = [flat(t) for t in (dq, dk, dv, dtable, dscale)]
    arrays += [flat(out.detach().float().transpose(1, 2).contiguous()), lse.numpy()]
    arrays += [flat(dout), np.array(dout.stride()[:3]), dlse.numpy()]
    run_together(lambda: _backward(*arrays, inputs), num_threads)
    table = scale = None
    if x.bias_table is not None:
        table = dtable.sum(dim=0).T.to(x.bias_table.dtype)
    if x.logit_scale is not None:
        clamped = x.logit_scale > MAX_LOGIT_SCALE
        scale = dscale.sum(dim=0).masked_fill(clamped, 0.0).to(x.logit_scale.dtype)
    dq, dk, dv = (saturate(t.transpose(1, 2), problem.dtype) for t in (dq, dk, dv))
    return Gradients(dq, dk, dv, table, None, scale)


def _empty_rows(problem):
    return torch.empty(
        problem.num_windows, problem.num_tokens, problem.num_heads, problem.head_size
    )


def _prepare(problem, x):
    """The kernels' inputs, and how many threads are worth waking."""
    q, k, v = (t.detach().float() for t in (x.q, x.k, x.v))
    none = torch.empty(0)
    table = none if x.bias_table is None else (x.bias_table.detach().float() * _LOG2_E.item()).T
    offsets = torch.arange(problem.num_tokens) if x.rel_offsets is None else x.rel_offsets
    width = -(-problem.num_tokens // 32) * 32
    regions, mixed = none, none.to(torch.uint8)
    if x.regions is not None:
        mixed = (x.regions != x.regions[:, :1]).any(dim=1).to(torch.uint8)
        regions = torch.nn.functional.pad(x.regions.float(), (0, width - problem.num_tokens))
    scale = none if x.logit_scale is None else x.logit_scale.detach().float()
    arrays = [flat(t) for t in (q, k, v)]
    strides = [np.array(t.stride()[:3]) for t in (q, k, v)]
    added = [
        flat(table.contiguous()),
        problem.table_size or 0,
        offsets.to(torch.int64).numpy(),
        flat(regions.contiguous()),
        mixed.numpy(),
        flat(scale.contiguous()),
    ]
    numbers = [
        np.float32(x.softmax_scale),
        np.float32(x.mask_value * _LOG2_E.item()),
        np.float32(x.qk_norm_eps if problem.cosine else -1),
    ]
    parts = max(1, min(problem.num_windows, _PARTS))
    counter = np.zeros(1, np.int64)
    inputs = _Inputs(*arrays, *strides, *added, *numbers, problem.head_size, parts, counter)  # type: ignore[call-arg]
    work = problem.num_windows * problem.num_heads * problem.num_tokens**2 * problem.head_size
    return inputs, torch.get_num_threads() if work > 1 << 18 else 1
