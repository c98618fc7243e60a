"""The argument contract of paged_attention: checked always, before any work.

Whatever is checked is in the tensors' forms and a few numbers, so calls of one form are checked
once: a decode step in an engine recognises the last one's, or looks the answer up (``settled``).
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError
from ...shapes import Form, bind, check_device, check_dtype, check_tensors, form, given
from ...tiles.types import ALL_FLOATS
from ..attention_checks import (
    as_number,
    check_contiguous_rows,
    check_flag,
    check_heads,
    check_options,
    is_size,
)
from ..scales import LARGEST_CODE, find_kind
from .plan import CpuPlan, GpuPlan
from .problem import CallForm, Options, PagedBatch, Problem

_NO_FORMS = (None,) * 5
_CONTIGUOUS = ("q", "k_cache", "v_cache", "out", "block_tables")  # in their last dimension


def describe(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor | None,
) -> tuple[Any, ...]:
    """A call's form as a key, quickly made; ``form_of`` makes it legible."""
    scale, causal, window, cap, slopes, sinks, k_scale, v_scale = options
    return (
        form(q),
        form(k_cache),
        form(v_cache),
        *forms_of(slopes, sinks, k_scale, v_scale, out),
        batch.forms,
        batch.max_query_len,
        batch.max_seq_len,
        scale,
        causal,
        window,
        cap,
        *alignment(q, k_cache, v_cache, out),
    )


def forms_of(
    slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
) -> tuple[Any, ...]:
    """Of tensors that a call seldom has; None for those that it has not."""
    if slopes is sinks is k_scale is v_scale is out is None:
        return _NO_FORMS
    tensors = slopes, sinks, k_scale, v_scale, out
    return tuple([None if tensor is None else form(tensor) for tensor in tensors])


def alignment(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None) -> tuple[bool, bool]:
    """Whether both caches begin at multiples of 16 bytes, and whether ``q`` and ``out`` do, too."""
    caches = k_cache.data_ptr() | v_cache.data_ptr()
    rows = q.data_ptr() if out is None else q.data_ptr() | out.data_ptr()
    return caches % 16 == 0, (caches | rows) % 16 == 0


def check_kinds(
    q: Any, k_cache: Any, v_cache: Any, batch: Any, rest: tuple[Any, ...], out: Any
) -> None:
    """Raise DTypeError for an argument whose form cannot be described."""
    if not isinstance(batch, PagedBatch):
        raise DTypeError(f"batch is of type {type(batch).__name__}, expected a PagedBatch")
    lengths = {n: getattr(batch, n) for n in ("block_tables", "seq_lens", "cu_seqlens_q")}
    names = ("alibi_slopes", "sinks", "k_scale", "v_scale", "out")
    others = given(**dict(zip(names, (*rest, out), strict=True)))
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, **lengths, **others)


def check_scalars(softmax_scale: Any, plan: Any, impl: Any) -> None:
    """Raise DTypeError for one that no form can hold: what is looked up has to be hashable."""
    if softmax_scale is not None:
        as_number("softmax_scale", softmax_scale)
    if not isinstance(impl, str):
        raise DTypeError(f"impl is {impl!r}, expected a name")
    check_plan(plan)


def check_plan(plan: Any, name: str | None = None) -> None:
    """Raise DTypeError for what is no plan, or none for the implementation of this ``name``."""
    if plan is None:
        return
    if not isinstance(plan, (CpuPlan, GpuPlan)):
        raise DTypeError(f"plan is {plan!r}, expected one that plan_paged_attention made")
    if name not in (None, "reference") and isinstance(plan, CpuPlan) != (name == "cpu"):
        raise DTypeError(
            f"plan is a {type(plan).__name__}, but {name} runs this: "
            "plan_paged_attention for these tensors"
        )


def form_of(description: tuple[Any, ...]) -> CallForm:
    """What ``describe`` saw."""
    tensors = (*description[:8], *description[8])
    forms: list[Any] = [None if form is None else Form(*form) for form in tensors]
    return CallForm(*forms, *description[9:])


