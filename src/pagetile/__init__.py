"""Paged and tiled attention: a KV cache, its kernels, an LLM engine, and Swin window attention."""

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    DTypeError,
    OutOfBlocksError,
    PagetileError,
    RequestError,
    ShapeError,
    UnsupportedError,
)
from .kv_cache import BlockPool, BlockTable, PrefixIndex
from .process import HOME as _HOME  # noqa: F401  here, and not when a kernel first asks for it

if TYPE_CHECKING:
    __version__: str

    from .engine import LLM, SamplingParams, StructuredOutputsParams
    from .engine.async_llm import AsyncLLM
    from .kv_cache.storage import KVCache, LayerSpec
    from .ops.attention import BlockMask, attention, explain_attention
    from .ops.attention_scores import attention_scores
    from .ops.copy_blocks import copy_blocks
    from .ops.merge_states import merge_states
    from .ops.paged_attention import (
        PagedBatch,
        SharedPrefixes,
        explain_paged_attention,
        paged_attention,
        plan_paged_attention,
    )
    from .ops.window_attention import (
        explain_window_attention,
        regions_from_mask,
        rel_offsets,
        shift_regions,
        shifted_window_attention,
        window_attention,
    )
    from .ops.write_kv import write_kv
    from .tiles.state import AttentionOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionOutput",
    "BlockMask",
    "BlockPool",
    "BlockTable",
    "DTypeError",
    "KVCache",
    "LayerSpec",
    "OutOfBlocksError",
    "PagedBatch",
    "PagetileError",
    "PrefixIndex",
    "RequestError",
    "SamplingParams",
    "ShapeError",
    "SharedPrefixes",
    "StructuredOutputsParams",
    "UnsupportedError",
    "attention",
    "attention_scores",
    "copy_blocks",
    "explain_attention",
    "explain_paged_attention",
    "explain_window_attention",
    "merge_states",
    "paged_attention",
    "plan_paged_attention",
    "regions_from_mask",
    "rel_offsets",
    "shift_regions",
    "shifted_window_attention",
    "window_attention",
    "write_kv",
]

# The module of each name that needs torch, imported on first use so that `--help` starts fast.
_HOMES = {
    "AsyncLLM": "engine.async_llm",
    "LLM": "engine",
    "SamplingParams": "engine",
    "StructuredOutputsParams": "engine",
    "KVCache": "kv_cache.storage",
    "LayerSpec": "kv_cache.storage",
    "AttentionOutput": "tiles.state",
    "BlockMask": "ops.attention",
    "PagedBatch": "ops.paged_attention",
    "SharedPrefixes": "ops.paged_attention",
    "attention": "ops.attention",
    "attention_scores": "ops.attention_scores",
    "copy_blocks": "ops.copy_blocks",
    "explain_attention": "ops.attention",
    "explain_paged_attention": "ops.paged_attention",
    "explain_window_attention": "ops.window_attention",
    "merge_states": "ops.merge_states",
    "paged_attention": "ops.paged_attention",
    "plan_paged_attention": "ops.paged_attention",
    "regions_from_mask": "ops.window_attention",
    "rel_offsets": "ops.window_attention",
    "shift_regions": "ops.window_attention",
    "shifted_window_attention": "ops.window_attention",
    "window_attention": "ops.window_attention",
    "write_kv": "ops.write_kv",
}

if not TYPE_CHECKING:  # a type checker would conclude from __getattr__ that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name from its home."""
        if name == "__version__":
            from .version import find_version

            return find_version()
        if name not in _HOMES:
            if not name.startswith("_"):
                from .engine.vllm_names import MODULE_NAMES

                if name in MODULE_NAMES:  # "from pagetile import" drops an AttributeError's text
                    reason = f"which is vLLM's: {MODULE_NAMES[name]}"
                    raise ImportError(f"pagetile has no {name!r}, {reason}", name=__name__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
