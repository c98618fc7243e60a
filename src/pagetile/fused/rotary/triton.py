"""Rotary position embedding of queries and keys on a GPU in one launch.

::

    head   [ first | second | rest ]      first, second: HALF elements each
    out    [ first * cos - second * sin | second * cos + first * sin | rest ]

Grid: tiles of ``TILE_M`` rows of q, then of k; a row is one head of one token. Results are stored
``[num_tokens, num_heads, head_size]``, as ``write_kv`` and ``paged_attention`` read them. Supports
float32, float16 and bfloat16, heads of up to 1024 elements.
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
from ..rows import RowsProblem

TILE = 1024  # elements of a program
WIDEST = 1024


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = problem.refuse(WIDEST, "the last dimension of q, k, cos or sin is not contiguous")
    return reason or refuse(device, q=problem.dtype)


@triton.jit
def load_angles(angles, at, inside, IS_SHARED: tl.constexpr, HALF: tl.constexpr):
    """Cosines or sines of the first half and of the second."""
    first = tl.load(angles + at, mask=inside, other=0.0).to(tl.float32)
    second = first
    if not IS_SHARED:
        second = tl.load(angles + at + HALF, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _rotate(
    out, x, cos, sin,
    program, num_tokens, x_token, x_head, cos_token, sin_token,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    IS_SHARED: tl.constexpr,
    TILE_M: tl.constexpr,
    W: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    row = program * TILE_M + tl.arange(0, TILE_M)
    token, head = (row // NUM_HEADS).to(tl.int64), row % NUM_HEADS
    from_row = (token * x_token + head * x_head)[:, None]
    to_row = (row.to(tl.int64) * SIZE)[:, None]
    is_row = (token < num_tokens)[:, None]

    column = tl.arange(0, W)[None, :]
    inside = is_row & (column < HALF)
    first = tl.load(x + from_row + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + from_row + column + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_at, sin_at = (token * cos_token)[:, None] + column, (token * sin_token)[:, None] + column
    cos_first, cos_second = load_angles(cos, cos_at, inside, IS_SHARED, HALF)
    sin_first, sin_second = load_angles(sin, sin_at, inside, IS_SHARED, HALF)
    dtype: tl.constexpr = out.dtype.element_ty
    rotated = (first * cos_first - second * sin_first).to(dtype)
    tl.store(out + to_row + column, rotated, mask=inside)
    rotated = (second * cos_second + first * sin_second).to(dtype)
    tl.store(out + to_row + column + HALF, rotated, mask=inside)

    if REST > 0:
        column = 2 * HALF + tl.arange(0, REST)[None, :]
        inside = is_row & (column < SIZE)
        tl.store(
            out + to_row + column, tl.load(x + from_row + column, mask=inside, other=0), mask=inside
        )


@triton.jit
def _rotary(
    q_out,  # [num_tokens, NUM_HEADS, SIZE]
    k_out,  # [num_tokens, NUM_KV_HEADS, SIZE]
    q,
    k,
    cos,  # [num_tokens, HALF] if IS_SHARED, else [num_tokens, 2 * HALF]
    sin,
    num_tokens,
    q_programs,  # how many of the first programs have rows of q
    q_token, q_head,
    k_token, k_head,
    cos_token, sin_token,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    IS_SHARED: tl.constexpr,
    TILE_M: tl.constexpr,
    W: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < q_programs:
        _rotate(
            q_out, q, cos, sin, program, num_tokens, q_token, q_head, cos_token, sin_token,
            NUM_HEADS, SIZE, HALF, IS_SHARED, TILE_M, W, REST,
        )  # fmt: skip
    else:
        program -= q_programs
        _rotate(
            k_out, k, cos, sin, program, num_tokens, k_token, k_head, cos_token, sin_token,
            NUM_KV_HEADS, SIZE, HALF, IS_SHARED, TILE_M, W, REST,
        )  # fmt: skip


def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, is_shared: bool) -> tuple[Tensor, Tensor]:
    """One launch over the heads of all tokens."""
    tensors = q, k, cos, sin
    is_aligned = functools.reduce(int.__or__, map(Tensor.data_ptr, tensors)) % 16 == 0
    launch = _prepare(*map(form, tensors), is_shared, is_aligned)
    (_, num_heads, num_tokens, size), num_kv_heads = q.shape, k.shape[1]
    q_out = q.new_empty((1, num_tokens, num_heads, size))
    k_out = q.new_empty((1, num_tokens, num_kv_heads, size))
    if launch is not None:
        launch(q_out, k_out, q, k, cos, sin)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@functools.lru_cache(maxsize=1024)
def _prepare(
    q: Any, k: Any, cos: Any, sin: Any, is_shared: bool, is_aligned: bool
) -> Launch | None:
    """The launch for tensors of these forms, without the tensors."""
    q, k, cos, sin = (Form(*fields) for fields in (q, k, cos, sin))
    (_, num_heads, num_tokens, size), num_kv_heads = q.shape, k.shape[1]
    if num_tokens == 0:
        return None
    half = cos.shape[2] if is_shared else cos.shape[2] // 2
    strides = (
        q.strides[2], q.strides[1], k.strides[2], k.strides[1], cos.strides[1], sin.strides[1]
    )  # fmt: skip
    factor = math.gcd(16 // q.dtype.itemsize, size, half, *strides)
    launcher = make_launcher(
        q.dtype, (num_heads, num_kv_heads), size, half, is_shared, factor, is_aligned
    )
    programs = [
        -(-num_tokens * n // launcher.constants["TILE_M"]) for n in (num_heads, num_kv_heads)
    ]
    return launcher.bind((sum(programs), 1, 1), num_tokens, programs[0], *strides)


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype,
    num_heads: tuple[int, int],
    size: int,
    half: int,
    is_shared: bool,
    factor: int,
    is_aligned: bool,
) -> Launcher:
    """The launcher for heads that begin at multiples of ``factor`` elements."""
    width, rest = triton.next_power_of_2(half), size - 2 * half
    new = f"{POINTERS[dtype]}:16"
    given = POINTERS[dtype] + ":16" * is_aligned
    types = {"q_out": new, "k_out": new, **dict.fromkeys(("q", "k", "cos", "sin"), given)}
    types |= {"num_tokens": "i32", "q_programs": "i32"}
    strides = ("q_token", "q_head", "k_token", "k_head", "cos_token", "sin_token")
    types |= dict.fromkeys(strides, f"i64:{factor}")
    constants = {
        "NUM_HEADS": num_heads[0],
        "NUM_KV_HEADS": num_heads[1],
        "SIZE": size,
        "HALF": half,
        "IS_SHARED": is_shared,
        "TILE_M": max(1, TILE // (2 * width)),
        "W": width,
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
    return Launcher(_rotary, types, constants, num_warps=2)
