"""Tile sizes of Triton's forward kernel, for paged and contiguous keys."""

from __future__ import annotations

from typing import NamedTuple


class ForwardTiles(NamedTuple):
    """Tiles and warps of a launch."""

    tile_m: int
    """Rows of a tile."""
    tile_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight from memory at a time."""


def choose_forward_tiles(
    width: int, *, is_float32: bool, is_8_bit: bool = False, is_small: bool = False
) -> ForwardTiles:
    """Return tiles with which a head's results stay in registers.

    Args:
        width: The larger of the head sizes of keys and values.
        is_float32: Whether products are float32: three TF32 products, or beyond 256 columns without
            tensor cores.
        is_8_bit: Whether keys and values are in 8 bits.
        is_small: Whether a program has only 99 KiB of shared memory.
    """
    if is_float32:
        if width <= 64:
            return ForwardTiles(64, 32, 4, 2) if is_small else ForwardTiles(128, 64, 8, 2)
        if width <= 128:
            return ForwardTiles(32, 32, 4, 2)
        if width <= 256:
            return ForwardTiles(16, 32, 4, 1 if is_small else 2)
        return ForwardTiles(16, 16, 8, 1)
    if width <= 128:
        return ForwardTiles(128, 32 if is_8_bit else 64, 8 if width > 64 else 4, 3)
    if width <= 256:
        return ForwardTiles(64, 32 if is_small else 64, 8, 2)
    return ForwardTiles(32, 16 if is_small else 32, 8, 1)
