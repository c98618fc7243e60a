"""Random shapes of attention, by classes in which another library is, or was, faster.

A class draws shapes of one kind from a seed: the same seed gives the same shapes on every machine.
Lengths are drawn for a GPU; ``scale`` shrinks them for a CPU and for tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
_BLOCK_SIZES = (16, 16, 32, 64, 128)


@dataclass(frozen=True)
class SweepShape:
    """One call of ``paged_attention``, or of ``attention`` where ``block_size`` is 0."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    block_size: int
    kv_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        """In words."""
        lengths = ", ".join(
            f"{count} x {query}/{seq}" if count > 1 else f"{query}/{seq}"
            for (query, seq), count in self._runs()[:6]
        )
        more = ", ..." if len(self._runs()) > 6 else ""
        sizes = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        narrow = f"/{self.v_head_size}" if self.v_head_size != self.head_size else ""
        kept = f"blocks of {self.block_size}" if self.block_size else "dense"
        kind = str(self.kv_dtype).removeprefix("torch.")
        return f"{lengths}{more} new/keys, {sizes}{narrow}, {kept}, {kind}"

    def _runs(self) -> list[tuple[tuple[int, int], int]]:
        counts: dict[tuple[int, int], int] = {}
        for pair in zip(self.query_lens, self.seq_lens, strict=True):
            counts[pair] = counts.get(pair, 0) + 1
        return list(counts.items())

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        width = self.num_kv_heads * (self.head_size + self.v_head_size)
        return sum(self.seq_lens) * width * self.kv_dtype.itemsize


Draw = Callable[[random.Random, float], SweepShape]


@dataclass(frozen=True)
class SweepClass:
    """Shapes of one kind, and the peers of pagetile in them."""

    name: str
    about: str
    draw: Draw
    against: str = "peers"
    """``"peers"``: other libraries. ``"bf16"``: the same call over a bfloat16 cache.
    ``"bandwidth"``: only reading the same pages. ``"matmul"``: torch's."""
    worst: float = 0.95
    """Target of the worst ratio."""
    median: float = 1.03
    """Target of the median ratio."""


def draw_shapes(kind: SweepClass, seed: int, count: int, scale: float = 1.0) -> list[SweepShape]:
    """Return a class's shapes for a seed.

    Examples:
        >>> shapes = draw_shapes(CLASSES["decode-any-size"], seed=0, count=2, scale=0.01)
        >>> shapes == draw_shapes(CLASSES["decode-any-size"], seed=0, count=2, scale=0.01)
        True
    """
    return [_draw_one(kind, seed, number, scale) for number in range(count)]


def _draw_one(kind: SweepClass, seed: int, number: int, scale: float) -> SweepShape:
    return kind.draw(random.Random(f"{kind.name} {seed} {number}"), scale)


class DrawnShape(NamedTuple):
    """A shape, and what it takes to draw it again."""

    kind: SweepClass
    seed: int
    number: int
    """Its place among the class's shapes of the seed."""
    shape: SweepShape


def draw_in_turns(
    kinds: Sequence[SweepClass], seed: int, count: int, scale: float = 1.0
) -> list[DrawnShape]:
    """Return ``count`` shapes of each class, one of every class after the other.

    So classes have as many shapes each where time does not suffice for all.

    Examples:
        >>> kinds = [CLASSES["mixed"], CLASSES["uneven"]]
        >>> [(drawn.kind.name, drawn.number) for drawn in draw_in_turns(kinds, seed=0, count=2)]
        [('mixed', 0), ('uneven', 0), ('mixed', 1), ('uneven', 1)]
    """
    return [
        DrawnShape(kind, seed, number, _draw_one(kind, seed, number, scale))
        for number in range(count)
        for kind in kinds
    ]


def redraw_worst(
    record: Mapping[str, Any], kinds: Sequence[SweepClass], count: int, scale: float = 1.0
) -> list[DrawnShape]:
    """Return up to ``count`` shapes of each class from a record of a sweep, the worst first.

    Raises:
        ValueError: The record does not say how its shapes were drawn.
    """
    by_class = {case["name"].removeprefix("sweep-"): case for case in record["cases"]}
    found = []
    for kind in kinds:
        details = by_class.get(kind.name, {}).get("details", [])
        if any("number" not in detail for detail in details):
            raise ValueError("its shapes have no seed and number: make the record again")
        for detail in sorted(details, key=lambda detail: detail["ratio"])[:count]:
            seed, number = detail["seed"], detail["number"]
            shape = _draw_one(kind, seed, number, scale)
            found.append(DrawnShape(kind, seed, number, shape))
    return found


def _between(rng: random.Random, low: int, high: int, scale: float) -> int:
    """A length, as often of one power of two as of another."""
    exact: float = low * (high / low) ** rng.random() * scale
    return max(1, round(exact))


def _heads(rng: random.Random, groups: tuple[int, ...], most_kv: int = 8) -> tuple[int, int]:
    num_kv_heads = rng.choice([n for n in (1, 2, 4, 8, 16, 32) if n <= most_kv])
    return num_kv_heads * rng.choice(groups), num_kv_heads


def _decode(
    rng: random.Random, lengths: list[int], heads: tuple[int, int], size: int
) -> SweepShape:
    ones = (1,) * len(lengths)
    return SweepShape(ones, tuple(lengths), *heads, size, size, rng.choice(_BLOCK_SIZES))


