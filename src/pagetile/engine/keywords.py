"""Errors for keywords and attributes that a class does not have."""

from __future__ import annotations

import difflib
import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def refuse_unknown_keywords(of_vllm: Mapping[str, str]) -> Callable[[C], C]:
    """Make an unknown keyword of a class or method a TypeError that names the nearest known one.

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

    def decorate(target: C) -> C:
        if not isinstance(target, type):
            wrapped: C = _wrap(target, target.__qualname__, of_vllm)
            return wrapped
        init: Any = vars(target)["__init__"]
        target.__init__ = _wrap(init, target.__name__, of_vllm)  # type: ignore[misc]
        return target

    return decorate


def _wrap(method: Callable[..., Any], owner: str, of_vllm: Mapping[str, str]) -> Any:
    known = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else f": see help({owner})"
                if name in of_vllm:
                    hint = f", which is vLLM's: {of_vllm[name]}"
                raise TypeError(f"{owner} has no option {name!r}{hint}")
        return method(*args, **options)

    return checked


class ExplainsAbsentNames(ABCMeta):  # so that a subclass may be abstract as well
    """Metaclass: an attribute that vLLM's class has and this one lacks is explained.

    >>> class Engine(metaclass=ExplainsAbsentNames, of_vllm={"sleep": "delete it"}): ...
    >>> Engine().sleep
    Traceback (most recent call last):
    ...
    AttributeError: Engine has no 'sleep', which is vLLM's: delete it
    """

    _of_vllm: Mapping[str, str]

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        of_vllm: Mapping[str, str] | None = None,
    ) -> ExplainsAbsentNames:
        """Make a class; ``of_vllm`` has attributes, and what to do instead."""
        if of_vllm is not None:
            namespace |= {"_of_vllm": of_vllm, "__getattr__": _explain_or_raise}
        return super().__new__(mcs, name, bases, namespace)

    def __getattr__(cls, name: str) -> Any:
        _explain(cls, cls, name)
        return type.__getattribute__(cls, name)  # Python's error again


def _explain_or_raise(self: Any, name: str) -> Any:
    _explain(type(self), self, name)
    # Python's error again: it may be of a name that a property looked for in vain.
    return object.__getattribute__(self, name)


def _explain(cls: Any, obj: object, name: str) -> None:
    if not name.startswith("_") and name in cls._of_vllm:
        hint = f"{cls.__name__} has no {name!r}, which is vLLM's: {cls._of_vllm[name]}"
        raise AttributeError(hint, name=name, obj=obj)
