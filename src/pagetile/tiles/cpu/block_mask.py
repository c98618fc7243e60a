"""Block masks on a CPU: skip tiles, and mask keys of a row.

A call has these fields: ``block_mask``, a flat uint8 array of blocks; ``mask_seq``, ``mask_head``
and ``mask_row``, its strides; ``block_q`` and ``block_k``. Without a mask ``block_q`` is 0.
"""

from __future__ import annotations

import numpy as np
import torch

from .compile import inner
from .online_softmax import TILE_N


def mask_fields(block_mask):
    """Return the fields of a call, in order, for a ``BlockMask`` or None."""
    if block_mask is None:
        return np.empty(0, np.uint8), 0, 0, 0, 0, 0
    mask = block_mask.mask.contiguous()
    seq, head = (s if n > 1 else 0 for s, n in zip(mask.stride()[:2], mask.shape[:2], strict=True))
    blocks = mask.view(torch.uint8).numpy().reshape(-1)
    return blocks, seq, head, mask.stride(2), block_mask.block_q, block_mask.block_k


@inner()
def sees_blocks(call, seq, head, first_row, num_rows, first_key, num_keys):
    """Whether any of ``num_rows`` rows of a head sees any of ``num_keys`` keys."""
    base = seq * call.mask_seq + head * call.mask_head
    last_row, last_key = first_row + num_rows - 1, first_key + num_keys - 1
    for q_block in range(first_row // call.block_q, last_row // call.block_q + 1):
        at = base + q_block * call.mask_row
        for k_block in range(first_key // call.block_k, last_key // call.block_k + 1):
            if call.block_mask[at + k_block]:
                return True
    return False


@inner()
def sees_keys(call, item, first_key, num_keys):
    """Whether any of an item's rows sees any of ``num_keys`` keys."""
    first_head = item.first_head * call.group
    for head in range(first_head, first_head + item.num_heads * call.group):
        if sees_blocks(
            call, item.seq, head, item.first_token, item.num_tokens, first_key, num_keys
        ):
            return True
    return False


@inner()
def repeat_visible(call, scratch, side, item, tile, first, last):
    """Replace the addresses of a tile's keys that no row sees by those of a visible key.

    A tile is read whole, and a NaN in a masked block times a weight of 0 would be NaN. Keys before
    ``first`` and from ``last`` on are replaced as well. A tile without a visible key is not read,
    so it is left as it is.
    """
    shown = first
    while shown < last and not sees_keys(call, item, shown, 1):
        shown = (shown // call.block_k + 1) * call.block_k
    if shown >= last:
        return
    is_visible = False
    for n in range(TILE_N):
        key = tile + n
        is_inside = first <= key < last
        if is_inside and (key == first or key % call.block_k == 0):
            is_visible = sees_keys(call, item, key, 1)
        if not (is_inside and is_visible):
            scratch.k_rows[side, n] = scratch.k_rows[side, shown - tile]
            scratch.v_rows[side, n] = scratch.v_rows[side, shown - tile]
            scratch.k_scale_rows[side, n] = scratch.k_scale_rows[side, shown - tile]
            scratch.v_scale_rows[side, n] = scratch.v_scale_rows[side, shown - tile]


@inner()
def hidden_end(call, seq, head, row, key, end):
    """The end of the masked keys that begin at ``key``; ``key`` itself if that is visible."""
    at = seq * call.mask_seq + head * call.mask_head + row // call.block_q * call.mask_row
    while key < end and not call.block_mask[at + key // call.block_k]:
        key = (key // call.block_k + 1) * call.block_k
    return min(key, end)