def _chunked_prefill(rng: random.Random, scale: float) -> SweepShape:
    queries, keys = [], []
    for _ in range(rng.choice([1, 1, 2, 4])):
        new = _between(rng, 1024, 4096, scale)
        queries.append(new)
        keys.append(new + round(new * rng.uniform(2, 8)))
    heads = _heads(rng, (4, 4, 7, 8))
    size = rng.choice([64, 128, 128])
    return SweepShape(tuple(queries), tuple(keys), *heads, size, size, rng.choice(_BLOCK_SIZES))


def _narrow_values(rng: random.Random, scale: float) -> SweepShape:
    num_seqs = rng.choice([1, 2, 4])
    length = _between(rng, 1024, 8192, scale)
    heads = rng.choice([16, 32, 64])
    lengths = (length,) * num_seqs
    return SweepShape(lengths, lengths, heads, heads, 192, 128, 0)


def _prefill_8_bit(rng: random.Random, scale: float) -> SweepShape:
    lengths = tuple(_between(rng, 512, 8192, scale) for _ in range(rng.choice([1, 2, 4, 8])))
    size = rng.choice([64, 128, 128])
    heads = _heads(rng, (1, 4, 8))
    return SweepShape(lengths, lengths, *heads, size, size, rng.choice(_BLOCK_SIZES), E4M3)


def _short_queries(rng: random.Random, scale: float) -> SweepShape:
    drafts = rng.randint(5, 8)
    num_seqs = rng.choice([1, 4, 16, 64])
    lengths = tuple(_between(rng, 512, 16384, scale) + drafts for _ in range(num_seqs))
    heads = _heads(rng, (4, 6, 7, 8))
    size = rng.choice([64, 128, 128])
    return SweepShape((drafts,) * num_seqs, lengths, *heads, size, size, rng.choice(_BLOCK_SIZES))


def _long_and_few(rng: random.Random, scale: float) -> SweepShape:
    lengths = [_between(rng, 65536, 524288, scale) for _ in range(rng.choice([1, 1, 2]))]
    return _decode(rng, lengths, (rng.choice([1, 2, 4, 8, 16]), 1), rng.choice([64, 128, 256]))


def _uneven(rng: random.Random, scale: float) -> SweepShape:
    lengths = [_between(rng, 16, 65536, scale) for _ in range(rng.randint(2, 8))]
    return _decode(rng, lengths, _heads(rng, (7,)), rng.choice([64, 128, 128]))


def _mixed(rng: random.Random, scale: float) -> SweepShape:
    decodes = [_between(rng, 128, 8192, scale) for _ in range(rng.randint(8, 64))]
    prompts = [_between(rng, 256, 2048, scale) for _ in range(rng.randint(1, 3))]
    heads = _heads(rng, (4, 7, 8))
    size = rng.choice([64, 128, 128])
    return SweepShape(
        (*[1] * len(decodes), *prompts), (*decodes, *prompts), *heads, size, size,
        rng.choice(_BLOCK_SIZES),
    )  # fmt: skip


def _decode_any_size(rng: random.Random, scale: float, size: int | None = None) -> SweepShape:
    num_seqs = rng.choice([16, 32, 64, 128])
    length = _between(rng, 2048, 8192, scale)
    heads = _heads(rng, (1, 4, 7, 8))
    return _decode(rng, [length] * num_seqs, heads, size or 16 * rng.randint(2, 16))


def _decode_80(rng: random.Random, scale: float) -> SweepShape:
    return _decode_any_size(rng, scale, 80)


def _scores(rng: random.Random, scale: float) -> SweepShape:
    length = rng.choice([49, 64, 144, 196, 256, 343])
    heads, size = rng.choice([3, 6, 12, 24]), rng.choice([16, 32, 64])
    lengths = (length,) * rng.choice([1, 2, 4, 8])
    return SweepShape(lengths, lengths, heads, heads, size, size, 0, torch.float32)


CLASSES = {
    kind.name: kind
    for kind in (
        SweepClass(
            "chunked-prefill",
            "a thousand or more new tokens over a cached prefix 2 to 8 times as long",
            _chunked_prefill,
        ),
        SweepClass("narrow-values", "prefill with keys of 192 and values of 128", _narrow_values),
        SweepClass(
            "prefill-8-bit",
            "prefill over e4m3 caches, beside bfloat16",
            _prefill_8_bit,
            "bf16",
            0.8,
            0.8,
        ),
        SweepClass("short-queries", "verification of 5 to 8 drafts", _short_queries),
        SweepClass("long-and-few", "one or two very long sequences, one KV head", _long_and_few),
        SweepClass("uneven", "few sequences of very uneven lengths, groups of 7", _uneven),
        SweepClass("mixed", "prompts and decodes in one call", _mixed),
        SweepClass(
            "decode-any-size",
            "decode of any head size that is a multiple of 16, beside reading the same pages",
            _decode_any_size,
            "bandwidth",
            0.88,
            0.88,
        ),
        SweepClass(
            "decode-80",
            "decode of heads of 80, beside reading the same pages",
            _decode_80,
            "bandwidth",
            0.88,
            0.88,
        ),
        SweepClass("scores", "attention_scores on a CPU, beside torch.matmul", _scores, "matmul"),
    )
}
