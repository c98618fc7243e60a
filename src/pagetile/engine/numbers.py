"""Numbers that users give, proven to be what they should be."""

from __future__ import annotations

import math
import numbers

from ..errors import RequestError

__all__ = ["check", "integer", "number"]


def check(fits: bool, name: str, value: object, allowed: str) -> None:
    """Refuse ``name=value`` where it does not fit."""
    if not fits:
        raise RequestError(f"{name}={value!r}: expected {allowed}")


def number(
    name: str, value: object, allowed: str, low: float, high: float, open_low: bool = False
) -> float:
    """A finite number from ``low`` to ``high``.

    Args:
        name: What it is called, for the message.
        value: What was given.
        allowed: What is expected, for the message.
        low: The least; with ``open_low`` it is refused itself.
        high: The greatest.
        open_low: See ``low``.

    Raises:
        RequestError: It is something else.
    """
    # A bool is an int to Python; where a number belongs it is a slip.
    check(isinstance(value, numbers.Real) and not isinstance(value, bool), name, value, allowed)
    try:
        found = float(value)  # type: ignore[arg-type]
    except OverflowError:
        found = math.inf
    fits = math.isfinite(found) and low <= found <= high and not (open_low and found == low)
    check(fits, name, value, allowed)
    return found


def integer(
    name: str,
    value: object,
    allowed: str,
    least: int | None = None,
    most: int | None = None,
) -> int:
    """A whole number from ``least`` to ``most``, where these are given.

    Raises:
        RequestError: It is something else.
    """
    check(isinstance(value, numbers.Integral) and not isinstance(value, bool), name, value, allowed)
    found: int = int(value)  # type: ignore[call-overload]
    check(least is None or found >= least, name, value, allowed)
    check(most is None or found <= most, name, value, allowed)
    return found
