import numpy as np
import pytest
import torch
from numba import njit

from pagetile.device import DeviceInfo
from pagetile.tiles.cpu.matrix_units import configure_tiles, multiply_tiles, release_tiles

pytestmark = pytest.mark.skipif(
    not DeviceInfo.of(torch.device("cpu")).bf16_tiles, reason="this CPU has no AMX"
)


@njit
def multiply(c, c_row, a, b, columns, steps):
    configure_tiles(b)
    multiply_tiles(c, 0, c_row, a, 0, steps, b, 0, columns, columns, steps)
    release_tiles(b)


def as_pairs(matrix):
    return matrix.contiguous().view(torch.int16).numpy().view(np.uint32).ravel()


@pytest.mark.parametrize("size", [32, 64, 160])
@pytest.mark.parametrize("columns", [32, 64, 96, 256])
def test_products_are_right_and_nothing_else_is_written(columns, size):
    draw = torch.Generator().manual_seed(columns + size)
    a = torch.randn(16, size, generator=draw).bfloat16()
    b = torch.randn(size, columns, generator=draw).bfloat16()
    c = torch.full((17, columns + 5), 7.0)
    of_columns = b.view(size // 2, 2, columns).transpose(1, 2)
    multiply(c.view(-1).numpy(), columns + 5, as_pairs(a), as_pairs(of_columns), columns, size // 2)
    expected = a.double() @ b.double()
    bound = 2**-22 * (a.double().abs() @ b.double().abs())
    assert ((c[:16, :columns] - expected).abs() <= bound).all()
    assert (c[16] == 7).all()
    assert (c[:, columns:] == 7).all()


def test_a_row_and_a_column_do_not_affect_the_others():
    a, b = torch.ones(16, 32).bfloat16(), torch.ones(32, 32).bfloat16()
    a[3], b[:, 5] = torch.nan, torch.inf
    c = torch.empty(16, 32)
    of_columns = b.view(16, 2, 32).transpose(1, 2)
    multiply(c.view(-1).numpy(), 32, as_pairs(a), as_pairs(of_columns), 32, 16)
    assert c[3].isnan().all()
    others = c[[r for r in range(16) if r != 3]]
    assert (others[:, 5] == torch.inf).all()
    assert (others[:, [n for n in range(32) if n != 5]] == 32).all()
