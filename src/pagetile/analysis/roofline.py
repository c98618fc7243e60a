"""Rooflines: the least time of some work on a machine, by bytes, products and exponentials.

::

    seconds >= max(bytes / bandwidth, flops / product rate, exponentials / exponential rate)

Exponentials bound attention with narrow heads: a score costs one exponential whatever the head
size, and a Hopper GPU does 128 multiply-adds in the time of one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..errors import RequestError
from .attention_io import AttentionShape
from .attention_io import compulsory as attention_bytes
from .window_io import WindowShape, backward_compulsory
from .window_io import compulsory as window_bytes

PRODUCT_STEP = 16  # matrix units multiply whole steps of this many elements


@dataclass(frozen=True)
class Machine:
    """How fast a machine is at the three things that bound attention."""

    name: str
    title: str
    bytes_per_second: float
    """Of memory."""
    flops: Mapping[str, float]
    """Floating-point operations a second of dense matrix products, by element type."""
    exps_per_second: float
    source: str
    """Where the figures are from."""
    program_bytes: int = 0
    """Shared memory that one program may have; 0 if there is none."""


@dataclass(frozen=True)
class Work:
    """The bytes, products and exponentials that any implementation needs."""

    bytes: int
    flops: int
    exps: int
    dtype: str = "bfloat16"
    """Element type of the products."""

    def on(self, machine: Machine) -> Roofs:
        """The three least times on a machine.

        Raises:
            RequestError: Its rate for this element type is not known.
        """
        if self.dtype not in machine.flops:
            known = ", ".join(machine.flops)
            raise RequestError(f"{machine.name} has no rate for {self.dtype}: it has {known}")
        return Roofs(
            self.bytes / machine.bytes_per_second,
            self.flops / machine.flops[self.dtype],
            self.exps / machine.exps_per_second,
        )


@dataclass(frozen=True)
class Roofs:
    """Least times in seconds.

    Examples:
        >>> Roofs(bytes=1e-6, products=3e-6, exps=2e-6).bound_by
        'products'
    """

    bytes: float
    products: float
    exps: float

    @property
    def seconds(self) -> float:
        """The greatest of them: nothing can be faster."""
        return max(self.bytes, self.products, self.exps)

    @property
    def bound_by(self) -> str:
        """``"bytes"``, ``"products"`` or ``"exps"``."""
        return max(("bytes", "products", "exps"), key=lambda name: float(getattr(self, name)))


def attention_work(shape: AttentionShape, *, dtype: str = "bfloat16") -> Work:
    """Of dense attention: no score that no row sees, head sizes in whole steps of 16.

    Examples:
        >>> roofs = attention_work(AttentionShape(16384, 128, num_heads=16)).on(machine("h200"))
        >>> roofs.bound_by, round(roofs.seconds * 1e6)
        ('products', 2223)
    """
    sizes = _padded(shape.head_size) + _padded(shape.v_head_size)
    scores = shape.num_scores
    return Work(attention_bytes(shape).bytes, 2 * scores * sizes, scores, dtype)


def window_work(shape: WindowShape, *, dtype: str = "bfloat16") -> Work:
    """Of window attention: a masked score of a shifted window is a score like any other.

    Examples:
        >>> swin_unetr = WindowShape(343, 3, 343, 16, num_region_windows=343)
        >>> roofs = window_work(swin_unetr).on(machine("h200-measured"))
        >>> roofs.bound_by, round(roofs.seconds * 1e6, 1)
        ('exps', 31.3)
    """
    scores = shape.num_scores
    return Work(window_bytes(shape).bytes, 4 * scores * _padded(shape.head_size), scores, dtype)


def window_training_work(shape: WindowShape, *, dtype: str = "bfloat16") -> Work:
    """Of a forward and a backward pass: five products instead of two, and every weight again.

    Examples:
        >>> swin_unetr = WindowShape(343, 3, 343, 16, num_region_windows=343)
        >>> work = window_training_work(swin_unetr)
        >>> work.flops / window_work(swin_unetr).flops, work.exps // swin_unetr.num_scores
        (3.5, 2)
    """
    scores = shape.num_scores
    moved = window_bytes(shape, with_lse=True).bytes + backward_compulsory(shape).bytes
    return Work(moved, 14 * scores * _padded(shape.head_size), 2 * scores, dtype)


def machine(name: str) -> Machine:
    """A machine of the table by its name.

    Raises:
        RequestError: It is not in the table; the message lists what is.

    Examples:
        >>> machine("a100").bytes_per_second
        2039000000000.0
    """
    if name not in _table():
        raise RequestError(f"no machine {name!r}: expected one of {', '.join(_table())}")
    return _table()[name]


def machine_names() -> tuple[str, ...]:
    """All names in the table."""
    return tuple(_table())


@cache
def _table() -> dict[str, Machine]:
    entries = json.loads((files(__package__) / "machines.json").read_text(encoding="utf-8"))
    return {entry["name"]: Machine(**entry) for entry in entries}


def _padded(head_size: int) -> int:
    return -(-head_size // PRODUCT_STEP) * PRODUCT_STEP
