"""Peers that are no part of torch: other libraries' kernels over the same pages, if installed.

FlashInfer plans on the host first, untimed; the others have no plan. It alone is handed caches of
8 bits, and is spared their scales: those of keys are in its queries, and its result lacks those of
values. A library that refuses a problem, or whose result differs, takes
no part, and a warning says why.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gpu_inputs import Inputs

__all__ = ["find_libraries"]

_WORKSPACE = 256 << 20  # bytes, for FlashInfer's partial states
_ROUNDING = 2**-6  # of bfloat16 results, generously: what is asked is whether they mean the same

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class _Pages:
    """A call's arrays in the forms that libraries ask for."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    """No poison past a sequence's end: some read ahead."""
    seq_lens: Tensor
    starts: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    soft_cap: float
    """0.0: none, as all of them say it."""

    @property
    def is_decode(self) -> bool:
        return self.max_query_len == 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, head size and block size."""
        _, block_size, num_kv_heads, head_size = self.k_cache.shape
        return self.q.shape[1], num_kv_heads, head_size, block_size


def find_libraries(inputs: Inputs) -> dict[str, Call]:
    """Calls by name, each returning ``[num_tokens, num_heads, head_size]``."""
    if inputs.shape.scales == "token":  # none has them
        return {}
    libraries = (
        {name: _LIBRARIES[name] for name in _TAKE_EIGHT_BITS} if inputs.scales else _LIBRARIES
    )
    q, expected = _without_scales(inputs, inputs.attend().out)
    batch = inputs.batch
    used = torch.arange(batch.block_tables.shape[1], device=inputs.q.device)
    used = used[None] < -(-batch.seq_lens // inputs.shape.block_size)[:, None]
    pages = _Pages(
        q, inputs.k_cache, inputs.v_cache, batch.block_tables.where(used, 0),
        batch.seq_lens, batch.cu_seqlens_q, batch.max_query_len, batch.max_seq_len, inputs.causal,
        inputs.shape.logits_soft_cap or 0.0,
    )  # fmt: skip
    found = {}
    for name, (module, make) in libraries.items():
        if find_spec(module.partition(".")[0]) is None:
            continue
        try:
            call = make(importlib.import_module(module), pages)
            gap = float((call() - expected).abs().max())
        except Exception as error:  # whatever a library raises about a problem
            warnings.warn(f"{name} takes no part: {error}", stacklevel=2)
            continue
        if gap <= _ROUNDING * float(expected.abs().max()):
            found[name] = call
        else:
            warnings.warn(f"{name} takes no part: its result is {gap:.2g} off", stacklevel=2)
    return found


def _without_scales(inputs: Inputs, out: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that hold the scales of keys, and a result without those of values."""
    if not inputs.scales:
        return inputs.q, out
    k_scale, v_scale = (
        inputs.scales[name].repeat_interleave(inputs.q.shape[1] // inputs.k_cache.shape[2])[:, None]
        for name in ("k_scale", "v_scale")
    )
    return (inputs.q * k_scale).to(inputs.q.dtype), out / v_scale


def _flash_attn(library: Any, pages: _Pages) -> Call:
    if pages.is_decode:
        return lambda: library.flash_attn_with_kvcache(
            pages.q[:, None], pages.k_cache, pages.v_cache,
            cache_seqlens=pages.seq_lens, block_table=pages.tables, causal=pages.causal,
            softcap=pages.soft_cap,
        )[:, 0]  # fmt: skip
    key_starts = torch.nn.functional.pad(pages.seq_lens.cumsum(0).int(), (1, 0))
    return lambda: library.flash_attn_varlen_func(
        pages.q, pages.k_cache, pages.v_cache, pages.starts, key_starts,
        pages.max_query_len, pages.max_seq_len, causal=pages.causal, block_table=pages.tables,
        softcap=pages.soft_cap,
    )  # fmt: skip


def _flash_attn_3(library: Any, pages: _Pages) -> Call:
    shared = {
        "cache_seqlens": pages.seq_lens, "page_table": pages.tables, "causal": pages.causal,
        "softcap": pages.soft_cap,
    }  # fmt: skip
    if pages.is_decode:
        return lambda: library.flash_attn_with_kvcache(
            pages.q[:, None], pages.k_cache, pages.v_cache, **shared
        )[:, 0]
    return lambda: library.flash_attn_with_kvcache(
        pages.q, pages.k_cache, pages.v_cache,
        cu_seqlens_q=pages.starts, max_seqlen_q=pages.max_query_len, **shared,
    )  # fmt: skip


def _flashinfer(library: Any, pages: _Pages) -> Call:
    block_size, device = pages.sizes[-1], pages.q.device
    counts = -(-pages.seq_lens // block_size)
    indices = torch.cat(
        [row[:n] for row, n in zip(pages.tables, counts.tolist(), strict=True)]
    )  # fmt: skip
    indptr = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))
    last = pages.seq_lens - (counts - 1) * block_size
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
    shared = {
        "q_data_type": pages.q.dtype, "kv_data_type": pages.k_cache.dtype,
        "logits_soft_cap": pages.soft_cap or None,
    }  # fmt: skip
    if pages.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(indptr, indices, last, *pages.sizes, **shared)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            pages.starts, indptr, indices, last, *pages.sizes, causal=pages.causal, **shared
        )
    out = torch.empty_like(pages.q)  # else it fills one with zeros first
    return lambda: wrapper.run(pages.q, (pages.k_cache, pages.v_cache), out=out)


def _vllm(library: Any, pages: _Pages) -> Call:
    out = torch.empty_like(pages.q)

    def call() -> Tensor:
        library.unified_attention(
            q=pages.q, k=pages.k_cache, v=pages.v_cache, out=out,
            cu_seqlens_q=pages.starts, max_seqlen_q=pages.max_query_len,
            seqused_k=pages.seq_lens, max_seqlen_k=pages.max_seq_len,
            softmax_scale=pages.q.shape[-1] ** -0.5, causal=pages.causal, window_size=(-1, -1),
            block_table=pages.tables, softcap=pages.soft_cap,
            q_descale=None, k_descale=None, v_descale=None,
        )  # fmt: skip
        return out

    return call


_LIBRARIES: dict[str, tuple[str, Callable[[Any, _Pages], Call]]] = {
    "flashinfer": ("flashinfer", _flashinfer),
    "flash_attn": ("flash_attn", _flash_attn),
    "flash_attn 3": ("flash_attn_interface", _flash_attn_3),
    "vllm triton": ("vllm.attention.ops.triton_unified_attention", _vllm),
}
_TAKE_EIGHT_BITS = ("flashinfer",)
