"""How kernels are compiled."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from numba import njit
from numba.extending import overload

from .linking import LINKED

inner = partial(njit, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, **LINKED)
"""For functions called from kernels: they borrow their arrays and allocate none.

Numba would otherwise count references to every array of every call, with atomic instructions:
on a tile of 64 keys that took longer than the arithmetic.
"""

folded = partial(inner, inline="always")
"""For those with one caller: a part of it before Numba infers types."""

inner_by_types = partial(overload, jit_options={"_nrt": False, **LINKED})
"""For those whose source depends on the types of their arguments."""

allocating = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, **LINKED)
"""For functions called from ``entry`` ones that make a thread's scratch memory."""


def entry() -> Callable[[Callable[..., Any]], Any]:
    """For functions called from Python: they run beside each other and are compiled once a machine.

    Once a process where nothing can be kept: the package lies where its user may not write, and so
    does the user's home.
    """
    compile_ = partial(njit, nogil=True, no_cfunc_wrapper=True)

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            kernel = compile_(cache=True)(function)
        except RuntimeError:  # Numba has found no directory
            _warn()
            return compile_()(function)
        return _follow_sources(kernel, Path(function.__code__.co_filename))

    return decorate


def _follow_sources(kernel: Any, path: Path) -> Any:
    """Compile a cached kernel anew when any file changes that it may be made of.

    Numba compares the one file that the kernel stands in: after an update of the package in place
    it would go on with old helpers. The digest is part of the index's version, which Numba compares
    before it unpickles anything: an old index may name classes that no longer exist.
    """
    kept = getattr(getattr(kernel, "_cache", None), "_cache_file", None)  # not a public attribute
    if kept is not None:
        kept._version = (kept._version, _digest(path.parent))
    return kernel


@cache
def _digest(folder: Path) -> str:
    """Of the shared tiles, of an operation's own kernels, and of its problem and types."""
    sources = {
        *Path(__file__).parent.glob("*.py"),
        Path(__file__).parents[2] / "device.py",  # which registers there are
        *folder.glob("*.py" if folder.name == "cpu" else "cpu*.py"),
        *folder.glob("problem.py"),
        *folder.parent.glob("*.py"),
    }
    texts = (path.read_bytes() for path in sorted(sources) if path.is_file())
    return hashlib.sha256(b"".join(texts)).hexdigest()


@cache
def _warn() -> None:
    warnings.warn(
        "pagetile compiles its CPU kernels anew in this process, some 10 seconds for each set of "
        "element types, since it cannot keep them anywhere: name a directory that can be written, "
        "NUMBA_CACHE_DIR=...",
        RuntimeWarning,
        stacklevel=3,
    )
