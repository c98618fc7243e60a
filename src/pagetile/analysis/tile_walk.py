"""Which K/V tiles a query tile visits, and which of them need a mask: exact for ragged edges.

Row ``t`` of ``query_len`` stands at position ``key_len - query_len + t`` and sees the keys::

    position - sliding_window < key            (sliding_window, if there is one)
    key <= position                            (causal)

The keys that a tile of rows sees are one range, so it walks from one K/V tile to another without
gaps. A tile is *full* if every row sees every key of it, *masked* if some do not, or if it ends
past the last key, and *skipped* if no row sees any::

    causal, 5 x 5 tiles         causal, window of 2 tiles
    m . . . .                   m . . . .
    f m . . .                   f m . . .
    f f m . .                   m f m . .       m masked
    f f f m .                   . m f m .       f full
    f f f f m                   . . m f m       . skipped
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError

FULL, MASKED, SKIPPED = "full", "masked", "skipped"


@dataclass(frozen=True)
class TileWalk:
    """The tiles of one head's ``query_len`` x ``key_len`` scores.

    Examples:
        >>> walk = TileWalk(query_len=300, key_len=300, tile_m=64, tile_n=64, causal=True)
        >>> walk.num_query_tiles, list(walk.visits(2))
        (5, [0, 1, 2])
        >>> [walk.kind(2, kv_tile) for kv_tile in range(5)]
        ['full', 'full', 'masked', 'skipped', 'skipped']
    """

    query_len: int
    key_len: int
    tile_m: int
    """Rows of a query tile."""
    tile_n: int
    """Keys of a K/V tile."""
    causal: bool = False
    sliding_window: int | None = None
    """Number of visible keys, the query's own included; ``None`` sees all."""

    def __post_init__(self) -> None:
        for name in ("query_len", "key_len", "tile_m", "tile_n", "sliding_window"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ShapeError(f"{name} is {size}, expected at least 1")

    @property
    def num_query_tiles(self) -> int:
        """``ceil(query_len / tile_m)``."""
        return -(-self.query_len // self.tile_m)

    @property
    def num_kv_tiles(self) -> int:
        """``ceil(key_len / tile_n)``."""
        return -(-self.key_len // self.tile_n)

    def rows(self, query_tile: int) -> range:
        """The rows of a query tile; fewer in the last one if it is ragged."""
        return range(query_tile * self.tile_m, min((query_tile + 1) * self.tile_m, self.query_len))

    def keys(self, kv_tile: int) -> range:
        """The keys of a K/V tile; fewer in the last one if it is ragged."""
        return range(kv_tile * self.tile_n, min((kv_tile + 1) * self.tile_n, self.key_len))

    def visible(self, row: int) -> range:
        """The keys that a row sees."""
        position = self.key_len - self.query_len + row
        first = 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)
        end = min(self.key_len, position + 1) if self.causal else self.key_len
        return range(min(first, self.key_len), max(first, end))

    def visits(self, query_tile: int) -> range:
        """The K/V tiles that a query tile walks over, in order."""
        starts, stops = self._spans
        return range(int(starts[query_tile]), int(stops[query_tile]))

    @cached_property
    def _spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first K/V tile of every query tile, and the one after its last.

        Both ends of what a row sees move forward with the row, and ranges leave no gaps: so a
        tile sees what lies between its first row's first key and its last row's last.
        """
        first = np.arange(self.num_query_tiles) * self.tile_m + self.key_len - self.query_len
        starts, stops = np.zeros_like(first), np.full_like(first, self.key_len)
        if self.sliding_window is not None:
            starts = np.maximum(0, first - self.sliding_window + 1)
        if self.causal:
            stops = np.clip(first + self.tile_m, 0, self.key_len)
        starts, empty = starts // self.tile_n, stops <= starts
        return starts, np.where(empty, starts, -(-stops // self.tile_n))

    def kind(self, query_tile: int, kv_tile: int) -> str:
        """``"full"``, ``"masked"`` or ``"skipped"``."""
        if kv_tile not in self.visits(query_tile):
            return SKIPPED
        rows, keys = self.rows(query_tile), self.keys(kv_tile)
        first, last = self.visible(rows[0]), self.visible(rows[-1])
        is_seen = last.start <= keys.start and keys.stop <= first.stop
        return FULL if is_seen and len(keys) == self.tile_n else MASKED

    def walk(self) -> Iterator[tuple[int, int, str]]:
        """Every visit in order: query tile, K/V tile, kind."""
        for query_tile in range(self.num_query_tiles):
            for kv_tile in self.visits(query_tile):
                yield query_tile, kv_tile, self.kind(query_tile, kv_tile)

    @property
    def counts(self) -> Counter[str]:
        """How many tiles are of each kind."""
        counts = Counter(kind for *_, kind in self.walk())
        counts[SKIPPED] = self.num_query_tiles * self.num_kv_tiles - counts.total()
        return counts

    @property
    def num_key_rows(self) -> int:
        """Rows of K (and of V) that all query tiles read together, the query tiles outside."""
        starts, stops = self._spans
        ends = np.minimum(stops * self.tile_n, self.key_len)
        return int(np.sum(ends - starts * self.tile_n, where=stops > starts))

    @property
    def num_query_rows(self) -> int:
        """Rows of Q that all K/V tiles read together, the K/V tiles outside."""
        starts, stops = self._spans
        ragged = self.num_query_tiles * self.tile_m - self.query_len
        return int(np.sum(stops - starts) * self.tile_m - (stops - starts)[-1] * ragged)

    @property
    def num_visible(self) -> int:
        """Scores that count."""
        return sum(len(self.visible(row)) for row in range(self.query_len))

    @property
    def num_computed(self) -> int:
        """Scores that whole tiles compute, those past ragged edges included."""
        starts, stops = self._spans
        return self.tile_m * self.tile_n * int(np.sum(stops - starts))
