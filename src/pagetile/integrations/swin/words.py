"""How a report spells sizes."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["heads", "times"]


def times(sizes: Iterable[int]) -> str:
    """One number an axis.

    Example:
        >>> times((7, 7, 7))
        '7×7×7'
    """
    return "×".join(map(str, sizes))


def heads(dim: int, num_heads: int) -> str:
    """Heads and their size.

    Example:
        >>> heads(48, 3)
        '3 heads of 16'
    """
    return f"{num_heads} heads of {dim // num_heads}"
