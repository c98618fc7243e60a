"""Timing on a GPU: how long it works, and how long the host takes to ask for it.

A call is recorded as a CUDA graph, so that its time is that of its kernels; before each replay
the second-level cache is overwritten, as other layers of a model would.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from .timing import Times

__all__ = ["time_gpu", "time_host"]

_CALLS_A_ROUND = 100
"""Few enough for the GPU's queue, which makes the host wait when it is full."""


def time_gpu(
    call: Callable[[], object], *, captured: bool = True, milliseconds: int = 100
) -> Times:
    """Seconds of the GPU in each of many calls.

    Args:
        call: Launches work on the current stream.
        captured: Whether it can be recorded. One that cannot should work longer than the host
            takes to ask for it.
        milliseconds: How long to repeat it, all calls together.
    """
    from triton.testing import do_bench

    times = do_bench(
        _record(call) if captured else call, warmup=20, rep=milliseconds, return_mode="all"
    )
    return Times(tuple(ms / 1e3 for ms in times))


def time_host(call: Callable[[], object], rounds: int = 9) -> Times:
    """Seconds that the host takes for a call when the GPU keeps up: means of many, by round."""
    call()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS_A_ROUND):
            call()
        seconds.append((time.perf_counter() - start) / _CALLS_A_ROUND)
    torch.cuda.synchronize()
    return Times(tuple(seconds))


def _record(call: Callable[[], object]) -> Callable[[], None]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
