"""Time several ways to compute the same thing in turns, and compare them with float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .roofline import Work
from .timing import Times, admit, clock_of, take_turns

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
    times: Times | None = None
    """None if it could not run."""
    error: float = 0.0
    """The largest difference from float64, relative to the largest value."""
    reason: str = ""
    """Why it could not run, if there are no times."""


def compare(
    contest: Contest, *, iterations: int, warmup: int, tick: Callable[[], object] = lambda: None
) -> list[Result]:
    """Run every contestant once for its error, then time them in turns.

    Args:
        contest: The problem.
        iterations: Timed rounds.
        warmup: Untimed rounds before them.
        tick: Called after every round.

    Examples:
        >>> x = torch.rand(1000)
        >>> contest = Contest("a sum", {"own": x.sum}, [x.double().sum()], Work(4000, 0, 0))
        >>> [result] = compare(contest, iterations=3, warmup=1)
        >>> len(result.times.seconds), result.error < 1e-3
        (3, True)
    """
    errors: dict[str, float] = {}

    def judge(name: str, results: Tensor | Sequence[Tensor]) -> None:
        tensors = [results] if isinstance(results, Tensor) else results
        pairs = zip(tensors, contest.expected, strict=True)
        # Unlike Python's max, torch's returns NaN if any value is NaN.
        errors[name] = float(torch.stack([_largest_error(*pair) for pair in pairs]).max())

    calls, absent = admit(contest.contestants, judge)
    clock = clock_of(contest.expected[0].device)
    times = take_turns(calls, repeats=iterations, warmup=warmup, clock=clock, tick=tick)
    return [
        Result(name, reason=absent[name])
        if name in absent
        else Result(name, times[name], errors[name])
        for name in contest.contestants
    ]


def _largest_error(result: Tensor, expected: Tensor) -> Tensor:
    """Compare piece by piece: all differences in float64 may not fit into memory."""
    pieces = -(-expected.numel() // PIECE)
    pairs = zip(
        *(torch.chunk(t.detach().flatten(), pieces) for t in (result, expected)), strict=True
    )
    errors = torch.stack([(found.double() - exact).abs().max() for found, exact in pairs])
    return errors.max() / expected.abs().max()
