"""Writing keys and values into an x-packed cache on a GPU, both in one launch.

::

    slot -> block = slot // BLOCK_SIZE, offset = slot % BLOCK_SIZE
    key_cache[block, head, d // X, offset, d % X] = key[token, head, d] / k_scale
    value_cache[block, head, d, offset]           = value[token, head, d] / v_scale

A program moves ``TILE_T`` tokens of one head. X elements of a key are one store of 16 bytes.
Stores of a value have the size of an element; L2 joins those of neighbouring tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.scales import LARGEST_CODE
from ...tiles.triton.launch import POINTERS, Launcher
from .layout import packing

_TILE = 2048  # elements of a program's keys, and of its values


@triton.jit
def _divide(x, scale, LARGEST: tl.constexpr):
    """``x / scale``, clamped to the cache type's largest value; NaN stays."""
    bound = LARGEST * scale
    x = tl.maximum(x.to(tl.float32), -bound, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + scale)


@triton.jit
def reshape_and_cache_kernel(
    key_cache,  # [num_blocks, num_heads, SIZE / X, BLOCK_SIZE, X]
    value_cache,  # [num_blocks, num_heads, SIZE, BLOCK_SIZE]
    key,  # [num_tokens, num_heads, SIZE]
    value,  # [num_tokens, num_heads, SIZE]
    slot_mapping,  # int64 [num_tokens]
    k_scale,  # float32 [1]
    v_scale,  # float32 [1]
    num_tokens, num_heads,
    key_block, key_head, value_block, value_head,
    k_token, k_head, v_token, v_head, slot_stride,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, X: tl.constexpr, LARGEST: tl.constexpr,
    TILE_T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """See the module docstring. Grid: ``tiles of TILE_T tokens · num_heads``, heads fastest."""
    token = (tl.program_id(0) // num_heads).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    column = tl.arange(0, D)
    slot = tl.load(slot_mapping + token * slot_stride, mask=token < num_tokens, other=-1)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    mask = (slot >= 0)[:, None] & (column < SIZE)[None, :]
    # Both loads come before any store, so that their latencies overlap.
    new_k = tl.load(
        key + (token * k_token + head * k_head)[:, None] + column[None, :], mask=mask, other=0.0
    )
    new_v = tl.load(
        value + (token * v_token + head * v_head)[:, None] + column[None, :], mask=mask, other=0.0
    )
    if LARGEST > 0:
        new_k = _divide(new_k, tl.load(k_scale), LARGEST)
        new_v = _divide(new_v, tl.load(v_scale), LARGEST)
    k_at = (block * key_block + head * key_head + offset * X)[:, None]
    k_at += (column // X * (BLOCK_SIZE * X) + column % X)[None, :]
    tl.store(key_cache + k_at, new_k.to(key_cache.dtype.element_ty), mask=mask)
    v_at = (block * value_block + head * value_head + offset)[:, None]
    v_at += (column * BLOCK_SIZE)[None, :]
    tl.store(value_cache + v_at, new_v.to(value_cache.dtype.element_ty), mask=mask)


def run(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Launch over all tokens and heads."""
    tensors = (key_cache, value_cache, key, value)
    strides = (
        *key_cache.stride()[:2], *value_cache.stride()[:2], *key.stride()[:2], *value.stride()[:2]
    )  # fmt: skip
    is_aligned = all(x.data_ptr() % 16 == 0 for x in tensors) and all(s % 16 == 0 for s in strides)
    launcher = make_launcher(
        key.dtype, key_cache.dtype, key.shape[2], key_cache.shape[3], is_aligned
    )
    num_tokens, num_heads = key.shape[:2]
    tiles = -(-num_tokens // launcher.constants["TILE_T"])
    any_scale = slot_mapping  # absent scales are never read
    launcher(
        (tiles * num_heads, 1, 1),
        *tensors, slot_mapping, any_scale if k_scale is None else k_scale,
        any_scale if v_scale is None else v_scale, num_tokens, num_heads, *strides,
        slot_mapping.stride(0),
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def make_launcher(
    dtype: torch.dtype, cache_dtype: torch.dtype, size: int, block_size: int, is_aligned: bool
) -> Launcher:
    """The kernel for one kind of cache."""
    width = max(8, triton.next_power_of_2(size))
    aligned = ":16" * is_aligned
    types = dict.fromkeys(("key_cache", "value_cache"), POINTERS[cache_dtype] + aligned)
    types |= dict.fromkeys(("key", "value"), POINTERS[dtype] + aligned)
    types |= {"slot_mapping": "*i64", "k_scale": "*fp32", "v_scale": "*fp32"}
    types |= dict.fromkeys(("num_tokens", "num_heads"), "i32")
    names = ("key_block", "key_head", "value_block", "value_head", "k_token", "k_head", "v_token")
    types |= dict.fromkeys((*names, "v_head"), "i64" + aligned)
    types["slot_stride"] = "i64"
    constants: dict[str, Any] = {
        "SIZE": size,
        "BLOCK_SIZE": block_size,
        "X": packing(cache_dtype),
        "LARGEST": LARGEST_CODE.get(cache_dtype, 0.0),
        "TILE_T": max(1, _TILE // width),
        "D": width,
    }
    return Launcher(reshape_and_cache_kernel, types, constants, num_warps=4)
