"""Convert the 8-bit blocks of a batch to 16-bit pages on a GPU, before a prefill kernel.

::

    block_tables    7  2  5             blocks of 16 keys, packed, anywhere in the cache
                    │  │  │
                    ▼  ▼  ▼
    page 3          [ 48 keys │ zeros ]  of each KV head, 128 rows side by side

A work item is a part of a page of one KV head; CTAs take items round-robin. Pages of a sequence are
consecutive, and block tables for them are written as well. Sequences of few new tokens, which the
decode kernel computes, get no pages, and neither do keys left of all windows. Rows past a
sequence's end are zeros, whatever the cache holds there.

The conversion is exact. The forward kernel applies scales of heads, except for the sign of a key's
scale, which is applied here. Keys get the queries' type, and values float16, as when the forward
kernel converts them itself, so the results are the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...shapes import power_of_2
from ...tiles.triton.early import let_next_begin
from ...tiles.triton.launch import INTERPRETED, POINTERS, Launch, Launcher, window_of
from .batch import PagedBatch
from .plan.prefill import short_len
from .plan.unpacking import PAGE, count_pages
from .problem import Arguments, CallForm, Problem

_ELEMENTS = 8192
"""Elements of a work item's keys: 64 bytes a thread."""
_WARPS = 4
_PROGRAMS = 6
"""CTAs of a multiprocessor: as many as registers allow, with enough bytes in flight."""


