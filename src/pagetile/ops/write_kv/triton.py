"""Write keys and values to a paged cache on a GPU in one launch, quantising for 8-bit caches.

::

    row  ->  token = row // num_kv_heads, head = row % num_kv_heads, slot = slot_mapping[token]
    cache[slot // block_size, slot % block_size, head, :] = new[token, head, :] / scale

A program writes ``TILE_M`` rows of the keys and the same rows of the values. A scale per head is
read, a scale per row computed; values are rounded as the reference does.

Supports float32, float16 and bfloat16 into those or into float8_e4m3fn, float8_e5m2 and int8;
any strides with a contiguous last dimension.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...shapes import Form, form
from ...tiles.triton.launch import POINTERS, Launch, Launcher, refuse
from ...tiles.triton.quantise import amax, encode, refuse_cache, row_scales
from ..scales import LARGEST_CODE, SMALLEST_SCALE

TILE = 2048  # elements of a program's keys, and of its values


def supports(dtypes: tuple[torch.dtype, torch.dtype], device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    return refuse_cache(device, dtypes[1]) or refuse(device, k=dtypes[0])


@triton.jit
def _load(new, at, is_wanted, SIZE: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    inside = is_wanted[:, None] & (column < SIZE)[None, :]
    return tl.load(new + at[:, None] + column[None, :], mask=inside, other=0), inside


@triton.jit
def _store(
    cache, scale,
    at, scale_at,  # int64 [TILE_M]: where rows begin, and where their scales lie
    x,
    inside,
    is_wanted,
    D: tl.constexpr,
    SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    if SCALES != "none":
        x = x.to(tl.float32)
        row_scale = row_scales(scale, scale_at, is_wanted, amax(x), SCALES, LARGEST, SMALLEST)
        x = encode(x, row_scale, SCALES, LARGEST, cache.dtype.element_ty)
    at = at[:, None] + tl.arange(0, D)[None, :]
    tl.store(cache + at, x.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def _write_kv(
    k_cache,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, SIZE]
    v_cache,  # [num_blocks, BLOCK_SIZE, NUM_HEADS, V_SIZE]
    k_scale,  # float32 [NUM_HEADS] ("head"), [num_blocks, BLOCK_SIZE, NUM_HEADS] ("token")
    v_scale,
    k,  # [num_tokens, NUM_HEADS, SIZE]
    v,  # [num_tokens, NUM_HEADS, V_SIZE]
    slot_mapping,  # int64 [num_tokens]
    num_rows,  # num_tokens * NUM_HEADS
    k_cache_block, k_cache_slot, k_cache_head,
    v_cache_block, v_cache_slot, v_cache_head,
    k_scale_block, k_scale_slot, k_scale_head,
    v_scale_block, v_scale_slot, v_scale_head,
    k_token, k_head,
    v_token, v_head,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    SCALES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    TILE_M: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    slot = tl.load(slot_mapping + token * slot_stride, mask=row < num_rows, other=-1)
    is_wanted = slot >= 0
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    # Both loads come before any store, so that their latencies overlap.
    new_k, k_inside = _load(k, token * k_token + head * k_head, is_wanted, SIZE, D)
    new_v, v_inside = _load(v, token * v_token + head * v_head, is_wanted, V_SIZE, V)
    _store(
        k_cache, k_scale,
        block * k_cache_block + offset * k_cache_slot + head * k_cache_head,
        block * k_scale_block + offset * k_scale_slot + head * k_scale_head,
        new_k, k_inside, is_wanted, D, SCALES, LARGEST, SMALLEST,
    )  # fmt: skip
    _store(
        v_cache, v_scale,
        block * v_cache_block + offset * v_cache_slot + head * v_cache_head,
        block * v_scale_block + offset * v_scale_slot + head * v_scale_head,
        new_v, v_inside, is_wanted, V, SCALES, LARGEST, SMALLEST,
    )  # fmt: skip


def run(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Launch over all rows."""
    if k.stride(2) != 1:
        k = k.contiguous()
    if v.stride(2) != 1:
        v = v.contiguous()
    addresses = k.data_ptr() | v.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    if k_scale is None or v_scale is None:
        k_strides = v_strides = None
        k_scale = v_scale = slot_mapping  # any address will do
    else:
        k_strides, v_strides = k_scale.stride(), v_scale.stride()
    launch = _prepare(
        form(k), form(v), form(k_cache), form(v_cache), k_strides, v_strides,
        slot_mapping.stride(0), addresses % 16 == 0,
    )  # fmt: skip
    if launch is not None:
        launch(k_cache, v_cache, k_scale, v_scale, k, v, slot_mapping)


