"""Poisoned memory, in which a missing write shows."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

_M_PERTURB = -6  # of mallopt in the GNU libc
_ONES = 256  # fresh bytes are its complement: 0xFF; freed ones are 0


@contextlib.contextmanager
def poisoned_memory() -> Iterator[bool]:
    """Context in which memory of the C library is filled with 0xFF: NaN in every float type.

    It applies to torch's empty tensors, NumPy's empty arrays and the scratch of Numba's kernels,
    except for arrays of a few bytes. The value says whether it works, for which glibc is needed.

    Examples:
        >>> import torch
        >>> with poisoned_memory() as works:
        ...     fresh = torch.empty(4096)
        >>> not works or bool(fresh.isnan().all())
        True
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield False
        return
    try:
        yield bool(mallopt(_M_PERTURB, _ONES))
    finally:
        mallopt(_M_PERTURB, 0)
