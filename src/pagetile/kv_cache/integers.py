"""Checks of whole numbers and block lists, without torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from ..errors import DTypeError, ShapeError


def whole_number(name: str, value: Any, *, least: int | None = 0) -> int:
    """Return ``value`` as an int; ``least=None`` takes negative ones too.

    Raises:
        ShapeError: ``value`` is not an integer, or below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        bound = "" if least is None else f" of at least {least}"
        raise ShapeError(f"{name}={value!r}, expected an integer{bound}") from None
    if least is not None and number < least:
        raise ShapeError(f"{name}={number}, expected at least {least}")
    return number


def check_type(name: str, value: Any, expected: type, hint: str = "") -> None:
    """Raise unless an argument is of a type; ``hint`` says how one is made.

    Raises:
        DTypeError: It is of another.
    """
    if not isinstance(value, expected):
        raise DTypeError(
            f"{name} is of type {type(value).__name__}, expected a {expected.__name__}{hint}"
        )


def block_ids(blocks: Iterable[Any]) -> list[int]:
    """Return block numbers as a list of ints.

    Raises:
        DTypeError: ``blocks`` is not a list, or one of its elements is not an integer.
    """
    try:
        return list(map(operator.index, blocks))
    except TypeError:
        raise DTypeError(f"blocks={blocks!r}, expected a list of block numbers (int)") from None
