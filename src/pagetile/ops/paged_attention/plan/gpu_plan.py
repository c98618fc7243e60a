"""The plan of a GPU kernel, and what the rules for all kernels share."""

from __future__ import annotations

from dataclasses import dataclass

DECODE_ROWS = 64
"""Up to this many rows (new tokens × group) of a sequence go to a decode kernel."""

GPU_SPLIT_SIZE = 1024
"""Keys of one split where a result must not depend on the batch."""

FEW_ROWS = 16
"""Rows of the smallest tile of a matrix product (``mma``). With more rows of a head, Hopper's
decode uses ``wgmma``, and splits are merged by a launch of their own."""

ROWS_OF_WARPGROUP = 64


@dataclass(frozen=True)
class GpuPlan:
    """Tiles, and how the keys of a decoding sequence are divided.

    With ``split_size`` 0 every CTA gets an equal range of the work queue, wherever that cuts a
    sequence: fastest, and the same bits on every call with the same batch. Otherwise keys are cut
    at multiples of ``split_size``, and a sequence's result does not depend on its neighbours in
    the batch, as long as all batches have the same ``max_query_len``, which chooses kernels and
    tiles.
    """

    path: str
    """``"decode"``, ``"prefill"``, or ``"prefix"`` for a prefix that sequences share."""
    tile_m: int
    """Rows of a tile."""
    tile_n: int
    """Keys of a tile."""
    num_warps: int
    """Warps that compute; Hopper's kernels have loading warps as well."""
    num_stages: int
    """Tiles in flight from memory at a time."""
    num_programs: int
    """CTAs of a persistent launch over a work queue; 0: one CTA for each tile of rows."""
    halving_size: int = 0
    """Only half of the CTAs take part where a CTA's range would have fewer keys than this."""
    split_size: int = 0
    whole_size: int = 0
    """Sequences of up to this many keys are not split where CTAs have little work, which the
    kernel decides from the lengths."""
    least_size: int = 0
    """Fewest keys of a CTA."""
    merge_rows: int = 0
    """Rows per CTA of the merge launch; 0: the last CTA of a head merges its splits."""
    short_split_size: int = 0
    """Longer sequences are then split at multiples of this many keys; 0: of ``tile_n``."""
    max_registers: int = 0
    """Register cap per thread; 0 means the compiler's default."""
    fetch_registers: int = 0
    """Register cap per thread of a loading warp."""
    divides_keys: bool = False
    """Whether a prefill's keys may be split: the kernel chooses the number of splits from the
    lengths, 1 where tiles occupy all multiprocessors."""
    unpacks: bool = False
    """Whether an 8-bit cache's blocks are unpacked to 16 bits first, in another launch."""
    tile_heads: int = 1
    """Neighbouring KV heads that share a tile."""
