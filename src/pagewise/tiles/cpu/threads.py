"""One function on several threads at once, without OpenMP.

Kernels compiled with ``nogil=True`` run beside each other on plain Python threads. Unlike
Numba's own threading layers this is safe to call from many threads of the caller's, survives a
fork, and leaves no team of threads spinning on the cores that torch's next product needs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["run_together"]


@functools.lru_cache(maxsize=1)
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pagewise")


# A forked child has none of its parent's threads: it makes its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)


def run_together(function: Callable[[], object], num_threads: int) -> None:
    """Call ``function()`` on ``num_threads`` threads, this one included, and wait for all.

    The calls share their work by an atomic counter, so it does no harm if one starts late.
    """
    if num_threads <= 1:
        function()
        return
    others = [_workers().submit(function) for _ in range(num_threads - 1)]
    try:
        function()
    finally:
        # A call that has not begun by now has nothing left to do.
        errors = [None if other.cancel() else other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error
