"""Products with packed rows against NumPy's, at every edge of a block and of a panel."""

import numpy as np
import pytest
import torch
from machine_code import loops_of_products, spills
from numba import njit, types

from pagetile.device import cpu_features
from pagetile.tiles.cpu.arrays import flat
from pagetile.tiles.cpu.panels import PANEL, multiply_panels, pack_panels
from pagetile.tiles.cpu.simd import array_at

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@njit
def pack(panels, b, at, b_row, rows, steps):
    pack_panels(panels, b, at, b_row, rows, steps)


@njit
def multiply(c, at, c_row, a, a_at, a_row, panels, rows, columns, steps, scale):
    multiply_panels(c, at, c_row, a, a_at, a_row, panels, rows, columns, steps, scale)


def product(a, b, scale, dtype):
    """The product of both, with operands and result in the middle of memory full of NaN."""
    rows, columns, steps = len(a), len(b), a.shape[1]
    wide_a, wide_b, c = (
        torch.full((n + 2, size + 8), torch.nan, dtype=kind)
        for n, size, kind in ((rows, steps, F32), (columns, steps, dtype), (rows, columns, dtype))
    )
    wide_a[1:-1, 3 : steps + 3], wide_b[1:-1, 3 : steps + 3] = a, b
    panels = np.full(-(-columns // PANEL) * PANEL * steps, np.nan, np.float32)
    pack(panels, flat(wide_b), steps + 8 + 3, steps + 8, columns, steps)
    multiply(
        flat(c), columns + 8 + 3, columns + 8, flat(wide_a), steps + 8 + 3, steps + 8, panels,
        rows, columns, steps, np.float32(scale),
    )  # fmt: skip
    inside = c[1:-1, 3 : columns + 3].clone()
    c[1:-1, 3 : columns + 3] = torch.nan
    assert c.isnan().all()  # nothing was written outside
    return inside


def draw(rows, columns, steps, dtype=F32):
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(rows, steps, generator=generator)
    return a, torch.randn(columns, steps, generator=generator).to(dtype)


@pytest.mark.parametrize("steps", [8, 24])
@pytest.mark.parametrize("columns", [16, 17, 24, 25, 31, 32, 40, 41, 48, 49, 57])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 13, 49])
def test_products_are_numpys(rows, columns, steps):
    a, b = draw(rows, columns, steps)
    wanted = a.numpy().astype(np.float64) @ b.numpy().T * -0.5
    np.testing.assert_allclose(product(a, b, -0.5, F32), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_16_bits_are_rounded_once(dtype):
    a, b = draw(10, 43, 16, dtype)
    exact = a.double() @ b.double().T * 0.3
    error = (product(a, b, 0.3, dtype).double() - exact).abs()
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


def test_a_result_has_the_same_bits_in_every_block():
    a, b = draw(25, 57, 40)
    whole = product(a, b, 0.7, F32)
    assert torch.equal(whole, torch.cat([product(row[None], b, 0.7, F32) for row in a]))
    assert torch.equal(whole[:, 20:41], product(a, b[20:41], 0.7, F32))


@njit
def copy_from(address, to):
    source = array_at(address, to.dtype)
    for i in range(len(to)):
        to[i] = source[i]


def test_memory_is_found_by_its_address():
    for dtype in (F32, BF16):
        numbers = torch.randn(7).to(dtype)
        copied = torch.zeros(5, dtype=dtype)
        copy_from(numbers[2:].data_ptr(), flat(copied))
        assert torch.equal(copied, numbers[2:])


@pytest.mark.skipif("avx2" not in cpu_features(), reason="fewer registers than a block needs")
def test_sums_stay_in_registers():
    """A sum on the stack would be loaded and stored at every step."""
    args = [types.float32[::1], *[types.intp] * 2] * 2
    loops = loops_of_products(
        multiply.py_func, (*args, types.float32[::1], *[types.intp] * 3, types.float32)
    )
    assert len(loops) >= 12  # of one to six rows, of two registers and of one
    assert not [line for loop in loops for line in spills(loop)]
