"""Memory plans: bytes of a token, blocks and sequences that fit, and wasted slots.

Integers are exact. A layer keeps ``num_kv_heads * (head_size + v_head_size)`` elements
of a token; a block is ``block_size`` tokens of all layers; a sequence of ``L`` tokens holds
``ceil(L / block_size)`` blocks, the last of them partly filled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from ..errors import OutOfBlocksError, RequestError, ShapeError
from .lengths import LengthDistribution


@dataclass(frozen=True)
class LayerKind:
    """Attention layers that keep the same of a token."""

    name: str
    num_layers: int
    num_heads: int
    """Query heads; the cache does not depend on them."""
    num_kv_heads: int
    head_size: int
    v_head_size: int
    sliding_window: int | None = None
    """Number of visible keys, the query's own included; ``None`` sees all."""
    is_shared: bool = False
    """Whether they read the keys and values of other layers and keep none themselves."""

    def num_visible(self, num_tokens: int) -> int:
        """How many of a sequence's tokens its next token looks at."""
        return min(num_tokens, self.sliding_window or num_tokens)


@dataclass(frozen=True)
class Occupancy:
    """A full cache with sequences of some length distribution, in blocks and without them.

    The comparison is with an engine that reserves ``max_model_len`` slots in one piece for every
    sequence, as all did before paging.
    """

    num_sequences: float
    """Sequences that fit on average: ``num_blocks / E[ceil(L / block_size)]``."""
    num_unused: float
    """Slots of a sequence's last block that hold no token, on average."""
    waste: float
    """Share of the held slots that hold no token: ``num_unused / (num_unused + E[L])``."""
    num_reserved: int
    """Sequences that fit when each reserves ``max_model_len`` slots."""
    reserved_waste: float
    """Share of the reserved slots that hold no token: ``1 - E[L] / max_model_len``."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a paged cache divides the memory that the weights leave; ``plan_memory`` makes one."""

    layers: tuple[LayerKind, ...]
    memory_bytes: int
    weight_bytes: int
    element_bytes: int
    block_size: int
    max_model_len: int
    scale_bytes: int = 0
    """Of the scales of a token's KV head: its key's and its value's."""

    @property
    def cache_bytes(self) -> int:
        """``memory_bytes - weight_bytes``."""
        return self.memory_bytes - self.weight_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return sum(map(self.layer_bytes, self.layers))

    def layer_bytes(self, kind: LayerKind) -> int:
        """Bytes of a token's keys and values, scales included, in layers of a kind."""
        if kind.is_shared:
            return 0
        head_bytes = self.element_bytes * (kind.head_size + kind.v_head_size) + self.scale_bytes
        return kind.num_layers * kind.num_kv_heads * head_bytes

    @property
    def block_bytes(self) -> int:
        """``block_size * bytes_per_token``."""
        return self.block_size * self.bytes_per_token

    @property
    def num_blocks(self) -> int:
        """Whole blocks that fit: ``cache_bytes // block_bytes``."""
        return self.cache_bytes // self.block_bytes

    @property
    def num_tokens(self) -> int:
        """``num_blocks * block_size``."""
        return self.num_blocks * self.block_size

    @property
    def num_full_sequences(self) -> int:
        """Sequences of ``max_model_len`` tokens that fit, each in whole blocks."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)

    def visible_bytes(self, num_tokens: int) -> int:
        """Bytes that the next token of a sequence reads: sliding layers look no further back.

        The rest of what a sequence holds lies behind the windows.
        """
        return sum(self.layer_bytes(kind) * kind.num_visible(num_tokens) for kind in self.layers)

    def occupancy(self, lengths: LengthDistribution) -> Occupancy:
        """How well sequences of these lengths fill the cache.

        Raises:
            RequestError: Some are longer than ``max_model_len``.
        """
        if lengths.longest > self.max_model_len:
            raise RequestError(
                f"a length of {lengths.longest} is more than max_model_len={self.max_model_len}"
            )
        mean, blocks = lengths.mean, lengths.mean_blocks(self.block_size)
        unused = blocks * self.block_size - mean
        return Occupancy(
            num_sequences=self.num_blocks / blocks,
            num_unused=unused,
            waste=unused / (blocks * self.block_size),
            num_reserved=self.cache_bytes // (self.max_model_len * self.bytes_per_token),
            reserved_waste=1 - mean / self.max_model_len,
        )


def plan_memory(
    layers: Sequence[LayerKind],
    *,
    memory_bytes: int,
    max_model_len: int,
    weight_bytes: int = 0,
    element_bytes: int = 2,
    block_size: int = 16,
    scale_bytes: int = 0,
) -> MemoryPlan:
    """Plan a cache.

    Args:
        layers: The model's attention layers by kind.
        memory_bytes: For weights and cache together.
        max_model_len: The most tokens of a sequence.
        weight_bytes: What the weights take of it.
        element_bytes: Size of an element of the cache: 4 for float32, 2 for float16 and bfloat16,
            1 for float8 and int8.
        block_size: Tokens per block, 1 to 256.
        scale_bytes: Of the scales of a token's KV head. A cache of 8 bits keeps two float32
            numbers there, 8 bytes.

    Raises:
        OutOfBlocksError: Not one block fits beside the weights; the message says what is missing.
        ShapeError: ``block_size`` or ``max_model_len`` is out of range.

    Examples:
        >>> llama_8b = LayerKind("full", 32, 32, num_kv_heads=8, head_size=128, v_head_size=128)
        >>> plan = plan_memory([llama_8b], memory_bytes=16 * 2**30, max_model_len=8192)
        >>> plan.bytes_per_token, plan.num_blocks, plan.num_full_sequences
        (131072, 8192, 16)
    """
    if not 1 <= block_size <= 256:
        raise ShapeError(f"block_size is {block_size}, expected 1 to 256")
    if max_model_len < 1:
        raise ShapeError(f"max_model_len is {max_model_len}, expected at least 1")
    plan = MemoryPlan(
        tuple(layers), memory_bytes, weight_bytes, element_bytes, block_size, max_model_len,
        scale_bytes,
    )  # fmt: skip
    if plan.cache_bytes < plan.block_bytes:
        missing = plan.block_bytes - plan.cache_bytes
        raise OutOfBlocksError(
            f"{format_bytes(memory_bytes)} of memory hold no cache: the weights take "
            f"{format_bytes(weight_bytes)} and one block of {block_size} tokens "
            f"{format_bytes(plan.block_bytes)}, so {format_bytes(missing)} are missing"
        )
    return plan


_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """A size as people write it, in bytes: ``M``, ``MB`` count by 1000, ``Mi``, ``MiB`` by 1024.

    Raises:
        RequestError: It is not a size, or not even one byte.

    Examples:
        >>> parse_bytes("16GiB"), parse_bytes("512MB"), parse_bytes("1.5G"), parse_bytes("4096")
        (17179869184, 512000000, 1500000000, 4096)
    """
    match = _SIZE.fullmatch(text)
    size = 0
    if match and (match[2] or not match[3]):
        base = 1024 if match[3] else 1000
        size = int(Decimal(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if size < 1:
        raise RequestError(
            f"{text!r} is not a memory size: expected one such as 16GiB, 512MB or 1.5G"
        )
    return size


def format_bytes(size: int) -> str:
    """A size with a unit that suits it, to three digits or more.

    Examples:
        >>> format_bytes(131072), format_bytes(16 * 2**30), format_bytes(900)
        ('128 KiB', '16 GiB', '900 bytes')
    """
    if size < 1024:
        return f"{size} bytes"
    power = min((size.bit_length() - 1) // 10, 4)
    value = size / 1024**power
    digits = max(0, 3 - len(str(int(value))))
    text = f"{value:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {'KMGT'[power - 1]}iB"
