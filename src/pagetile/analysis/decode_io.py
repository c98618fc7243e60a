"""Bytes of one decode step over a paged cache, with grouped and with ungrouped query heads."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ShapeError
from .traffic import Stream, Traffic

FLOAT32 = INT32 = 4


@dataclass(frozen=True)
class DecodeShape:
    """One new token for each of some sequences.

    Example:
        >>> shape = DecodeShape((4096,) * 64, num_heads=32, num_kv_heads=8, head_size=128)
        >>> shape.kv_bytes
        1073741824
        >>> round(seconds_at(shape, bytes_per_second=4.42e12) * 1e6)  # on an H200
        243
    """

    seq_lens: tuple[int, ...]
    """All keys of each sequence, the new token's included."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int = 0
    """0 is ``head_size``."""
    block_size: int = 16
    sliding_window: int | None = None
    """Number of visible keys, the query's own included; ``None`` sees all."""
    element_bytes: int = 2
    """Of queries and results."""
    cache_bytes: int = 0
    """Of an element of the cache; 0 is ``element_bytes``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_head_size", self.v_head_size or self.head_size)
        object.__setattr__(self, "cache_bytes", self.cache_bytes or self.element_bytes)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if min(self.seq_lens, default=0) < 0 or self.block_size < 1:
            raise ShapeError(
                f"seq_lens start at {min(self.seq_lens, default=0)} and block_size is "
                f"{self.block_size}, expected at least 0 and 1"
            )

    @property
    def num_visible(self) -> int:
        """Keys that the new tokens see."""
        return sum(min(length, self.sliding_window or length) for length in self.seq_lens)

    @property
    def num_table_entries(self) -> int:
        """Blocks that hold a visible key."""
        firsts = (max(0, n - (self.sliding_window or n)) // self.block_size for n in self.seq_lens)
        ends = (-(-n // self.block_size) for n in self.seq_lens)
        return sum(end - first for first, end in zip(firsts, ends, strict=True))

    @property
    def kv_bytes(self) -> int:
        """Of the visible keys and values, read once."""
        sizes = self.head_size + self.v_head_size
        return self.num_visible * self.num_kv_heads * sizes * self.cache_bytes


def compulsory(shape: DecodeShape, *, packs_groups: bool = True) -> Traffic:
    """Every tensor once.

    Args:
        shape: The step.
        packs_groups: Whether the query heads that share a KV head are computed together. If each
            is a program of its own, as in vLLM's first kernels, every one of them asks for the
            group's keys and values again: traffic that only caches can take off memory.

    Example:
        >>> shape = DecodeShape((4096,) * 64, num_heads=32, num_kv_heads=8, head_size=128)
        >>> compulsory(shape, packs_groups=False).bytes / compulsory(shape).bytes
        3.99...
    """
    readers = shape.num_kv_heads if packs_groups else shape.num_heads
    rows, keys = len(shape.seq_lens) * shape.num_heads, shape.num_visible * readers
    return Traffic(
        (
            Stream("block_tables", shape.num_table_entries, INT32),
            Stream("q", rows * shape.head_size, shape.element_bytes),
            Stream("k_cache", keys * shape.head_size, shape.cache_bytes),
            Stream("v_cache", keys * shape.v_head_size, shape.cache_bytes),
            Stream("out", rows * shape.v_head_size, shape.element_bytes, is_write=True),
            Stream("lse", rows, FLOAT32, is_write=True),
        )
    )


def seconds_at(shape: DecodeShape, bytes_per_second: float) -> float:
    """The floor of a step's time on memory of this bandwidth."""
    return compulsory(shape).bytes / bytes_per_second
