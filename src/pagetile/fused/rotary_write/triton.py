"""Head norms, rotary embedding and cache write on a GPU in one launch.

::

    row of qkv   [ q heads | k heads | v heads ]
    q head       norm, rotate     -> q_out[token, head]
    k head       norm, rotate     -> k_cache[slot]
    v head                        -> v_cache[slot]
    rotate       [ first | second | rest ]  first, second: HALF elements each
                 [ first * cos - second * sin | second * cos + first * sin | rest ]

Grid: tiles of ``TILE_M`` heads: the query heads of all tokens, then the key heads, then the value
heads. Values are rounded to the type of ``qkv`` after the norm and after the rotation, as by
separate operations, and then quantised for an 8-bit cache as by ``write_kv``.
Supports float32, float16 and bfloat16, heads of up to 1024 elements.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...device import DeviceInfo
from ...ops.scales import LARGEST_CODE, SMALLEST_SCALE, bind_scales
from ...tiles.triton.launch import POINTERS, Launch, Launcher, begins_early, refuse
from ...tiles.triton.norms import normalise
from ...tiles.triton.quantise import amax, encode, larger, refuse_cache, row_scales
from ..rotary.triton import load_angles
from .problem import Heads, Problem

TILE = 512  # elements of a program
WIDEST = 1024


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    rows = problem.rows
    reason = rows.refuse(WIDEST, "the last dimension of a tensor is not contiguous")
    return reason or refuse_cache(device, problem.cache_dtype) or refuse(device, qkv=rows.dtype)


@triton.jit
def _weights(weight, column, END: tl.constexpr):
    return tl.load(weight + column, mask=column < END, other=0.0).to(tl.float32)


@triton.jit
def _norm_and_rotate(
    out, to, scale, scale_at, x, at, is_row, weight, cos, sin, cos_at, sin_at, eps,
    dtype: tl.constexpr, NORM: tl.constexpr, ANGLES: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, W: tl.constexpr, REST: tl.constexpr,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store the heads at ``x + at`` to ``out + to``; both are ``[TILE_M, 1]``."""
    column = tl.arange(0, W)[None, :]
    inside = is_row & (column < HALF)
    if NORM != "":
        first_weight = _weights(weight, column, HALF)
        second_weight = _weights(weight + HALF, column, HALF)
    first = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + at + column + HALF, mask=inside, other=0.0).to(tl.float32)
    if REST > 0:
        last = 2 * HALF + tl.arange(0, REST)[None, :]
        in_rest = is_row & (last < SIZE)
        rest = tl.load(x + at + last, mask=in_rest, other=0.0).to(tl.float32)
    if NORM != "":
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        first = normalise(first, factor, first_weight, NORM, dtype)
        second = normalise(second, factor, second_weight, NORM, dtype)
        if REST > 0:
            rest = normalise(rest, factor, _weights(weight, last, SIZE), NORM, dtype)
    if ANGLES != "":
        cos_first, cos_second = load_angles(cos, cos_at + column, inside, ANGLES == "shared", HALF)
        sin_first, sin_second = load_angles(sin, sin_at + column, inside, ANGLES == "shared", HALF)
        rotated = first * cos_first - second * sin_first
        second = second * cos_second + first * sin_second
        first = rotated
    kind: tl.constexpr = out.dtype.element_ty
    first, second = first.to(dtype), second.to(dtype)
    if REST > 0:
        rest = rest.to(dtype)
    if SCALES != "none":
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = larger(amax(first), amax(second))
        if REST > 0:
            rest = rest.to(tl.float32)
            largest = larger(largest, amax(rest))
        is_head = tl.reshape(is_row, largest.shape)
        row_scale = row_scales(scale, scale_at, is_head, largest, SCALES, LARGEST, SMALLEST)
        first = encode(first, row_scale, SCALES, LARGEST, kind)
        second = encode(second, row_scale, SCALES, LARGEST, kind)
        if REST > 0:
            rest = encode(rest, row_scale, SCALES, LARGEST, kind)
    tl.store(out + to + column, first.to(kind), mask=inside)
    tl.store(out + to + column + HALF, second.to(kind), mask=inside)
    if REST > 0:
        tl.store(out + to + last, rest.to(kind), mask=in_rest)


