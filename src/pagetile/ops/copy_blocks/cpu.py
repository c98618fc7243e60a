"""Copy blocks on a CPU by C's ``memmove``, which runs at memory speed without compilation.

::

    src_to_dst = [[3, 7], [3, 9]]     block 3  ──┬─> block 7
                                                 └─> block 9

Sources that are also a destination are first copied to scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import memmove

from torch import Tensor

from ...device import DeviceInfo
from .problem import Problem, may_overlap


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    source, destination = problem.source.device, problem.destination.device
    if source.type != "cpu" or destination.type != "cpu":
        return f"the caches are on {source} and {destination}"
    return None if problem.has_whole_blocks else "a block is not contiguous"


def run(caches: Sequence[tuple[Tensor, Tensor]], src_to_dst: Tensor) -> None:
    """Copy in one cache after another; sources that may be overwritten are copied first."""
    pairs: list[tuple[int, int]] = src_to_dst.tolist()
    is_chain = not {source for source, _ in pairs}.isdisjoint(to for _, to in pairs)
    for source, destination in caches:
        # Different views may overlap in any way.
        if is_chain if source is destination else may_overlap(source, destination):
            aside = source[src_to_dst[:, 0]]
            _copy(aside, destination, ((number, to) for number, (_, to) in enumerate(pairs)))
        else:
            _copy(source, destination, pairs)


def _copy(source: Tensor, destination: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    size = source[:1].numel() * source.element_size()
    start, step = _span(source)
    to_start, to_step = _span(destination)
    for number, to in pairs:
        memmove(to_start + to * to_step, start + number * step, size)


def _span(cache: Tensor) -> tuple[int, int]:
    """The address of the first block, and the bytes from one block to the next."""
    return cache.data_ptr(), cache.stride(0) * cache.element_size()
