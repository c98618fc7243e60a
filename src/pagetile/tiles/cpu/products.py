"""Scores with transposed keys, by the element type of the queries."""

from __future__ import annotations

from .compile import inner_by_types
from .gemm import multiply
from .online_softmax import TILE_N
from .simd import fma, load, splat, store, zeros
from .simd_pairs import are_pairs


def score_transposed(scores, q, q_at, num_rows, keys, num_keys, width):
    """``scores[r, n] = Σ_d q[r, d] · keys[d, n]``; for compiled code only."""
    raise NotImplementedError


@inner_by_types(score_transposed)
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
        pass  # never called: bfloat16 pairs are not transposed

    return of_pairs if are_pairs(q) else of_float32