@functools.lru_cache(maxsize=1024)
def _prepare(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    k_scale: tuple[int, ...] | None,
    v_scale: tuple[int, ...] | None,
    slot_stride: int,
    is_aligned: bool,
) -> Launch | None:
    """The launch for tensors of these forms (and strides of scales); None if there is no row."""
    k, v, k_cache, v_cache = (Form(*fields) for fields in (k, v, k_cache, v_cache))
    num_tokens, num_heads, size = k.shape
    if not num_tokens * num_heads:
        return None
    v_size, block_size = v.shape[2], k_cache.shape[1]
    source = *k.strides[:2], *v.strides[:2]
    to = *k_cache.strides[:3], *v_cache.strides[:3]
    launcher = make_launcher(
        k.dtype, k_cache.dtype, block_size, num_heads, size, v_size,
        "none" if k_scale is None else "token" if len(k_scale) == 3 else "head",
        # Elements by which all rows are aligned, up to 16 bytes.
        math.gcd(16 // k.dtype.itemsize, size, v_size, *source),
        math.gcd(16 // k_cache.dtype.itemsize, size, v_size, *to),
        is_aligned,
    )  # fmt: skip
    num_rows = num_tokens * num_heads
    scales = [number for scale in (k_scale, v_scale) for number in (0, 0, 0, *(scale or ()))[-3:]]
    num_programs = -(-num_rows // launcher.constants["TILE_M"])
    return launcher.bind((num_programs, 1, 1), num_rows, *to, *scales, *source, slot_stride)


@functools.lru_cache(maxsize=1024)
def make_launcher(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    size: int,
    v_size: int,
    scales: str,
    factor: int,
    to_factor: int,
    is_aligned: bool,
) -> Launcher:
    """The launcher for one cache; source rows are aligned to ``factor`` elements."""
    d, v = (max(8, triton.next_power_of_2(width)) for width in (size, v_size))
    aligned = ":16" * is_aligned
    names = ("k_cache", "v_cache", "k_scale", "v_scale", "k", "v")
    cache, scale, new = POINTERS[cache_dtype] + aligned, "*fp32", POINTERS[dtype] + aligned
    types = dict(zip(names, (cache, cache, scale, scale, new, new), strict=True))
    types |= {"slot_mapping": "*i64", "num_rows": "i64"}
    for tensor in ("k_cache", "v_cache", "k_scale", "v_scale"):
        stride = "i64" if tensor.endswith("scale") else f"i64:{to_factor}"
        types |= {f"{tensor}_{dimension}": stride for dimension in ("block", "slot", "head")}
    types |= dict.fromkeys(("k_token", "k_head", "v_token", "v_head"), f"i64:{factor}")
    types["slot_stride"] = "i64"
    constants = {
        "BLOCK_SIZE": block_size,
        "NUM_HEADS": num_heads,
        "SIZE": size,
        "V_SIZE": v_size,
        "SCALES": scales,
        "LARGEST": LARGEST_CODE.get(cache_dtype, 0.0),
        "SMALLEST": SMALLEST_SCALE,
        "TILE_M": max(1, TILE // max(d, v)),
        "D": d,
        "V": v,
    }
    return Launcher(_write_kv, types, constants, num_warps=2)
