"""Memory that programs of one launch pass partial results through."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["borrow"]

_GRAPHS = -1


def borrow(
    device: torch.device, num_floats: int, num_sums: int, num_counters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Two lots of floats that hold anything, and int32 zeros, which a launch must leave as zeros.

    A stream has one workspace of a size, since its launches follow each other. All CUDA graphs
    of a device share another one: like those that use cuBLAS, they must not be replayed at the
    same time, nor may branches of one graph that run side by side both borrow. It is made
    beside the first eager call's; a graph that is captured before any such call gets its own,
    and sets it to zero at every replay.
    """
    sizes = _round(num_floats), _round(num_sums), _round(num_counters)
    if device.type != "cuda":  # the interpreter's
        return _make(device, 0, *sizes)
    if torch.cuda.is_current_stream_capturing():
        return _made.get((device, *sizes)) or _allocate(device, *sizes)
    _make(device, _GRAPHS, *sizes)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return _make(device, stream, *sizes)


_Memory = tuple[Tensor, Tensor, Tensor]
_made: dict[tuple[torch.device, int, int, int], _Memory] = {}


@functools.cache
def _make(device: torch.device, owner: int, floats: int, sums: int, counters: int) -> _Memory:
    memory = _allocate(device, floats, sums, counters)
    if owner == _GRAPHS:
        _made[device, floats, sums, counters] = memory
    return memory


def _allocate(device: torch.device, floats: int, sums: int, counters: int) -> _Memory:
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.empty(sums, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _round(size: int) -> int:
    """Few sizes, so that few workspaces are kept."""
    return max(1024, 1 << (size - 1).bit_length())
