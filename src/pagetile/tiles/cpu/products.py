"""The two products of attention over one tile of keys, by the element type of the left side.

Weights and queries in float32 take the float32 micro-kernels, whatever the keys are stored as.
With bfloat16 on both sides, on a machine that multiplies it, they travel as they are.
"""

from __future__ import annotations

from numba import types
from numba.extending import overload

from . import bf16_microkernels, microkernels
from .gemm import multiply
from .online_softmax import TILE_N
from .simd import fma, load, splat, store, zeros

__all__ = ["mix_tile", "score_tile", "score_turned"]


def score_tile(scores, q, q_at, q_stride, num_rows, k, base, rows, ahead, tile_n, width):
    """``scores[r, n] = q[r] · k[base + rows[n]]``; called from compiled code only."""
    raise NotImplementedError


def score_turned(scores, q, q_at, num_rows, keys, num_keys, width):
    """``scores[r, n] = Σ_d q[r, d] · keys[d, n]``, keys by columns; compiled code only."""
    raise NotImplementedError


def mix_tile(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    """``acc[r] = decay[r] * acc[r] + Σ_n p[r, n] * v[base + rows[n]]``; compiled code only."""
    raise NotImplementedError


def _microkernels_for(array):
    return bf16_microkernels if array.dtype == types.uint16 else microkernels


@overload(score_tile)
def _(scores, q, q_at, q_stride, num_rows, k, base, rows, ahead, tile_n, width):
    return _microkernels_for(q).score_tile.py_func


@overload(score_turned, jit_options={"_nrt": False})
def _(scores, q, q_at, num_rows, keys, num_keys, width):
    def of_float32(scores, q, q_at, num_rows, keys, num_keys, width):
        columns = (num_keys + 15) // 16 * 16
        if num_rows == 1:  # in the same order
            for n in range(0, columns, 16):
                s = zeros()
                for d in range(width):
                    s = fma(splat(q[q_at + d]), load(keys, d * TILE_N + n), s)
                store(scores, n, s)
            return
        multiply(
            scores, 0, TILE_N, q, q_at, width, 1, keys, TILE_N, num_rows, columns, width, False
        )

    def of_pairs(scores, q, q_at, num_rows, keys, num_keys, width):
        pass  # these are summed over lanes

    return of_pairs if q.dtype == types.uint16 else of_float32


@overload(mix_tile)
def _(acc, at, stride, decay, num_rows, p, tile_n, v, base, rows, ahead, num_keys, width):
    return _microkernels_for(p).mix_tile.py_func
