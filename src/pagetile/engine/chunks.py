"""How many prompt tokens a step may compute beside sequences that stream their tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Sequence

_WEIGHT = 0.1
"""Of the newest step in all averages."""


class ChunkSizer:
    """Sizes prefill chunks by measured step time, so that streams stay smooth.

    A decode step of ``n`` sequences takes ``d(n)`` seconds, and ``t`` prompt tokens beside it
    ``f + c * t`` more: launching them costs something whatever their number, and over a long
    context so does reading its keys. A mixed step may take ``stretch`` times the decode step that
    is to come, when all that wait have begun: a stream will see that time between its tokens
    anyway. That leaves ``s = stretch * d(all) - d(running)`` seconds for prompt tokens::

        f < s / 2      (s - f) / c tokens
        f > s / 2      f / c tokens: the step takes longer than it may, but smaller chunks would
                       save at most half of that and need many more steps

    ``d``, between powers of two, and the means and variances behind ``f`` and ``c`` are running
    averages of what steps took.

    Args:
        stretch: The longest step beside a stream, in decode steps.
        least: Fewest prompt tokens of a step: smaller chunks cost more than they smooth.
    """

    def __init__(self, stretch: float = 2.2, least: int = 32) -> None:
        self.stretch, self.least = stretch, least
        self._decode: dict[int, float] = {}  # by the number of sequences, in bits
        self._line = _Line()

    def record(self, seconds: float, num_decode: int, num_prompt: int) -> None:
        """Take note of what a step took from the one before it to its tokens."""
        if num_prompt == 0:
            size = num_decode.bit_length()
            self._decode[size] = _average(self._decode.get(size, 0.0), seconds)
        elif num_prompt >= self.least:
            beside = self._decode_seconds(num_decode) if num_decode else 0.0
            self._line.add(num_prompt, max(seconds - beside, 0.0))

    def limit(self, running: Collection[Sequence], budget: int, num_waiting: int = 0) -> int:
        """The most prompt tokens of the next step.

        Args:
            running: The sequences that run.
            budget: What there is room for.
            num_waiting: Sequences that wait and have room to run beside them.
        """
        if not self._line.mean_y or not self._decode:
            return budget
        if not any(s.request.stream and s.num_pending <= 1 for s in running):
            return budget
        now = self._decode_seconds(len(running))
        soon = max(now, self._decode_seconds(len(running) + num_waiting))
        fixed, token = self._line.find()
        seconds = self.stretch * soon - now
        fitting = max(seconds - fixed, fixed) / token
        return min(budget, max(self.least, int(fitting)))

    def _decode_seconds(self, num_seqs: int) -> float:
        """What a decode step takes: of as many sequences, or of the nearest number known."""
        size = num_seqs.bit_length()
        smaller = [known for known in self._decode if known <= size]
        nearest = max(smaller) if smaller else min(self._decode, default=0)
        return self._decode.get(nearest, 0.0)


class _Line:
    """The line through recent points ``(x, y)``, of which neither part is negative."""

    def __init__(self) -> None:
        self.mean_x = self.mean_y = self._variance = self._covariance = 0.0

    def add(self, x: float, y: float) -> None:
        if not self.mean_x:
            self.mean_x, self.mean_y = x, y
            return
        # A step that waits for a compiler or another process counts as four usual ones at most.
        most = 4 * self.mean_y * max(1.0, x / self.mean_x)
        dx, dy = x - self.mean_x, min(y, most) - self.mean_y
        self.mean_x += _WEIGHT * dx
        self.mean_y += _WEIGHT * dy
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * dx * dx)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * dx * dy)

    def find(self) -> tuple[float, float]:
        """Where it meets x = 0, and its slope. Points of one x give a line through the origin."""
        most = self.mean_y / self.mean_x
        if self._variance < (0.05 * self.mean_x) ** 2:
            return 0.0, most
        # Not more than all of it, nor so little that one noisy step makes a chunk endless.
        slope = min(max(self._covariance / self._variance, most / 64), most)
        return self.mean_y - slope * self.mean_x, slope


def _average(average: float, value: float) -> float:
    return value if not average else (1 - _WEIGHT) * average + _WEIGHT * min(value, 4 * average)
