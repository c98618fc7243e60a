"""Peers from other libraries than torch: their kernels over the same pages, if installed.

FlashInfer plans on the host first, untimed; the others have no plan. Only FlashInfer is called with
8-bit caches, without their scales: those of keys are multiplied into its queries, and its result
lacks those of values. Its BatchAttention is a peer as well as its decode and prefill wrappers. For
prefill so is its kernel ``fa2``, which splits keys: on Hopper the wrapper chooses ``fa3``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gpu_inputs import Inputs

_WORKSPACE = 256 << 20  # bytes, for FlashInfer's partial states
_LARGER_WORKSPACE = 2 << 30  # where BatchAttention asks for more than its own 384 MiB
_BATCH_ATTENTION_SIZES = (64, 128, 256)  # heads of others may end the process

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class _Pages:
    """A call's tensors in the forms that libraries take."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    """Table entries past a sequence's end are valid: some libraries read ahead."""
    seq_lens: Tensor
    starts: Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    soft_cap: float
    """0.0: none, as in all these libraries."""

    @property
    def is_decode(self) -> bool:
        return self.max_query_len == 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, head size and block size."""
        _, block_size, num_kv_heads, head_size = self.k_cache.shape
        return self.q.shape[1], num_kv_heads, head_size, block_size


def find_libraries(
    inputs: Inputs, without: Mapping[str, str] | None = None
) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls by name that return what ``paged_attention`` does, and why others are left out.

    Results are not compared here: ``admit`` does it for all peers. ``without`` names libraries that
    are not even planned, with reasons.
    """
    if inputs.scales and inputs.shape.scales == "token":
        return {}, dict.fromkeys(_LIBRARIES, "unsupported: a scale for each token")
    q = _scaled_queries(inputs.q, inputs)
    batch = inputs.batch
    used = torch.arange(batch.block_tables.shape[1], device=inputs.q.device)
    used = used[None] < -(-batch.seq_lens // inputs.shape.block_size)[:, None]
    pages = _Pages(
        q, inputs.k_cache, inputs.v_cache, batch.block_tables.where(used, 0),
        batch.seq_lens, batch.cu_seqlens_q, batch.max_query_len, batch.max_seq_len, inputs.causal,
        inputs.shape.logits_soft_cap or 0.0,
    )  # fmt: skip
    found: dict[str, Call] = {}
    absent: dict[str, str] = {}
    for name, (module, make) in _LIBRARIES.items():
        if find_spec(module.partition(".")[0]) is None:
            absent[name] = "not installed"
        elif without and name in without:
            absent[name] = without[name]
        elif inputs.shape.head_size in _CRASHING_SIZES.get(module, ()):
            absent[name] = f"heads of {inputs.shape.head_size} end its process"
        elif name == _SPLITTING and (pages.is_decode or inputs.scales):
            continue  # the wrapper already chooses it
        elif inputs.scales and name.partition(" ")[0] not in _TAKE_EIGHT_BITS:
            absent[name] = "unsupported: caches of 8 bits"
        else:
            try:
                found[name] = make(importlib.import_module(module), pages)
            except Exception as error:  # whatever a library raises about a problem
                lines = str(error).strip().splitlines()
                absent[name] = f"unsupported: {lines[0] if lines else repr(error)}"
    return found, absent


def _scaled_queries(q: Tensor, inputs: Inputs) -> Tensor:
    """Queries multiplied by the scales of keys; ``Inputs.in_tokens`` applies those of values."""
    if not inputs.scales:
        return q
    group = q.shape[1] // inputs.k_cache.shape[2]
    factors: Tensor = inputs.scales["k_scale"].repeat_interleave(group)[:, None]
    return (q * factors).to(q.dtype)


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


def _vllm_flash_attn_3(library: Any, pages: _Pages, *, is_scheduled: bool) -> Call:
    """FlashAttention-3 as vLLM ships it; vLLM itself calls it with a schedule made before."""
    if pages.soft_cap:  # where its build lacks the kernel, its error ends the process
        raise ValueError("a soft cap is not tried")
    num_heads, num_kv_heads, size, block_size = pages.sizes
    v_size = pages.v_cache.shape[-1]
    out = pages.q.new_empty(*pages.q.shape[:2], v_size)
    schedule = None
    if is_scheduled:
        schedule = library.get_scheduler_metadata(
            len(pages.seq_lens), pages.max_query_len, pages.max_seq_len, num_heads, num_kv_heads,
            size, pages.seq_lens, pages.q.dtype, v_size, pages.starts, page_size=block_size,
            causal=pages.causal,
        )  # fmt: skip

    def call() -> Tensor:
        result: Tensor = library.flash_attn_varlen_func(
            pages.q, pages.k_cache, pages.v_cache, max_seqlen_q=pages.max_query_len,
            cu_seqlens_q=pages.starts, max_seqlen_k=pages.max_seq_len, seqused_k=pages.seq_lens,
            softmax_scale=size**-0.5, causal=pages.causal, block_table=pages.tables, out=out,
            scheduler_metadata=schedule, fa_version=3,
        )  # fmt: skip
        return result

    if is_scheduled:  # a schedule serves several calls: the judged call is its second
        call()
        out.fill_(torch.nan)
    return call


def _listed_pages(pages: _Pages) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's page ids begin, all page ids, and tokens of each last page."""
    block_size = pages.sizes[-1]
    counts = -(-pages.seq_lens // block_size)
    rows = zip(pages.tables, counts.tolist(), strict=True)
    indptr = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))
    last = pages.seq_lens - (counts - 1) * block_size
    return indptr, torch.cat([row[:n] for row, n in rows]), last


