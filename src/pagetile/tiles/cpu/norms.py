"""RMS norm of a row, for CPU kernels that do more in the same pass."""

from __future__ import annotations

import numpy as np

from .compile import inner
from .simd import add, fma, load_first, mul, splat, store_first, sum_lanes, zeros

NONE, ROUNDED, SCALED, SHIFTED = -1, 0, 1, 2
KINDS = {"rounded": ROUNDED, "scaled": SCALED, "shifted": SHIFTED}
"""The kinds of ``rms_norm``; ``NONE``: no norm."""


@inner()
def normalise(out, to, x, at, weight, size, eps, kind):
    """``out[to:] = x[at:] / sqrt(mean(x²) + eps) * weight``, for ``size`` elements."""
    squares = zeros()
    for d in range(0, size, 16):
        v = load_first(x, at + d, size - d)
        squares = fma(v, v, squares)
    mean = sum_lanes(squares) / np.float32(size)
    factor = splat(np.float32(1) / np.sqrt(mean + np.float32(eps)))
    for d in range(0, size, 16):
        y, w = mul(load_first(x, at + d, size - d), factor), load_first(weight, d, size - d)
        if kind == ROUNDED:  # to the type of out, before it is multiplied
            store_first(out, to + d, y, size - d)
            y = load_first(out, to + d, size - d)
        elif kind == SHIFTED:
            w = add(w, splat(np.float32(1)))
        store_first(out, to + d, mul(y, w), size - d)
