"""Copying blocks on a CPU: straight from block to block, unless one is read and written.

::

    src_to_dst = [[3, 7], [3, 9]]     block 3  ──┬─> block 7
                                                 └─> block 9
"""

from __future__ import annotations

import numpy as np
import torch

from ...tiles.cpu.compile import entry
from .problem import may_overlap


def supports(problem, device):
    """Why this cannot run, or None if it can."""
    source, destination = problem.source.device, problem.destination.device
    if source.type != "cpu" or destination.type != "cpu":
        return f"the caches are on {source} and {destination}"
    return None if problem.has_whole_blocks else "a block is not contiguous"


@entry()
def _copy(source, destination, src_to_dst, source_stride, destination_stride, size):
    for i in range(len(src_to_dst)):
        source_at = src_to_dst[i, 0] * source_stride
        at = src_to_dst[i, 1] * destination_stride
        destination[at : at + size] = source[source_at : source_at + size]


def run(caches, src_to_dst):
    """Copy in one cache after another."""
    for source, destination in caches:
        _run(source, destination, src_to_dst)


def _run(source, destination, src_to_dst):
    """Copy bytes; sources that may be destinations too are set aside first."""
    pairs = src_to_dst.contiguous().numpy()
    if _may_meet(source, destination, pairs):
        source = source[src_to_dst[:, 0]]
        pairs = np.stack([np.arange(len(pairs)), pairs[:, 1]], axis=1)
    size = source[:1].numel() * source.element_size()
    _copy(_bytes(source), _bytes(destination), pairs, _stride(source), _stride(destination), size)


def _may_meet(source, destination, pairs):
    """Whether writing a destination could change a source: two views may lie anyhow."""
    if source is destination:
        return np.intersect1d(pairs[:, 0], pairs[:, 1]).size > 0
    return may_overlap(source, destination)


def _bytes(cache):
    span = (cache.shape[0] - 1) * cache.stride(0) + cache[:1].numel() if cache.numel() else 0
    return cache.detach().as_strided((span,), (1,)).view(torch.uint8).numpy()


def _stride(cache):
    return cache.stride(0) * cache.element_size()
