"""Block-sparse attention forward in Triton: a program visits the tiles of keys on its list.

One program computes ``TILE_M`` queries of one head over the tiles of keys that ``tile_lists`` lists
for them: partial ones, which need a mask, then full ones, each from right to left::

    keys      0    N    2N   3N   4N   5N
    queries   ████           ████      ██░░       visited: 5N (partial), 3N, 0

Supports every option of ``attention`` over dense batches. Where blocks are not whole tiles
(``HAS_BLOCKS``), a partial tile loads its part of the mask, element by element.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.forward_tiles import choose_forward_tiles
from ...tiles.triton.launch import POINTERS, Launcher, as_floats, is_aligned, window_of
from ...tiles.triton.online_softmax import (
    LOG2_E,
    add_sink,
    finish,
    precision_of,
    tanh,
    update_softmax,
)
from .block_mask import BlockMask
from .problem import Options, Problem, strides_of
from .tile_lists import FIELDS, fits_tiles, list_tiles
from .triton_rows import load_tile, store_tile

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def find_record(lists, rank, seq, head, pitch, list_seq, list_head):
    """A program's record: its tile, numbers of partial and full tiles, and pointer to the list."""
    lists += (seq * list_seq + head * list_head + rank) * pitch
    return tl.load(lists), tl.load(lists + 1), tl.load(lists + 2), lists + _FIELDS


@triton.jit
def load_blocks(mask, row, key, query_len, seq_len, mask_row, block_q, block_k):
    """The block mask's value for each row and key, which broadcast."""
    at = mask + row // block_q * mask_row + key // block_k
    return tl.load(at, mask=(row < query_len) & (key < seq_len), other=0) != 0