def _flashinfer(library: Any, pages: _Pages, backend: str = "auto") -> Call:
    device = pages.q.device
    indptr, indices, last = _listed_pages(pages)
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
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(
            pages.starts, indptr, indices, last, *pages.sizes, causal=pages.causal, **shared
        )
    out = torch.empty_like(pages.q)  # without it, the wrapper fills one with zeros first
    return lambda: wrapper.run(pages.q, (pages.k_cache, pages.v_cache), out=out)


def _batch_attention(library: Any, pages: _Pages) -> Call:
    num_heads, num_kv_heads, size, block_size = pages.sizes
    if size not in _BATCH_ATTENTION_SIZES:
        raise ValueError(f"heads of {size}; {_BATCH_ATTENTION_SIZES} run")
    indptr, indices, _ = _listed_pages(pages)
    wrapper = library.BatchAttention("NHD", device=str(pages.q.device))
    plan = functools.partial(
        wrapper.plan, pages.starts, indptr, indices, pages.seq_lens, num_heads, num_kv_heads, size,
        size, block_size, causal=pages.causal, sm_scale=size**-0.5,
        logits_soft_cap=pages.soft_cap, q_data_type=pages.q.dtype,
        kv_data_type=pages.k_cache.dtype,
    )  # fmt: skip
    try:
        plan()
    except Exception as error:  # its type depends on the library's binding
        if "workspace" not in str(error):
            raise
        device = pages.q.device
        wrapper.float_workspace_buffer = torch.empty(
            _LARGER_WORKSPACE, dtype=torch.uint8, device=device
        )
        plan()
    out, caches = torch.empty_like(pages.q), (pages.k_cache, pages.v_cache)
    lse = torch.empty(pages.q.shape[:2], dtype=torch.float32, device=pages.q.device)

    def call() -> Tensor:
        wrapper.run(pages.q, caches, out=out, lse=lse, logits_soft_cap=pages.soft_cap)
        return out

    return call


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


_SPLITTING = "flashinfer fa2"
_LIBRARIES: dict[str, tuple[str, Callable[[Any, _Pages], Call]]] = {
    "flashinfer": ("flashinfer", _flashinfer),
    _SPLITTING: ("flashinfer", functools.partial(_flashinfer, backend="fa2")),
    "flashinfer BatchAttention": ("flashinfer", _batch_attention),
    "flash_attn": ("flash_attn", _flash_attn),
    "flash_attn 3": ("flash_attn_interface", _flash_attn_3),
    "vllm flash_attn 3": (
        "vllm.vllm_flash_attn",
        functools.partial(_vllm_flash_attn_3, is_scheduled=False),
    ),
    "vllm flash_attn 3 scheduled": (
        "vllm.vllm_flash_attn",
        functools.partial(_vllm_flash_attn_3, is_scheduled=True),
    ),
    "vllm triton": ("vllm.v1.attention.ops.triton_unified_attention", _vllm),
}
_TAKE_EIGHT_BITS = ("flashinfer",)
_CRASHING_SIZES = {"flashinfer": (80, 96)}
"""Head sizes for which a library ends the whole process (FlashInfer 0.6.18)."""
COMPILED_WHEN_PLANNED = ("flashinfer", _SPLITTING, "flashinfer BatchAttention")
"""Planning compiles a module for a call's head size and types if there is none."""
