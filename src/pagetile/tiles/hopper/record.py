"""Gluon aggregates whose constructor only assigns its arguments."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate
from typing_extensions import dataclass_transform


@dataclass_transform()
def record(cls: Any) -> Any:
    """Make an aggregate of ``cls``: its constructor takes the annotated fields in their order.

    Values of ``gl.constexpr`` fields become constants.
    """
    names = tuple(cls.__annotations__)
    are_constants = tuple(kind is gl.constexpr for kind in cls.__annotations__.values())

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, is_constant, value in zip(names, are_constants, values, strict=True):
            setattr(self, name, gl.constexpr(value) if is_constant else value)

    cls.__init__ = __init__
    return _aggregate(cls)