@triton.jit
def _rotary_write(
    q_out,  # [num_tokens, NUM_HEADS, SIZE]
    k_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, SIZE]
    v_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, V_SIZE]
    qkv,  # [num_tokens, ...]
    q_weight,  # [SIZE]
    k_weight,  # [SIZE]
    cos,  # [num_tokens, HALF] if ANGLES == "shared", else [num_tokens, 2 * HALF]
    sin,
    slot_mapping,  # int64 [num_tokens]
    k_scale,  # float32 [NUM_KV_HEADS] ("head"), [num_blocks, BLOCK_SIZE, NUM_KV_HEADS] ("token")
    v_scale,
    num_tokens,
    q_programs,  # how many of the first programs have queries
    k_programs,
    q_eps, k_eps,
    qkv_token, cos_token, sin_token,
    k_block, k_slot, k_head,
    v_block, v_slot, v_head,
    k_scale_block, k_scale_slot, k_scale_head,
    v_scale_block, v_scale_slot, v_scale_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,  # a kind of ``rms_norm``, or ""
    K_NORM: tl.constexpr,
    ANGLES: tl.constexpr,  # "", "shared" or "own"
    TILE_M: tl.constexpr,
    W: tl.constexpr,
    REST: tl.constexpr,
    V: tl.constexpr,
    SCALES: tl.constexpr,  # "none", "head" or "token"
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = q_out.dtype.element_ty
    program = tl.program_id(0)
    rows = tl.arange(0, TILE_M)
    if program < q_programs:
        row = program * TILE_M + rows
        token, head = (row // NUM_HEADS).to(tl.int64), (row % NUM_HEADS).to(tl.int64)
        _norm_and_rotate(
            q_out, (row.to(tl.int64) * SIZE)[:, None], q_out, row,
            qkv, (token * qkv_token + head * SIZE)[:, None], (token < num_tokens)[:, None],
            q_weight, cos, sin, (token * cos_token)[:, None], (token * sin_token)[:, None], q_eps,
            dtype, Q_NORM, ANGLES, SIZE, HALF, W, REST, "none", LARGEST, SMALLEST,
        )  # fmt: skip
    else:
        program -= q_programs
        is_key = program < k_programs
        if not is_key:
            program -= k_programs
        row = program * TILE_M + rows
        token, head = (row // NUM_KV_HEADS).to(tl.int64), (row % NUM_KV_HEADS).to(tl.int64)
        slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        is_row = (slot >= 0)[:, None]
        first_key: tl.constexpr = NUM_HEADS * SIZE
        if is_key:
            _norm_and_rotate(
                k_cache, (block * k_block + offset * k_slot + head * k_head)[:, None],
                k_scale, block * k_scale_block + offset * k_scale_slot + head * k_scale_head,
                qkv, (token * qkv_token + first_key + head * SIZE)[:, None], is_row,
                k_weight, cos, sin, (token * cos_token)[:, None], (token * sin_token)[:, None],
                k_eps, dtype, K_NORM, ANGLES, SIZE, HALF, W, REST, SCALES, LARGEST, SMALLEST,
            )  # fmt: skip
        else:
            first_value: tl.constexpr = (NUM_HEADS + NUM_KV_HEADS) * SIZE
            column = tl.arange(0, V)[None, :]
            inside = is_row & (column < V_SIZE)
            at = (token * qkv_token + first_value + head * V_SIZE)[:, None] + column
            to = (block * v_block + offset * v_slot + head * v_head)[:, None] + column
            value = tl.load(qkv + at, mask=inside, other=0.0)
            kind: tl.constexpr = v_cache.dtype.element_ty
            if SCALES != "none":
                value = value.to(tl.float32)
                scale_at = block * v_scale_block + offset * v_scale_slot + head * v_scale_head
                row_scale = row_scales(
                    v_scale, scale_at, slot >= 0, amax(value), SCALES, LARGEST, SMALLEST
                )
                value = encode(value, row_scale, SCALES, LARGEST, kind)
            tl.store(v_cache + to, value.to(kind), mask=inside)


def run(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """One launch over the heads of all tokens."""
    num_tokens = qkv.shape[0]
    q_out = qkv.new_empty(num_tokens, heads.num_heads, heads.head_size)
    if num_tokens == 0:
        return q_out
    # Absent tensors are never read, so any address will do.
    q_weight, k_weight = (qkv if n is None else n.weight for n in (heads.q_norm, heads.k_norm))
    angles = (qkv, qkv) if cos is None or sin is None else (cos, sin)
    addresses = functools.reduce(
        int.__or__, (t.data_ptr() for t in (qkv, k_cache, v_cache, q_weight, k_weight, *angles))
    )
    kind, k_scale, v_scale = bind_scales(k_scale, v_scale, k_cache, v_cache)
    scales = (slot_mapping,) * 2 if k_scale is None or v_scale is None else (k_scale, v_scale)
    scale_strides = [n for t in scales for n in (0, 0, 0, *t.stride())[-3:]]
    launch = _prepare(
        num_tokens,
        (heads.num_heads, heads.num_kv_heads, heads.head_size, heads.v_head_size),
        tuple(None if n is None else n[1:] for n in (heads.q_norm, heads.k_norm)),
        None if cos is None or sin is None else (heads.is_shared, cos.shape[2]),
        (qkv.dtype, k_cache.dtype),
        k_cache.shape[1],
        (qkv.stride(0), angles[0].stride(-2), angles[1].stride(-2)),
        (*k_cache.stride()[:3], *v_cache.stride()[:3]),
        kind,
        tuple(scale_strides),
        addresses % 16 == 0,
        begins_early(qkv.device),
    )
    launch(q_out, k_cache, v_cache, qkv, q_weight, k_weight, *angles, slot_mapping, *scales)
    return q_out


@functools.lru_cache(maxsize=4096)
def _prepare(
    num_tokens: int,
    sizes: tuple[int, int, int, int],
    norms: tuple[Any, Any],
    angles: tuple[bool, int] | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    block_size: int,
    strides: tuple[int, int, int],
    cache_strides: tuple[int, ...],
    scales: str,
    scale_strides: tuple[int, ...],
    is_aligned: bool,
    is_early: bool,
) -> Launch:
    """The launch without its tensors."""
    num_heads, num_kv_heads, size, v_size = sizes
    half = size // 2 if angles is None else angles[1] if angles[0] else angles[1] // 2
    kind = "" if angles is None else "shared" if angles[0] else "own"
    factor = math.gcd(16 // dtypes[0].itemsize, size, v_size, half, *strides)
    to_factor = math.gcd(16 // dtypes[1].itemsize, size, v_size, half, *cache_strides)
    launcher = make_launcher(
        dtypes, sizes, half, block_size, tuple("" if n is None else n[1] for n in norms), kind,
        (factor, to_factor), scales, is_aligned, is_early,
    )  # fmt: skip
    tile = launcher.constants["TILE_M"]
    programs = [-(-num_tokens * n // tile) for n in (num_heads, num_kv_heads)]
    eps = (0.0 if norm is None else norm[0] for norm in norms)
    return launcher.bind(
        (programs[0] + 2 * programs[1], 1, 1),
        num_tokens, *programs, *eps, *strides, *cache_strides, *scale_strides,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int, int],
    half: int,
    block_size: int,
    norms: tuple[str, ...],
    angles: str,
    factors: tuple[int, int],
    scales: str,
    is_aligned: bool,
    is_early: bool,
) -> Launcher:
    """The launcher for one kind of heads and one cache."""
    num_heads, num_kv_heads, size, v_size = sizes
    aligned = ":16" * is_aligned
    given, cache = (POINTERS[dtype] + aligned for dtype in dtypes)
    types = {"q_out": f"{POINTERS[dtypes[0]]}:16", "k_cache": cache, "v_cache": cache}
    types |= dict.fromkeys(("qkv", "q_weight", "k_weight", "cos", "sin"), given)
    types |= {"slot_mapping": "*i64", "k_scale": "*fp32", "v_scale": "*fp32"}
    types |= {"num_tokens": "i32", "q_programs": "i32"}
    types |= {"k_programs": "i32", "q_eps": "fp32", "k_eps": "fp32"}
    types |= dict.fromkeys(("qkv_token", "cos_token", "sin_token"), f"i64:{factors[0]}")
    to = ("k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head")
    types |= dict.fromkeys(to, f"i64:{factors[1]}")
    of = ("block", "slot", "head")
    types |= {f"{tensor}_scale_{part}": "i64" for tensor in ("k", "v") for part in of}
    width, rest = triton.next_power_of_2(half), size - 2 * half
    constants = {
        "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "SIZE": size, "V_SIZE": v_size,
        "HALF": half, "BLOCK_SIZE": block_size, "Q_NORM": norms[0], "K_NORM": norms[1],
        "ANGLES": angles, "TILE_M": max(1, TILE // triton.next_power_of_2(max(size, v_size))),
        "W": width, "REST": triton.next_power_of_2(rest) if rest else 0,
        "V": triton.next_power_of_2(v_size), "SCALES": scales,
        "LARGEST": LARGEST_CODE.get(dtypes[1], 0.0), "SMALLEST": SMALLEST_SCALE, "PDL": is_early,
    }  # fmt: skip
    return Launcher(_rotary_write, types, constants, num_warps=2, launch_pdl=is_early)
