"""Paged attention as one node of a graph, for compilers, tracers and tensors without data.

Plain eager calls do not come this way: torch's dispatchers take the host longer. An operator may
not return what it was given, so a call with ``out`` has an operator of its own.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...tiles.state import AttentionOutput
from .batch import PagedBatch, SharedPrefixes
from .problem import Arguments

_INPUTS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "Tensor cu_seqlens_q, SymInt max_query_len, SymInt max_seq_len, Tensor? cu_group_seqs, "
    "Tensor? prefix_lens, SymInt? max_group_tokens, SymInt? max_prefix_len, float softmax_scale, "
    "bool causal, SymInt? sliding_window, float? logits_soft_cap, Tensor? alibi_slopes, "
    "Tensor? sinks, Tensor? k_scale, Tensor? v_scale, Tensor? visible_blocks, str impl"
)


def attend(call: Arguments, impl: str) -> AttentionOutput:
    """Call the operator."""
    q, k_cache, v_cache, batch, *options, out = call
    prefixes = batch.shared_prefixes
    shared: list[Any] = [None] * 4
    if prefixes is not None:
        names = [field.name for field in fields(prefixes) if field.name != "passes"]
        shared = [getattr(prefixes, name) for name in names]
    inputs = [
        q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q,
        batch.max_query_len, batch.max_seq_len, *shared, *options, impl,
    ]  # fmt: skip
    # It has no gradients, whatever the tensors ask for.
    inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    if out is None:
        found, lse = _operator(*inputs)
        return AttentionOutput(found, lse)
    return AttentionOutput(out, _operator_into(*inputs, out.detach()))


def _run(*inputs: Any, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from .api import paged_attention

    q, k_cache, v_cache, tables, seq_lens, starts, query_len, seq_len = inputs[:8]
    shared = None if inputs[8] is None else SharedPrefixes(*inputs[8:12])
    names = Arguments._fields[4:-1]
    options = dict(zip(names, inputs[12:-1], strict=True))
    batch = PagedBatch(tables, seq_lens, starts, query_len, seq_len, shared)
    found, lse = paged_attention(q, k_cache, v_cache, batch, **options, out=out, impl=inputs[-1])
    return found, lse


_operator: Any = torch.library.custom_op(
    "pagetile::paged_attention",
    _run,
    mutates_args=(),
    schema=f"({_INPUTS}) -> (Tensor out, Tensor lse)",
)


def _run_into(*inputs: Any) -> Tensor:
    return _run(*inputs[:-1], out=inputs[-1])[1]


_operator_into: Any = torch.library.custom_op(
    "pagetile::paged_attention_into",
    _run_into,
    mutates_args=("out",),
    schema=f"({_INPUTS}, Tensor(a!) out) -> Tensor lse",
)


@_operator.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v_cache.shape[-1]), _fake_lse(q)


@_operator_into.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, *others: Any) -> Tensor:
    return _fake_lse(q)


def _fake_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:2], dtype=torch.float32)
