"""vLLM's paged-attention and cache operators, by the names and signatures of ``vllm._custom_ops``.

vLLM has removed these kernels; code that calls them goes on with one changed line:

    from pagetile.integrations import vllm_ops as ops  # instead of: from vllm import _custom_ops

The cache is x-packed, as in vLLM's documents, and is read in place:

    key_cache    [num_blocks, num_kv_heads, head_size / x, block_size, x]     x = 16 bytes
    value_cache  [num_blocks, num_kv_heads, head_size, block_size]

``pack_cache`` and ``unpack_cache`` convert it from and to the layout of
``pagetile.paged_attention``. Signatures are those of vLLM 0.22; all run on CUDA GPUs and on CPUs.
"""

from .attention import paged_attention_v1, paged_attention_v2
from .cache import convert_fp8, copy_blocks, reshape_and_cache, reshape_and_cache_flash, swap_blocks
from .layout import pack_cache, unpack_cache

__all__ = [
    "convert_fp8",
    "copy_blocks",
    "pack_cache",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
    "unpack_cache",
]
