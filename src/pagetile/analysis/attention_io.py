"""Bytes of dense attention, counted exactly: compulsory, tiled in both orders, unfused.

Three numbers, and what each of them is:

- **compulsory**: every tensor once. No kernel moves less between memory and chip.
- **tiled**: what the tiles of a walk load and store. A cache may answer repeated reads, so this is
  the multiprocessors' traffic; memory sees something between this and the first.
- **standard**: three kernels with the scores in memory between them.

With ``N`` keys and queries, ``d`` the head size, ``B`` the rows of the outer tile, in elements and
without the log-sum-exp::

    compulsory           4 N d
    tiled, Q outside     2 N d + 2 N d ceil(N / B)           re-reads K and V
    tiled, K/V outside   2 N d + (3 N d + 4 N) ceil(N / B)   re-reads Q; out, m and l come and go
    standard             4 N d + 4 N²

So tiling is linear in ``N`` where one tile holds all rows, and quadratic beyond: it divides the
quadratic part of standard attention by ``2 B / d`` (Dao et al. 2022, theorem 2, has the
``N² d² / M`` with ``M`` the elements on chip: ``B`` is proportional to ``M / d``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ShapeError
from .tile_walk import TileWalk
from .traffic import Stream, Traffic

FLOAT32 = 4


@dataclass(frozen=True)
class AttentionShape:
    """Dense attention, its sizes and element type.

    Examples:
        >>> shape = AttentionShape(1024, 64)
        >>> shape.key_len, shape.v_head_size
        (1024, 64)
        >>> compulsory(shape).bytes  # q, k, v and out of 2 bytes, log-sum-exp of 4
        528384
    """

    query_len: int
    head_size: int
    key_len: int = 0
    """0 is ``query_len``."""
    v_head_size: int = 0
    """0 is ``head_size``."""
    num_heads: int = 1
    num_kv_heads: int = 0
    """0 is ``num_heads``."""
    batch: int = 1
    causal: bool = False
    sliding_window: int | None = None
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name, default in (
            ("key_len", self.query_len),
            ("v_head_size", self.head_size),
            ("num_kv_heads", self.num_heads),
        ):
            object.__setattr__(self, name, getattr(self, name) or default)
        sizes = "query_len key_len head_size v_head_size num_heads batch element_bytes"
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )

    def walk(self, tile_m: int, tile_n: int) -> TileWalk:
        """How tiles walk over one head's scores."""
        return TileWalk(
            self.query_len, self.key_len, tile_m, tile_n, self.causal, self.sliding_window
        )

    @property
    def num_scores(self) -> int:
        """Scores that count: visible keys of all rows, heads and sequences."""
        walk = self.walk(self.query_len, self.key_len)
        return self.batch * self.num_heads * walk.num_visible


def compulsory(shape: AttentionShape) -> Traffic:
    """Every tensor once: queries, keys, values, results and log-sum-exps."""
    keys = shape.batch * shape.num_kv_heads * shape.key_len
    rows = shape.batch * shape.num_heads * shape.query_len
    return _attention_streams(shape, rows, keys, keys)


