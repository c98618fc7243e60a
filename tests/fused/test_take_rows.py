import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.fused.take_rows import take_rows


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 24, 2500])
@pytest.mark.parametrize("shape", [(5,), (1, 3), (0,)], ids=str)
def test_rows_are_those_of_the_table(impl, shape, size, dtype, mirror):
    generator = torch.Generator().manual_seed(size)
    table = torch.randn(7, size, generator=generator).to(dtype)
    rows = torch.randint(0, 7, shape, generator=generator)
    if rows.numel():
        rows.view(-1)[0] = 6
    with mirror(table, rows, impl=impl) as there:
        out = take_rows(*there, impl=impl).cpu()
    assert torch.equal(out, table[rows])


@pytest.mark.interpret
def test_a_row_that_is_not_there_reads_the_nearest(mirror):
    table, rows = torch.arange(6.0).view(3, 2), torch.tensor([-1, 3, 1 << 40])
    with mirror(table, rows, impl="triton") as there:
        out = take_rows(*there, impl="triton").cpu()
    assert torch.equal(out, table[[0, 2, 2]])


def test_wrong_arguments_are_named():
    with pytest.raises(ShapeError, match=r"table is \[3\]"):
        take_rows(torch.zeros(3), torch.tensor([0]))
    with pytest.raises(DTypeError, match="rows is int32"):
        take_rows(torch.zeros(3, 4), torch.tensor([0], dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="gaps"):
        take_rows(torch.zeros(3, 8)[:, ::2], torch.tensor([0]), impl="triton")
