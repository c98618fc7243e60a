"""The CPU kernels' exponential alone, to measure its speed."""

from __future__ import annotations

from typing import Any

from ..tiles.cpu.compile import entry
from ..tiles.cpu.simd import exp2, load, store


@entry()
def raise_two(into: Any, x: Any, repeats: int) -> None:
    """``into = 2 ** x`` for float32 arrays of a multiple of 16 numbers, ``repeats`` times."""
    for _ in range(repeats):
        for n in range(0, len(x), 16):
            store(into, n, exp2(load(x, n)))
