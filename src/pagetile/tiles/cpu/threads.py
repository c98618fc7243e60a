"""One function on several threads at once, on the threads that torch already has.

Torch's products run on a team of OpenMP threads, which keep spinning for milliseconds after
their work is done. A second set of threads beside them would wait for cores that are busy doing
nothing: attention between two linear layers took twice as long that way. So kernels, which are
compiled with ``nogil=True``, are handed to the same team. Where torch brings no libgomp (macOS,
Windows), and in a forked child, where the team is gone, plain threads do it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...process import HOME

__all__ = ["run_together"]


def run_together(function: Callable[[], object], num_threads: int) -> None:
    """Call ``function()`` on ``num_threads`` threads, this one included, and wait for all.

    The calls share their work by an atomic counter, so it does no harm if one starts late or
    never. May itself be called from several threads at once.

    Raises:
        Exception: The first that a call raised, when all have ended.
    """
    if num_threads <= 1:
        function()
        return
    errors: list[BaseException] = []

    def guarded(_: object = None) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    parallel = _openmp(os.getpid())
    if parallel is not None:
        parallel(_Call(guarded), None, num_threads, 0)
    else:
        _run_on_workers(guarded, num_threads)
    if errors:
        raise errors[0]


_Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.lru_cache(maxsize=1)
def _openmp(process: int) -> Any:
    """``GOMP_parallel(function, data, num_threads, flags)`` of the libgomp that torch runs on."""
    if process != HOME:
        return None  # forked: libgomp would wait for ever for threads that are gone
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
        # Torch's own copy if there are two: a program may have loaded another for itself.
        parallel = ctypes.CDLL(max(paths, key=lambda path: "torch" in path)).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    parallel.argtypes = [_Call, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _run_on_workers(function: Callable[[], None], num_threads: int) -> None:
    others = [_workers(os.getpid()).submit(function) for _ in range(num_threads - 1)]
    function()
    for other in others:
        # A call that has not begun by now has nothing left to do.
        if not other.cancel():
            other.result()


@functools.lru_cache(maxsize=1)
def _workers(process: int) -> ThreadPoolExecutor:
    """A process's own threads: a forked child has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pagetile")
