"""Errors for keywords that a class does not know."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any, TypeVar

__all__ = ["refuse_unknown_keywords"]

C = TypeVar("C", bound=type)


def refuse_unknown_keywords(cls: C) -> C:
    """Make an unknown keyword of ``cls(...)`` a TypeError that names the nearest known one.

    >>> @refuse_unknown_keywords
    ... class Cache:
    ...     def __init__(self, *, num_blocks: int = 1) -> None: ...
    >>> Cache(blocks=3)
    Traceback (most recent call last):
    ...
    TypeError: Cache has no option 'blocks'; did you mean num_blocks?
    """
    init: Any = vars(cls)["__init__"]
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else f": see help({cls.__name__})"
                raise TypeError(f"{cls.__name__} has no option {name!r}{hint}")
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls
