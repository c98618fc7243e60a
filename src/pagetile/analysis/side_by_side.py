"""Ways to compute the same thing, timed in turns and compared with float64."""

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
    """A problem, its float64 result, and who computes it."""

    title: str
    contestants: Mapping[str, Callable[[], Tensor | Sequence[Tensor]]]
    """By name, pagetile's first. Each returns a tensor, or several."""
    expected: Sequence[Tensor]
    """float64, of the shapes of everyone's results."""
    work: Work
    """For the least time."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """How one contestant did."""

    name: str
    seconds: tuple[float, ...] = ()
    """Of each timed call."""
    error: float = 0.0
    """The largest difference from float64, as a part of the largest value."""
    reason: str = ""
    """Why it could not run; then there are no times."""

    @property
    def median(self) -> float:
        """As many calls took less as took more."""
        return statistics.median(self.seconds)

    def quantile(self, share: float) -> float:
        """What this share of the calls did not exceed."""
        return sorted(self.seconds)[round(share * (len(self.seconds) - 1))]

    def times_slower(self, other: Result) -> float:
        """The median over rounds of its time by another's: what slows a whole round cancels."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def compare(
    contest: Contest,
    *,
    iterations: int,
    warmup: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Run everyone once for their error, then in rounds of one call each, in changing order.

    Args:
        contest: Who and what.
        iterations: Timed rounds.
        warmup: Rounds before them that do not count.
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
    """The errors of those who can run it, and why the others cannot."""
    errors, reasons = {}, {}
    for name, call in contest.contestants.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of kernels that PyTorch does not choose
                results = call()
        except (RuntimeError, NotImplementedError) as error:
            reasons[name] = str(error).strip().splitlines()[0] if str(error) else repr(error)
            continue
        tensors = [results] if isinstance(results, Tensor) else results
        pairs = zip(tensors, contest.expected, strict=True)
        # torch's maximum, unlike Python's, of anything with a NaN is NaN.
        errors[name] = float(torch.stack([_largest_error(*pair) for pair in pairs]).max())
    return errors, reasons


def _largest_error(result: Tensor, expected: Tensor) -> Tensor:
    """Piece by piece: the difference of all in float64 may not fit into memory."""
    pieces = -(-expected.numel() // PIECE)
    pairs = zip(
        *(torch.chunk(t.detach().flatten(), pieces) for t in (result, expected)), strict=True
    )
    errors = torch.stack([(mine.double() - exact).abs().max() for mine, exact in pairs])
    return errors.max() / expected.abs().max()
