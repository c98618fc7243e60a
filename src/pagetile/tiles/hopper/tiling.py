"""How the forward kernel is built for one configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PACKED_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
UNIT = 8  # rows of an atom; elements of 16 bytes
_COLUMNS = 64  # of an atom
_LONG_ROWS = (2 * _COLUMNS, 4 * _COLUMNS)  # head sizes
_LONG_BOX = 64  # rows
_SMALLEST_CAP = 1e-6  # scores are divided by it in float32
_LARGEST_CAP = 64  # a cap multiplies the absolute error of tanh, even for small scores


@dataclass(frozen=True)
class Tiling:
    """How the kernel is built for heads up to a width."""

    width: int
    tile_n: int
    """Keys of a tile."""
    warpgroups: int
    """Computing warpgroups, of 64 query rows each."""
    q_stages: int
    stages: int
    """Slots of the rings of keys and of values."""
    staged: bool
    """Whether results of full tiles are stored by TMA: if it fits, and is faster."""
    pingpong: bool
    """Whether warpgroups issue their products in turns (FlashAttention-3's ping-pong)."""
    registers: int
    """Registers of a computing thread."""
    holds_queries: bool = False
    """Whether computing threads hold their queries in registers, which halves the reads of shared
    memory. Its bandwidth limits products of tiles with few keys or padded rows."""


# The fastest on an H200 of those that fit: 1 × 16384 causal, heads of 64, 128 and 256.
TILINGS = (
    Tiling(64, 128, 3, 2, 2, False, True, 160),
    Tiling(128, 128, 2, 2, 2, True, True, 232),
    Tiling(256, 64, 2, 1, 2, False, True, 232),
)
SMALL_TILING = Tiling(64, 128, 2, 2, 2, False, True, 232)
"""For narrow heads of block-sparse attention, whose blocks have 128 queries, and of divided keys:
three warpgroups have too few registers for the merge."""
HALF_TILING = Tiling(128, 128, 2, 1, 2, True, True, 232, holds_queries=True)
"""For heads of 72 to 96, whose rows are padded to 128 columns."""
WIDE_TILING = Tiling(256, 64, 2, 1, 2, False, True, 232, holds_queries=True)
"""For heads of 136 to 192, whose rows are padded to 256 columns."""
CAPPED_TILINGS = (
    Tiling(64, 64, 3, 2, 4, False, True, 160),
    Tiling(128, 64, 3, 1, 4, False, True, 160),
)
"""For bfloat16 scores with a cap: hyperbolic tangents take longer than products, and small tiles
leave registers to interleave more of them."""
PACKED_TILINGS = (
    Tiling(64, 128, 3, 2, 2, False, True, 160),
    Tiling(128, 128, 2, 2, 2, True, True, 216),
    Tiling(256, 64, 2, 1, 2, False, True, 216),
)
"""For 8-bit caches: the same tiles, with more registers for the warps that convert them."""
SMALL_PACKED_TILING = Tiling(64, 128, 2, 2, 2, False, True, 216)
"""Likewise, for narrow heads whose keys are divided."""


NARROW_TILING = Tiling(192, 128, 2, 1, 2, False, True, 232)
"""For values of up to 128 columns beside wider keys.

Keys lie in three tiles of 64 columns: padded to 256, as tiles of one power of two are, 128 of
them would not fit.
"""


@dataclass(frozen=True)
class ForwardConfig:
    """Types, sizes and options that one forward kernel is compiled for."""

    dtype: torch.dtype
    head_size: int
    block_size: int
    """0: keys are ragged, not paged."""
    causal: bool = False
    has_window: bool = False
    uniform: bool = False
    """Whether all sequences have the same number of queries."""
    pack: int = 1
    """Query heads of a KV head in one tile."""
    has_cap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    v_head_size: int | None = None
    """``None``: as ``head_size``."""
    is_sparse: bool = False
    """Whether it visits the tiles on a list; then it is not paged."""
    is_far: bool = False
    """Whether rows are too many for boxes, or too far apart for offsets of 32 bits: they are
    gathered, with offsets of 64 bits."""
    splits: bool = False
    """Whether programs may share the keys of a tile of queries; then it is paged."""
    packed: str = "none"
    """The format of 8-bit caches, of ``PACKED_FORMATS``; ``"none"``: of the queries' type."""
    few_seqs: bool = False
    """Whether query lengths differ, but a warp has a lane for each sequence."""
    has_token_scales: bool = False
    """Whether 8-bit caches have a scale for each token instead of one for each head."""
    is_unpacked: bool = False
    """Whether a previous launch unpacks 8-bit caches to 16-bit pages, values to float16. This
    kernel applies scales per head."""

    @property
    def tiling(self) -> Tiling:
        """How its kernel is built."""
        is_packed = self.packed != "none"
        return tiling_of(
            *self.sizes,
            is_sparse=self.is_sparse,
            splits=self.splits,
            is_packed=is_packed,
            is_capped=self.has_cap and self.dtype == torch.bfloat16 and not self.is_unpacked,
        )

    @property
    def draws(self) -> bool:
        """Whether programs draw their tiles from a shared counter, rather than round-robin."""
        return self.uniform or self.few_seqs

    @property
    def staged(self) -> bool:
        """Whether results are stored by TMA.

        Not if keys of all tiles are split, when few tiles are whole; nor with scales per token,
        which need the shared memory.
        """
        has_whole = self.few_seqs or not self.splits
        return self.tiling.staged and has_whole and not self.has_token_scales

    @property
    def sizes(self) -> tuple[int, int]:
        """Head sizes of keys and of values."""
        return self.head_size, self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def key_tiles(self) -> int:
        """Number of 64-column tiles that hold a key, or 1: a tile of a power of two."""
        return -(-self.head_size // _COLUMNS) if self.tiling is NARROW_TILING else 1

    @property
    def gathers(self) -> bool:
        """Whether keys and values are gathered row by row, which is faster than small boxes.

        A box is a page's rows of one head, or a part of them. Rows of 256 or 512 bytes are copied
        whole; with other rows a box takes a copy for every 64 columns, or is half as large.
        """
        if self.block_size == 0:
            return False
        if self.packed != "none" or self.is_far:  # TMA neither converts nor counts beyond 2^31
            return True
        if all(size in _LONG_ROWS for size in self.sizes):
            return self.block_size != UNIT and self.block_size % (2 * UNIT) != 0
        return self.block_size & -self.block_size < _LONG_BOX

    @property
    def box(self) -> int:
        """Rows of one TMA copy."""
        tile_n = self.tiling.tile_n
        if self.gathers or not self.block_size:
            return tile_n
        return min(self.block_size & -self.block_size, tile_n)

    @property
    def has_atoms(self) -> bool:
        """Whether a copy brings all columns of its rows, eight rows at a time."""
        is_power_of_2 = all(size in (_COLUMNS, *_LONG_ROWS) for size in self.sizes)
        return self.block_size > 0 and is_power_of_2 and not self.gathers

    def chunks(self, size: int) -> int:
        """Number of 64-column chunks that one copy loads, for rows of ``size``."""
        has_tiles = size == self.head_size and self.key_tiles > 1
        is_whole = self.box == self.tiling.tile_n and size % _COLUMNS == 0 and not has_tiles
        return width_of(size) // _COLUMNS if self.has_atoms or is_whole else 1

    def boxes(self, size: int) -> list[int]:
        """The box shape of a descriptor, for rows of ``size``."""
        if self.has_atoms:
            return [1, self.box // 8, self.chunks(size), 8, _COLUMNS]
        return [1, self.chunks(size), self.box, _COLUMNS]


def width_of(head_size: int) -> int:
    """Columns of a tile in shared memory, for a head size up to 256."""
    return next(tiling.width for tiling in TILINGS if head_size <= tiling.width)


def tiling_of(
    head_size: int,
    v_head_size: int,
    *,
    is_sparse: bool = False,
    splits: bool = False,
    is_packed: bool = False,
    is_capped: bool = False,
) -> Tiling:
    """The tiling for head sizes up to 256; a small one for sparse tiles and divided keys.

    ``is_packed``: for 8-bit caches. ``is_capped``: for bfloat16 with a soft cap.
    """
    width = max(head_size, v_head_size)
    if (is_sparse or splits) and width <= SMALL_TILING.width:
        return SMALL_PACKED_TILING if is_packed else SMALL_TILING
    if is_packed:
        return next(tiling for tiling in PACKED_TILINGS if width <= tiling.width)
    if not is_sparse and v_head_size <= 128 < head_size <= NARROW_TILING.width:
        return NARROW_TILING
    if not is_sparse and not splits and head_size == v_head_size:
        if is_capped and width <= 128:
            return next(tiling for tiling in CAPPED_TILINGS if width <= tiling.width)
        if 64 < width <= 96:
            return HALF_TILING
        if 128 < width <= 192:
            return WIDE_TILING
    return next(tiling for tiling in TILINGS if width <= tiling.width)


def refuse_cap(logits_soft_cap: float | None) -> str | None:
    """Why the forward kernel cannot cap scores so, or None if it can."""
    if logits_soft_cap is not None and not _SMALLEST_CAP <= logits_soft_cap <= _LARGEST_CAP:
        return f"logits_soft_cap is {logits_soft_cap:g}; {_SMALLEST_CAP:g} to {_LARGEST_CAP} run"
    return None