@triton.jit
def block_sparse_kernel(
    out,  # [num_seqs, query_len, num_heads, V_SIZE]
    lse,  # float32 [num_seqs, query_len, num_heads]
    q,  # [num_seqs, query_len, num_heads, SIZE]
    k,  # [num_seqs, seq_len, num_kv_heads, SIZE]
    v,  # [num_seqs, seq_len, num_kv_heads, V_SIZE]
    alibi_slopes,  # float32 [num_heads]
    sinks,  # float32 [num_heads]
    lists,  # int32 [num_seqs or 1, num_heads or 1, query tiles, pitch]
    mask,  # uint8 [num_seqs or 1, num_heads or 1, q_blocks, k_blocks]
    query_len, seq_len, num_heads, pitch, block_q, block_k,
    softmax_scale, soft_cap, window,
    q_seq, q_token, q_head, k_seq, k_token, k_head, v_seq, v_token, v_head,
    list_seq, list_head, mask_seq, mask_head, mask_row,
    GROUP: tl.constexpr, SIZE: tl.constexpr, V_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: query tiles × heads × sequences."""
    # Which tile.
    num_tiles = tl.cdiv(query_len, TILE_M)
    rank = tl.program_id(0) % num_tiles
    pair = tl.program_id(0) // num_tiles
    seq, head = (pair // num_heads).to(tl.int64), (pair % num_heads).to(tl.int64)
    tile, num_partial, num_full, tiles = find_record(
        lists, rank, seq, head, pitch, list_seq, list_head
    )
    mask += seq * mask_seq + head * mask_head

    # Its queries.
    first_row = tile * TILE_M
    row = first_row + tl.arange(0, TILE_M)
    position = row + seq_len - query_len
    q += seq * q_seq + head * q_head
    k += seq * k_seq + head // GROUP * k_head
    v += seq * v_seq + head // GROUP * v_head
    q_tile = load_tile(q, first_row, q_token, query_len, TILE_M, D, SIZE, False)
    scale = softmax_scale / soft_cap if HAS_CAP else softmax_scale * LOG2_E
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + head) * LOG2_E

    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, V], tl.float32)
    for is_full in tl.static_range(2):
        count = num_full if is_full else num_partial
        listed = tiles + num_partial if is_full else tiles
        for i in range(count):
            first_key = tl.load(listed + i) * TILE_N
            key = first_key + tl.arange(0, TILE_N)
            end = first_key + TILE_N if is_full else seq_len
            k_tile = load_tile(k, first_key, k_token, end, TILE_N, D, SIZE, False)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=precision_of(D, V)) * scale
            if HAS_CAP:
                s = tanh(s) * (soft_cap * LOG2_E)
            if HAS_ALIBI:
                s += slope * (key[None, :] - position[:, None])
            if not is_full:
                seen = (key[None, :] < seq_len) & (key[None, :] > position[:, None] - window)
                if CAUSAL:
                    seen = seen & (key[None, :] <= position[:, None])
                if HAS_BLOCKS:
                    seen = seen & load_blocks(
                        mask, row[:, None], key[None, :], query_len, seq_len, mask_row, block_q,
                        block_k,
                    )  # fmt: skip
                s = tl.where(seen, s, float("-inf"))
            p, decay, m, l = update_softmax(s, m, l)
            v_tile = load_tile(v, first_key, v_token, end, TILE_N, V, V_SIZE, False)
            acc = tl.dot(
                p.to(v_tile.dtype), v_tile, acc * decay[:, None],
                input_precision=precision_of(D, V),
            )  # fmt: skip

    # Finish and store.
    if HAS_SINKS:
        sink = tl.full([TILE_M], 0.0, tl.float32) + tl.load(sinks + head) * LOG2_E
        m, l, acc = add_sink(m, l, acc, sink)
    result, row_lse = finish(m, l, acc)
    out += (seq * query_len * num_heads + head) * V_SIZE
    store_tile(out, result, first_row, num_heads * V_SIZE, query_len, TILE_M, V, V_SIZE)
    at = (seq * query_len + row) * num_heads + head
    tl.store(lse + at, row_lse, mask=row < query_len)


def attend(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, options: Options, block_mask: BlockMask
) -> tuple[Tensor, Tensor]:
    """Return ``out`` and ``lse`` of a dense batch; the mask's lists are built on first use."""
    p = problem
    out = q.new_empty(*q.shape[:-1], p.v_head_size)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    tiles = choose_forward_tiles(
        max(p.head_size, p.v_head_size), is_float32=p.dtype == torch.float32,
        is_small=DeviceInfo.of(q.device).is_small,
    )  # fmt: skip
    launcher = make_launcher(
        p.dtype, p.group, p.head_size, p.v_head_size, options.causal,
        options.logits_soft_cap is not None, options.alibi_slopes is not None,
        options.sinks is not None, not fits_tiles(block_mask, tiles.tile_m, tiles.tile_n),
        all(map(is_aligned, (q, k, v))), tiles,
    )  # fmt: skip
    lists = list_tiles(
        block_mask, p.max_query_len, p.max_seq_len, tiles.tile_m, tiles.tile_n,
        causal=options.causal, sliding_window=options.sliding_window,
    )  # fmt: skip
    slopes, sinks = as_floats(options.alibi_slopes), as_floats(options.sinks)
    tensors, numbers, strides = list_arguments(block_mask, lists)
    launcher(
        (lists.shape[2] * p.num_heads * p.num_seqs, 1, 1),
        out, lse, q, k, v, lse if slopes is None else slopes, lse if sinks is None else sinks,
        *tensors, p.max_query_len, p.max_seq_len, p.num_heads, *numbers,
        options.softmax_scale, options.logits_soft_cap or 0.0, window_of(options.sliding_window),
        *(stride for t in (q, k, v) for stride in strides_of(t)), *strides,
    )  # fmt: skip
    return out, lse


LIST_TYPES = {
    "pointers": {"lists": "*i32", "mask": "*u8"},
    "numbers": dict.fromkeys(("pitch", "block_q", "block_k"), "i32"),
    "strides": dict.fromkeys(("list_seq", "list_head", "mask_seq", "mask_head", "mask_row"), "i64"),
}
"""Types of the parameters whose values ``list_arguments`` returns."""


def list_arguments(
    block_mask: BlockMask, lists: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int, int], tuple[int, ...]]:
    """Arguments of kernels: lists and mask; record length and block sizes; strides of both.

    Strides of lists are in records. A dimension of size 1 has stride 0.
    """
    mask = block_mask.mask.contiguous().view(torch.uint8)
    pitch = lists.shape[3]
    list_strides = lists.stride(0) // pitch, lists.stride(1) // pitch
    strides = [s if n > 1 else 0 for s, n in zip(list_strides, lists.shape[:2], strict=True)]
    strides += [s if n > 1 else 0 for s, n in zip(mask.stride()[:2], mask.shape[:2], strict=True)]
    numbers = pitch, block_mask.block_q, block_mask.block_k
    return (lists, mask), numbers, (*strides, mask.stride(2))


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, group: int, head_size: int, v_head_size: int, causal: bool,
    has_cap: bool, has_alibi: bool, has_sinks: bool, has_blocks: bool, are_aligned: bool,
    tiles: Any,
) -> Launcher:  # fmt: skip
    """The launcher for these types, sizes and options."""
    pointer = POINTERS[dtype]
    given, stride = (
        (f"{pointer}:16", f"i64:{16 // dtype.itemsize}") if are_aligned else (pointer, "i64")
    )
    types = {
        "out": f"{pointer}:16", "lse": "*fp32:16", **dict.fromkeys(("q", "k", "v"), given),
        "alibi_slopes": "*fp32", "sinks": "*fp32", **LIST_TYPES["pointers"],
        "query_len": "i32", "seq_len": "i32", "num_heads": "i32", **LIST_TYPES["numbers"],
        "softmax_scale": "fp32", "soft_cap": "fp32", "window": "i32",
        **{f"{name}_{axis}": stride for name in "qkv" for axis in ("seq", "token", "head")},
        **LIST_TYPES["strides"],
    }  # fmt: skip
    d, d_v = (max(16, triton.next_power_of_2(size)) for size in (head_size, v_head_size))
    constants = {
        "GROUP": group, "SIZE": head_size, "V_SIZE": v_head_size, "CAUSAL": causal,
        "HAS_CAP": has_cap, "HAS_ALIBI": has_alibi, "HAS_SINKS": has_sinks,
        "HAS_BLOCKS": has_blocks, "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n, "D": d,
        # Triton 3.6 gives wrong products where values are padded to less than 64 and keys are not.
        "V": max(d_v, min(d, 64)),
    }  # fmt: skip
    return Launcher(
        block_sparse_kernel, types, constants, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
