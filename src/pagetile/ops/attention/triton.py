"""Attention on a GPU by Triton: ``tiles.triton.forward`` over contiguous keys and values."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.forward_tiles import choose_forward_tiles
from ...tiles.state import AttentionOutput
from ...tiles.triton.forward import forward_kernel
from ...tiles.triton.launch import POINTERS, PRODUCTS, Launcher, as_floats, refuse, window_of
from . import triton_block_sparse
from .problem import Lengths, Options, Problem, in_a_row


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    return refuse(device, q=problem.dtype)


def run(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> AttentionOutput:
    """One launch."""
    if options.block_mask is not None and q.numel() and k.numel():
        return AttentionOutput(
            *triton_block_sparse.attend(problem, q, k, v, options, options.block_mask)
        )
    shape = q.shape[:-1]
    q, k, v, starts, key_starts = in_a_row(q, k, v, lengths)
    out = q.new_empty(*q.shape[:2], problem.v_head_size)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    strides = *out.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
    width = 16 // q.element_size()
    launcher = make_launcher(
        problem.dtype, problem.group, problem.head_size, problem.v_head_size, options.causal,
        options.logits_soft_cap is not None, options.alibi_slopes is not None,
        options.sinks is not None, not any(stride % width for stride in strides),
        all(t.data_ptr() % 16 == 0 for t in (q, k, v)), DeviceInfo.of(q.device).is_small,
    )  # fmt: skip
    tiles = problem.num_tokens * problem.group // launcher.constants["TILE_M"] + problem.num_seqs
    launcher(
        (tiles, problem.num_kv_heads * (len(q) > 0), 1),
        out, lse, q, k, v, starts, key_starts, starts,
        _floats(options.alibi_slopes, lse), _floats(options.sinks, lse), lse, lse, starts,
        problem.num_seqs, problem.num_kv_heads, 0,
        options.softmax_scale, options.logits_soft_cap or 0.0,
        window_of(options.sliding_window), 0,
        *strides[:4], 0, *strides[4:6], 0, *strides[6:], *(0,) * 11,
    )  # fmt: skip
    return AttentionOutput(out.view(*shape, out.shape[-1]), lse.view(shape))


def _floats(biases: Tensor | None, other: Tensor) -> Tensor:
    """Return biases as the kernel reads them, or ``other`` as a placeholder."""
    given = as_floats(biases)
    return other if given is None else given


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, group: int, head_size: int, v_head_size: int, causal: bool,
    has_cap: bool, has_alibi: bool, has_sinks: bool, has_whole_strides: bool, is_aligned: bool,
    is_small: bool = False,
) -> Launcher:  # fmt: skip
    """The launcher for these types, sizes and options."""
    given = POINTERS[dtype] + ":16" * is_aligned
    stride = f"i64:{16 // dtype.itemsize}" if has_whole_strides else "i64"
    integers = ("block_tables", "seq_lens", "cu_seqlens_q")
    strides = (
        "out_token", "out_head", "q_token", "q_head",
        "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head", "table_stride",
        "ks_block", "ks_slot", "ks_head", "vs_block", "vs_slot", "vs_head",
    )  # fmt: skip
    types = {
        "out": POINTERS[dtype] + ":16", "lse": "*fp32:16", "q": given, "k_cache": given,
        "v_cache": given, **dict.fromkeys(integers, "*i32"),
        **dict.fromkeys(("alibi_slopes", "sinks", "k_scale", "v_scale"), "*fp32"),
        "visible_blocks": "*i32",
        "num_seqs": "i32", "num_kv_heads": "i32", "short": "i32", "softmax_scale": "fp32",
        "soft_cap": "fp32", "window": "i32", "block_size": "i32", **dict.fromkeys(strides, stride),
        **dict.fromkeys(("max_visible", "search_steps", "list_seq", "list_head"), "i32"),
    }  # fmt: skip
    tile_m, tile_n, num_warps, num_stages = choose_forward_tiles(
        max(head_size, v_head_size), is_float32=dtype == torch.float32, is_small=is_small
    )
    d, d_v = (max(16, triton.next_power_of_2(size)) for size in (head_size, v_head_size))
    constants = {
        "GROUP": group, "SIZE": head_size, "V_SIZE": v_head_size, "BLOCK_SIZE": 0,
        "PAGED": False, "CAUSAL": causal, "HAS_CAP": has_cap, "HAS_ALIBI": has_alibi,
        "HAS_SINKS": has_sinks, "SCALES": "none", "TILE_M": tile_m, "TILE_N": tile_n, "D": d,
        # Triton 3.6 gives wrong products where values are padded to less than 64 and keys are not.
        "V": max(d_v, min(d, 64)), "DOT": PRODUCTS[dtype], "VISIBLE": False,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    return Launcher(forward_kernel, types, constants, **options)
