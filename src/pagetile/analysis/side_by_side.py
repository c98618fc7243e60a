"""Time several ways to compute the same thing in turns, and compare them with float64."""

from __future__ import annotations

import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .measure import seconds_of
from .roofline import Work

__all__ = ["Contest", "Result", "compare"]

PIECE = 2**24


@dataclass(frozen=True)
class Contest:
    """A problem, its float64 result, and the ways to compute it."""

    title: str
    contestants: Mapping[str, Callable[[], Tensor | Sequence[Tensor]]]
    """By name, pagetile's first. Each returns a tensor, or several."""
    expected: Sequence[Tensor]
    """float64 tensors of the shapes that all contestants return."""
    work: Work
    """Bytes and operations, for the lower bound of the time."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The times and the error of one contestant."""

    name: str
    seconds: tuple[float, ...] = ()
    """Seconds of each timed call."""
    error: float = 0.0
    """The largest difference from float64, relative to the largest value."""
    reason: str = ""
    """Why it could not run, if there are no times."""

    @property
    def median(self) -> float:
        """The median of the times."""
        return statistics.median(self.seconds)

    def quantile(self, share: float) -> float:
        """The time that this share of the calls did not exceed."""
        return sorted(self.seconds)[round(share * (len(self.seconds) - 1))]

    def times_slower(self, other: Result) -> float:
        """The median over rounds of the ratio of times; what slows a whole round cancels."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(one / another for one, another in pairs)


def compare(
    contest: Contest,
    *,
    iterations: int,
    warmup: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Run every contestant once for its error, then in rounds of one call each, shuffled.

    Args:
        contest: The problem.
        iterations: Timed rounds.
        warmup: Untimed rounds before them.
        tick: Called after every round.

    Example:
        >>> x = torch.rand(1000)
        >>> contest = Contest("a sum", {"own": x.sum}, [x.double().sum()], Work(4000, 0, 0))
        >>> [result] = compare(contest, iterations=3, warmup=1)
        >>> len(result.seconds), result.error < 1e-3
        (3, True)
    """
    device = contest.expected[0].device
    errors, reasons = _try_all(contest)
    seconds: dict[str, list[float]] = {name: [] for name in errors}
    shuffle = random.Random(0)
    for turn in range(warmup + iterations):
        for name in shuffle.sample(list(errors), len(errors)):
            elapsed = seconds_of(contest.contestants[name], device)
            if turn >= warmup:
                seconds[name].append(elapsed)
        tick()
    return [
        Result(name, reason=reasons[name])
        if name in reasons
        else Result(name, tuple(seconds[name]), errors[name])
        for name in contest.contestants
    ]


def _try_all(contest: Contest) -> tuple[dict[str, float], dict[str, str]]:
    """The errors of the contestants that run, and the reasons of those that do not."""
    errors, reasons = {}, {}
    for name, call in contest.contestants.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about kernels that PyTorch does not choose
                results = call()
        except (RuntimeError, NotImplementedError) as error:
            reasons[name] = str(error).strip().splitlines()[0] if str(error) else repr(error)
            continue
        tensors = [results] if isinstance(results, Tensor) else results
        pairs = zip(tensors, contest.expected, strict=True)
        # Unlike Python's max, torch's returns NaN if any value is NaN.
        errors[name] = float(torch.stack([_largest_error(*pair) for pair in pairs]).max())
    return errors, reasons


def _largest_error(result: Tensor, expected: Tensor) -> Tensor:
    """Compare piece by piece: all differences in float64 may not fit into memory."""
    pieces = -(-expected.numel() // PIECE)
    pairs = zip(
        *(torch.chunk(t.detach().flatten(), pieces) for t in (result, expected)), strict=True
    )
    errors = torch.stack([(found.double() - exact).abs().max() for found, exact in pairs])
    return errors.max() / expected.abs().max()
