"""Clocks of a GPU's own work, for ``take_turns``, and the host's time to launch a call.

A call is captured as a CUDA graph, so that its time is that of its kernels. Before each replay L2
is overwritten, as by Triton's ``do_bench``, or, for ``clean``, filled by reading: overwriting
leaves tens of megabytes of dirty lines there, and a kernel that reads next waits until they are
written back (decision 15).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pagetile.analysis.timing import Times, WallClock, between_events, take_turns

_CALLS_A_ROUND = 100
"""Few enough for the GPU's queue: the host has to wait when it is full."""
ROUNDS = 7
_LEAST_REST, _REST_SHARE = 0.01, 4


@dataclass(frozen=True)
class GraphClock:
    """Replays a call's CUDA graph several times a turn, each with a cold cache.

    After some 30 ms of dense products an H200 reaches its power limit and lowers its clock by a
    tenth or more: hence a rest before every turn.
    """

    clean: bool = False
    """Whether L2 is filled by reading instead of overwriting."""
    captured: bool = True
    """Whether calls can be captured. One that cannot should run longer on the GPU than the host
    takes to launch it."""
    burst: int = 3
    """Timed calls of a turn, after one that is not timed."""
    rest: float = 0.05
    cools: float = 0.0
    """The most seconds of a further rest after each turn, which lasts four times as long as the
    turn's work."""

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        """Capture the call as a graph; return its replay."""
        return _record(call) if self.captured else call

    def time(self, call: Callable[[], object]) -> list[float]:
        """Time several replays, each after L2 was overwritten or read."""
        from triton.runtime import driver

        memory = driver.active.get_empty_cache_for_benchmark()
        pairs = []
        for _ in range(1 + self.burst):
            if self.clean:
                memory.sum()
            else:
                driver.active.clear_cache(memory)
            pairs.append(between_events(call))
        torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        time.sleep(min(self.cools, _REST_SHARE * sum(seconds)))
        return seconds[1:]


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    device: str,
    *,
    repeats: int | None = None,
    clean: bool = False,
    captured: bool = True,
    rest: float | None = None,
) -> dict[str, Times]:
    """Time calls in turns with the clock of a device; ``repeats`` is the number of rounds.

    On a GPU ``rest`` precedes every turn; without it, a rest follows each turn's work.
    """
    if device == "cpu":
        return take_turns(calls, repeats=repeats or 15, clock=WallClock())
    clock = (
        GraphClock(clean, captured, rest=_LEAST_REST, cools=GraphClock.rest)
        if rest is None
        else GraphClock(clean, captured, rest=rest)
    )
    return take_turns(calls, repeats=repeats or ROUNDS, warmup=1, clock=clock)


def time_host(call: Callable[[], object], rounds: int = 9) -> Times:
    """Host seconds of a call while the GPU keeps up: the mean of many calls, by round."""
    call()
    seconds = []
    for _ in range(rounds):
        _synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS_A_ROUND):
            call()
        seconds.append((time.perf_counter() - start) / _CALLS_A_ROUND)
    _synchronize()
    return Times(tuple(seconds))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _record(call: Callable[[], object]) -> Callable[[], None]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Autograd runs a gradient on the stream on which its forward ran.
    stream = torch.cuda.current_stream()
    own = None if stream == torch.cuda.default_stream() else stream
    with torch.cuda.graph(graph, stream=own):
        call()
    return graph.replay
