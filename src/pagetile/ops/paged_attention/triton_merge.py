"""Merge the states of a shared prefix's splits and of a sequence's own keys on a GPU.

Grid: tokens × tiles of ``HEADS`` heads. The states of several splits are loaded at once::

    lse = log Σ exp(lse_i)        out = Σ exp(lse_i - lse) out_i
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tiles.triton.early import wait_for_previous
from ...tiles.triton.launch import INTERPRETED, POINTERS, Launcher, begins_early, is_aligned
from ...tiles.triton.online_softmax import LOG2_E, finish, finite
from .plan.decode import MERGED_AT_ONCE


@triton.jit
def _add_splits(
    m, l, acc, outs, lses, start, splits, pitch, row, is_head, mask,
    V_SIZE: tl.constexpr, V: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the states of ``AT_ONCE`` splits into a state."""
    new_m = m
    for i in tl.static_range(AT_ONCE):
        is_there = is_head & (start + i < splits)
        at = (start + i) * pitch + row
        split_m = tl.load(lses + at, mask=is_there, other=float("-inf")) * LOG2_E
        new_m = tl.maximum(new_m, split_m)
    pivot = finite(new_m)
    decay = tl.exp2(m - pivot)
    l, acc = l * decay, acc * decay[:, None]
    # Loads of outputs do not wait for the log-sum-exps. Without keys an output may be anything.
    for i in tl.static_range(AT_ONCE):
        is_there = is_head & (start + i < splits)
        at = (start + i) * pitch + row
        split_m = tl.load(lses + at, mask=is_there, other=float("-inf")) * LOG2_E
        states = outs + (at * V_SIZE)[:, None] + tl.arange(0, V)[None, :]
        state = tl.load(states, mask=mask & is_there[:, None], other=0.0).to(tl.float32)
        is_seen, weight = split_m != float("-inf"), tl.exp2(split_m - pivot)
        l += weight
        acc += tl.where(is_seen[:, None], state, 0.0) * weight[:, None]
    return new_m, l, acc


@triton.jit
def _merge_kernel(
    out,  # [num_tokens, num_heads, V_SIZE]
    lse,  # float32 [num_tokens, num_heads]
    outs,  # [splits, num_tokens, num_heads, V_SIZE], contiguous; anything where lses is -inf
    lses,  # float32 [splits, num_tokens, num_heads], contiguous
    own,  # [num_tokens, num_heads, V_SIZE], contiguous
    own_lse,  # float32 [num_tokens, num_heads], contiguous
    num_tokens, splits, out_token, out_head,
    NUM_HEADS: tl.constexpr, V_SIZE: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr,
    AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See the module docstring."""
    if EARLY:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, V)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (column < V_SIZE)[None, :]
    row = token * NUM_HEADS + head
    pitch = num_tokens.to(tl.int64) * NUM_HEADS
    m = tl.load(own_lse + row, mask=is_head, other=float("-inf")) * LOG2_E
    l = tl.where(m == float("-inf"), 0.0, 1.0)
    acc = tl.load(own + (row * V_SIZE)[:, None] + column[None, :], mask=mask, other=0.0)
    acc = acc.to(tl.float32) * l[:, None]
    for start in range(0, splits, AT_ONCE):
        m, l, acc = _add_splits(
            m, l, acc, outs, lses, start, splits, pitch, row, is_head, mask, V_SIZE, V, AT_ONCE
        )
    result, row_lse = finish(m, l, acc)
    to = out + (token * out_token + head * out_head)[:, None] + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row, row_lse, mask=is_head)


def merge(out: Tensor, outs: Tensor, lses: Tensor, own: Tensor, own_lse: Tensor) -> Tensor:
    """Write the merged states to ``out``; return their log-sum-exp.

    All but ``out`` are contiguous and begin at multiples of 16 bytes.
    """
    lse = torch.empty_like(own_lse)
    tokens, heads, width = own.shape
    launcher = make_launcher(
        out.dtype, heads, width, len(outs), is_aligned(out), begins_early(out.device)
    )
    per_program = launcher.constants["HEADS"]
    launcher(
        (tokens, -(-heads // per_program), 1), out, lse, outs, lses.contiguous(), own, own_lse,
        tokens, len(outs), out.stride(0), out.stride(1),
    )  # fmt: skip
    return lse


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, num_heads: int, width: int, splits: int, aligned: bool, is_early: bool
) -> Launcher:
    """Return the launcher for a type of results, a number of heads and a width of values.

    Args:
        dtype: Element type of results.
        num_heads: Query heads.
        width: Width of values.
        splits: Number of splits, which limits how many are loaded at once.
        aligned: Whether rows of ``out`` begin at multiples of 16 bytes.
        is_early: Whether it is launched before the previous kernel ends.
    """
    pointer, factor = POINTERS[dtype], f":{16 // dtype.itemsize}" if aligned else ""
    types = {
        "out": pointer + ":16" * aligned, "lse": "*fp32", "outs": f"{pointer}:16",
        "lses": "*fp32:16", "own": f"{pointer}:16", "own_lse": "*fp32:16", "num_tokens": "i32",
        "splits": "i32", "out_token": f"i64{factor}", "out_head": f"i64{factor}",
    }  # fmt: skip
    v = triton.next_power_of_2(width)
    heads = max(1, min(triton.next_power_of_2(num_heads), 512 // v))
    constants = {
        "NUM_HEADS": num_heads, "V_SIZE": width, "HEADS": heads, "V": v,
        "AT_ONCE": min(triton.next_power_of_2(splits), MERGED_AT_ONCE), "EARLY": not INTERPRETED,
    }  # fmt: skip
    options = {"launch_pdl": True} if is_early else {}
    return Launcher(_merge_kernel, types, constants, num_warps=2, **options)
