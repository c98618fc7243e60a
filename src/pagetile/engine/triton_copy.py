"""The Triton kernel that copies words between the device and pinned host memory.

A GPU reads and writes pinned memory by its address. With copies both ways, 14 us lie between the
draw of a decode step and the next one's layout (H100), where by ``cudaMemcpyAsync`` 28 lay (H200):
kernels wait for a memcpy, and it for them.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ..tiles.triton.launch import Launch, Launcher

_TILE = 512


@triton.jit
def copy_kernel(
    target,  # int32 [num_words]
    source,  # int32 [num_words], on the device if target is on the host, and the other way round
    num_words,
    TILE: tl.constexpr,
):
    """Grid: tiles of words."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    words = tl.load(source + at, mask=at < num_words)
    tl.store(target + at, words, mask=at < num_words)


def copy_words(target: Tensor, source: Tensor, num_words: int) -> None:
    """Queue a copy of the first ``num_words`` of int32 words, one side of it in pinned memory."""
    device = max(target.get_device(), source.get_device())
    if device < 0:
        target[:num_words] = source[:num_words]
    else:
        _prepare(num_words).here(device, target, source)


@functools.lru_cache(maxsize=1024)
def _prepare(num_words: int) -> Launch:
    return _make_launcher().bind((triton.cdiv(num_words, _TILE), 1, 1), num_words)


@functools.cache
def _make_launcher() -> Launcher:
    types = {"target": "*i32:16", "source": "*i32:16", "num_words": "i32"}
    return Launcher(copy_kernel, types, {"TILE": _TILE}, num_warps=4)
