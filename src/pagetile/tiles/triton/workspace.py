"""Scratch memory through which programs of one launch exchange partial results."""

from __future__ import annotations

import torch
from torch import Tensor

_GRAPHS = -1

_Sizes = tuple[int, int, int]
_Memory = tuple[Tensor, Tensor, Tensor]
_made: dict[tuple[int, int], tuple[_Sizes, _Memory]] = {}
_counters: dict[tuple[int, int], Tensor] = {}
_outgrown: list[_Memory] = []
"""Workspaces of CUDA graphs, which keep using the memory that they were captured with."""


def borrow(device: int, sizes: _Sizes) -> _Memory:
    """Return two uninitialised float buffers, and int32 zeros that a launch must leave as zeros.

    ``device`` is a tensor's ``get_device()``; a GPU must be the current device, and its stream may
    be capturing. ``sizes`` are the least sizes of the three. A stream has one workspace, since its
    launches run in order; it grows, and is kept. All CUDA graphs of a device share another one, so
    like graphs that use cuBLAS they must not be replayed at the same time, and parallel branches
    of a graph must not both borrow. It grows with that of eager calls; a graph that is captured
    before any eager call of its size gets its own, which every replay sets to zero.
    """
    if device < 0:  # the interpreter runs on the CPU
        return _find(device, 0, sizes) or _make(device, 0, sizes)
    if torch._C._cuda_isCurrentStreamCapturing():
        return _find(device, _GRAPHS, sizes) or _allocate(device, sizes)
    stream = torch._C._cuda_getCurrentRawStream(device)
    memory = _find(device, stream, sizes)
    if memory is None:
        memory = _make(device, stream, sizes)
        if _find(device, _GRAPHS, sizes) is None:
            _make(device, _GRAPHS, sizes)
    return memory


def borrow_counter(device: int) -> Tensor:
    """Return an int32 zero that a launch must leave as zero, separate from ``borrow``'s memory.

    So a launch may use it that overlaps a later one that borrows. The rules for streams and graphs
    are those of ``borrow``.
    """
    is_capturing = device >= 0 and torch._C._cuda_isCurrentStreamCapturing()
    stream = 0 if device < 0 else torch._C._cuda_getCurrentRawStream(device)
    found = _counters.get((device, _GRAPHS if is_capturing else stream))
    if found is not None:
        return found
    counter = _zeros(device, 1)
    if not is_capturing:
        _counters[device, stream] = counter
        if (device, _GRAPHS) not in _counters:
            _counters[device, _GRAPHS] = _zeros(device, 1)
    return counter


def _find(device: int, owner: int, sizes: _Sizes) -> _Memory | None:
    made = _made.get((device, owner))
    if made is None:
        return None
    (floats, sums, counters), memory = made
    is_enough = floats >= sizes[0] and sums >= sizes[1] and counters >= sizes[2]
    return memory if is_enough else None


def _make(device: int, owner: int, sizes: _Sizes) -> _Memory:
    """Allocate a workspace, doubling its size so that this is rare."""
    old, outgrown = _made.get((device, owner), ((1024, 1024, 1024), None))
    if outgrown is not None and owner == _GRAPHS:
        _outgrown.append(outgrown)
    floats, sums, counters = (
        1 << (max(pair) - 1).bit_length() for pair in zip(old, sizes, strict=True)
    )
    memory = _allocate(device, (floats, sums, counters))
    _made[device, owner] = (floats, sums, counters), memory
    return memory


def _allocate(device: int, sizes: _Sizes) -> _Memory:
    floats, sums, counters = sizes
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    return (
        torch.empty(floats, dtype=torch.float32, device=where),
        torch.empty(sums, dtype=torch.float32, device=where),
        _zeros(device, counters),
    )


def _zeros(device: int, size: int) -> Tensor:
    where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    return torch.zeros(size, dtype=torch.int32, device=where)
