"""A KV cache in 8 bits: half the memory of bfloat16, with a scale for each token and head.

::

    python examples/eight_bit_cache.py

``write_kv`` computes the scales and rounds; ``paged_attention`` reads the packed values and
converts them while it computes. Nothing is calibrated beforehand.
"""

import torch

from pagetile import BlockPool, KVCache, LayerSpec, PagedBatch, paged_attention, write_kv


def attend(
    dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return decode attention over a cache of ``dtype``, and the cache's bytes."""
    num_tokens, num_kv_heads, head_size = k.shape
    pool = BlockPool(num_blocks=-(-num_tokens // 16), block_size=16)
    cache = KVCache([LayerSpec(num_kv_heads, head_size, head_size)], pool, dtype=dtype)
    (k_cache,), (v_cache,), (k_scale,), (v_scale,) = cache.k, cache.v, cache.k_scale, cache.v_scale
    slots = torch.arange(num_tokens)
    write_kv(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    batch = PagedBatch.of([list(range(pool.num_blocks))], [num_tokens])
    result = paged_attention(q, k_cache, v_cache, batch, k_scale=k_scale, v_scale=v_scale)
    return result.out, cache.num_bytes


def main() -> None:
    """Compare the element types on the same keys and values."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8, 64), torch.randn(1000, 2, 64), torch.randn(1000, 2, 64)
    exact, _ = attend(torch.float32, q, k, v)
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        out, num_bytes = attend(dtype, q.bfloat16(), k.bfloat16(), v.bfloat16())
        error = (out.float() - exact).norm() / exact.norm()
        print(f"{str(dtype).removeprefix('torch.'):14} {num_bytes:7,} bytes, error {error:.1e}")


if __name__ == "__main__":
    main()
