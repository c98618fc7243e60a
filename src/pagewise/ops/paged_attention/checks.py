"""The argument contract of paged_attention: checked always, in microseconds, before any work."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError
from ...shapes import bind, check_device, check_dtype
from ..scales import LARGEST_CODE, bind_scales
from .problem import Options, PagedBatch, Problem

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor | None,
) -> tuple[Problem, Options]:
    """Raise ShapeError or DTypeError naming the argument at fault.

    Returns:
        The problem, and the options with their scales in the shape that implementations take.
    """
    sizes = bind(
        q=(q, "num_tokens num_heads head_size"),
        k_cache=(k_cache, "num_blocks block_size num_kv_heads head_size"),
        v_cache=(v_cache, "num_blocks block_size num_kv_heads v_head_size"),
        out=(out, "num_tokens num_heads v_head_size"),
        seq_lens=(batch.seq_lens, "num_seqs"),
        block_tables=(batch.block_tables, "num_seqs max_blocks_per_seq"),
        alibi_slopes=(options.alibi_slopes, "num_heads"),
        sinks=(options.sinks, "num_heads"),
    )
    bind(cu_seqlens_q=(batch.cu_seqlens_q, "length"))
    if batch.cu_seqlens_q.shape[0] != sizes["num_seqs"] + 1:
        raise ShapeError(
            f"cu_seqlens_q has {batch.cu_seqlens_q.shape[0]} entries, expected num_seqs + 1 = "
            f"{sizes['num_seqs'] + 1}: it starts with 0 and ends with num_tokens"
        )
    _check_types(q, k_cache, v_cache, batch, options, out)
    _check_sizes(sizes, batch, options)
    scale_kind, k_scale, v_scale = bind_scales(options.k_scale, options.v_scale, k_cache, v_cache)
    problem = Problem(
        num_seqs=sizes["num_seqs"],
        num_tokens=sizes["num_tokens"],
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_size=sizes["head_size"],
        v_head_size=sizes["v_head_size"],
        block_size=sizes["block_size"],
        q_dtype=q.dtype,
        kv_dtype=k_cache.dtype,
        scale_kind=scale_kind,
    )
    if scale_kind != "none":
        options = dataclasses.replace(options, k_scale=k_scale, v_scale=v_scale)
    return problem, options


def _check_types(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor | None,
) -> None:
    # float64 is for the reference: it makes it an oracle.
    check_dtype("q", q, *_FLOATS, torch.float64)
    check_dtype("k_cache", k_cache, *_FLOATS, torch.float64, *LARGEST_CODE)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    if out is not None:
        check_dtype("out", out, q.dtype)
    check_dtype("block_tables", batch.block_tables, torch.int32)
    check_dtype("seq_lens", batch.seq_lens, torch.int32)
    check_dtype("cu_seqlens_q", batch.cu_seqlens_q, torch.int32)
    for name, biases in (("alibi_slopes", options.alibi_slopes), ("sinks", options.sinks)):
        if biases is not None:
            check_dtype(name, biases, *_FLOATS, torch.float64)
    check_device(
        "q",
        q.device,
        k_cache=k_cache,
        v_cache=v_cache,
        out=out,
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
    )
    named = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "out": out,
        "block_tables": batch.block_tables,
    }
    for name, tensor in named.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1: "
                f"pass {name}.contiguous()"
            )
    if q.dtype != k_cache.dtype and torch.float64 in (q.dtype, k_cache.dtype):
        raise DTypeError(
            f"q is {q.dtype} but k_cache is {k_cache.dtype}: float64 goes with float64"
        )


def _check_sizes(sizes: dict[str, int], batch: PagedBatch, options: Options) -> None:
    for name in ("head_size", "v_head_size"):
        if sizes[name] % 8 or not 8 <= sizes[name] <= 512:
            raise ShapeError(f"{name} is {sizes[name]}, expected a multiple of 8 from 8 to 512")
    if not 1 <= sizes["block_size"] <= 256:
        raise ShapeError(f"k_cache has block_size={sizes['block_size']}, expected 1 to 256")
    num_heads, num_kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"q has num_heads={num_heads}, expected a multiple of "
            f"k_cache's num_kv_heads={num_kv_heads}"
        )
    if options.sliding_window is not None and options.sliding_window < 1:
        raise ShapeError(
            f"sliding_window is {options.sliding_window}, expected at least 1, or None for all keys"
        )
    if options.logits_soft_cap is not None and not 0 < options.logits_soft_cap < math.inf:
        raise ShapeError(
            f"logits_soft_cap is {options.logits_soft_cap}, expected a finite number more than 0, "
            "or None for no cap"
        )
    if batch.max_query_len < 0 or batch.max_seq_len < 0:
        raise ShapeError(
            f"max_query_len={batch.max_query_len} and max_seq_len={batch.max_seq_len} must not be "
            "negative"
        )