def tiled(
    shape: AttentionShape, tile_m: int, tile_n: int, *, outer: Literal["q", "kv"] = "q"
) -> Traffic:
    """What the tiles load and store; every query head reads K and V by itself.

    Args:
        shape: The problem.
        tile_m: Rows of a query tile.
        tile_n: Keys of a K/V tile.
        outer: ``"q"``: a query tile stays and K/V tiles pass, as in FlashAttention-2 and here.
            ``"kv"``: a K/V tile stays and query tiles pass with their running results, as in the
            first FlashAttention.

    Examples:
        >>> tiled(AttentionShape(1024, 64), 64, 64).elements
        2229248
        >>> tiled(AttentionShape(1024, 64), 64, 200, outer="kv").elements
        1335296
    """
    walk = shape.walk(tile_m, tile_n)
    heads = shape.batch * shape.num_heads
    if outer == "q":
        keys = heads * walk.num_key_rows
        return _attention_streams(shape, heads * shape.query_len, keys, keys)
    if outer != "kv":
        raise ShapeError(f"outer is {outer!r}, expected 'q' or 'kv'")
    size, keys = shape.element_bytes, heads * len(_seen_keys(walk))
    rows = heads * walk.num_query_rows
    return Traffic(
        (
            Stream("k", keys * shape.head_size, size),
            Stream("v", keys * shape.v_head_size, size),
            Stream("q", rows * shape.head_size, size),
            Stream("out", rows * shape.v_head_size, size),
            Stream("m and l", 2 * rows, FLOAT32),
            Stream("out", rows * shape.v_head_size, size, is_write=True),
            Stream("m and l", 2 * rows, FLOAT32, is_write=True),
        )
    )


def standard(shape: AttentionShape) -> Traffic:
    """Three kernels, the scores of all pairs in memory between them.

    Causality and windows save nothing here.

    Examples:
        >>> standard(AttentionShape(1024, 64)).elements
        4456448
    """
    heads, size = shape.batch * shape.num_heads, shape.element_bytes
    rows, keys = heads * shape.query_len, heads * shape.key_len
    scores = rows * shape.key_len
    return Traffic(
        (
            Stream("q", rows * shape.head_size, size),
            Stream("k", keys * shape.head_size, size),
            Stream("scores", scores, size, is_write=True),
            Stream("softmax", scores, size),
            Stream("softmax", scores, size, is_write=True),
            Stream("weights", scores, size),
            Stream("v", keys * shape.v_head_size, size),
            Stream("out", rows * shape.v_head_size, size, is_write=True),
        )
    )


def tile_bytes(shape: AttentionShape, tile_m: int, tile_n: int, *, stages: int = 2) -> int:
    """Bytes on chip for one query tile and ``stages`` K/V tiles in flight.

    Query tile, K/V tiles, and in float32 the running result, one tile of scores, and ``m`` and
    ``l`` of every row. No length occurs in it; head size and element type do.

    Examples:
        >>> tile_bytes(AttentionShape(1024, 64), 64, 64)
        74240
        >>> tile_bytes(AttentionShape(8192, 64), 64, 64)
        74240
    """
    sizes = shape.head_size + shape.v_head_size
    loaded = tile_m * shape.head_size + stages * tile_n * sizes
    computed = tile_m * shape.v_head_size + tile_m * tile_n + 2 * tile_m
    return loaded * shape.element_bytes + computed * FLOAT32


def longest_resident(shape: AttentionShape, on_chip_bytes: int) -> int:
    """The most keys of one head whose K and V fit into so many bytes together.

    Up to there nothing is read twice, whatever the query tiles: every window of a Swin fits.

    Examples:
        >>> longest_resident(AttentionShape(1, 64), 227 * 1024)
        908
    """
    return on_chip_bytes // ((shape.head_size + shape.v_head_size) * shape.element_bytes)


def _attention_streams(shape: AttentionShape, rows: int, k_rows: int, v_rows: int) -> Traffic:
    size = shape.element_bytes
    return Traffic(
        (
            Stream("q", rows * shape.head_size, size),
            Stream("k", k_rows * shape.head_size, size),
            Stream("v", v_rows * shape.v_head_size, size),
            Stream("out", rows * shape.v_head_size, size, is_write=True),
            Stream("lse", rows, FLOAT32, is_write=True),
        )
    )


def _seen_keys(walk: TileWalk) -> range:
    """The keys of all tiles that any query tile visits."""
    visits = [tiles for tiles in map(walk.visits, range(walk.num_query_tiles)) if tiles]
    if not visits:
        return range(0)
    return range(visits[0].start * walk.tile_n, min(visits[-1].stop * walk.tile_n, walk.key_len))
