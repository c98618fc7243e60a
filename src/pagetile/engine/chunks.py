"""How many prompt tokens a step may compute beside sequences that stream their tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Sequence

__all__ = ["ChunkSizer"]


class ChunkSizer:
    """Sizes prefill chunks by measured step time, so that streams stay smooth.

    A decode step of ``n`` sequences takes ``d(n)`` seconds and a prompt token beside it ``c`` more.
    A mixed step may take ``stretch`` times the decode step that is to come, when all that wait
    have begun: a stream will see that time between its tokens anyway. So it computes at most
    ``(stretch * d(all) - d(running)) / c`` prompt tokens. ``c``, and ``d`` between powers of two,
    are running averages of what steps took.

    Args:
        stretch: The longest step beside a stream, in decode steps.
        least: Fewest prompt tokens of a step: smaller chunks cost more than they smooth.
    """

    def __init__(self, stretch: float = 2.2, least: int = 32) -> None:
        self.stretch, self.least = stretch, least
        self._decode: dict[int, float] = {}  # by the number of sequences, in bits
        self._token = 0.0

    def record(self, seconds: float, num_decode: int, num_prompt: int) -> None:
        """Take note of what a step took from the one before it to its tokens."""
        if num_prompt == 0:
            size = num_decode.bit_length()
            self._decode[size] = _average(self._decode.get(size, 0.0), seconds)
        elif num_prompt >= self.least:
            beside = self._decode_seconds(num_decode) if num_decode else 0.0
            self._token = _average(self._token, max(seconds - beside, 0.0) / num_prompt)

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
        now = self._decode_seconds(len(running))
        soon = max(now, self._decode_seconds(len(running) + num_waiting))
        fitting = (self.stretch * soon - now) / self._token
        return min(budget, max(self.least, int(fitting)))

    def _decode_seconds(self, num_seqs: int) -> float:
        """What a decode step takes: of as many sequences, or of the nearest number known."""
        size = num_seqs.bit_length()
        smaller = [known for known in self._decode if known <= size]
        nearest = max(smaller) if smaller else min(self._decode, default=0)
        return self._decode.get(nearest, 0.0)


def _average(average: float, value: float) -> float:
    return value if not average else 0.9 * average + 0.1 * min(value, 4 * average)
