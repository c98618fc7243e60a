"""Attention on Hopper: the forward kernel of ``tiles.hopper`` over contiguous keys and values.

Supports float16 and bfloat16, head sizes of keys and values to 256 in steps of 8, any group, causal
or not, sliding windows, soft caps up to 64, ALiBi, sinks, log-sum-exp, and block masks whose blocks
are whole tiles. Gradients are in ``hopper_backward``, or Triton's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.hopper.launch import attend, refuse
from ...tiles.hopper.tiling import refuse_cap, tiling_of
from ...tiles.state import AttentionOutput
from .problem import Lengths, Options, Problem, in_a_row
from .tile_lists import count_words, list_tiles


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = refuse(device, problem.dtype, problem.head_size, problem.v_head_size)
    if reason is None and problem.is_block_sparse:
        tile_q, tile_k = _sparse_tile(problem)
        if problem.block_q % tile_q or problem.block_k % tile_k:
            given = f"{problem.block_q} × {problem.block_k}"
            reason = f"blocks are {given}; multiples of {tile_q} × {tile_k} run"
        elif count_words(problem, tile_q, tile_k) >= 1 << 31:
            reason = "the lists of the block mask's tiles have 2^31 words or more, 8 GiB"
    return reason or refuse_cap(problem.logits_soft_cap)


def _sparse_tile(problem: Problem) -> tuple[int, int]:
    """Queries and keys of a tile of block-sparse attention."""
    tiling = tiling_of(problem.head_size, problem.v_head_size, is_sparse=True)
    return 64 * tiling.warpgroups, tiling.tile_n


def run(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> AttentionOutput:
    """One launch; a tensor that TMA cannot read is copied first."""
    shape = q.shape[:-1]
    lists = None
    if options.block_mask is not None and q.numel() and k.numel():
        lists = list_tiles(
            options.block_mask, problem.max_query_len, problem.max_seq_len,
            *_sparse_tile(problem), causal=options.causal, sliding_window=options.sliding_window,
        )  # fmt: skip
    q, k, v, starts, key_starts = in_a_row(q, k, v, lengths)
    out = q.new_empty(*q.shape[:2], problem.v_head_size)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    attend(
        out,
        lse,
        q,
        k,
        v,
        starts,
        key_starts,
        None,
        max_query_len=problem.max_query_len,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        sliding_window=options.sliding_window,
        logits_soft_cap=options.logits_soft_cap,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        lists=lists,
    )
    return AttentionOutput(out.view(*shape, out.shape[-1]), lse.view(shape))
