"""Distributions of sequence lengths, and the cache blocks that such sequences fill on average.

A sequence of ``L`` tokens takes ``ceil(L / block_size)`` blocks. Its mean over a distribution has
a closed form for each of these, so nothing is sampled and the results are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RequestError


@dataclass(frozen=True)
class GivenLengths:
    """Lengths that were observed, each as likely as the others.

    Examples:
        >>> lengths = GivenLengths((1, 16, 17))
        >>> lengths.mean_blocks(16) == (1 + 1 + 2) / 3
        True
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise RequestError(
                f"lengths {list(self.lengths)}: expected one or more, each at least 1"
            )

    @property
    def longest(self) -> int:
        """The greatest of them."""
        return max(self.lengths)

    @property
    def mean(self) -> float:
        """Their mean."""
        return sum(self.lengths) / len(self.lengths)

    def mean_blocks(self, block_size: int) -> float:
        """The mean of ``ceil(L / block_size)``."""
        return sum(-(-length // block_size) for length in self.lengths) / len(self.lengths)

    def __str__(self) -> str:
        count = len(self.lengths)
        return f"{count} given length{'s' * (count > 1)}"


@dataclass(frozen=True)
class UniformLengths:
    """Every length from ``shortest`` to ``longest`` is equally likely.

    Examples:
        >>> UniformLengths(1, 32).mean_blocks(16)
        1.5
    """

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise RequestError(
                f"lengths {self.shortest}-{self.longest}: expected a range such as 1-2048"
            )

    @property
    def mean(self) -> float:
        """Half way."""
        return (self.shortest + self.longest) / 2

    def mean_blocks(self, block_size: int) -> float:
        """``(F(longest) - F(shortest - 1)) / count`` with ``F(n)`` the blocks of lengths 1 to n."""
        count = self.longest - self.shortest + 1
        return (_sum(self.longest, block_size) - _sum(self.shortest - 1, block_size)) / count

    def __str__(self) -> str:
        return f"lengths from {self.shortest:,} to {self.longest:,}, all equally likely"


@dataclass(frozen=True)
class GeometricLengths:
    """Sequences end after each token with the same probability ``1 / mean_uncut``.

    What would grow past ``longest`` is cut there. With ``q = 1 - 1 / mean_uncut`` a sequence is
    longer than ``t < longest`` with probability ``q**t``, and a mean is the sum of such
    probabilities::

        E[L]           = sum of q**t      for t = 0, 1, … below longest
        E[ceil(L / b)] = sum of q**(k b)  for k = 0, 1, … below ceil(longest / b)

    Examples:
        >>> lengths = GeometricLengths(mean_uncut=2, longest=3)  # 1, 2, 3: 1/2, 1/4, 1/4
        >>> lengths.mean, lengths.mean_blocks(2)
        (1.75, 1.25)
    """

    mean_uncut: float
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean_uncut < float("inf"):
            raise RequestError(f"mean length {self.mean_uncut}: expected a number of at least 1")

    @property
    def mean(self) -> float:
        """The mean of what remains after the cut."""
        return self.mean_blocks(1)

    def mean_blocks(self, block_size: int) -> float:
        """The geometric sum above."""
        terms = -(-self.longest // block_size)
        ratio = float((1 - 1 / self.mean_uncut) ** block_size)
        return float(terms) if ratio == 1 else (1 - ratio**terms) / (1 - ratio)

    def __str__(self) -> str:
        return f"geometric lengths, mean {self.mean_uncut:,g}, cut at {self.longest:,}"


LengthDistribution = GivenLengths | UniformLengths | GeometricLengths
"""How long sequences are, in tokens: the longest, the mean, and the blocks that they take."""


def parse_lengths(text: str) -> LengthDistribution:
    """Lengths as they are written on a command line: ``"100,250,900"`` or ``"1-2048"``.

    Raises:
        RequestError: It is neither.
    """
    try:
        if "-" in text:
            shortest, longest = (int(part) for part in text.split("-"))
            return UniformLengths(shortest, longest)
        return GivenLengths(tuple(int(part) for part in text.split(",")))
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"lengths {text!r}: expected numbers such as 100,250,900 or a range such as 1-2048"
        ) from None


def _sum(n: int, block_size: int) -> int:
    """``ceil(L / block_size)`` summed over ``L = 1 … n``."""
    full, rest = divmod(n, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
