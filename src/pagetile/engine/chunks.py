"""How many prompt tokens a step may compute beside sequences that stream their tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Sequence

__all__ = ["ChunkSizer"]


class ChunkSizer:
    """Sizes prefill chunks by measured step time, so that streams stay smooth.

    A decode step of ``n`` sequences takes ``d(n)`` seconds, and ``t`` prompt tokens beside it
    ``c(t) * t`` more. A mixed step may take ``stretch`` times the decode step that is to come, when
    all that wait have begun: a stream will see that time between its tokens anyway. So it computes
    as many prompt tokens as take ``stretch * d(all) - d(running)``. ``c`` and ``d``, between powers
    of two, are running averages of what steps took: a mixed step costs something by itself, so a
    token of a short chunk costs more than one of a long chunk.

    Args:
        stretch: The longest step beside a stream, in decode steps.
        least: Fewest prompt tokens of a step: smaller chunks cost more than they smooth.
    """

    def __init__(self, stretch: float = 2.2, least: int = 32) -> None:
        self.stretch, self.least = stretch, least
        self._decode: dict[int, float] = {}  # by the number of sequences, in bits
        self._token: dict[int, float] = {}  # by the number of prompt tokens, in bits

    def record(self, seconds: float, num_decode: int, num_prompt: int) -> None:
        """Take note of what a step took from the one before it to its tokens."""
        if num_prompt == 0:
            size = num_decode.bit_length()
            self._decode[size] = _average(self._decode.get(size, 0.0), seconds)
        elif num_prompt >= self.least:
            beside = _nearest(self._decode, num_decode) if num_decode else 0.0
            size, cost = num_prompt.bit_length(), max(seconds - beside, 0.0) / num_prompt
            self._token[size] = _average(self._token.get(size, 0.0), cost)

    def limit(self, running: Collection[Sequence], budget: int, num_waiting: int = 0) -> int:
        """The most prompt tokens of the next step.

        Args:
            running: The sequences that run.
            budget: What there is room for.
            num_waiting: Sequences that wait and have room to run beside them.
        """
        if not self._token or not self._decode:
            return budget
        if not any(s.request.stream and s.num_pending <= 1 for s in running):
            return budget
        now = _nearest(self._decode, len(running))
        soon = max(now, _nearest(self._decode, len(running) + num_waiting))
        fitting = self._fit(self.stretch * soon - now, budget)
        return min(budget, max(self.least, fitting))

    def _fit(self, seconds: float, budget: int) -> int:
        """The most prompt tokens that take so long."""
        for size in range(budget.bit_length(), 0, -1):
            least, most = 1 << size - 1, (1 << size) - 1
            fitting = int(seconds / max(_nearest(self._token, least), 1e-9))
            if fitting >= least:
                return min(fitting, most)
        return 0


def _nearest(seconds: dict[int, float], number: int) -> float:
    """What is known of a number's power of two, or of the nearest one below, or else above."""
    size = number.bit_length()
    smaller = [known for known in seconds if known <= size]
    return seconds.get(max(smaller) if smaller else min(seconds, default=0), 0.0)


def _average(average: float, value: float) -> float:
    return value if not average else 0.9 * average + 0.1 * min(value, 4 * average)
