"""Chunked prefill: limits a step's prompt tokens while other sequences stream."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Sequence

_WEIGHT = 0.1
"""Weight of the newest step in the running averages."""


class ChunkSizer:
    """Sizes prefill chunks by measured step times, to bound the time between a stream's tokens.

    A decode step of ``n`` sequences takes ``d(n)`` seconds, and ``t`` prompt tokens in it take
    ``f + c * t`` more; ``f`` is the cost of launching and, over a long context, of reading its
    keys. A mixed step may take ``stretch`` times a decode step of all sequences, the waiting ones
    included, since streams will wait that long between tokens anyway. That leaves
    ``s = stretch * d(all) - d(running)`` seconds for prompt tokens::

        f < s / 2      (s - f) / c tokens
        f > s / 2      f / c tokens: the step exceeds its limit, but smaller chunks would save at
                       most half of that and need many more steps

    ``d``, between powers of two, and the means and variances behind ``f`` and ``c`` are running
    averages of what steps took.

    Args:
        stretch: The longest mixed step, as a multiple of a decode step.
        least: Fewest prompt tokens of a step: smaller chunks cost more than they gain.
    """

    def __init__(self, stretch: float = 2.2, least: int = 32) -> None:
        self.stretch, self.least = stretch, least
        self._decode: dict[int, float] = {}  # by the number of sequences, in bits
        self._fit = _LinearFit()

    def record(self, seconds: float, num_decode: int, num_prompt: int) -> None:
        """Record a step's time, from the previous step's tokens to its own."""
        if num_prompt == 0:
            size = num_decode.bit_length()
            self._decode[size] = _average(self._decode.get(size, 0.0), seconds)
        elif num_prompt >= self.least:
            beside = self._decode_seconds(num_decode) if num_decode else 0.0
            self._fit.add(num_prompt, max(seconds - beside, 0.0))

    def limit(self, running: Collection[Sequence], budget: int, num_waiting: int = 0) -> int:
        """Return the most prompt tokens of the next step.

        Args:
            running: The running sequences.
            budget: The upper limit.
            num_waiting: Waiting sequences that have room to run beside them.
        """
        is_streaming = any(s.request.stream and s.num_pending <= 1 for s in running)
        if not (is_streaming and self._fit.mean_y and self._decode):
            return budget
        now = self._decode_seconds(len(running))
        soon = max(now, self._decode_seconds(len(running) + num_waiting))
        fixed, token = self._fit.coefficients()
        seconds = self.stretch * soon - now
        fitting = max(seconds - fixed, fixed) / token
        return min(budget, max(self.least, int(fitting)))

    def _decode_seconds(self, num_seqs: int) -> float:
        """Return a decode step's time for this number of sequences, or the nearest measured one."""
        size = num_seqs.bit_length()
        smaller = [known for known in self._decode if known <= size]
        nearest = max(smaller) if smaller else min(self._decode, default=0)
        return self._decode.get(nearest, 0.0)


class _LinearFit:
    """Linear regression of recent points ``(x, y)``, with intercept and slope at least 0."""

    def __init__(self) -> None:
        self.mean_x = self.mean_y = self._variance = self._covariance = 0.0

    def add(self, x: float, y: float) -> None:
        if not self.mean_x:
            self.mean_x, self.mean_y = x, y
            return
        # Clip outliers, such as a step that waited for a compiler, at four usual steps.
        most = 4 * self.mean_y * max(1.0, x / self.mean_x)
        dx, dy = x - self.mean_x, min(y, most) - self.mean_y
        self.mean_x += _WEIGHT * dx
        self.mean_y += _WEIGHT * dy
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * dx * dx)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * dx * dy)

    def coefficients(self) -> tuple[float, float]:
        """Return intercept and slope; with points of one x the intercept is 0."""
        most = self.mean_y / self.mean_x
        if self._variance < (0.05 * self.mean_x) ** 2:
            return 0.0, most
        # At most the mean ratio; at least a fraction of it, or noise could make a chunk endless.
        slope = min(max(self._covariance / self._variance, most / 64), most)
        return self.mean_y - slope * self.mean_x, slope


def _average(average: float, value: float) -> float:
    return value if not average else (1 - _WEIGHT) * average + _WEIGHT * min(value, 4 * average)
