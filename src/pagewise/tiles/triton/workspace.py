"""Memory that programs of one launch pass partial results through."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["borrow"]

_GRAPHS = -1


def borrow(device: torch.device, num_floats: int, num_counters: int) -> tuple[Tensor, Tensor]:
    """Floats that hold anything, and int32 counters of zeros, which a launch must leave as zeros.

    A stream has one workspace of a size, since its launches follow each other. All CUDA graphs
    of a device share another one: like those that use cuBLAS, they must not be replayed at the
    same time. It is made beside the first eager call's; a graph that is captured before any such
    call gets its own, and sets it to zero at every replay.
    """
    floats, counters = _round(num_floats), _round(num_counters)
    if device.type != "cuda":
        return _make(device, 0, floats, counters)
    if not torch.cuda.is_current_stream_capturing():
        _make(device, _GRAPHS, floats, counters)
        stream = torch.cuda.current_stream(device).cuda_stream
        return _make(device, stream, floats, counters)
    known = _made.get((device, floats, counters))
    return known or _allocate(device, floats, counters)


_made: dict[tuple[torch.device, int, int], tuple[Tensor, Tensor]] = {}


@functools.cache
def _make(device: torch.device, owner: int, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    memory = _allocate(device, floats, counters)
    if owner == _GRAPHS:
        _made[device, floats, counters] = memory
    return memory


def _allocate(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _round(size: int) -> int:
    """Few sizes, so that few workspaces are kept."""
    return max(1024, 1 << (size - 1).bit_length())
