"""Copy blocks on a GPU, or between it and pinned host memory: all caches in one launch.

::

    program (i, c) copies TILE words: part i % parts of pair i // parts in cache c

The caches' addresses and strides are sent to the GPU once and kept; the pairs of each call are sent
without waiting. Words are as wide as addresses, strides and sizes allow, up to 16 bytes. Pinned
host memory is read and written by the GPU itself, at the host's address.

Sources that are also a destination are first copied to scratch memory: two more launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import Launcher, refuse
from ...transfer import send
from .problem import Problem, may_overlap

TILE_BYTES = 4096
CPU = torch.device("cpu")
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    source, destination = problem.source.device, problem.destination.device
    if not problem.has_whole_blocks:
        return "a block is not contiguous"
    if source.type != destination.type and not problem.is_pinned:
        host = "source" if source.type == "cpu" else "destination"
        return f"the {host} is on cpu and not pinned: a GPU reaches no other memory of the host"
    if source.type == destination.type and source != destination:
        return f"the caches are on {source} and {destination}"
    return refuse(device)


@triton.jit
def _copy(
    caches,  # int64 [num_caches, 5]: two addresses, two strides in bytes, words of a block
    pairs,  # int64 [num_pairs, 2]
    parts,  # programs of the largest block
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,  # words that addresses, strides and sizes are multiples of
    TILE: tl.constexpr,
):
    cache = caches + tl.program_id(1) * 5
    pair = pairs + (tl.program_id(0) // parts).to(tl.int64) * 2
    word = (tl.program_id(0) % parts) * TILE + tl.arange(0, TILE)
    inside = word < tl.multiple_of(tl.load(cache + 4), WIDTH)
    source = tl.load(cache) + tl.load(pair) * tl.load(cache + 2)
    destination = tl.load(cache + 1) + tl.load(pair + 1) * tl.load(cache + 3)

    factor: tl.constexpr = WIDTH * (WORD.primitive_bitwidth // 8)
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), factor)
    destination = tl.multiple_of(destination.to(tl.pointer_type(WORD)), factor)
    tl.store(destination + word, tl.load(source + word, mask=inside, other=0), mask=inside)


def run(caches: Sequence[tuple[Tensor, Tensor]], src_to_dst: Tensor) -> None:
    """Copy all pairs; sources that another pair overwrites go through scratch memory."""
    pairs = src_to_dst.numpy()
    risky = _find_overwritten(caches, pairs)
    if risky.any():
        numbers = np.arange(np.count_nonzero(risky))
        device = _find_device(caches)
        copies = [
            torch.empty((len(numbers), *to.shape[1:]), dtype=to.dtype, device=device)
            for _, to in caches
        ]
        to_copies = [(source, copy) for (source, _), copy in zip(caches, copies, strict=True)]
        from_copies = [(copy, to) for (_, to), copy in zip(caches, copies, strict=True)]
        _launch(to_copies, np.stack([pairs[risky, 0], numbers], axis=1))
        _launch(from_copies, np.stack([numbers, pairs[risky, 1]], axis=1))
        pairs = pairs[~risky]
    _launch(caches, pairs)


def _find_overwritten(
    caches: Sequence[tuple[Tensor, Tensor]], pairs: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Which pairs read a block that some pair writes; all, if different views may overlap."""
    for source, to in caches:
        if source is not to and may_overlap(source, to):
            return np.ones(len(pairs), bool)
    if any(source is to for source, to in caches):
        return np.isin(pairs[:, 0], pairs[:, 1])
    return np.zeros(len(pairs), bool)


def _launch(caches: Sequence[tuple[Tensor, Tensor]], pairs: npt.NDArray[Any]) -> None:
    """Copy pairs; no source may be another pair's destination."""
    if not len(pairs):
        return
    device = _find_device(caches)
    described = tuple(
        (
            source.data_ptr(), to.data_ptr(), source.stride(0), to.stride(0),
            source.shape, source.element_size(),
        )
        for source, to in caches
    )  # fmt: skip
    # A transfer that is captured in a graph does not run now, so its table must not be cached.
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    lay_out = _lay_out.__wrapped__ if is_captured else _lay_out
    table, word, num_words = lay_out(described, device)
    launcher = make_launcher(word)
    parts = -(-num_words // launcher.constants["TILE"])
    on_device = send(np.ascontiguousarray(pairs), device)
    launcher((len(pairs) * parts, len(caches), 1), table, on_device, parts)


def _find_device(caches: Sequence[tuple[Tensor, Tensor]]) -> torch.device:
    """The GPU; the CPU under the interpreter."""
    return next((cache.device for pair in caches for cache in pair if cache.is_cuda), CPU)


@functools.lru_cache(maxsize=64)
def _lay_out(caches: tuple[Any, ...], device: torch.device) -> tuple[Tensor, int, int]:
    """The kernel's table on the device, the width of a word, and the words of the largest block."""
    table = np.array(
        [
            (source, to, stride * byte, to_stride * byte, math.prod(shape[1:]) * byte)
            for source, to, stride, to_stride, shape, byte in caches
        ],
        np.int64,
    )
    word = int(np.gcd.reduce(table.ravel(), initial=16))
    table[:, 4] //= min(word, 8)
    return send(table, device), word, int(table[:, 4].max())


@functools.cache
def make_launcher(word: int) -> Launcher:
    """The launcher for words of ``word`` bytes."""
    types = {"caches": "*i64:16", "pairs": "*i64:16", "parts": "i32"}
    tile = TILE_BYTES // min(word, 8)
    constants = {"WORD": _WORDS[word], "WIDTH": 1 + (word == 16), "TILE": tile}
    return Launcher(_copy, types, constants, num_warps=4)
