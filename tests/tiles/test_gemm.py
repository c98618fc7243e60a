"""Products in scratch memory against NumPy's, at every edge of a block."""

import numpy as np
import pytest
import torch
from machine_code import loops_of_products, spills
from numba import njit, types

from pagetile.device import cpu_features
from pagetile.tiles.cpu.gemm import load_rows, multiply, transpose
from pagetile.tiles.cpu.microkernels import mix_tile, score_tile
from pagetile.tiles.cpu.simd_pairs import as_operand

RANDOM = np.random.default_rng(0)


@njit
def run(c, at, c_row, a, a_at, a_row, a_step, b, b_step, rows, columns, steps, adds):
    multiply(c, at, c_row, a, a_at, a_row, a_step, b, b_step, rows, columns, steps, adds)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "steps"),
    [(4, 16, 1), (8, 64, 3), (4, 80, 0), (12, 144, 17), (16, 32, 5), (20, 80, 9), (64, 64, 2)],
)
def test_products_are_numpys(rows, columns, steps, transposed, adds):
    a = RANDOM.standard_normal((steps, rows) if transposed else (rows, steps)).astype(np.float32)
    b = RANDOM.standard_normal((steps, columns + 16)).astype(np.float32)
    c = np.full((rows + 1, columns + 32), np.nan, np.float32)
    c[:rows, 16 : columns + 16] = before = RANDOM.standard_normal((rows, columns))
    if not adds:
        c[:rows, 16 : columns + 16] = np.nan  # what was there does not matter
    flat = np.concatenate([np.full(3, np.nan, np.float32), a.ravel()])
    strides = (1, rows) if transposed else (steps, 1)
    run(
        c.reshape(-1), 16, columns + 32, flat, 3, *strides, b.reshape(-1), columns + 16,
        rows, columns, steps, adds,
    )  # fmt: skip
    wanted = (a.T if transposed else a) @ b[:, :columns] + (before if adds else 0)
    np.testing.assert_allclose(c[:rows, 16 : columns + 16], wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(c[rows]).all()
    assert np.isnan(c[:, :16]).all()
    assert np.isnan(c[:, columns + 16 :]).all()


@njit
def run_pairs(c, c_row, a, b, b_at, rows, columns, steps):
    multiply(
        c, 0, c_row, as_operand(a), 0, steps, 1, as_operand(b), columns, rows, columns, steps, True,
        b_at,
    )  # fmt: skip


@pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="no products of pairs")
@pytest.mark.parametrize(("rows", "columns", "steps"), [(4, 16, 1), (8, 64, 3), (12, 112, 17)])
def test_products_of_pairs_are_numpys(rows, columns, steps):
    a, b = (torch.randn(n, 2 * steps).bfloat16() for n in (rows, columns))
    c = np.ones((rows, columns + 16), np.float32)
    zipped = b.view(columns, steps, 2).transpose(0, 1).contiguous()
    bits = [x.view(torch.uint16).numpy().reshape(-1) for x in (a, torch.cat([zipped[:1], zipped]))]
    run_pairs(c.reshape(-1), columns + 16, *bits, columns, rows, columns, steps)
    wanted = 1 + a.float().numpy() @ b.float().numpy().T
    np.testing.assert_allclose(c[:, :columns], wanted, rtol=1e-5, atol=1e-5)
    assert (c[:, columns:] == 1).all()


def test_a_sum_has_the_same_bits_in_every_block():
    """Its bits do not depend on the number of rows or on neighbouring columns."""
    a = RANDOM.standard_normal((28, 50)).astype(np.float32)
    b = RANDOM.standard_normal((50, 80)).astype(np.float32)

    def product(first, end, columns):
        c = np.zeros((end - first, columns), np.float32)
        run(
            c.reshape(-1), 0, columns, a[first:end].reshape(-1), 0, 50, 1, b.reshape(-1), 80,
            end - first, columns, 50, False,
        )  # fmt: skip
        return c

    whole = product(0, 28, 80)
    for first, end, columns in ((0, 4, 80), (4, 12, 64), (8, 28, 16), (16, 28, 48)):
        assert (product(first, end, columns) == whole[first:end, :columns]).all()


def mix(acc, decay, num_rows, p, tile_n, v, rows, ahead, num_keys, width):
    mix_tile(acc, 0, width, decay, num_rows, p, tile_n, v, 0, rows, ahead, num_keys, width)


def score(scores, q, num_rows, k, rows, ahead, tile_n, width):
    score_tile(scores, q, 0, width, num_rows, k, 0, rows, ahead, tile_n, width)


FLOATS, INDICES, INDEX = types.float32[::1], types.intp[::1], types.intp
SIGNATURES = {
    run.py_func: (
        FLOATS, INDEX, INDEX, FLOATS, *[INDEX] * 3, FLOATS, *[INDEX] * 4, types.boolean,
    ),
    mix: (FLOATS, FLOATS, INDEX, FLOATS, INDEX, FLOATS, INDICES, INDICES, INDEX, INDEX),
    score: (FLOATS, FLOATS, INDEX, FLOATS, INDICES, INDICES, INDEX, INDEX),
}  # fmt: skip


@pytest.mark.skipif("avx512bf16" not in cpu_features(), reason="no products of pairs")
def test_sums_of_pairs_stay_in_registers():
    signature = FLOATS, INDEX, *[types.uint16[::1]] * 2, *[INDEX] * 4
    loops = loops_of_products(run_pairs.py_func, signature, "dpbf16")
    assert len(loops) >= 2
    assert not [line for loop in loops for line in spills(loop)]


@pytest.mark.skipif("avx2" not in cpu_features(), reason="fewer registers than a block needs")
@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_sums_stay_in_registers(function):
    """A sum on the stack would be loaded and stored at every step."""
    loops = loops_of_products(function, SIGNATURES[function])
    assert len(loops) >= 2
    assert not [line for loop in loops for line in spills(loop)]


@njit
def turn(into, into_row, matrix, row, rows, columns):
    transpose(into, into_row, matrix, row, rows, columns)


def test_transpose():
    matrix = RANDOM.standard_normal((5, 9)).astype(np.float32)
    into = np.zeros((9, 8), np.float32)
    turn(into.reshape(-1), 8, matrix.reshape(-1), 9, 5, 7)
    assert (into[:7, :5] == matrix[:, :7].T).all()
    assert (into[7:] == 0).all()
    assert (into[:, 5:] == 0).all()


@njit
def rows_of(tile, width, source, at, step, rows, size, all_rows):
    load_rows(tile, width, source, at, step, rows, size, all_rows)


@pytest.mark.parametrize("size", [8, 16, 24, 40])
def test_rows_are_followed_by_zeros(size):
    width = -(-size // 16) * 16
    source = np.full((6, 50), np.nan, np.float32)
    source[1:5, 1 : size + 1] = RANDOM.standard_normal((4, size))
    tile = np.full((7, width), np.nan, np.float32)
    tile[:, size:] = 0  # as allocated: no kernel writes there
    rows_of(tile.reshape(-1), width, source.reshape(-1), 51, 50, 4, size, 6)
    assert (tile[:4, :size] == source[1:5, 1 : size + 1]).all()
    assert (tile[:4, size:] == 0).all()
    assert (tile[4:6] == 0).all()
    assert np.isnan(tile[6, :size]).all()
