"""Timing on a machine that others use: contestants take turns, and the median speaks."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Contestant", "Times", "ratio", "take_turns"]

# Threads of a parallel region spin for some 5 ms after it and share a core with the next contestant
# if that uses other threads. After a rest every contestant finds the machine idle.
REST_SECONDS = 0.02


@dataclass(frozen=True)
class Contestant:
    """Something to time."""

    call: Callable[[], object]
    before: Callable[[], object] | None = None
    """Runs right before every call, untimed."""


@dataclass(frozen=True)
class Times:
    """Seconds of one contestant's calls, a call a round.

    Example:
        >>> times = Times((3.0, 1.0, 2.0))
        >>> times.median, times.quantile(0.9), times.best
        (2.0, 2.8, 1.0)
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """As many calls took less as took more."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The fastest call."""
        return min(self.seconds)

    def quantile(self, share: float) -> float:
        """What this share of the calls did not exceed, interpolated."""
        ordered = sorted(self.seconds)
        low, part = divmod(share * (len(ordered) - 1), 1)
        following = ordered[min(int(low) + 1, len(ordered) - 1)]
        return ordered[int(low)] + part * (following - ordered[int(low)])


def ratio(times: Times, other: Times) -> float:
    """The median over rounds of one time by the other: what slows a whole round down cancels."""
    pairs = zip(times.seconds, other.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


def take_turns(
    contestants: Mapping[str, Contestant], *, repeats: int, warmup: int = 2
) -> dict[str, Times]:
    """Time contestants in rounds of one call each, so that drift of the machine hits all alike.

    The order changes from round to round, so no contestant always follows the same one.

    Args:
        contestants: By name.
        repeats: Timed rounds.
        warmup: Rounds before them that do not count.
    """
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + repeats):
        for name in shuffle.sample(list(contestants), len(contestants)):
            elapsed = _time(contestants[name])
            if turn >= warmup:
                seconds[name].append(elapsed)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def _time(contestant: Contestant) -> float:
    time.sleep(REST_SECONDS)
    if contestant.before is not None:
        contestant.before()
    start = time.perf_counter()
    contestant.call()
    return time.perf_counter() - start
