"""Decode over an x-packed cache on a CPU, without conversion; a work item is a partition of keys.

A block of keys is ``[head_size / x, block_size, x]``: sixteen lanes in a row are ``16 / x`` tokens,
``x`` columns each. They are multiplied by the same columns of the query, repeated for each token,
and summed over the chunks; what is left is a sum over ``x`` lanes a token::

    lanes   t0 t0 t0 t0 t0 t0 t0 t0 t1 t1 t1 t1 t1 t1 t1 t1       x = 8
    query   c0 c1 c2 c3 c4 c5 c6 c7 c0 c1 c2 c3 c4 c5 c6 c7

A block of values is ``[head_size, block_size]``: a column's tokens lie side by side, are multiplied
by the weights, and a row of ``acc`` keeps sixteen partial sums to the end.

Partitions of 512 keys are worked on by any thread and merged in the order of their keys, so a
result does not depend on the number of threads. All arithmetic is float32.
"""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat
from ...tiles.cpu.compile import allocating, entry, inner
from ...tiles.cpu.online_softmax import exp2_scalar
from ...tiles.cpu.simd import (
    LOG2_E,
    exp2,
    fma,
    lane_numbers,
    load,
    load_half,
    load_one,
    prefetch,
    splat,
    store,
    sum_lanes,
    take_number,
    where_less,
    zeros,
)
from ...tiles.cpu.threads import on_team, run_together
from .checks import PARTITION_SIZE

TILE = 64
"""Keys that share one step of the softmax; blocks that are larger are a tile of their own."""

_SMALL = 1 << 19  # multiply-adds that take a thread about as long as waking another one


@inner()
def _score_block(sums, k, base, size, x, queries, row, num_rows, q_stride):
    """``sums[r, n · x + e] = Σ_c q[r, c, e] · k[c, n, e]`` over chunks; ``size``: of a chunk."""
    chunks = q_stride // 16
    r = row
    while r + 4 <= num_rows:
        at = r * q_stride
        for g in range(0, size, 16):
            a, b, c, d = zeros(), zeros(), zeros(), zeros()
            for chunk in range(chunks):
                keys = load(k, base + chunk * size + g)
                q_at = at + chunk * 16
                a = fma(load(queries, q_at), keys, a)
                b = fma(load(queries, q_at + q_stride), keys, b)
                c = fma(load(queries, q_at + 2 * q_stride), keys, c)
                d = fma(load(queries, q_at + 3 * q_stride), keys, d)
            store(sums, r * size + g, a)
            store(sums, (r + 1) * size + g, b)
            store(sums, (r + 2) * size + g, c)
            store(sums, (r + 3) * size + g, d)
        r += 4
    while r < num_rows:
        for g in range(0, size, 16):
            a = zeros()
            for chunk in range(chunks):
                a = fma(
                    load(queries, r * q_stride + chunk * 16), load(k, base + chunk * size + g), a
                )
            store(sums, r * size + g, a)
        r += 1


@inner()
def _values(v, at, n, block_size, valid):
    """Sixteen tokens of a column, or eight; those from ``valid`` on are 0, whatever lies there."""
    values = load_half(v, at + n) if block_size - n < 16 else load(v, at + n)
    if valid - n < 16:
        values = where_less(lane_numbers(), splat(np.float32(valid - n)), values, zeros())
    return values


@inner(inline="always")
def _weights(p, at, is_half):
    return load_half(p, at) if is_half else load(p, at)


