"""What a benchmark is: a named case with targets, a correctness gate, and a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagetile.analysis.timing import Times

__all__ = [
    "COMPILED_ELSEWHERE",
    "Case",
    "Check",
    "Measurement",
    "Target",
    "at_least",
    "at_most",
    "compile_effort",
]

COMPILED_ELSEWHERE = "left out: it compiles for minutes; other cases have it"
"""Why a peer that torch.compile makes takes no part in a case."""


class Target(NamedTuple):
    """A bound that one metric of a case should keep."""

    metric: str
    bound: float
    sign: str
    """``">="`` or ``"<="``."""

    def is_reached(self, metrics: dict[str, float]) -> bool:
        """Whether a measurement keeps the bound; a metric that was not measured does not."""
        value = metrics.get(self.metric)
        if value is None:
            return False
        return value >= self.bound if self.sign == ">=" else value <= self.bound


def at_least(metric: str, bound: float) -> Target:
    """The metric must reach the bound."""
    return Target(metric, bound, ">=")


def at_most(metric: str, bound: float) -> Target:
    """The metric must not pass the bound."""
    return Target(metric, bound, "<=")


class Check(NamedTuple):
    """One statement about correctness."""

    what: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Measurement:
    """What a run of a case found."""

    times: dict[str, Times]
    """Times of every contestant, ``"pagetile"`` among them."""
    metrics: dict[str, float]
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that take no part, and why: unsupported, out of memory, wrong, or not installed."""


class Case(Protocol):
    """A benchmark. Cases for other devices bring their own timer and are otherwise alike."""

    @property
    def name(self) -> str:
        """How the command line calls it."""

    @property
    def about(self) -> str:
        """The problem in one line."""

    @property
    def device(self) -> str:
        """Where it runs: ``"cpu"`` or ``"cuda"``."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """What should be reached."""

    def verify(self) -> list[Check]:
        """Prove that what is timed is right."""

    def measure(self, repeats: int | None) -> Measurement:
        """Time it beside its peers; ``None`` repeats it as often as suits the case."""


def compile_effort(case: Case) -> int:
    """How long a case compiles on a fresh machine, its peers included, in levels.

    0: seconds; 1: many kernels, or a peer by torch.compile; 2: such a peer for a shape that takes
    it minutes. A case says so by an attribute of this name; most have none.
    """
    return int(getattr(case, "compile_effort", 0))
