"""Timing on a machine that others use: peers take turns, and the median speaks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["Contestant", "Times", "take_turns"]

# libgomp's threads spin for some 5 ms after a parallel region and would share their core with
# whoever is timed next. After a rest every contestant finds the machine idle.
REST_SECONDS = 0.02


@dataclass(frozen=True)
class Contestant:
    """Something to time."""

    call: Callable[[], object]
    before: Callable[[], object] | None = None
    """Runs right before every call, untimed."""


@dataclass(frozen=True)
class Times:
    """Seconds of one contestant's calls."""

    median: float
    p10: float
    p90: float
    best: float
    repeats: int

    @staticmethod
    def of(seconds: list[float]) -> Times:
        """Summarise the calls of one contestant.

        Example:
            >>> Times.of([3.0, 1.0, 2.0])
            Times(median=2.0, p10=1.2, p90=2.8, best=1.0, repeats=3)
        """
        p10, p90 = seconds[0], seconds[0]
        if len(seconds) > 1:
            tenths = statistics.quantiles(seconds, n=10, method="inclusive")
            p10, p90 = tenths[0], tenths[-1]
        return Times(statistics.median(seconds), p10, p90, min(seconds), len(seconds))


@torch.inference_mode()
def take_turns(
    contestants: Mapping[str, Contestant], *, repeats: int, warmup: int = 2
) -> dict[str, Times]:
    """Time contestants in rounds (A B C, A B C, …), so that drift of the machine hits all alike.

    Args:
        contestants: By name.
        repeats: Timed rounds.
        warmup: Rounds before them that do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + repeats):
        for name, contestant in contestants.items():
            elapsed = _time(contestant)
            if turn >= warmup:
                seconds[name].append(elapsed)
    return {name: Times.of(values) for name, values in seconds.items()}


def _time(contestant: Contestant) -> float:
    time.sleep(REST_SECONDS)
    if contestant.before is not None:
        contestant.before()
    start = time.perf_counter()
    contestant.call()
    return time.perf_counter() - start
