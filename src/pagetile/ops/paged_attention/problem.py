"""Data types of a call of paged attention: arguments, form, problem, cached dispatch.

::

    Arguments ──form_of──▶ CallForm ──checks.validate──▶ Problem ──▶ plan, implementation
    tensors                shapes, strides, types        sizes
        └────────────────── CachedCall.matches ──────────────────────▶ run(Arguments)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...shapes import Form, check_apart, form, recogniser, span
from ...tiles.state import AttentionOutput
from .batch import PagedBatch


class Arguments(NamedTuple):
    """The arguments of one call, with defaults filled in, for an implementation."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch
    softmax_scale: float
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    visible_blocks: Tensor | None = None
    out: Tensor | None = None


class CallForm(NamedTuple):
    """Shapes, strides, types and scalars of a call, validated once for all equal calls."""

    q: Form
    k_cache: Form
    v_cache: Form
    alibi_slopes: Form | None
    sinks: Form | None
    k_scale: Form | None
    v_scale: Form | None
    visible_blocks: Form | None
    out: Form | None
    block_tables: Form
    seq_lens: Form
    cu_seqlens_q: Form
    shared_prefixes: tuple[Form, Form, int | None, int | None] | None
    """Forms of ``cu_group_seqs`` and ``prefix_lens``, and their bounds."""
    max_query_len: int
    max_seq_len: int
    allows_early_reads: bool
    softmax_scale: float
    causal: bool
    sliding_window: int | None
    logits_soft_cap: float | None
    has_aligned_caches: bool
    """Whether both caches begin at multiples of 16 bytes."""
    is_aligned: bool
    """Whether q and out do, too."""
    has_aligned_scales: bool
    """Whether scales for each token begin at multiples of 16 bytes."""


def form_of(arguments: Arguments) -> CallForm:
    """Return the form of a call.

    Raises:
        AttributeError: An argument that must be a tensor is not one.
    """
    q, k_cache, v_cache, batch, scale, causal, window, cap, *optional = arguments
    return CallForm._make(
        (
            *[Form._make(form(tensor)) for tensor in (q, k_cache, v_cache)],
            *[None if tensor is None else Form._make(form(tensor)) for tensor in optional],
            *batch.forms,
            batch.shared_form,
            batch.max_query_len,
            batch.max_seq_len,
            batch.allows_early_reads,
            scale,
            causal,
            window,
            cap,
            *alignment(q, k_cache, v_cache, arguments.out),
            has_aligned_scales(arguments.k_scale, arguments.v_scale),
        )
    )


def alignment(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None) -> tuple[bool, bool]:
    """Return whether both caches begin at multiples of 16 bytes, and whether q and out do, too."""
    caches = k_cache.data_ptr() | v_cache.data_ptr()
    rows = q.data_ptr() if out is None else q.data_ptr() | out.data_ptr()
    return caches % 16 == 0, (caches | rows) % 16 == 0


def has_aligned_scales(k_scale: Tensor | None, v_scale: Tensor | None) -> bool:
    """Return whether scales for each token begin at multiples of 16 bytes."""
    if k_scale is None or v_scale is None or k_scale.dim() != 3:
        return False
    return (k_scale.data_ptr() | v_scale.data_ptr()) % 16 == 0


def has_aligned_rows(k_cache: Form, v_cache: Form, has_aligned_caches: bool) -> bool:
    """Return whether every token's head begins at a multiple of 16 bytes in both caches."""
    unit = 16 // k_cache.dtype.itemsize
    strides = (*k_cache.strides[:3], *v_cache.strides[:3])
    return has_aligned_caches and all(stride % unit == 0 for stride in strides)