def check(forms: CallForm) -> Problem:
    """Raise ShapeError or DTypeError naming the argument at fault, or say what the problem is."""
    sizes = bind(
        q=(forms.q, "num_tokens num_heads head_size"),
        k_cache=(forms.k_cache, "num_blocks block_size num_kv_heads head_size"),
        v_cache=(forms.v_cache, "num_blocks block_size num_kv_heads v_head_size"),
        out=(forms.out, "num_tokens num_heads v_head_size"),
        seq_lens=(forms.seq_lens, "num_seqs"),
        block_tables=(forms.block_tables, "num_seqs max_blocks_per_seq"),
        alibi_slopes=(forms.alibi_slopes, "num_heads"),
        sinks=(forms.sinks, "num_heads"),
    )
    length = bind(cu_seqlens_q=(forms.cu_seqlens_q, "length"))["length"]
    if length != sizes["num_seqs"] + 1:
        raise ShapeError(
            f"cu_seqlens_q has {length} entries, expected num_seqs + 1 = "
            f"{sizes['num_seqs'] + 1}: it starts with 0 and ends with num_tokens"
        )
    _check_types(forms)
    _check_sizes(sizes, forms)
    rows = (*forms.k_cache.strides[:3], *forms.v_cache.strides[:3])
    row_unit = 16 // forms.k_cache.dtype.itemsize
    return Problem(
        num_seqs=sizes["num_seqs"],
        num_tokens=sizes["num_tokens"],
        max_query_len=forms.max_query_len,
        max_seq_len=forms.max_seq_len,
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_size=sizes["head_size"],
        v_head_size=sizes["v_head_size"],
        block_size=sizes["block_size"],
        q_dtype=forms.q.dtype,
        kv_dtype=forms.k_cache.dtype,
        scale_kind=find_kind(forms.k_scale, forms.v_scale, forms.k_cache, forms.v_cache),
        is_aligned=forms.has_aligned_caches and all(stride % row_unit == 0 for stride in rows),
        logits_soft_cap=forms.logits_soft_cap,
    )


def _check_types(forms: CallForm) -> None:
    # float64 is for the reference: it makes it an oracle.
    check_dtype("q", forms.q, *ALL_FLOATS)
    check_dtype("k_cache", forms.k_cache, *ALL_FLOATS, *LARGEST_CODE)
    check_dtype("v_cache", forms.v_cache, forms.k_cache.dtype)
    if forms.out is not None:
        check_dtype("out", forms.out, forms.q.dtype)
    for name in ("block_tables", "seq_lens", "cu_seqlens_q"):
        check_dtype(name, getattr(forms, name), torch.int32)
    for name in ("alibi_slopes", "sinks"):
        if getattr(forms, name) is not None:
            check_dtype(name, getattr(forms, name), *ALL_FLOATS)
    tensors = (*_CONTIGUOUS, "seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks")
    check_device("q", forms.q.device, **{name: getattr(forms, name) for name in tensors})
    check_contiguous_rows(**{name: getattr(forms, name) for name in _CONTIGUOUS})
    q_dtype, kv_dtype = forms.q.dtype, forms.k_cache.dtype
    if q_dtype != kv_dtype and torch.float64 in (q_dtype, kv_dtype):
        names = (str(dtype).removeprefix("torch.") for dtype in (q_dtype, kv_dtype))
        raise DTypeError("q is {} but k_cache is {}: float64 goes with float64".format(*names))


def _check_sizes(sizes: dict[str, int], forms: CallForm) -> None:
    heads = {name: sizes[name] for name in ("head_size", "v_head_size")}
    check_heads(sizes["num_heads"], sizes["num_kv_heads"], "k_cache", **heads)
    if not 1 <= sizes["block_size"] <= 256:
        raise ShapeError(f"k_cache has block_size={sizes['block_size']}, expected 1 to 256")
    check_options(forms.sliding_window, forms.logits_soft_cap)
    check_flag("causal", forms.causal)
    if not isinstance(forms.softmax_scale, Real):
        raise DTypeError(f"softmax_scale is {forms.softmax_scale!r}, expected a number")
    as_number("softmax_scale", forms.softmax_scale)  # some are too large for one
    for name in ("max_query_len", "max_seq_len"):
        value = getattr(forms, name)
        if not is_size(value):
            raise ShapeError(
                f"{name} is {value!r}, expected an integer of the host from 0 to 2**31 - 1"
            )
