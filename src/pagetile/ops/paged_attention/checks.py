"""The argument contract of paged_attention, always checked before any work.

It concerns only the tensors' forms and a few numbers, so each form is validated once, and calls of
a validated form are looked up (``PagedBatch.calls``).
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError, UnsupportedError, plural
from ...shapes import (
    bind,
    check_contiguous_rows,
    check_device,
    check_dtype,
    check_tensors,
    check_written_once,
    given,
)
from ...tiles.cpu.plan import Plan as CpuPlan
from ...tiles.types import ALL_FLOATS
from ..attention_checks import (
    as_number,
    check_cache_layout,
    check_flag,
    check_heads,
    check_options,
    is_size,
)
from ..scales import check_cache_dtype, find_kind
from .batch import PagedBatch, SharedPrefixes
from .plan import GpuPlan
from .problem import OF_BATCH, CallForm, Problem, has_aligned_rows

TENSORS = (
    "q",
    "k_cache",
    "v_cache",
    "alibi_slopes",
    "sinks",
    "k_scale",
    "v_scale",
    "visible_blocks",
    "out",
)
_CONTIGUOUS = ("q", "k_cache", "v_cache", "out", "block_tables", "visible_blocks")
"""Tensors whose last dimension must be contiguous."""


def check_types(batch: Any, **arguments: Any) -> None:
    """Raise DTypeError for an argument whose form cannot be described.

    Args:
        batch: The batch.
        **arguments: A call's ``TENSORS``; those after the caches may be None.
    """
    if not isinstance(batch, PagedBatch):
        raise DTypeError(
            f"batch is of type {type(batch).__name__}, expected a PagedBatch: make one with "
            "PagedBatch.of(blocks, seq_lens, query_lens)"
        )
    check_tensors(**{name: arguments.pop(name) for name in TENSORS[:3]}, **given(**arguments))
    check_tensors(**{name: getattr(batch, name) for name in OF_BATCH})
    _check_bounds(batch.max_query_len, batch.max_seq_len)
    shared: Any = batch.shared_prefixes
    if shared is not None:
        if not isinstance(shared, SharedPrefixes):
            raise DTypeError(
                f"shared_prefixes is of type {type(shared).__name__}, expected SharedPrefixes"
            )
        check_tensors(cu_group_seqs=shared.cu_group_seqs, prefix_lens=shared.prefix_lens)


def _check_bounds(max_query_len: Any, max_seq_len: Any) -> None:
    for name, value in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if not is_size(value):
            raise ShapeError(
                f"{name} is {value!r}, expected a Python int from 0 to 2**31 - 1"
                f"{': pass its .item(), or an upper bound' if isinstance(value, Tensor) else ''}"
            )


def check_plan(plan: Any, impl: Any, runs: str | None = None) -> None:
    """Raise DTypeError for a wrong type of plan or name, or a plan for another implementation.

    Raise ShapeError for a split size that kernels do not support.

    Args:
        plan: As for ``paged_attention``.
        impl: As for ``paged_attention``.
        runs: The name of the implementation that runs, where it is known.
    """
    if not isinstance(impl, str):
        raise DTypeError(f"impl is {impl!r}, expected a name")
    if plan is None:
        return
    if not isinstance(plan, (CpuPlan, GpuPlan)):
        raise DTypeError(f"plan is {plan!r}, expected one that plan_paged_attention made")
    if runs not in (None, "reference") and isinstance(plan, CpuPlan) != (runs == "cpu"):
        raise DTypeError(
            f"plan is a {type(plan).__name__}, but {runs} runs this: "
            "plan_paged_attention for these tensors"
        )
    if isinstance(plan, GpuPlan) and plan.split_size:
        tiles, rest = divmod(plan.split_size, plan.tile_n)
        if rest or tiles & (tiles - 1):
            raise ShapeError(
                f"the plan has split_size={plan.split_size}, expected a power of two times "
                f"tile_n={plan.tile_n}"
            )


def validate(form: CallForm) -> Problem:
    """Return the problem of a call, or raise ShapeError or DTypeError naming an argument."""
    check_cache_layout(k_cache=form.k_cache, v_cache=form.v_cache)
    sizes = bind(
        q=(form.q, "num_tokens num_heads head_size"),
        k_cache=(form.k_cache, "num_blocks block_size num_kv_heads head_size"),
        v_cache=(form.v_cache, "num_blocks block_size num_kv_heads v_head_size"),
        out=(form.out, "num_tokens num_heads v_head_size"),
        seq_lens=(form.seq_lens, "num_seqs"),
        block_tables=(form.block_tables, "num_seqs max_blocks_per_seq"),
        alibi_slopes=(form.alibi_slopes, "num_heads"),
        sinks=(form.sinks, "num_heads"),
        visible_blocks=(form.visible_blocks, "num_seqs num_kv_heads max_visible"),
    )
    check_written_once(out=form.out)
    length = bind(cu_seqlens_q=(form.cu_seqlens_q, "length"))["length"]
    if length != sizes["num_seqs"] + 1:
        raise ShapeError(
            f"cu_seqlens_q has {length} entries, expected num_seqs + 1 = "
            f"{sizes['num_seqs'] + 1}: it starts with 0 and ends with num_tokens"
        )
    _check_dtypes(form)
    _check_sizes(sizes, form)
    _check_shared_prefixes(form)
    return Problem(
        num_seqs=sizes["num_seqs"],
        num_tokens=sizes["num_tokens"],
        max_query_len=form.max_query_len,
        max_seq_len=form.max_seq_len,
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_size=sizes["head_size"],
        v_head_size=sizes["v_head_size"],
        block_size=sizes["block_size"],
        q_dtype=form.q.dtype,
        kv_dtype=form.k_cache.dtype,
        scale_kind=find_kind(form.k_scale, form.v_scale, form.k_cache, form.v_cache),
        is_aligned=has_aligned_rows(form.k_cache, form.v_cache, form.has_aligned_caches),
        logits_soft_cap=form.logits_soft_cap,
        max_visible=sizes.get("max_visible"),
        sliding_window=form.sliding_window,
    )


def _check_shared_prefixes(form: CallForm) -> None:
    if form.shared_prefixes is None:
        return
    groups, lens, max_group_tokens, max_prefix_len = form.shared_prefixes
    length = bind(cu_group_seqs=(groups, "length"))["length"]
    num_groups = bind(prefix_lens=(lens, "num_groups"))["num_groups"]
    if length != num_groups + 1:
        raise ShapeError(
            f"cu_group_seqs has {length} entries, expected num_groups + 1 = {num_groups + 1}: it "
            "starts with 0 and ends with num_seqs"
        )
    if not num_groups and form.seq_lens.shape[0]:
        raise ShapeError(
            "prefix_lens has no group, but the batch has "
            f"{plural(form.seq_lens.shape[0], 'sequence')}: each belongs to a group, "
            "of prefix 0 where it shares nothing"
        )
    check_dtype("cu_group_seqs", groups, torch.int32)
    check_dtype("prefix_lens", lens, torch.int32)
    check_device("q", form.q.device, cu_group_seqs=groups, prefix_lens=lens)
    for name, value in (("max_group_tokens", max_group_tokens), ("max_prefix_len", max_prefix_len)):
        if value is not None and not is_size(value):
            raise ShapeError(
                f"{name} is {value!r}, expected a Python int from 0 to 2**31 - 1, or None"
            )
    if form.visible_blocks is not None:
        raise UnsupportedError(
            "visible_blocks with shared_prefixes: pass a batch without shared_prefixes"
        )


def _check_dtypes(form: CallForm) -> None:
    # float64 is for the reference: it makes it an oracle.
    check_dtype("q", form.q, *ALL_FLOATS)
    check_cache_dtype("k_cache", form.k_cache)
    check_dtype("v_cache", form.v_cache, form.k_cache.dtype)
    if form.out is not None:
        check_dtype("out", form.out, form.q.dtype)
    for name in OF_BATCH:
        check_dtype(name, getattr(form, name), torch.int32)
    if form.visible_blocks is not None:
        check_dtype("visible_blocks", form.visible_blocks, torch.int32)
    for name in ("alibi_slopes", "sinks"):
        if getattr(form, name) is not None:
            check_dtype(name, getattr(form, name), *ALL_FLOATS)
    tensors = (*_CONTIGUOUS, "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks")
    check_device("q", form.q.device, **{name: getattr(form, name) for name in tensors})
    check_contiguous_rows(**{name: getattr(form, name) for name in _CONTIGUOUS})
    q_dtype, kv_dtype = form.q.dtype, form.k_cache.dtype
    if q_dtype != kv_dtype and torch.float64 in (q_dtype, kv_dtype):
        names = (str(dtype).removeprefix("torch.") for dtype in (q_dtype, kv_dtype))
        raise DTypeError("q is {} but k_cache is {}: float64 goes with float64".format(*names))


def _check_sizes(sizes: dict[str, int], form: CallForm) -> None:
    heads = {name: sizes[name] for name in ("head_size", "v_head_size")}
    num_heads, num_kv_heads, block_size = (
        sizes[name] for name in ("num_heads", "num_kv_heads", "block_size")
    )
    if num_kv_heads and block_size and num_heads % num_kv_heads and not num_heads % block_size:
        raise ShapeError(
            f"q has num_heads={num_heads}, expected a multiple of k_cache's "
            f"num_kv_heads={num_kv_heads}. If the caches are [num_blocks, num_kv_heads, "
            "block_size, head_size], pass k_cache.transpose(1, 2) and v_cache.transpose(1, 2)"
        )
    check_heads(sizes["num_heads"], sizes["num_kv_heads"], "k_cache", **heads)
    if not 1 <= sizes["block_size"] <= 256:
        raise ShapeError(f"k_cache has block_size={sizes['block_size']}, expected 1 to 256")
    check_options(form.sliding_window, form.logits_soft_cap)
    check_flag("causal", form.causal)
    if not isfinite(as_number("softmax_scale", form.softmax_scale)):
        raise ShapeError(
            f"softmax_scale is {form.softmax_scale}, expected a finite number, or None for "
            "head_size ** -0.5"
        )
    _check_bounds(form.max_query_len, form.max_seq_len)