@dataclass(frozen=True)
class Problem:
    """Sizes and element types of a call: all that a plan depends on."""

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    block_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    scale_kind: str = "none"
    """Kind of scale: one per ``"head"``, one per ``"token"`` and head, or ``"none"``."""
    is_aligned: bool = True
    """Whether every token's head begins at a multiple of 16 bytes in both caches."""
    logits_soft_cap: float | None = None
    max_visible: int | None = None
    """Most visible blocks of a KV head; None: all blocks are visible."""
    sliding_window: int | None = None
    """Visible keys up to a query's own; None: all."""

    def __hash__(self) -> int:
        """Return the hash, computed once, since a call makes several look-ups by its problem."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, field.name) for field in fields(self)))
            self.__dict__["_hash"] = known
        return int(known)

    @property
    def out_sizes(self) -> tuple[int, int, int]:
        """Sizes of ``out``."""
        return self.num_tokens, self.num_heads, self.v_head_size

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def join_kv_heads(self, count: int) -> Problem:
        """Return the problem with every ``count`` neighbouring KV heads joined into one."""
        return self if count == 1 else replace(self, num_kv_heads=self.num_kv_heads // count)

    @property
    def rows(self) -> int:
        """Upper bound of queries of a sequence that share a KV head: new tokens × group."""
        return self.max_query_len * self.group

    @property
    def width(self) -> int:
        """The wider of a key and a value."""
        return max(self.head_size, self.v_head_size)

    @property
    def multiplies_float32(self) -> bool:
        """Whether products are float32: if an operand is, or if both are different 16-bit types."""
        q, kv = self.q_dtype, self.kv_dtype
        return torch.float32 in (q, kv) or (kv.itemsize == 2 and q != kv)


_OPTIONAL = "alibi_slopes", "sinks", "k_scale", "v_scale", "visible_blocks"
OF_BATCH = "block_tables", "seq_lens", "cu_seqlens_q"
"""Tensors of a batch that every call has."""


class CachedCall:
    """A validated form of call, and the prepared function that runs it."""

    __slots__ = (
        "_alignment", "_has_same_form", "_other_spans", "_spans", "num_blocks", "problem", "run",
        "softmax_scale",
    )  # fmt: skip

    def __init__(
        self, form: CallForm, problem: Problem, run: Callable[[Arguments], AttentionOutput]
    ) -> None:
        self._alignment = form.has_aligned_caches, form.is_aligned
        self._has_same_form: Callable[..., bool] | None = None
        self.problem, self.run, self.softmax_scale = problem, run, form.softmax_scale
        self.num_blocks = form.k_cache.shape[0]
        tensors = form.out or form.q, form.q, form.k_cache, form.v_cache
        self._spans = [span(tensor) for tensor in tensors]
        named = {name: getattr(form, name) for name in (*_OPTIONAL, *OF_BATCH)}
        self._other_spans = {name: span(x) for name, x in named.items() if x is not None}

    def matches(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None) -> bool:
        """Return whether a call that may differ in these arguments only has this form.

        It is faster than describing them. False until ``record`` was called.
        """
        is_same = self._has_same_form is not None and self._has_same_form(q, k_cache, v_cache)
        return is_same and self._alignment == alignment(q, k_cache, v_cache, out)

    def check_out(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Raise ShapeError if ``out`` shares memory with q or a cache of a call of this form."""
        start, (size, q_size, k_size, v_size) = out.data_ptr(), self._spans
        if (
            -q_size < q.data_ptr() - start < size
            or -k_size < k_cache.data_ptr() - start < size
            or -v_size < v_cache.data_ptr() - start < size
        ):
            check_apart("out", out, q=q, k_cache=k_cache, v_cache=v_cache)

    def check_others(self, call: Arguments) -> None:
        """Raise ShapeError if ``out`` shares memory with any other input of a call of this form.

        It is made until a call is recorded: later ones would only repeat what it finds.
        """
        out = call.out
        if out is None:
            return
        start, size = out.data_ptr(), self._spans[0]
        for name, other_size in self._other_spans.items():
            other = getattr(call.batch if name in OF_BATCH else call, name)
            if -other_size < other.data_ptr() - start < size:
                check_apart("out", out, **{name: other})

    def record(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Match calls whose arguments are like these, which have this form."""
        self._has_same_form = recogniser(q, k_cache, v_cache)
