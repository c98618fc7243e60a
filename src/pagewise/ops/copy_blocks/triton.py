"""Copying blocks on a GPU, or between it and pinned host memory: all caches in one launch.

::

    work = [source, destination, strides, size] of each cache, then [from, to] of each pair
    program (i, c) moves part i % parts of pair i // parts in cache c, TILE words of it

Addresses and pairs travel to the GPU in one transfer that nobody waits for. Words are as wide as
addresses, strides and sizes allow, up to 16 bytes; pinned host memory is read and written by the
GPU itself, at the address that the host knows it by.

A source that is some pair's destination, too, is set aside first: two launches more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import INTERPRETED, Launcher, refuse

TILE_BYTES = 8192
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def supports(caches: tuple[Tensor, Tensor], device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    for cache in caches:
        if not cache[:1].is_contiguous():
            return "a block is not contiguous"
        if not (cache.is_cuda or INTERPRETED or cache.is_pinned()):
            return f"a cache is on {cache.device}: of host memory a GPU reaches what is pinned"
    if caches[0].is_cuda and caches[1].is_cuda and caches[0].device != caches[1].device:
        return f"the caches are on {caches[0].device} and {caches[1].device}"
    return refuse(device)


@triton.jit
def _copy(
    work,  # int64 [num_caches * 5 + num_pairs * 2]
    num_caches,
    parts,  # programs of the largest block
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,  # words that addresses, strides and sizes are multiples of
    TILE: tl.constexpr,
):
    cache = work + tl.program_id(1) * 5
    pair = work + num_caches * 5 + (tl.program_id(0) // parts) * 2
    word = (tl.program_id(0) % parts) * TILE + tl.arange(0, TILE)
    source, source_stride = tl.load(cache), tl.load(cache + 2)
    destination, destination_stride = tl.load(cache + 1), tl.load(cache + 3)
    inside = word < tl.multiple_of(tl.load(cache + 4), WIDTH)

    bytes_: tl.constexpr = WORD.primitive_bitwidth // 8
    source += tl.load(pair) * source_stride
    destination += tl.load(pair + 1) * destination_stride
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), WIDTH * bytes_)
    destination = tl.multiple_of(destination.to(tl.pointer_type(WORD)), WIDTH * bytes_)
    tl.store(destination + word, tl.load(source + word, mask=inside, other=0), mask=inside)


def run(caches: Sequence[tuple[Tensor, Tensor]], src_to_dst: Tensor) -> None:
    """Set aside what would be overwritten before it is read, and copy."""
    pairs = src_to_dst.numpy()
    risky = _find_overwritten(caches, pairs)
    if risky.any():
        shelf = np.arange(np.count_nonzero(risky))
        shelves = [source.new_empty((len(shelf), *source.shape[1:])) for source, _ in caches]
        to_shelves = [(source, shelf) for (source, _), shelf in zip(caches, shelves, strict=True)]
        from_shelves = [(shelf, to) for (_, to), shelf in zip(caches, shelves, strict=True)]
        _launch(to_shelves, np.stack([pairs[risky, 0], shelf], axis=1))
        _launch(from_shelves, np.stack([shelf, pairs[risky, 1]], axis=1))
        pairs = pairs[~risky]
    _launch(caches, pairs)


def _find_overwritten(caches: Sequence[tuple[Tensor, Tensor]], pairs: np.ndarray) -> np.ndarray:
    """Which pairs read what some pair writes; all of them, if two views may overlap anyhow."""
    if all(source is not to and _memory(source) != _memory(to) for source, to in caches):
        return np.zeros(len(pairs), bool)
    if any(source is not to and _memory(source) == _memory(to) for source, to in caches):
        return np.ones(len(pairs), bool)
    return np.isin(pairs[:, 0], pairs[:, 1])


def _memory(cache: Tensor) -> int:
    return cache.untyped_storage().data_ptr()


def _launch(caches: Sequence[tuple[Tensor, Tensor]], pairs: np.ndarray) -> None:
    """Copy pairs whose sources nobody writes."""
    if not len(pairs):
        return
    table = np.array([_describe(source, to) for source, to in caches], np.int64)
    word = int(np.gcd.reduce(table.ravel(), initial=16))
    table[:, 4] //= min(word, 8)
    work = torch.from_numpy(np.concatenate([table.ravel(), pairs.ravel()]))
    launcher = make_launcher(word)
    parts = -(-int(table[:, 4].max()) // launcher.constants["TILE"])
    if not INTERPRETED:
        device = next(cache.device for pair in caches for cache in pair if cache.is_cuda)
        work = work.pin_memory().to(device, non_blocking=True)
    launcher((len(pairs) * parts, len(caches), 1), work, len(caches), parts)


def _describe(source: Tensor, to: Tensor) -> tuple[int, int, int, int, int]:
    """Addresses, strides and the size of a block, in bytes."""
    byte = source.element_size()
    size = source[:1].numel() * byte
    return source.data_ptr(), to.data_ptr(), source.stride(0) * byte, to.stride(0) * byte, size


@functools.cache
def make_launcher(word: int) -> Launcher:
    """The kernel for words of up to 16 bytes."""
    types = {"work": "*i64:16", "num_caches": "i32", "parts": "i32"}
    tile = TILE_BYTES // min(word, 8)
    constants = {"WORD": _WORDS[word], "WIDTH": 1 + (word == 16), "TILE": tile}
    return Launcher(_copy, types, constants, num_warps=4)
