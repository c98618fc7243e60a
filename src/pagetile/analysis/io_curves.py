"""Bytes of one head of attention over a range of lengths, and where the curves cross."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import RequestError
from .attention_io import AttentionShape, compulsory, longest_resident, standard, tile_bytes, tiled

PER_OCTAVE = 12  # points of a curve
MOST_CURVES = 7  # as many as have colours of their own
MOST_TILES = 1 << 14  # each may have to be looked at, with all before it: seconds


@dataclass(frozen=True)
class Curve:
    """Bytes at each length."""

    name: str
    count: Callable[[int], int]
    """Bytes at any length."""
    bytes: tuple[int, ...]
    tile_m: int = 0
    """Rows of a query tile; 0 if there are no tiles."""
    on_chip_bytes: int = 0
    worse_from: int | None = None
    """The least length from which on it is more than standard attention's, to the range's end."""


@dataclass(frozen=True)
class IoCurves:
    """What ``io_curves`` counts; plain numbers, for a table or a picture."""

    title: str
    lengths: tuple[int, ...]
    standard: Curve
    compulsory: Curve
    tiled: tuple[Curve, ...]
    longest_resident: int
    """The most keys of which one head's K and V fit on chip together."""

    def where_worse(self, curve: Curve) -> str:
        """In words, where a curve is above standard attention's."""
        if curve.worse_from is None:
            return "never"
        return "everywhere" if curve.worse_from == self.lengths[0] else f"from {curve.worse_from:,}"


def io_curves(
    *,
    head_size: int,
    tiles_m: Sequence[int],
    tile_n: int = 64,
    shortest: int = 64,
    longest: int = 16384,
    causal: bool = False,
    element_bytes: int = 2,
    on_chip_bytes: int = 232_448,
    v_head_size: int | None = None,
    group: int = 1,
    outer: Literal["q", "kv"] = "q",
) -> IoCurves:
    """Count one KV head's bytes for each of some query tiles.

    Args:
        head_size: Of keys, and of values if nothing else is said.
        tiles_m: Rows of query tiles to compare.
        tile_n: Keys of a K/V tile.
        shortest: Where the range of lengths begins.
        longest: Where it ends.
        causal: Whether tiles without a visible key are skipped; standard attention skips none.
        element_bytes: Of an element.
        on_chip_bytes: What one program may hold; by default a Hopper GPU's.
        v_head_size: Of values.
        group: Query heads of the KV head.
        outer: What stays while the other passes: query tiles, or K/V tiles (``tiled``).

    Raises:
        RequestError: The range is empty, or there are no tiles, or too many of them.

    Examples:
        >>> curves = io_curves(head_size=128, tiles_m=[48, 64, 128])
        >>> [curve.worse_from for curve in curves.tiled]
        [145, None, None]
    """
    if not 1 <= shortest < longest:
        raise RequestError(f"lengths from {shortest} to {longest}: expected two such as 64, 16384")
    if not 1 <= len(tiles_m) <= MOST_CURVES or min(tiles_m) < 1:
        raise RequestError(
            f"tiles of {list(tiles_m)} rows: expected up to {MOST_CURVES} sizes, such as 64, 128"
        )
    least = min(tiles_m) if outer == "q" else tile_n
    most = -(-longest // least)
    if most > MOST_TILES:
        raise RequestError(
            f"{longest} rows in tiles of {least} are {most:,} tiles, expected at most "
            f"{MOST_TILES:,}: use larger tiles or shorter lengths"
        )

    def shape(length: int) -> AttentionShape:
        return AttentionShape(
            length, head_size, v_head_size=v_head_size or head_size, num_heads=group,
            num_kv_heads=1, causal=causal, element_bytes=element_bytes,
        )  # fmt: skip

    lengths = _lengths(shortest, longest)
    base = _curve("standard", lambda n: standard(shape(n)).bytes, lengths)
    curves = []
    for tile_m in tiles_m:
        count = _counter(shape, tile_m, tile_n, outer)
        staying = tile_m if outer == "q" else tile_n
        curves.append(
            Curve(
                f"tiles of {tile_m} rows",
                count,
                tuple(map(count, lengths)),
                tile_m,
                tile_bytes(shape(1), tile_m, tile_n),
                _worse_from(count, base.count, staying, shortest, longest),
            )
        )
    return IoCurves(
        f"Bytes of {'causal ' * causal}attention, {_title(shape(1))}"
        f"{element_bytes} bytes an element{', K/V tiles stay' * (outer == 'kv')}",
        lengths,
        base,
        _curve("compulsory", lambda n: compulsory(shape(n)).bytes, lengths),
        tuple(curves),
        longest_resident(shape(1), on_chip_bytes),
    )


def _title(shape: AttentionShape) -> str:
    group = f"{shape.num_heads} query heads a KV head, " * (shape.num_heads > 1)
    values = f" and {shape.v_head_size} of values" * (shape.v_head_size != shape.head_size)
    return f"{group}head size {shape.head_size}{values}, "


def _curve(name: str, count: Callable[[int], int], lengths: Sequence[int]) -> Curve:
    return Curve(name, count, tuple(map(count, lengths)))


def _counter(
    shape: Callable[[int], AttentionShape], tile_m: int, tile_n: int, outer: Literal["q", "kv"]
) -> Callable[[int], int]:
    return lambda length: tiled(shape(length), tile_m, tile_n, outer=outer).bytes


def _lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """Evenly spaced on a logarithmic scale, both ends included."""
    ratio = longest / shortest
    steps = max(1, round(PER_OCTAVE * math.log2(ratio)))
    return tuple(sorted({round(shortest * ratio ** (i / steps)) for i in range(steps + 1)}))


def _worse_from(
    count: Callable[[int], int], base: Callable[[int], int], tile: int, shortest: int, longest: int
) -> int | None:
    """Look down from the longest, one number of tiles that stay after the other.

    For a fixed number of them the tiled bytes are concave in the length and the standard
    ones convex, so a difference that is positive at both ends is positive between them.
    """

    def is_worse(length: int) -> bool:
        return count(length) > base(length)

    end = longest
    while end >= shortest:
        start = max(shortest, (end - 1) // tile * tile + 1)
        if not (is_worse(start) and is_worse(end)):
            best = next(length for length in range(end, start - 1, -1) if not is_worse(length))
            return best + 1 if best < longest else None
        end = start - 1
    return shortest
