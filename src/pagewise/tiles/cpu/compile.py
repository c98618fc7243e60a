"""How kernels are compiled."""

from __future__ import annotations

from functools import partial

from numba import njit

__all__ = ["entry", "folded", "inner"]

entry = partial(njit, nogil=True, cache=True, no_cfunc_wrapper=True)
"""For functions called from Python: they run beside each other and are compiled once a machine."""

inner = partial(njit, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""For functions called from kernels: they borrow their arrays and allocate none.

Numba would otherwise count references to every array of every call, with atomic instructions:
on a tile of 64 keys that took longer than the arithmetic (see docs/lab-log.md).
"""

folded = partial(inner, inline="always")
"""For those with one caller: a part of it before LLVM sees either.

LLVM optimises and compiles a function together with all that it calls, and does so anew at every
level up to the entry: two levels less are a quarter of the time.
"""
