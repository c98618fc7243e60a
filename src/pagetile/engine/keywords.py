"""Errors for keywords and attributes that a class does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def refuse_unknown_keywords(of_vllm: Mapping[str, str]) -> Callable[[C], C]:
    """Make an unknown keyword of ``cls(...)`` a TypeError that names the nearest known one.

    Args:
        of_vllm: Keywords that vLLM has, and what to do instead.

    >>> @refuse_unknown_keywords({"swap_space": "leave it out"})
    ... class Cache:
    ...     def __init__(self, *, num_blocks: int = 1) -> None: ...
    >>> Cache(blocks=3)
    Traceback (most recent call last):
    ...
    TypeError: Cache has no option 'blocks'; did you mean num_blocks?
    >>> Cache(swap_space=4)
    Traceback (most recent call last):
    ...
    TypeError: Cache has no option 'swap_space', which is vLLM's: leave it out
    """

    def decorate(cls: C) -> C:
        init: Any = vars(cls)["__init__"]
        known = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    close = difflib.get_close_matches(name, known, 1)
                    hint = f"; did you mean {close[0]}?" if close else f": see help({cls.__name__})"
                    if name in of_vllm:
                        hint = f", which is vLLM's: {of_vllm[name]}"
                    raise TypeError(f"{cls.__name__} has no option {name!r}{hint}")
            init(self, *args, **options)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def explain_absent_names(of_vllm: Mapping[str, str]) -> Callable[[C], C]:
    """Make an attribute that vLLM has and ``cls`` has not an AttributeError that says what to do.

    Args:
        of_vllm: Attributes, and what to do instead.

    >>> @explain_absent_names({"sleep": "delete it"})
    ... class Engine: ...
    >>> Engine().sleep
    Traceback (most recent call last):
    ...
    AttributeError: Engine has no 'sleep', which is vLLM's: delete it
    """

    def decorate(cls: C) -> C:
        def __getattr__(self: Any, name: str) -> Any:
            if name in of_vllm:
                hint = f"{cls.__name__} has no {name!r}, which is vLLM's: {of_vllm[name]}"
                raise AttributeError(hint, name=name, obj=self)
            # Python's error again: it may be of a name that a property looked for in vain.
            return object.__getattribute__(self, name)

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return cls

    return decorate
