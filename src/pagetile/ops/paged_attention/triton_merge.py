"""Merge the states of a prefix's splits and of a sequence's own keys on a GPU.

A program merges one token's heads::

    lse = log Σ exp(lse_i)        out = Σ exp(lse_i - lse) out_i
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tiles.triton.launch import POINTERS, Launcher
from ...tiles.triton.online_softmax import LN_2, LOG2_E, finite

__all__ = ["merge"]


@triton.jit
def _merge_kernel(
    out,  # [num_tokens, num_heads, V_SIZE]
    lse,  # float32 [num_tokens, num_heads]
    outs,  # [splits, num_tokens, num_heads, V_SIZE], contiguous
    lses,  # float32 [splits, num_tokens, num_heads], contiguous
    own,  # [num_tokens, num_heads, V_SIZE], contiguous
    own_lse,  # float32 [num_tokens, num_heads], contiguous
    num_tokens, splits, out_token, out_head,
    NUM_HEADS: tl.constexpr, V_SIZE: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """See the module."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, V)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (column < V_SIZE)[None, :]
    row = token * NUM_HEADS + head
    m = tl.load(own_lse + row, mask=is_head, other=float("-inf")) * LOG2_E
    l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.load(own + (row * V_SIZE)[:, None] + column[None, :], mask=mask, other=0.0)
    acc = acc.to(tl.float32) * l[:, None]
    for split in range(splits):
        at = split * num_tokens * NUM_HEADS + row
        other_m = tl.load(lses + at, mask=is_head, other=float("-inf")) * LOG2_E
        other = tl.load(outs + (at * V_SIZE)[:, None] + column[None, :], mask=mask, other=0.0)
        new_m = tl.maximum(m, other_m)
        pivot = finite(new_m)
        decay, weight = tl.exp2(m - pivot), tl.exp2(other_m - pivot)
        acc = acc * decay[:, None] + other.to(tl.float32) * weight[:, None]
        l = l * decay + weight
        m = new_m
    seen = l != 0  # NaN counts as seen: it has to show
    divisor = tl.where(seen, l, 1.0)
    to = out + (token * out_token + head * out_head)[:, None] + column[None, :]
    tl.store(to, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=mask)
    row_lse = tl.where(seen, (m + tl.log2(divisor)) * LN_2, float("-inf"))
    tl.store(lse + token * NUM_HEADS + head, row_lse, mask=is_head)


def merge(out: Tensor, outs: Tensor, lses: Tensor, own: Tensor, own_lse: Tensor) -> Tensor:
    """Write the merged states to ``out``; return their log-sum-exp."""
    lse = torch.empty_like(own_lse)
    tokens, heads, width = own.shape
    launcher = make_launcher(out.dtype, heads, width)
    per_program = launcher.constants["HEADS"]
    launcher(
        (tokens, -(-heads // per_program), 1), out, lse, outs, lses.contiguous(), own, own_lse,
        tokens, outs.shape[0], out.stride(0), out.stride(1),
    )  # fmt: skip
    return lse


@functools.lru_cache(maxsize=256)
def make_launcher(dtype: torch.dtype, num_heads: int, width: int) -> Launcher:
    """Return the kernel for a type of results, a number of heads and a width of values."""
    pointer = POINTERS[dtype]
    types = {
        "out": pointer, "lse": "*fp32", "outs": pointer, "lses": "*fp32", "own": pointer,
        "own_lse": "*fp32", "num_tokens": "i32", "splits": "i32", "out_token": "i64",
        "out_head": "i64",
    }  # fmt: skip
    v = triton.next_power_of_2(width)
    heads = max(1, min(triton.next_power_of_2(num_heads), 4096 // v))
    constants = {"NUM_HEADS": num_heads, "V_SIZE": width, "HEADS": heads, "V": v}
    return Launcher(_merge_kernel, types, constants, num_warps=4)
