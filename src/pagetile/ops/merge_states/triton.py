"""Merge states on a GPU: one launch, each state read once.

::

    for each (token, head):   m = max lse,   out = Σ exp(lse - m) out / Σ exp(lse - m)

A program merges ``TILE_M`` rows; a row is one head of one token. It reads all log-sum-exps for the
maximum, and then the outputs, each weighted relative to that maximum. So a state's weight does not
depend on the order, and the output of a state without keys is not read.

Supports float32, float16 and bfloat16, any strides with a contiguous last dimension.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.state import AttentionOutput
from ...tiles.triton.launch import POINTERS, Launcher, refuse
from ...tiles.triton.online_softmax import LN_2, LOG2_E
from .problem import Problem

TILE = 2048  # elements of a program's rows


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    return refuse(device, outs=problem.dtype)


@triton.jit
def _merge(
    out,  # [num_tokens * NUM_HEADS, WIDTH]
    lse,  # float32 [num_tokens * NUM_HEADS]
    outs,  # [num_states, num_tokens, NUM_HEADS, WIDTH]
    lses,  # float32 [num_states, num_tokens, NUM_HEADS]
    num_states,
    num_rows,
    outs_state, outs_token, outs_head,
    lses_state, lses_token, lses_head,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, D)
    inside = row < num_rows
    token, head = row // NUM_HEADS, row % NUM_HEADS
    lses += token * lses_token + head * lses_head
    outs += (token * outs_token + head * outs_head)[:, None] + column[None, :]

    m = tl.full([TILE_M], float("-inf"), tl.float32)
    for state in range(num_states):
        m = tl.maximum(m, tl.load(lses + state * lses_state, mask=inside, other=float("-inf")))
    pivot = tl.where(m == float("-inf"), 0.0, m)  # without keys -inf - -inf would be NaN

    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, D], tl.float32)
    for state in range(num_states):
        x = tl.load(lses + state * lses_state, mask=inside, other=float("-inf"))
        weight = tl.exp2((x - pivot) * LOG2_E)
        # The output of a state without keys may hold anything, NaN included: it is not read.
        wanted = (weight != 0)[:, None] & (column < WIDTH)[None, :]
        part = tl.load(outs + state * outs_state, mask=wanted, other=0.0)
        acc += weight[:, None] * part.to(tl.float32)
        total += weight

    seen = total != 0  # true for NaN, so that it propagates
    divisor = tl.where(seen, total, 1.0)
    acc = acc / divisor[:, None]
    at = out + row[:, None] * WIDTH + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])
    tl.store(lse + row, tl.where(seen, m + tl.log2(divisor) * LN_2, float("-inf")), mask=inside)


def run(outs: Tensor, lses: Tensor) -> AttentionOutput:
    """Launch over all rows."""
    num_states, num_tokens, num_heads, width = outs.shape
    if width > 1 and outs.stride(3) != 1:
        outs = outs.contiguous()
    out = outs.new_empty((num_tokens, num_heads, width))
    lse = lses.new_empty((num_tokens, num_heads))
    strides, num_rows = outs.stride()[:3], num_tokens * num_heads
    # Elements by which all rows are aligned, up to 16 bytes.
    factor = math.gcd(16 // outs.element_size(), width, *strides)
    is_aligned = outs.data_ptr() % 16 == 0
    launcher = make_launcher(outs.dtype, max(num_heads, 1), width, factor, is_aligned)
    launcher(
        (-(-num_rows // launcher.constants["TILE_M"]), 1, 1),
        out, lse, outs, lses, num_states, num_rows, *strides, *lses.stride(),
    )  # fmt: skip
    return AttentionOutput(out, lse)


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, num_heads: int, width: int, factor: int, is_aligned: bool
) -> Launcher:
    """The launcher for rows of one width, aligned to ``factor`` elements."""
    d = max(8, triton.next_power_of_2(width))
    pointer, stride = POINTERS[dtype], f"i64:{factor}"
    types = {
        "out": f"{pointer}:16", "lse": "*fp32:16",
        "outs": pointer + ":16" * is_aligned, "lses": "*fp32",
        "num_states": "i32", "num_rows": "i64",
        "outs_state": stride, "outs_token": stride, "outs_head": stride,
        "lses_state": "i64", "lses_token": "i64", "lses_head": "i64",
    }  # fmt: skip
    constants = {"NUM_HEADS": num_heads, "WIDTH": width, "TILE_M": max(1, TILE // d), "D": d}
    return Launcher(_merge, types, constants, num_warps=4)
