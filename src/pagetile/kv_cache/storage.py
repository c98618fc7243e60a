"""The memory of a paged KV cache: one key and one value tensor a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DTypeError, OutOfBlocksError, ShapeError, plural
from ..ops.attention_checks import check_heads
from ..ops.copy_blocks import copy_blocks
from ..ops.scales import LARGEST_CODE
from ..tiles.types import ALL_FLOATS
from .block_pool import BlockPool
from .integers import check_type, whole_number


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer keeps of a token."""

    num_kv_heads: int
    """Heads of keys and values."""
    head_size: int
    """Width of a head's queries and keys."""
    v_head_size: int
    """Width of a head's values; as a rule that of the keys."""
    sliding_window: int | None = None
    """Number of visible keys, the query's own included; ``None`` sees all."""

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_size", "v_head_size"):
            whole_number(name, getattr(self, name), least=1)
        if self.sliding_window is not None:
            whole_number("sliding_window", self.sliding_window, least=1)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's key and value in this layer, and of their scales if it has any."""
        scale_bytes = 2 * torch.float32.itemsize if dtype in LARGEST_CODE else 0
        head_bytes = (self.head_size + self.v_head_size) * dtype.itemsize + scale_bytes
        return self.num_kv_heads * head_bytes


class KVCache:
    """Key and value blocks of all layers; block ``b`` of every layer holds the same tokens.

    Args:
        layers: What each attention layer keeps of a token.
        pool: Gives the number of blocks and their size, and hands them out.
        dtype: Element type of keys and values.
        device: Where the tensors lie.

    In 8 bits (float8_e4m3fn, float8_e5m2, int8) each token and head has its own scale, which
    ``write_kv`` computes, so no calibration is needed.

    Attributes:
        k: A layer's keys, ``[num_blocks, block_size, num_kv_heads, head_size]`` each.
        v: A layer's values, ``[num_blocks, block_size, num_kv_heads, v_head_size]`` each.
        k_scale: The keys' scales, float32 ``[num_blocks, block_size, num_kv_heads]``, with strides
            ``[num_kv_heads * block_size, 1, block_size]``; ``None`` for each layer of a cache that
            is not of 8 bits.
        v_scale: The values' scales.

    Raises:
        ShapeError: A size is out of range.
        DTypeError: ``dtype`` is not a type of caches, or ``layers`` is not a list of ``LayerSpec``.

    Examples:
        >>> layer = LayerSpec(num_kv_heads=2, head_size=64, v_head_size=64)
        >>> cache = KVCache([layer] * 4, BlockPool(32, block_size=16), dtype=torch.bfloat16)
        >>> cache.num_tokens, cache.k[0].shape
        (512, torch.Size([32, 16, 2, 64]))
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        pool: BlockPool,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        check_type("pool", pool, BlockPool, "(num_blocks, block_size)")
        if pool.block_size > 256:
            raise ShapeError(f"block_size is {pool.block_size}, expected 1 to 256")
        _check_dtype(dtype)
        self.layers = layers = _check_layers(layers)
        for layer in layers:
            check_heads(
                layer.num_kv_heads, layer.num_kv_heads, "a layer",
                head_size=layer.head_size, v_head_size=layer.v_head_size,
            )  # fmt: skip
        self.pool, self.dtype = pool, dtype
        self.num_blocks, self.block_size = pool.num_blocks, pool.block_size
        self.k = [self._blocks(layer.num_kv_heads, layer.head_size, device) for layer in layers]
        self.v = [self._blocks(layer.num_kv_heads, layer.v_head_size, device) for layer in layers]
        self.k_scale, self.v_scale = (
            [self._scales(layer.num_kv_heads, device) for layer in layers] for _ in range(2)
        )

    def _blocks(self, num_kv_heads: int, size: int, device: torch.device | str) -> Tensor:
        shape = (self.num_blocks, self.block_size, num_kv_heads, size)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def _scales(self, num_kv_heads: int, device: torch.device | str) -> Tensor | None:
        if self.dtype not in LARGEST_CODE:
            return None
        # A block's scales of a head lie together, so that decode can load four at once.
        shape = (self.num_blocks, num_kv_heads, self.block_size)
        return torch.empty(shape, dtype=torch.float32, device=device).transpose(1, 2)

    @staticmethod
    def blocks_that_fit(
        layers: Sequence[LayerSpec], memory_bytes: int, *, block_size: int, dtype: torch.dtype
    ) -> int:
        """Return how many blocks of all layers fit into ``memory_bytes``.

        Raises:
            OutOfBlocksError: Not one does; the message says how many bytes are missing.
            ShapeError: A size is not an integer or out of range.
            DTypeError: ``dtype`` is not a type of caches, or ``layers`` is not a list of
                ``LayerSpec``.
        """
        memory_bytes = whole_number("memory_bytes", memory_bytes)
        block_size = whole_number("block_size", block_size, least=1)
        _check_dtype(dtype)
        layers = _check_layers(layers)
        if not layers:
            raise ShapeError("layers is empty, expected one LayerSpec for each layer")
        block_bytes = block_size * sum(layer.bytes_per_token(dtype) for layer in layers)
        if memory_bytes < block_bytes:
            raise OutOfBlocksError(
                f"the KV cache gets {plural(memory_bytes, 'byte')}, but one block of "
                f"{plural(block_size, 'token')} takes {block_bytes:,}: "
                f"{plural(block_bytes - memory_bytes, 'byte')} too few. "
                "Free memory, or use a smaller block_size or an 8-bit kv_cache_dtype"
            )
        return memory_bytes // block_bytes

    @property
    def num_tokens(self) -> int:
        """The most tokens that the cache can hold: ``num_blocks * block_size``."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return self.num_tokens * sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    def copy(self, src_to_dst: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every layer: the copies that ``BlockTable.append`` returns."""
        if src_to_dst:
            pairs = torch.tensor(src_to_dst, dtype=torch.int64, device="cpu")
            scales = [scale for scale in (*self.k_scale, *self.v_scale) if scale is not None]
            whole = [scale.transpose(1, 2) for scale in scales]  # contiguous
            copy_blocks([*self.k, *self.v, *whole], pairs)


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in (*ALL_FLOATS, *LARGEST_CODE):
        names = ", ".join(map(str, LARGEST_CODE))
        raise DTypeError(
            f"dtype is {dtype!r}, expected torch.float16, another floating type, or {names}"
        )


def _check_layers(layers: Any) -> tuple[LayerSpec, ...]:
    if isinstance(layers, LayerSpec) or not isinstance(layers, Iterable):
        raise DTypeError(
            f"layers is of type {type(layers).__name__}, expected a list of one LayerSpec for "
            "each layer: [LayerSpec(num_kv_heads, head_size, v_head_size)] * num_layers"
        )
    specs: tuple[LayerSpec, ...] = tuple(layers)
    for spec in specs:
        check_type("a layer", spec, LayerSpec, "(num_kv_heads, head_size, v_head_size)")
    return specs
