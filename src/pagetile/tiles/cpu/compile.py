"""How kernels are compiled."""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps
from numba.extending import overload

from .linking import LINKED

inner = partial(njit, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, **LINKED)
"""For functions called from kernels that allocate no arrays: without reference counting.

Numba would otherwise count references to every array of every call, with atomic instructions:
on a tile of 64 keys that took longer than the arithmetic.
"""

folded = partial(inner, inline="always")
"""For those with one caller: inlined before Numba infers types."""

inner_by_types = partial(overload, jit_options={"_nrt": False, **LINKED})
"""For those whose source depends on the types of their arguments."""

allocating = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, **LINKED)
"""For functions called from ``entry`` ones that allocate a thread's scratch memory."""


@allocating()
def aligned(count, dtype):
    """Allocate ``count`` elements that begin at a cache line, as vectors and tiles then do, too.

    A vector of 64 bytes across two lines takes twice the time to load.
    """
    line = 64
    room = np.empty(count + line, dtype)
    first = -room.ctypes.data % line // room.itemsize
    return room[first : first + count]


def entry() -> Callable[[Callable[..., Any]], Any]:
    """For functions called from Python: they release the GIL, and are compiled once per machine.

    Once per process if nothing can be cached, because neither the package's directory nor the
    user's home is writable.
    """
    compile_ = partial(njit, nogil=True, no_cfunc_wrapper=True)

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = compile_()(function)
        try:
            kernel._cache = _KernelCache(function)  # as ``cache=True`` sets Numba's own
        except RuntimeError:  # Numba has found no directory
            _warn()
        return kernel

    return decorate


_DIGEST_BYTES = hashlib.sha256().digest_size


class _KernelCache(FunctionCache):
    """Compiled kernels on disk, a file for each kernel and types: a digest, and what it is of.

    Numba keeps an index of numbered files. Of two processes that compile one kernel at once, for
    other types each, both take the next number, and the next process runs the one kernel for the
    other's types. It also fails where a file is damaged or cannot be read.

    Numba compares the one file that the kernel stands in: after an update of the package in place
    it would go on with old helpers. Here the digest covers all sources. It is compared before
    anything is unpickled: an old file may name classes that no longer exist.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        folder = Path(function.__code__.co_filename).parent
        self._sources = self._impl.locator.get_source_stamp(), _digest(folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the kernel for these types; None where no whole and current one is kept."""
        target_context.refresh()
        path, about = self._describe(sig, target_context.codegen())
        try:
            content = Path(path).read_bytes()
        except OSError:
            return None
        digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != hashlib.sha256(about + kept).digest():
            return None
        return self._impl.rebuild(target_context, pickle.loads(kept))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel, if there is a place for it."""
        if not self._impl.check_cachable(data):
            return
        path, about = self._describe(sig, data.codegen)
        kept = dumps(self._impl.reduce(data))
        try:
            self._impl.locator.ensure_cache_path()
            with self._cache_file._open_for_write(path) as file:  # a new file, moved there whole
                file.write(hashlib.sha256(about + kept).digest() + kept)
        except OSError:
            _warn()

    def _describe(self, sig: Any, codegen: Any) -> tuple[str, bytes]:
        """Return a kernel's file, named by its types and target, and all that it depends on."""
        types, target, code = self._index_key(sig, codegen)
        number = hashlib.sha256(repr((types, target)).encode()).hexdigest()[:16]
        about = repr((numba.__version__, types, target, code, self._sources)).encode()
        return os.path.join(self.cache_path, f"{self._impl.filename_base}.{number}.nbc"), about


@cache
def _digest(folder: Path) -> str:
    """Digest of the shared tiles, an operation's own kernels, its problem and types."""
    sources = {
        *Path(__file__).parent.glob("*.py"),
        Path(__file__).parents[2] / "device.py",  # chooses the vector registers
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