@triton.jit
def _load_rows(cache, at, is_key, SIZE: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    inside = is_key[:, None] & (column < SIZE)[None, :]
    # Read once, so evicted first: the pages, which are read next, should stay in L2.
    return tl.load(
        cache + at[:, None] + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _store_rows(pages, row, x, SIZE: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    to = pages + (row * SIZE)[:, None] + column[None, :]
    tl.store(to, x, mask=(column < SIZE)[None, :])


@triton.jit
def unpack_kernel(
    keys,  # [num_pages, num_kv_heads, PAGE, SIZE]
    values,  # float16 [num_pages, num_kv_heads, PAGE, V_SIZE]
    tables,  # int32 [num_seqs, tables_stride]: pages of every sequence
    k_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, SIZE] of 8 bits
    v_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, V_SIZE] of 8 bits
    k_scale,  # float32 [num_kv_heads]
    block_tables,  # int32 [num_seqs, ...]
    seq_lens,  # int32 [num_seqs]
    cu_seqlens_q,  # int32 [num_seqs + 1]
    num_seqs, num_kv_heads, num_pages, longest, short, window, table_stride, tables_stride,
    k_block, k_slot, k_head, v_block, v_slot, v_head, ks_head,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,  # of a work item
    SEQS: tl.constexpr,  # lanes, one for each sequence
    D: tl.constexpr,
    V: tl.constexpr,
    PDL: tl.constexpr,  # whether the next kernel may start early; it waits before it reads pages
):  # fmt: skip
    """See the module docstring."""
    if PDL:
        let_next_begin()
    lane = tl.arange(0, SEQS)
    is_seq = lane < num_seqs
    query_lens = tl.load(cu_seqlens_q + lane + 1, mask=is_seq, other=0)
    query_lens -= tl.load(cu_seqlens_q + lane, mask=is_seq, other=0)
    # Clamp lengths, so that none makes the kernel write past the allocated pages.
    lens = tl.minimum(tl.load(seq_lens + lane, mask=is_seq, other=0), longest)
    # The page of the first key that a new token sees.
    first_pages = tl.maximum(lens - query_lens + 1 - window, 0) // PAGE
    counts = tl.where(query_lens > short, tl.cdiv(lens, PAGE) - first_pages, 0)
    ends = tl.cumsum(counts)
    PARTS: tl.constexpr = PAGE // ROWS
    num_items = tl.minimum(tl.sum(counts), num_pages) * PARTS * num_kv_heads
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        head = item % num_kv_heads
        part = item // num_kv_heads % PARTS
        page = item // num_kv_heads // PARTS
        seq = tl.sum((ends <= page).to(tl.int32))
        number = page - tl.sum(tl.where(lane == seq, ends - counts - first_pages, 0))
        seq_len = tl.sum(tl.where(lane == seq, lens, 0))
        to = tables + seq.to(tl.int64) * tables_stride + number
        tl.store(to, page, mask=(head == 0) & (part == 0))

        key = number * PAGE + part * ROWS + tl.arange(0, ROWS)
        is_key = key < seq_len
        table = block_tables + seq.to(tl.int64) * table_stride
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = key % BLOCK_SIZE
        kv_head = head.to(tl.int64)
        # All loads come before any store, so that their latencies overlap.
        at = block * k_block + slot * k_slot + kv_head * k_head
        new_keys = _load_rows(k_cache, at, is_key, SIZE, D)
        at = block * v_block + slot * v_slot + kv_head * v_head
        new_values = _load_rows(v_cache, at, is_key, V_SIZE, V)
        signs = tl.where(tl.load(k_scale + kv_head * ks_head) < 0, -32768, 0).to(tl.int16)
        row = (page.to(tl.int64) * num_kv_heads + kv_head) * PAGE + key % PAGE
        # Exact: float16 and bfloat16 hold all 8-bit values.
        wide = new_keys.to(tl.float16).to(tl.float32).to(keys.dtype.element_ty)
        wide = (wide.to(tl.int16, bitcast=True) ^ signs).to(keys.dtype.element_ty, bitcast=True)
        _store_rows(keys, row, wide, SIZE, D)
        _store_rows(values, row, new_values.to(tl.float16), V_SIZE, V)


class UnpackedCache(NamedTuple):
    """Keys and values of a call in 16 bits, without those that no new token of it sees."""

    k: Tensor
    """``[num_pages, PAGE, num_kv_heads, head_size]`` of the queries' type."""
    v: Tensor
    """``[num_pages, PAGE, num_kv_heads, v_head_size]`` of float16."""
    tables: Tensor
    """int32 ``[num_seqs, max_pages]``: a page for 128 keys; undefined where there is none."""


@dataclass(frozen=True, eq=False)
class UnpackLaunch:
    """A launch of ``unpack_kernel``, with the arguments bound that calls of one form share.

    Every call allocates the pages, rather than taking them from ``workspace``, which holds memory
    for good: torch's allocator reuses the same memory for every layer.
    """

    launch: Launch
    k_sizes: tuple[int, int, int, int]
    v_sizes: tuple[int, int, int, int]
    table_sizes: tuple[int, int]

    def __call__(self, call: Arguments, batch: PagedBatch) -> UnpackedCache:
        """Unpack the blocks of a call, whose lengths are contiguous in ``batch``."""
        keys = call.q.new_empty(self.k_sizes)
        values = call.q.new_empty(self.v_sizes, dtype=torch.float16)
        tables = call.q.new_empty(self.table_sizes, dtype=torch.int32)
        self.launch(
            keys, values, tables, call.k_cache, call.v_cache, call.k_scale, batch.block_tables,
            batch.seq_lens, batch.cu_seqlens_q,
        )  # fmt: skip
        return UnpackedCache(keys.transpose(1, 2), values.transpose(1, 2), tables)


def prepare_unpacking(problem: Problem, form: CallForm, device: DeviceInfo) -> UnpackLaunch:
    """Bind all that calls of a form share.

    Args:
        problem: A call over an 8-bit cache with scales of heads.
        form: Its form.
        device: Where it runs.
    """
    assert form.k_scale is not None
    short, heads = short_len(problem), problem.num_kv_heads
    # The block tables may bound lengths more tightly than max_seq_len.
    longest = min(problem.max_seq_len, form.block_tables.shape[1] * problem.block_size)
    pages = count_pages(problem, short, longest)
    launcher = make_launcher(
        problem.q_dtype, problem.kv_dtype, problem.head_size, problem.v_head_size,
        problem.block_size, power_of_2(max(problem.num_seqs, 32)),
    )  # fmt: skip
    items = pages * heads * PAGE // launcher.constants["ROWS"]
    row_pages = -(-longest // PAGE)
    is_one = form.k_scale.shape in ((), (1,))  # for all heads
    launch = launcher.bind(
        (max(1, min(items, _PROGRAMS * device.num_workers)), 1, 1),
        problem.num_seqs, heads, pages, longest, short, window_of(form.sliding_window),
        form.block_tables.strides[0], row_pages, *form.k_cache.strides[:3],
        *form.v_cache.strides[:3], 0 if is_one else form.k_scale.strides[0],
    )  # fmt: skip
    return UnpackLaunch(
        launch,
        (pages, heads, PAGE, problem.head_size),
        (pages, heads, PAGE, problem.v_head_size),
        (problem.num_seqs, row_pages),
    )


@functools.lru_cache(maxsize=1024)
def make_launcher(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_size: int,
    v_head_size: int,
    block_size: int,
    seqs: int,
) -> Launcher:
    """The launcher for one cache, and batches of up to ``seqs`` sequences, a power of two."""
    d, v = (max(16, power_of_2(size)) for size in (head_size, v_head_size))
    cache = POINTERS[kv_dtype] + ":16"
    types = {"keys": POINTERS[q_dtype] + ":16", "values": "*fp16:16", "tables": "*i32"}
    types |= {"k_cache": cache, "v_cache": cache, "k_scale": "*fp32"}
    types |= dict.fromkeys(("block_tables", "seq_lens", "cu_seqlens_q"), "*i32")
    numbers = "num_seqs num_kv_heads num_pages longest short window table_stride tables_stride"
    types |= dict.fromkeys(numbers.split(), "i32")
    strides = [f"{cache}_{dimension}" for cache in "kv" for dimension in ("block", "slot", "head")]
    types |= dict.fromkeys(strides, "i64:16") | {"ks_head": "i64"}
    constants = {
        "SIZE": head_size,
        "V_SIZE": v_head_size,
        "BLOCK_SIZE": block_size,
        "PAGE": PAGE,
        "ROWS": min(PAGE, _ELEMENTS // max(d, v)),
        "SEQS": seqs,
        "D": d,
        "V": v,
        "PDL": not INTERPRETED,
    }
    return Launcher(unpack_kernel, types, constants, num_warps=_WARPS)
