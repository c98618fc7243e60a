"""How many prompt tokens a step may compute beside sequences that stream their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Sequence

__all__ = ["ChunkSizer"]


class ChunkSizer:
    """Sizes prefill chunks by measured step time, so that streams stay smooth.

    A decode step takes ``d`` seconds and a prompt token beside it ``c`` more. A mixed step may
    take ``stretch`` times ``d``, so it computes at most ``(stretch - 1) * d / c`` prompt tokens.
    Both are running averages of what steps took.

    Args:
        stretch: The longest step beside a stream, in decode steps.
        least: Fewest prompt tokens of a step: smaller chunks cost more than they smooth.
    """

    def __init__(self, stretch: float = 2.2, least: int = 32) -> None:
        self.stretch, self.least = stretch, least
        self._decode = self._token = 0.0

    def record(self, seconds: float, num_decode: int, num_prompt: int) -> None:
        """Take note of what a step took from the one before it to its tokens."""
        if num_prompt == 0:
            self._decode = _average(self._decode, seconds)
        elif num_prompt >= self.least:
            beside = self._decode if num_decode else 0.0
            self._token = _average(self._token, max(seconds - beside, 0.0) / num_prompt)

    def limit(self, running: Iterable[Sequence], budget: int) -> int:
        """The most prompt tokens of the next step.

        Args:
            running: The sequences that run.
            budget: What there is room for.
        """
        if not self._token or not self._decode:
            return budget
        if not any(s.request.stream and s.num_pending <= 1 for s in running):
            return budget
        fitting = (self.stretch - 1) * self._decode / self._token
        return min(budget, max(self.least, int(fitting)))


def _average(average: float, value: float) -> float:
    return value if not average else 0.9 * average + 0.1 * min(value, 4 * average)
