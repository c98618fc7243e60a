"""The x-packed cache layout, and its conversion to and from the package's own."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError
from ...shapes import Form, bind, check_tensors, dtype_name

FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The element type that a ``kv_cache_dtype`` other than ``"auto"`` stands for."""


def packing(dtype: torch.dtype) -> int:
    """Return ``x``: how many elements of a key lie side by side, 16 bytes of them.

    Examples:
        >>> packing(torch.bfloat16), packing(torch.uint8)
        (8, 16)
    """
    return 16 // dtype.itemsize


def bind_packed(key_cache: Form | Tensor, value_cache: Form | Tensor) -> dict[str, int]:
    """Return the sizes of an x-packed cache; raise ShapeError where its two tensors disagree."""
    sizes = bind(
        key_cache=(key_cache, "num_blocks num_kv_heads chunks block_size x"),
        value_cache=(value_cache, "num_blocks num_kv_heads head_size block_size"),
    )
    if sizes["chunks"] * sizes["x"] != sizes["head_size"]:
        raise ShapeError(
            f"key_cache has head_size={sizes['chunks'] * sizes['x']} (its shape is "
            f"{list(key_cache.shape)}) but value_cache has {sizes['head_size']} (its shape is "
            f"{list(value_cache.shape)})"
        )
    return sizes


def as_float8(name: str, cache: Tensor, kv_cache_dtype: str) -> Tensor:
    """View a uint8 cache as the float8 type of ``kv_cache_dtype``; with ``"auto"`` it stays.

    Raises:
        DTypeError: The name is unknown, or the cache is neither uint8 nor of that float8 type.
    """
    if kv_cache_dtype == "auto":
        return cache
    wanted = FLOAT8.get(kv_cache_dtype) if isinstance(kv_cache_dtype, str) else None
    if wanted is None:
        raise DTypeError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, expected 'auto' or one of {', '.join(FLOAT8)}"
        )
    check_tensors(**{name: cache})
    if cache.dtype == wanted:
        return cache
    if cache.dtype != torch.uint8:
        given = dtype_name(cache.dtype)
        raise DTypeError(
            f"{name} is {given}, but kv_cache_dtype={kv_cache_dtype!r} is kept as uint8: "
            f"allocate it with dtype=torch.uint8, or pass kv_cache_dtype='auto'"
        )
    return cache.view(wanted)


def pack_cache(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copy a cache of ``pagetile.paged_attention`` into vLLM's x-packed layout.

    Args:
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides, any type.
        v_cache: The same for values.

    Returns:
        ``key_cache`` ``[num_blocks, num_kv_heads, head_size / x, block_size, x]`` and
        ``value_cache`` ``[num_blocks, num_kv_heads, head_size, block_size]``, both contiguous, with
        ``x = 16 / element size``.

    Raises:
        ShapeError: The two differ in blocks, heads or sizes, or x does not divide ``head_size``.

    Examples:
        >>> k_cache = v_cache = torch.zeros(5, 16, 2, 64, dtype=torch.float16)
        >>> [list(cache.shape) for cache in pack_cache(k_cache, v_cache)]
        [[5, 2, 8, 16, 8], [5, 2, 64, 16]]
    """
    sizes = bind(
        k_cache=(k_cache, "num_blocks block_size num_kv_heads head_size"),
        v_cache=(v_cache, "num_blocks block_size num_kv_heads head_size"),
    )
    x = packing(k_cache.dtype)
    if sizes["head_size"] % x:
        raise ShapeError(
            f"k_cache has head_size={sizes['head_size']}, expected a multiple of x={x} "
            f"(16 bytes of {str(k_cache.dtype).removeprefix('torch.')})"
        )
    key_cache = k_cache.reshape(*k_cache.shape[:3], -1, x).permute(0, 2, 3, 1, 4).contiguous()
    return key_cache, v_cache.permute(0, 2, 3, 1).contiguous()


def unpack_cache(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copy an x-packed cache into the layout of ``pagetile.paged_attention``.

    Args:
        key_cache: ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``, any type.
        value_cache: ``[num_blocks, num_kv_heads, head_size, block_size]``.

    Returns:
        ``k_cache`` and ``v_cache`` ``[num_blocks, block_size, num_kv_heads, head_size]``, both
        contiguous.

    Raises:
        ShapeError: The two differ in blocks, heads or sizes.

    Examples:
        >>> k_cache = torch.randn(5, 16, 2, 64)
        >>> torch.equal(unpack_cache(*pack_cache(k_cache, k_cache))[0], k_cache)
        True
    """
    bind_packed(key_cache, value_cache)
    k_cache = key_cache.permute(0, 3, 1, 2, 4).flatten(3)
    return k_cache.contiguous(), value_cache.permute(0, 3, 1, 2).contiguous()
