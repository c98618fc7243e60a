"""What a benchmark is: a named case with targets, a correctness gate, and a measurement."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagetile.analysis.timing import Times

COMPILED_ELSEWHERE = "left out: it compiles for minutes; other cases have it"
"""Why a case leaves out a peer that torch.compile makes."""


class Target(NamedTuple):
    """A bound that one metric of a case should keep."""

    metric: str
    bound: float
    sign: str
    """``">="`` or ``"<="``."""

    def is_reached(self, metrics: dict[str, float]) -> bool:
        """Whether a measurement meets the bound; a metric that was not measured does not."""
        value = metrics.get(self.metric)
        if value is None:
            return False
        return value >= self.bound if self.sign == ">=" else value <= self.bound


def at_least(metric: str, bound: float) -> Target:
    """Require at least ``bound`` of a metric."""
    return Target(metric, bound, ">=")


def at_most(metric: str, bound: float) -> Target:
    """Require at most ``bound`` of a metric."""
    return Target(metric, bound, "<=")


class Check(NamedTuple):
    """One statement about correctness."""

    what: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Measurement:
    """Times and metrics of one run of a case."""

    times: dict[str, Times]
    """Times of every contestant, ``"pagetile"`` among them."""
    metrics: dict[str, float]
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that were left out, and why: unsupported, out of memory, wrong, or not installed."""


class Case(Protocol):
    """A benchmark on one device."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def about(self) -> str:
        """The problem in one line."""

    @property
    def device(self) -> str:
        """Where it runs: ``"cpu"`` or ``"cuda"``."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """Bounds that its metrics should meet."""

    def verify(self) -> list[Check]:
        """Compare the result of the timed call with float64."""

    def measure(self, repeats: int | None) -> Measurement:
        """Time it and its peers in turns; with ``None`` the case chooses the repeats."""


def compile_effort(case: Case) -> int:
    """How long a case and its peers compile on a fresh machine, as a level.

    0: seconds; 1: many kernels, or a peer by torch.compile; 2: such a peer for a shape that takes
    it minutes. Cases above 0 have an attribute of this name.
    """
    return int(getattr(case, "compile_effort", 0))
