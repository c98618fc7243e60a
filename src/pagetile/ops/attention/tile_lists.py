"""Lists of the tiles that a block-sparse kernel visits, made from a ``BlockMask`` on its device.

One int32 record for each tile of queries, the longest first, or for each tile of keys, in order::

    tile · num_partial · num_full · 0 │ partial tiles … │ full tiles … │ undefined

Tiles of each kind are listed from right to left. A partial tile needs a mask, because of the block
mask, causality, the window or a sequence's end; a full one does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from .block_mask import BlockMask
from .problem import Problem

FIELDS = 4
"""Header words of a record."""

_made: Any = WeakTensorKeyDictionary()
"""Cached lists by the mask's tensor, then by sizes, options and the tensor's version."""


def fits_tiles(block_mask: BlockMask, tile_q: int, tile_k: int) -> bool:
    """Whether blocks are made of whole tiles, so that no tile needs the block mask."""
    return block_mask.block_q % tile_q == 0 and block_mask.block_k % tile_k == 0


def count_words(problem: Problem, tile_q: int, tile_k: int) -> int:
    """Return the number of int32 words of the lists of tiles of queries."""
    rows, columns = -(-problem.max_query_len // tile_q), -(-problem.max_seq_len // tile_k)
    return problem.num_masks * rows * (FIELDS + columns)


def list_tiles(
    block_mask: BlockMask,
    query_len: int,
    seq_len: int,
    tile_q: int,
    tile_k: int,
    *,
    causal: bool,
    sliding_window: int | None,
    by_keys: bool = False,
) -> Tensor:
    """int32 ``[batch or 1, num_heads or 1, tiles, FIELDS + inner tiles]``; see the module.

    Args:
        block_mask: The mask.
        query_len: Queries of a sequence.
        seq_len: Keys of a sequence.
        tile_q: Queries of a tile.
        tile_k: Keys of a tile.
        causal: As for ``attention``.
        sliding_window: As there.
        by_keys: Whether a record is of a tile of keys and lists tiles of queries.
    """
    mask = block_mask.mask
    sizes = block_mask.block_q, block_mask.block_k, query_len, seq_len, tile_q, tile_k
    if mask.is_inference():  # its changes are not counted, so nothing can be kept
        return _list_tiles(mask, *sizes, causal, sliding_window, by_keys)
    key = (*sizes, causal, sliding_window, by_keys, mask._version)
    made = _made.setdefault(mask, {})
    if key in made:
        found: Tensor = made[key]
        return found
    lists = _list_tiles(mask, *sizes, causal, sliding_window, by_keys)
    # What is allocated while a graph is captured belongs to the graph.
    if not (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        for old in [old for old in made if old[-1] != mask._version]:
            del made[old]
        made[key] = lists
    return lists


def _list_tiles(
    mask: Tensor, block_q: int, block_k: int, query_len: int, seq_len: int, tile_q: int,
    tile_k: int, causal: bool, sliding_window: int | None, by_keys: bool,
) -> Tensor:  # fmt: skip
    blocks = (block_q, query_len, tile_q), (block_k, seq_len, tile_k)
    some, every = (_pool(mask, *blocks, is_all) for is_all in (False, True))
    first_row = torch.arange(0, query_len, tile_q, device=mask.device)[:, None]
    first_key = torch.arange(0, seq_len, tile_k, device=mask.device)
    last_key = (first_key + tile_k).clamp(max=seq_len) - 1
    first_at, last_at = (
        seq_len - query_len + row
        for row in (first_row, (first_row + tile_q).clamp(max=query_len) - 1)
    )
    # The last tile of those that are walked ends with rows that do not exist.
    exists = first_row + tile_q <= query_len if by_keys else first_key + tile_k <= seq_len
    every = every & exists
    if causal:
        some, every = some & (first_key <= last_at), every & (last_key <= first_at)
    if sliding_window is not None:
        some = some & (last_key > first_at - sliding_window)
        every = every & (first_key > last_at - sliding_window)
    if by_keys:
        some, every = some.mT, every.mT
    inner = some.shape[-1]
    number = torch.arange(inner, dtype=torch.int32, device=mask.device)
    place = torch.where(some, torch.where(every, 2 * inner, inner), 3 * inner) - number
    tiles = place.argsort(dim=-1).int()
    counts = (some & ~every).sum(dim=-1), (some & every).sum(dim=-1)
    num_partial, num_full = (count.int() for count in counts)
    order = (num_partial + num_full).argsort(dim=-1, descending=True, stable=True)
    if by_keys:  # heads of a group are walked together, each by its own list
        order = torch.arange(order.shape[-1], device=mask.device).expand_as(order)
    fields = torch.stack([order.int(), num_partial, num_full, torch.zeros_like(num_full)], dim=-1)
    index = order[..., None]
    fields[..., 1:] = fields[..., 1:].gather(-2, index.expand(*order.shape, FIELDS - 1))
    return torch.cat([fields, tiles.gather(-2, index.expand_as(tiles))], dim=-1).contiguous()


def _pool(
    mask: Tensor, rows: tuple[int, int, int], keys: tuple[int, int, int], is_all: bool
) -> Tensor:
    """From blocks to tiles: whether any (``is_all``: every) element of a tile is visible."""
    for dim, (block, length, tile) in ((-2, rows), (-1, keys)):
        unit = math.gcd(block, tile)
        mask = mask.repeat_interleave(block // unit, dim=dim)
        mask = mask.narrow(dim, 0, -(-length // unit))
        missing = -mask.shape[dim] % (tile // unit)
        mask = pad(mask, (0, missing) if dim == -1 else (0, 0, 0, missing), value=is_all)
        parts = mask.unflatten(dim, (-1, tile // unit))  # type: ignore[no-untyped-call]
        mask = parts.all(dim=dim) if is_all else parts.any(dim=dim)
    return mask