@inner()
def _mix_tile(acc, v, bases, head_size, block_size, num_keys, p, tile, num_rows):
    """``acc[r, d] += Σ_n p[r, n] · v[d, n]`` over a tile's blocks, which begin at ``bases``."""
    is_half = block_size < 16
    r = 0
    while r < num_rows:
        is_four = r + 4 <= num_rows
        for d in range(head_size):
            to = (r * head_size + d) * 16
            step = head_size * 16
            a = load(acc, to)
            b = load(acc, to + step) if is_four else a
            c = load(acc, to + 2 * step) if is_four else a
            e = load(acc, to + 3 * step) if is_four else a
            for first in range(0, num_keys, block_size):
                base = bases[first // block_size]
                if base < 0:
                    continue
                valid = min(block_size, num_keys - first)
                for n in range(0, valid, 16):
                    values = _values(v, base + d * block_size, n, block_size, valid)
                    at = r * tile + first + n
                    a = fma(_weights(p, at, is_half), values, a)
                    if is_four:
                        b = fma(_weights(p, at + tile, is_half), values, b)
                        c = fma(_weights(p, at + 2 * tile, is_half), values, c)
                        e = fma(_weights(p, at + 3 * tile, is_half), values, e)
            store(acc, to, a)
            if is_four:
                store(acc, to + step, b)
                store(acc, to + 2 * step, c)
                store(acc, to + 3 * step, e)
        r += 4 if is_four else 1


@inner()
def _fetch_ahead(cache, tables, at, base, step, size, line):
    """Prefetch a head's part of the block ``tables[at]``, cache line by cache line."""
    start = base + np.int64(tables[at]) * step
    for element in range(start, start + size, line):
        prefetch(cache, element)


@inner()
def _is_seen(k_block, last, offset, local_blocks, vert_stride):
    """Whether a head sees a sparse block; a ``vert_stride`` of 1 or less: it sees all."""
    return (
        vert_stride <= 1 or (k_block + offset) % vert_stride == 0 or k_block > last - local_blocks
    )


# Partitions' sums, maxima and sums of weights; the tensors; sizes, sparsity and strides.
PartitionsCall = namedtuple(
    "PartitionsCall",
    "acc_parts m_parts l_parts counter q k v tables seq_lens slopes"
    " num_seqs num_heads num_kv_heads head_size block_size x max_parts part_size scale"
    " tp_rank local_blocks vert_stride sparse_size sliding_step"
    " q_seq q_head k_block k_head v_block v_head table_stride",
)


@entry()
def _attend(parallel, num_threads, call):
    on_team(parallel, num_threads, _make_scratch, _take_items, (call,))


@allocating()
def _make_scratch(call):
    """A thread's queries, sums of a block, weights, state of its rows, and places of blocks."""
    group = call.num_heads // call.num_kv_heads
    per_tile = max(1, TILE // call.block_size)
    return (
        np.empty(group * call.head_size // call.x * 16, np.float32),
        np.empty(group * call.block_size * call.x, np.float32),
        np.empty(group * per_tile * call.block_size, np.float32),
        np.empty(group * call.head_size * 16, np.float32),
        np.empty(group, np.float32), np.empty(group, np.float32),
        np.empty(group, np.int64), np.empty(per_tile, np.int64),
    )  # fmt: skip


@inner()
def _take_items(call, scratch):
    """Compute work items (sequence, KV head, partition) until none are left."""
    (
        acc_parts, m_parts, l_parts, counter, q, k, v, tables, seq_lens, slopes,
        num_seqs, num_heads, num_kv_heads, head_size, block_size, x, max_parts, part_size, scale,
        tp_rank, local_blocks, vert_stride, sparse_size, sliding_step,
        q_seq, q_head, k_block, k_head, v_block, v_head, table_stride,
    ) = call  # fmt: skip
    queries, sums, p, acc, m, l, offsets, bases = scratch
    group = num_heads // num_kv_heads
    size = block_size * x
    q_stride = head_size // x * 16
    whole = head_size * block_size
    tile = len(bases) * block_size
    num_items = num_seqs * num_kv_heads * max_parts
    while True:
        item = take_number(counter)
        if item >= num_items:
            break
        part = item % max_parts
        kv_head = item // max_parts % num_kv_heads
        seq = item // max_parts // num_kv_heads
        seq_len = seq_lens[seq]
        low, high = part * part_size, min((part + 1) * part_size, seq_len)
        if low >= high:
            continue
        for r in range(group):
            head = kv_head * group + r
            for d in range(head_size):
                number = load_one(q, seq * q_seq + head * q_head + d) * scale
                for lane in range(d % x, 16, x):
                    queries[r * q_stride + d // x * 16 + lane] = number
            offsets[r] = (tp_rank * num_heads + head) * sliding_step + 1
            if sliding_step < 0:
                offsets[r] = (tp_rank * num_kv_heads + kv_head) * -sliding_step + 1
        acc[:] = 0
        m[:] = -np.inf
        l[:] = 0
        last = (seq_len - 1) // sparse_size
        for start in range(low, high, tile):
            end = min(start + tile, high)
            for r in range(group):
                p[r * tile : (r + 1) * tile] = -np.inf
            for first in range(start, end, block_size):
                at = first - start
                sparse_block = first // sparse_size
                any_sees = False
                for r in range(group):
                    any_sees |= _is_seen(sparse_block, last, offsets[r], local_blocks, vert_stride)
                bases[at // block_size] = -1
                if not any_sees:
                    continue
                entry_at = seq * table_stride + first // block_size
                if first + block_size < high:
                    _fetch_ahead(k, tables, entry_at + 1, kv_head * k_head, k_block, whole, 4 * x)
                    _fetch_ahead(v, tables, entry_at + 1, kv_head * v_head, v_block, whole, 4 * x)
                block = np.int64(tables[entry_at])
                bases[at // block_size] = block * v_block + kv_head * v_head
                base = block * k_block + kv_head * k_head
                _score_block(sums, k, base, size, x, queries, 0, group, q_stride)
                for r in range(group):
                    if not _is_seen(sparse_block, last, offsets[r], local_blocks, vert_stride):
                        continue
                    slope = slopes[kv_head * group + r] if len(slopes) else np.float32(0)
                    for n in range(min(block_size, end - first)):
                        s = np.float32(0)
                        for e in range(x):
                            s += sums[r * size + n * x + e]
                        if slope != 0:
                            s += slope * LOG2_E * np.float32(first + n - seq_len + 1)
                        p[r * tile + at + n] = s
            for r in range(group):
                new_m = m[r]
                for n in range(end - start):
                    s = p[r * tile + n]
                    if s > new_m or s != s:
                        new_m = s
                pivot = new_m if new_m > -np.inf else np.float32(0)
                decay = exp2_scalar(m[r] - pivot)
                total = zeros()
                for n in range(0, tile // 16 * 16, 16):
                    w = exp2(_minus(p, r * tile + n, pivot))
                    store(p, r * tile + n, w)
                    total = fma(w, splat(np.float32(1)), total)
                tail = np.float32(0)
                for n in range(tile // 16 * 16, tile):
                    w_one = exp2_scalar(p[r * tile + n] - pivot)
                    p[r * tile + n] = w_one
                    tail += w_one
                l[r] = l[r] * decay + sum_lanes(total) + tail
                m[r] = new_m
                if decay != 1:
                    shrink = splat(decay)
                    for to in range(r * head_size * 16, (r + 1) * head_size * 16, 16):
                        store(acc, to, fma(load(acc, to), shrink, zeros()))
            _mix_tile(acc, v, bases, head_size, block_size, end - start, p, tile, group)
        for r in range(group):
            to = (seq * num_heads + kv_head * group + r) * max_parts + part
            m_parts[to] = m[r]
            l_parts[to] = l[r]
            for d in range(head_size):
                acc_parts[to * head_size + d] = sum_lanes(load(acc, (r * head_size + d) * 16))


@inner()
def _minus(p, at, pivot):
    return fma(splat(np.float32(-1)), splat(pivot), load(p, at))


def run(
    problem, out, query, key_cache, value_cache, scale, block_tables, seq_lens, max_seq_len,
    alibi_slopes, k_scale, v_scale, sparse, partitions,
):  # fmt: skip
    """Attend by partitions, and merge them."""
    longest = max(1, min(max_seq_len, block_tables.shape[1] * problem.block_size))
    max_parts = -(-longest // PARTITION_SIZE)
    sizes = (problem.num_seqs, problem.num_heads, max_parts)
    acc = query.new_zeros(*sizes, problem.head_size, dtype=torch.float32)
    m, l = acc.new_full(sizes, -torch.inf), acc.new_zeros(sizes)
    factor = 1.0 if v_scale is None else float(v_scale)
    scale *= 1.0 if k_scale is None else float(k_scale)
    slopes = np.empty(0, np.float32)
    if alibi_slopes is not None:
        slopes = alibi_slopes.detach().contiguous().numpy()
    arrays = (
        *(flat(x) for x in (query, key_cache, value_cache, block_tables)),
        seq_lens.contiguous().numpy(), slopes,
    )  # fmt: skip
    numbers = (
        *sizes[:2], problem.num_kv_heads, problem.head_size, problem.block_size, problem.x,
        max_parts, PARTITION_SIZE, np.float32(scale * LOG2_E), *sparse,
        *query.stride()[:2], *key_cache.stride()[:2], *value_cache.stride()[:2],
        block_tables.stride(0),
    )  # fmt: skip
    counter = np.zeros(1, np.int64)
    work = acc.numel() // max_parts * longest * 2
    num_threads = DeviceInfo.of(query.device).num_workers if work > _SMALL else 1
    parts = acc.view(-1).numpy(), m.view(-1).numpy(), l.view(-1).numpy()
    run_together(_attend, num_threads, PartitionsCall(*parts, counter, *arrays, *numbers))
    if partitions is not None:
        _write_partitions(acc * factor, m, l, seq_lens, *partitions)
    highest = m.amax(-1, keepdim=True)
    weights = torch.where(l == 0, 0.0, torch.exp2(m - highest))
    total = (l * weights).sum(-1)
    merged = (acc * weights[..., None]).sum(2) * factor
    out.copy_(torch.where(total == 0, 0.0, 1 / total)[..., None] * merged)


def _write_partitions(acc, m, l, seq_lens, exp_sum, max_logits, tmp_out):
    """What is known of each partition that begins before its sequence's end."""
    part = torch.arange(acc.shape[2], device=acc.device)
    used = (part * PARTITION_SIZE < seq_lens[:, None])[:, None].expand_as(m)
    rows = acc * torch.where(l == 0, 0.0, 1 / l)[..., None]
    natural = m * float(np.log(2.0))
    for to, new in ((exp_sum, l), (max_logits, natural), (tmp_out, rows)):
        there = to[:, :, : len(part)]
        mask = used if to.dim() == 3 else used[..., None]
        there.copy_(torch.where(mask, new.to(to.dtype), there))
