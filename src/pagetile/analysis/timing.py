"""Timing of calls in turns, for ``pagetile bench`` and ``benchmarks/``.

On a shared machine a single time says little. Calls take turns in shuffled rounds, so that drift
affects all alike; all times are kept, and ratios are taken round by round.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import PagetileError, UnsupportedError


@dataclass(frozen=True)
class Times:
    """Seconds of each timed call.

    Examples:
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
        return float(np.quantile(self.seconds, share))


def ratio(times: Times, other: Times) -> float:
    """The median over rounds of one time by the other: what slows a whole round cancels."""
    pairs = zip(times.seconds, other.seconds, strict=True)
    return statistics.median(a / b for a, b in pairs)


class Clock(Protocol):
    """How a turn is timed."""

    @property
    def rest(self) -> float:
        """Seconds before each turn in which nothing runs."""

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        """What a turn runs in place of ``call``: the call, or its CUDA graph."""

    def time(self, call: Callable[[], object]) -> list[float]:
        """Seconds of each timed call of one turn."""


@dataclass(frozen=True)
class WallClock:
    """One call a turn by the system's clock, for a CPU.

    Threads of a parallel region spin for some 5 ms after it and share a core with the next call's
    threads; after ``rest`` seconds every call finds the machine idle.
    """

    rest: float = 0.02

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call itself."""
        return call

    def time(self, call: Callable[[], object]) -> list[float]:
        """One call."""
        start = time.perf_counter()
        call()
        return [time.perf_counter() - start]


@dataclass(frozen=True)
class EventClock:
    """One call a turn between CUDA events, launches included."""

    rest: float = 0.0

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call itself."""
        return call

    def time(self, call: Callable[[], object]) -> list[float]:
        """One call, with the time in which the GPU waits for its launches."""
        start, end = between_events(call)
        end.synchronize()
        return [float(start.elapsed_time(end)) / 1e3]


def between_events(call: Callable[[], object]) -> tuple[Any, Any]:
    """Run a call between two CUDA events, which know the time once the second has happened."""
    make: Any = torch.cuda.Event
    start, end = make(enable_timing=True), make(enable_timing=True)
    start.record()
    call()
    end.record()
    return start, end


def clock_of(device: torch.device | str) -> Clock:
    """The clock of a device, for calls that are timed with their launches."""
    return EventClock() if torch.device(device).type == "cuda" else WallClock()


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 2,
    clock: Clock | None = None,
    before: Mapping[str, Callable[[], object]] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Time calls in rounds in which each has one turn, in another order every round.

    Args:
        calls: By name.
        repeats: Timed rounds.
        warmup: Rounds before them that do not count; as many for every call.
        clock: ``WallClock()`` if not given.
        before: What runs right before every turn of a call, untimed, by the call's name.
        tick: Called after every round.

    Examples:
        >>> times = take_turns({"a": lambda: None, "b": lambda: None}, repeats=5)
        >>> [len(found.seconds) for found in times.values()]
        [5, 5]
    """
    clock, before = clock or WallClock(), before or {}
    prepared = {name: clock.prepare(call) for name, call in calls.items()}
    shuffle = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name in shuffle.sample(list(prepared), len(prepared)):
            time.sleep(clock.rest)
            if name in before:
                before[name]()
            elapsed = clock.time(prepared[name])
            if turn >= warmup:
                seconds[name] += elapsed
        tick()
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def admit(
    calls: Mapping[str, Callable[[], Any]], judge: Callable[[str, Any], str | None]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Run each call once: those that take part, and why the others do not.

    Args:
        calls: By name.
        judge: From a call's name and result to what is wrong with it; ``None`` if nothing is.

    Examples:
        >>> calls = {"right": lambda: 4, "wrong": lambda: 5, "zero": lambda: 1 / 0}
        >>> found, absent = admit(calls, lambda name, four: None if four == 4 else "wrong")
        >>> list(found), absent
        (['right'], {'wrong': 'wrong', 'zero': 'unsupported: division by zero'})
    """
    found: dict[str, Callable[[], Any]] = {}
    absent: dict[str, str] = {}
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about kernels that PyTorch does not choose
                reason = judge(name, call())
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            reason = "out of memory"
        except Exception as error:  # whatever a library raises about a problem
            if isinstance(error, PagetileError) and not isinstance(error, UnsupportedError):
                raise  # the request is wrong, not the library
            reason = f"unsupported: {_first_line(error)}"
        if reason is None:
            found[name] = call
        else:
            absent[name] = reason
    return found, absent


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
