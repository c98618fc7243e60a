"""Writing keys and values on a CPU: one row of memory a token and head.

::

    slot  ->  block = slot // block_size, offset = slot % block_size
    cache[block, offset, head, :] = new[token, head, :]
"""

from __future__ import annotations

from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry
from ...tiles.cpu.simd import load, load_half, store, store_half


def supports(dtypes, device):
    """Why this cannot run, or None if it can."""
    return refuse(device, k=dtypes[0], k_cache=dtypes[1])


@entry()
def _scatter(cache, new, slot_mapping, block_size, num_heads, size, cache_strides, new_strides):
    whole = size // 16 * 16
    for token in range(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot < 0:
            continue
        row = slot // block_size * cache_strides[0] + slot % block_size * cache_strides[1]
        for head in range(num_heads):
            to = row + head * cache_strides[2]
            source = token * new_strides[0] + head * new_strides[1]
            for d in range(0, whole, 16):
                store(cache, to + d, load(new, source + d))
            if whole < size:
                store_half(cache, to + whole, load_half(new, source + whole))


def run(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    """Scatter keys, then values."""
    slots = slot_mapping.contiguous().numpy()
    for cache, new in ((k_cache, k), (v_cache, v)):
        if new.stride(-1) != 1:
            new = new.contiguous()
        _scatter(
            flat(cache), flat(new), slots, cache.shape[1], *new.shape[1:],
            cache.stride()[:3], new.stride()[:2],
        )  # fmt: skip
