"""Attention backward on a CPU: scores are recomputed from the saved log-sum-exp, tile by tile.

::

    P = 2 ** (S - lse)     dS = P ∘ (dout Vᵀ - delta)      delta = Σ dout ∘ out - dlse, one a row

             queries   0    64   128  …          for each tile of keys
    keys   0  ┌────────┬────┬────┬──                 K, Kᵀ, Vᵀ into scratch; dK = dV = 0
              │ dK dV  │ P  │ P  │ …                 for each head, each tile of queries
          64  ├────────┼────┼────┼──                     S = Q Kᵀ,  dP = dout Vᵀ;  P, dS
              │ dK dV  │ ·  │ P  │ …                     dV += Pᵀ dout,  dK += dSᵀ Q,  dQ += dS K
              └────────┴────┴────┴──                 store dK, dV

A work item is a KV head of a sequence and a chunk of its queries. No other item adds to the ``dQ``
of these queries, and each has its own ``dK`` and ``dV``, which are summed at the end in a fixed
order. So nothing is atomic, and the same inputs give the same bits.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.block_mask import hidden_end, mask_fields, sees_blocks
from ...tiles.cpu.blocks import PADDING
from ...tiles.cpu.compile import allocating, entry, folded, inner
from ...tiles.cpu.gemm import load_rows, multiply, pad_to_fours, transpose
from ...tiles.cpu.simd import (
    LOG2_E,
    add,
    exp2,
    fma,
    lane_numbers,
    load,
    mul,
    splat,
    store,
    sub,
    take_number,
    tanh,
    where_less,
)
from ...tiles.cpu.threads import on_team, run_together
from .problem import Problem, strides_of

TILE = 64  # queries, and keys, of a tile
ROW = TILE + PADDING  # elements from a row of its scores, or of transposed keys, to the next
_SMALL = 1 << 18  # multiply-adds: fewer take one thread no longer than waking a second

GradientsCall = namedtuple(
    "GradientsCall",
    "dq dk dv q k v d_out lse delta starts key_starts slopes"
    " group num_heads head_size v_head_size width v_width num_keys"
    " q_seq q_token q_head k_seq k_token k_head v_seq v_token v_head do_seq do_token do_head"
    " query_len seq_len scale cap causal window chunk"
    " block_mask mask_seq mask_head mask_row block_q block_k",
)
GradientsScratch = namedtuple(
    "GradientsScratch", "q d_out k k_transposed v_transposed s ds dk dv rest lse delta"
)
GradientsItem = namedtuple("GradientsItem", "seq kv_head first_row end_row first_key end_key part")


@allocating()
def _make_scratch(call, num_seqs, num_kv_heads, num_chunks, counter):
    w, v = (call.width + PADDING) * ROW, (call.v_width + PADDING) * ROW
    return GradientsScratch(
        np.zeros(w, np.float32), np.zeros(v, np.float32),
        np.zeros(w, np.float32), np.zeros(w, np.float32), np.zeros(v, np.float32),
        np.zeros(TILE * ROW, np.float32), np.zeros(TILE * ROW, np.float32),
        np.zeros(call.width * TILE, np.float32), np.zeros(call.v_width * TILE, np.float32),
        np.zeros(4 * call.width, np.float32),
        np.zeros(TILE, np.float32), np.zeros(TILE, np.float32),
    )  # fmt: skip


@entry()
def _differentiate(parallel, num_threads, call, num_seqs, num_kv_heads, num_chunks, counter):
    arguments = call, num_seqs, num_kv_heads, num_chunks, counter
    on_team(parallel, num_threads, _make_scratch, _take_items, arguments)


@inner()
def _take_items(call, num_seqs, num_kv_heads, num_chunks, counter, scratch):
    """Compute work items until none is left."""
    while True:
        taken = take_number(counter)
        if taken >= num_seqs * num_kv_heads * num_chunks:
            return
        # The last queries see the most keys, so long items are taken first.
        chunk = num_chunks - 1 - taken // (num_seqs * num_kv_heads)
        seq, kv_head = taken // num_kv_heads % num_seqs, taken % num_kv_heads
        start, query_len = seq * call.query_len, call.query_len
        key_start, seq_len = seq * call.seq_len, call.seq_len
        if len(call.starts) > 0:
            start, query_len = call.starts[seq], call.starts[seq + 1] - call.starts[seq]
            key_start = call.key_starts[seq]
            seq_len = call.key_starts[seq + 1] - key_start
        first = min(query_len, chunk * call.chunk)
        end = min(query_len, first + call.chunk)
        item = GradientsItem(seq, kv_head, start, query_len, key_start, seq_len, chunk)
        for n in range(0, seq_len, TILE):
            _walk_queries(call, scratch, item, first, end, n)


@folded()
def _walk_queries(call, scratch, item, first, end, n):
    """One tile of keys, and all queries from ``first`` to ``end`` that see one of them."""
    keys = min(TILE, item.end_key - n)
    shift = item.end_key - item.end_row
    _load_keys(call, scratch, item, n, keys)
    if call.causal:
        first = max(first, (n - shift) // TILE * TILE)
    if call.window > 0:
        end = min(end, n + keys - 1 + call.window - shift)
    scratch.dk[:] = 0
    scratch.dv[:] = 0
    for g in range(call.group):
        head = item.kv_head * call.group + g
        for m in range(first, end, TILE):
            rows = min(TILE, end - m)
            if call.block_q == 0 or sees_blocks(call, item.seq, head, m, rows, n, keys):
                _add_tile(call, scratch, item, head, m, rows, n, keys)
    to = (item.part * call.num_keys + item.first_key + n) * (call.num_heads // call.group)
    _store_rows(call.dk, to + item.kv_head, scratch.dk, keys, call.width, call)
    _store_rows(call.dv, to + item.kv_head, scratch.dv, keys, call.v_width, call)


@inner()
def _store_rows(into, row, tile, rows, width, call):
    for r in range(rows):
        at = (row + r * (call.num_heads // call.group)) * width
        for d in range(0, width, 16):
            store(into, at + d, load(tile, r * width + d))


@inner()
def _load_keys(call, scratch, item, n, keys):
    ragged = len(call.starts) > 0
    row = item.first_key + n if ragged else n
    seq = 0 if ragged else item.seq
    at = seq * call.v_seq + row * call.v_token + item.kv_head * call.v_head
    # scratch.d_out is free here: _load_queries fills it later.
    k_row, v_row = call.width + PADDING, call.v_width + PADDING
    load_rows(scratch.d_out, v_row, call.v, at, call.v_token, keys, call.v_head_size, TILE)
    transpose(scratch.v_transposed, ROW, scratch.d_out, v_row, TILE, call.v_width)
    at = seq * call.k_seq + row * call.k_token + item.kv_head * call.k_head
    load_rows(scratch.k, k_row, call.k, at, call.k_token, keys, call.head_size, TILE)
    transpose(scratch.k_transposed, ROW, scratch.k, k_row, TILE, call.width)


@inner()
def _load_queries(call, scratch, item, head, m, rows):
    ragged = len(call.starts) > 0
    row = item.first_row + m if ragged else m
    seq = 0 if ragged else item.seq
    at = seq * call.q_seq + row * call.q_token + head * call.q_head
    width, v_width = call.width + PADDING, call.v_width + PADDING
    load_rows(scratch.q, width, call.q, at, call.q_token, rows, call.head_size, TILE)
    at = seq * call.do_seq + row * call.do_token + head * call.do_head
    load_rows(scratch.d_out, v_width, call.d_out, at, call.do_token, rows, call.v_head_size, TILE)
    for r in range(rows):
        at = (item.first_row + m + r) * call.num_heads + head
        # A row without a visible key gets weights of 0: 2 ** (s - inf).
        scratch.lse[r] = call.lse[at] * LOG2_E if call.lse[at] > -np.inf else np.inf
        scratch.delta[r] = call.delta[at]


@folded()
def _add_tile(call, scratch, item, head, m, rows, n, keys):
    """The five products of one tile of queries and keys."""
    padded, width, v_width = pad_to_fours(rows), call.width, call.v_width
    columns = (keys + 15) // 16 * 16
    _load_queries(call, scratch, item, head, m, rows)
    multiply(
        scratch.s, 0, ROW, scratch.q, 0, width + PADDING, 1, scratch.k_transposed, ROW,
        padded, columns, width, False,
    )  # fmt: skip
    multiply(
        scratch.ds, 0, ROW, scratch.d_out, 0, v_width + PADDING, 1, scratch.v_transposed, ROW,
        padded, columns, v_width, False,
    )  # fmt: skip
    position = m + item.end_key - item.end_row
    _differentiate_tile(call, scratch, head, position - n, rows, keys, columns)
    if call.block_q > 0:
        _mask_blocks(call, scratch, item.seq, head, m, rows, n, keys)
    multiply(
        scratch.dv, 0, v_width, scratch.s, 0, 1, ROW, scratch.d_out, v_width + PADDING,
        pad_to_fours(keys), v_width, rows, True,
    )  # fmt: skip
    multiply(
        scratch.dk, 0, width, scratch.ds, 0, 1, ROW, scratch.q, width + PADDING,
        pad_to_fours(keys), width, rows, True,
    )  # fmt: skip
    to = ((item.first_row + m) * call.num_heads + head) * width
    whole, step = rows // 4 * 4, call.num_heads * width
    k_row = width + PADDING
    multiply(call.dq, to, step, scratch.ds, 0, ROW, 1, scratch.k, k_row, whole, width, keys, True)
    if whole < rows:  # a block of four rows would also write rows of dQ of another thread
        multiply(
            scratch.rest, 0, width, scratch.ds, whole * ROW, ROW, 1, scratch.k, k_row,
            4, width, keys, False,
        )  # fmt: skip
        for r in range(rows - whole):
            for d in range(0, width, 16):
                at = to + (whole + r) * step + d
                store(call.dq, at, add(load(call.dq, at), load(scratch.rest, r * width + d)))


@inner()
def _differentiate_tile(call, scratch, head, distance, rows, keys, columns):
    """Turn ``S`` and ``dout Vᵀ`` into ``P`` and ``dS`` in place.

    The position of row 0 is ``distance`` past key 0.
    """
    nothing, one = splat(np.float32(0)), splat(np.float32(1))
    factor = splat(np.float32(call.scale * LOG2_E))
    if call.cap > 0:
        factor = splat(np.float32(call.scale / call.cap))
    cap, scale = splat(np.float32(call.cap * LOG2_E)), splat(np.float32(call.scale))
    has_alibi = len(call.slopes) > 0
    slope = splat(call.slopes[head] * LOG2_E if has_alibi else np.float32(0))
    for r in range(rows):
        first, end = 0, keys
        if call.causal:
            end = min(end, distance + r + 1)
        if call.window > 0:
            first = max(first, distance + r - call.window + 1)
        low, high = splat(np.float32(first)), splat(np.float32(end))
        lse, delta = splat(-scratch.lse[r]), splat(scratch.delta[r])
        for c in range(0, columns, 16):
            at = r * ROW + c
            s, derivative = mul(load(scratch.s, at), factor), scale
            if call.cap > 0:
                tanh_s = tanh(s)
                s = mul(tanh_s, cap)
                derivative = mul(scale, sub(one, mul(tanh_s, tanh_s)))
            if has_alibi:
                steps = add(lane_numbers(), splat(np.float32(c - distance - r)))
                s = fma(slope, steps, s)
            p = exp2(add(s, lse))
            if first > c or end < c + 16:
                lane = add(lane_numbers(), splat(np.float32(c)))
                p = where_less(lane, high, p, nothing)
                p = where_less(lane, low, nothing, p)
            store(scratch.s, at, p)
            ds = mul(p, sub(load(scratch.ds, at), delta))
            store(scratch.ds, at, mul(ds, derivative))
    for r in range(rows, pad_to_fours(rows)):
        scratch.ds[r * ROW : r * ROW + columns] = 0


@inner()
def _mask_blocks(call, scratch, seq, head, m, rows, n, keys):
    """Zero the weights and gradients of scores that the block mask hides."""
    for r in range(rows):
        key = n
        while key < n + keys:
            hidden = hidden_end(call, seq, head, m + r, key, n + keys)
            for c in range(key - n, hidden - n):
                scratch.s[r * ROW + c] = 0
                scratch.ds[r * ROW + c] = 0
            key = hidden if hidden > key else (key // call.block_k + 1) * call.block_k


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    return refuse(device, q=problem.dtype)


def run_backward(problem, d_out, d_lse, q, k, v, out, lse, lengths, options):
    """Compute delta, run the work items, and sum dK and dV over chunks of queries."""
    device = DeviceInfo.of(q.device)
    delta = (d_out.float() * out.float()).sum(dim=-1)
    if d_lse is not None:
        delta -= d_lse
    num_keys = k.shape[:-2].numel()
    width, v_width = (-(-size // 16) * 16 for size in (problem.head_size, problem.v_head_size))
    num_threads, num_chunks, chunk = _cut(problem, device)
    dq = delta.new_zeros(q.shape[:-2].numel(), problem.num_heads, width)
    dk = delta.new_empty(num_chunks, num_keys, problem.num_kv_heads, width)
    dv = delta.new_empty(num_chunks, num_keys, problem.num_kv_heads, v_width)
    none = np.empty(0, np.int32)
    slopes = options.alibi_slopes
    call = GradientsCall(  # type: ignore[call-arg]
        flat(dq), flat(dk), flat(dv), flat(q), flat(k), flat(v), flat(d_out),
        flat(lse.contiguous()), flat(delta.contiguous()),
        none if lengths.cu_seqlens_q is None else lengths.cu_seqlens_q.contiguous().numpy(),
        none if lengths.cu_seqlens_k is None else lengths.cu_seqlens_k.contiguous().numpy(),
        np.empty(0, np.float32) if slopes is None else slopes.detach().float().contiguous().numpy(),
        problem.group, problem.num_heads, problem.head_size, problem.v_head_size, width, v_width,
        num_keys, *(s for t in (q, k, v, d_out) for s in strides_of(t)),
        problem.max_query_len, problem.max_seq_len, float(options.softmax_scale),
        float(options.logits_soft_cap or 0.0), bool(options.causal),
        int(options.sliding_window or 0), chunk, *mask_fields(options.block_mask),
    )  # fmt: skip
    counter = np.zeros(1, np.int64)
    sizes = problem.num_seqs, problem.num_kv_heads, num_chunks
    run_together(_differentiate, num_threads, call, *sizes, counter)
    d_k, d_v = (d[0] if num_chunks == 1 else d.sum(dim=0) for d in (dk, dv))
    return tuple(
        d[..., : t.shape[-1]].to(t.dtype).contiguous().view(t.shape)
        for d, t in ((dq, q), (d_k, k), (d_v, v))
    )


def _cut(problem, device):
    """Return the number of threads, chunks of a sequence's queries, and queries of a chunk."""
    pairs = problem.num_seqs * problem.max_query_len * problem.max_seq_len
    work = pairs * problem.num_heads * (problem.head_size + problem.v_head_size)
    num_threads = device.num_workers if work > _SMALL else 1
    items = problem.num_seqs * problem.num_kv_heads
    wanted = 1 if num_threads == 1 or items % num_threads == 0 else 4 * num_threads
    most = max(1, problem.max_query_len // (4 * TILE))
    pieces = min(most, -(-wanted // max(1, items)))
    chunk = -(-problem.max_query_len // (pieces * TILE)) * TILE
    return num_threads, max(1, -(-problem.max_query_len // max(1, chunk))), max(1, chunk)
