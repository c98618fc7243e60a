import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.fused.add_norm import add_norm
from pagetile.fused.rms_norm import KINDS, Norm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def formula(x, weight, eps, kind):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y * (weight + (kind == "shifted"))


def check(shape, dtype, before, after, impl, mirror):
    generator = torch.Generator().manual_seed(shape[-1])
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for _ in range(2)]
    tensors += [torch.randn(shape[-1], generator=generator).to(dtype) for _ in range(2)]
    residual, x, first, second = tensors
    with mirror(*tensors, impl=impl) as there:
        norms = [Norm(w, e, k) if k else None for w, e, k in
                 zip(there[2:], (1e-3, 1e-6), (before, after), strict=True)]  # fmt: skip
        found = add_norm(*there[:2], before=norms[0], after=norms[1], impl=impl)
        hidden, normed = (None if t is None else t.cpu() for t in found)
    eps = torch.finfo(dtype).eps
    added = formula(x.double(), first.double(), 1e-3, before) if before else x.double()
    true = residual.double() + added
    assert (hidden.dtype, hidden.shape) == (dtype, x.shape)
    assert (hidden.double() - true).norm() <= 2 * eps * true.norm()
    if not after:
        assert normed is None
        return
    # Of the sum as it was rounded: that is what the model's own norm is given.
    true = formula(hidden.double(), second.double(), 1e-6, after)
    assert (normed.double() - true).norm() <= 2 * eps * true.norm()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("before", "after"), [("", k) for k in KINDS] + [(k, k) for k in KINDS] + [("shifted", "")]
)
@pytest.mark.parametrize("shape", [(1, 3, 40), (5, 128)], ids=str)
def test_the_sum_and_its_norm(impl, shape, before, after, dtype, mirror):
    check(shape, dtype, before, after, impl, mirror)


@pytest.mark.parametrize("shape", [(1, 1), (33, 16), (2, 5000)], ids=str)
def test_rows_of_any_width(impl, shape, mirror):
    check(shape, F32, "scaled", "rounded", impl, mirror)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 700])
@pytest.mark.parametrize("size", [1024, 5120, 16384])
def test_large_models_rows(size, num_rows, mirror):
    check((num_rows, size), BF16, "shifted", "shifted", "triton", mirror)


def test_no_rows(impl):
    x = torch.zeros(
        0, 8, device="cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    )
    norm = Norm(x.new_ones(8), 1e-6, "rounded")
    hidden, normed = add_norm(x, x, after=norm, impl=impl)
    assert hidden.shape == normed.shape == (0, 8)


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 8)
    with pytest.raises(ShapeError, match=r"x is \[3, 8\], expected \[2, 8\]"):
        add_norm(x, torch.zeros(3, 8))
    with pytest.raises(DTypeError, match="x is float16"):
        add_norm(x, x.half())
    with pytest.raises(ShapeError, match=r"a weight is \[7\], expected \[8\]"):
        add_norm(x, x, after=Norm(torch.ones(7), 0.0, "scaled"))
    with pytest.raises(UnsupportedError, match="kind is 'plain'"):
        add_norm(x, x, before=Norm(torch.ones(8), 0.0, "plain"))
    with pytest.raises(UnsupportedError, match="gaps"):
        add_norm(torch.zeros(2, 16)[:, ::2], x, impl="triton")


@pytest.mark.parametrize("num_parts", [1, 3, 8])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_parts_are_summed_in_their_order_and_rounded_first(impl, dtype, num_parts, mirror):
    generator = torch.Generator().manual_seed(num_parts)
    residual = torch.randn(3, 40, generator=generator).to(dtype)
    parts = torch.randn(num_parts, 3, 40, generator=generator)
    weight = torch.randn(40, generator=generator).to(dtype)
    with mirror(residual, parts, weight, impl=impl) as there:
        norm = Norm(there[2], 1e-6, "rounded")
        found = add_norm(*there[:2], after=norm, impl=impl)
        hidden, normed = (t.cpu() for t in found)
    rounded = parts.double().sum(0).to(dtype)
    expected = add_norm(residual, rounded, after=Norm(weight, 1e-6, "rounded"), impl="reference")
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(hidden, expected[0], rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(normed, expected[1], rtol=8 * eps, atol=8 * eps)
