"""Timing on a GPU: how long it works, and how long the host takes to ask for it.

A call is recorded as a CUDA graph, so that its time is that of its kernels; before each replay
the second-level cache is overwritten, as Triton's ``do_bench`` does it, or, ``clean``, read over:
what overwrites it leaves tens of megabytes of dirty lines there, and a kernel that reads
next pushes them out and waits for them (decision 15).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .timing import Times

__all__ = ["between_events", "time_gpu", "time_gpu_clean", "time_gpu_in_turns", "time_host"]

_CALLS_A_ROUND = 100
"""Few enough for the GPU's queue, which makes the host wait when it is full."""
_REST_SECONDS = 0.05
_WARMUP = 3


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


def time_gpu_clean(call: Callable[[], object], *, rounds: int = 40) -> Times:
    """As ``time_gpu``, captured, after the cache was read over."""
    from triton.runtime import driver

    memory, replay, pairs = driver.active.get_empty_cache_for_benchmark(), _record(call), []
    for _ in range(_WARMUP + rounds):
        memory.sum()
        pairs.append(between_events(replay))
    torch.cuda.synchronize()
    return Times(tuple(start.elapsed_time(end) / 1e3 for start, end in pairs[_WARMUP:]))


def time_gpu_in_turns(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 9, burst: int = 3
) -> dict[str, Times]:
    """As ``time_gpu``, captured, in short bursts that take turns, with a rest before each.

    After some 30 ms of dense products an H200 is at its power limit and lowers its clock, by a
    tenth and more: without rests, who is timed later is timed on a slower machine.

    Args:
        calls: By name.
        rounds: Bursts of each.
        burst: Timed calls of a burst, after one that does not count.
    """
    from triton.runtime import driver

    cache = driver.active.get_empty_cache_for_benchmark()
    replays = {name: _record(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            time.sleep(_REST_SECONDS)
            pairs = []
            for _ in range(1 + burst):
                driver.active.clear_cache(cache)
                pairs.append(between_events(replay))
            torch.cuda.synchronize()
            seconds[name] += [start.elapsed_time(end) / 1e3 for start, end in pairs[1:]]
    return {name: Times(tuple(values)) for name, values in seconds.items()}


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
    # Gradients are computed on the stream of the call that they belong to.
    stream = torch.cuda.current_stream()
    own = None if stream == torch.cuda.default_stream() else stream
    with torch.cuda.graph(graph, stream=own):
        call()
    return graph.replay


def between_events(call: Callable[[], object]) -> tuple[Any, Any]:
    """Ask for a call, and for events before and after it, which know the time when it is done."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    call()
    end.record()
    return start, end
