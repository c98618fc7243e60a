"""Write keys and values to a paged cache on a CPU, one row per token and head.

::

    slot  ->  block = slot // block_size, offset = slot % block_size
    cache[block, offset, head, :] = new[token, head, :] / scale

Without a scale a row is only converted; with scales per token a row's scale is computed first.
"""

from __future__ import annotations

import numpy as np

from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.simd import (
    div,
    load,
    load_half,
    max_lanes,
    maximum,
    splat,
    store,
    store_half,
    sub,
    where_less,
    zeros,
)
from ..scales import LARGEST_CODE, SMALLEST_SCALE


@inner()
def _measure(new, source, size, largest_code):
    """A row's scale: its largest absolute value over the largest 8-bit value, NaN if infinite."""
    whole = size // 16 * 16
    amax = zeros()
    for d in range(0, whole, 16):
        amax = maximum(_finite_size(load(new, source + d)), amax)
    if whole < size:
        amax = maximum(_finite_size(load_half(new, source + whole)), amax)
    amax = max_lanes(amax)
    if amax == np.inf:
        return np.float32(np.nan)
    return max(amax / np.float32(largest_code), np.float32(SMALLEST_SCALE))


@inner(inline="always")
def _finite_size(x):
    """Absolute values; infinite for NaN, which a maximum would drop."""
    infinity = splat(np.float32(np.inf))
    size = maximum(x, sub(zeros(), x))
    return where_less(size, infinity, size, infinity)


@inner()
def _convert(cache, to, new, source, size):
    whole = size // 16 * 16
    for d in range(0, whole, 16):
        store(cache, to + d, load(new, source + d))
    if whole < size:
        store_half(cache, to + whole, load_half(new, source + whole))


@inner()
def _quantise(cache, to, new, source, size, scale):
    whole, divisor = size // 16 * 16, splat(scale)
    for d in range(0, whole, 16):
        store(cache, to + d, div(load(new, source + d), divisor))
    if whole < size:
        store_half(cache, to + whole, div(load_half(new, source + whole), divisor))


@entry()
def _scatter(
    cache, new, scale, slot_mapping, block_size, num_heads, size,
    cache_strides, new_strides, scale_strides, largest_code,
):  # fmt: skip
    """Write all rows. ``scale`` is None, or read, or computed and written if ``largest_code``."""
    for token in range(len(slot_mapping)):
        slot = slot_mapping[token]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        row = block * cache_strides[0] + offset * cache_strides[1]
        for head in range(num_heads):
            to = row + head * cache_strides[2]
            source = token * new_strides[0] + head * new_strides[1]
            if scale is None:
                _convert(cache, to, new, source, size)
            else:
                at = block * scale_strides[0] + offset * scale_strides[1] + head * scale_strides[2]
                if largest_code > 0:
                    scale[at] = _measure(new, source, size, largest_code)
                _quantise(cache, to, new, source, size, scale[at])


def supports(dtypes, device):
    """Why this cannot run, or None if it can."""
    caches = {} if dtypes[1] in LARGEST_CODE else {"k_cache": dtypes[1]}
    return refuse(device, k=dtypes[0], **caches)


def run(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    """Scatter keys, then values."""
    slots = slot_mapping.contiguous().numpy()
    k, v = (new if new.stride(-1) == 1 else new.contiguous() for new in (k, v))
    keys, values = flat(k), flat(v)  # both before anything is written, in case one has no memory
    for cache, new, rows, scale in (
        (k_cache, k, keys, k_scale),
        (v_cache, v, values, v_scale),
    ):
        measured = scale is not None and scale.dim() == 3
        each = None if scale is None else scale.expand(cache.shape[:3])
        _scatter(
            flat(cache), rows, None if each is None else flat(each), slots,
            cache.shape[1], *new.shape[1:], cache.stride()[:3], new.stride()[:2],
            (0, 0, 0) if each is None else each.stride(),
            LARGEST_CODE[cache.dtype] if measured else 0.0,
        )  # fmt: skip
