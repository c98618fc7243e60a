import math

import pytest
import torch

from pagetile.errors import ShapeError, UnsupportedError
from pagetile.fused.rms_norm import KINDS, rms_norm
from pagetile.fused.rows import fold

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def place(*tensors):
    """Put tensors where the kernel can run."""
    return [x.cuda() if torch.cuda.is_available() else x for x in tensors]


def problem(shape, dtype=F32):
    """Rows with norms from below the root of ``EPS`` to far above it."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    x = torch.randn(shape, generator=generator) * torch.logspace(-4, 2, shape[-2])[:, None]
    return x.to(dtype), (0.3 * torch.randn(shape[-1], generator=generator) + 0.5).to(dtype)


def by_hand(x, weight, kind):
    """The formula, rounded as Transformers' modules round."""
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    if kind == "rounded":
        return y.to(x.dtype) * weight
    return (y * (weight.to(wide.dtype) + (kind == "shifted"))).to(x.dtype)


def check(out, x, weight, kind):
    """At most twice as far from float64 as the formula in the same type, plus rounding."""
    true = by_hand(x.double(), weight.double(), kind)
    reference = by_hand(x, weight, kind)
    assert out.dtype == reference.dtype
    for computed, own, row in zip(
        *(t.double().flatten(0, -2) for t in (out, reference, true)), strict=True
    ):
        allowed = 2 * (own - row).norm() + torch.finfo(x.dtype).eps * row.norm()
        assert (computed - row).norm() <= allowed


def run(x, weight, kind, impl, mirror):
    with mirror(x, weight, impl=impl) as there:
        out = rms_norm(*there, eps=EPS, kind=kind, impl=impl)
        return out.cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 5, 64), (3, 1), (2, 3, 72), (1, 7, 3, 128), (2, 1025), (1, 2, 5000)], ids=str
)
def test_each_row_is_the_formulas(impl, shape, dtype, kind, mirror):
    x, weight = problem(shape, dtype)
    out = run(x, weight, kind, impl, mirror)
    assert out.shape == x.shape
    check(out, x, weight, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 300, 16, 128), (1, 37, 4096), (1, 9, 16384)], ids=str)
def test_rows_of_large_models_are_the_formulas(shape, dtype, kind, mirror):
    x, weight = problem(shape, dtype)
    check(run(x, weight, kind, "triton", mirror), x, weight, kind)


LAYOUTS = {
    "heads of a wider projection": lambda x: torch.cat((x, x + 1), 2)[:, :, : x.shape[2]],
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "odd address": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    "rows of a wider one": lambda x: torch.cat((x, x), 3)[..., : x.shape[3]],
    "one row for all": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_may_lie_apart(impl, name, mirror):
    x, weight = problem((1, 5, 6, 24), F16)
    x = LAYOUTS[name](x)
    out = run(x, weight, "rounded", impl, mirror)
    check(out, x, weight, "rounded")
    assert out.stride(-1) == 1


@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_folding_meets_every_row_once_and_in_the_order_of_memory(dims, cut):
    x = torch.arange(4 * 3 * 5 * 2).view(4, 3, 5, 2)
    x = x.narrow(cut, 0, x.shape[cut] - 1).permute(*dims, 3)
    rows = fold(x.shape, x.stride())
    assert rows is not None
    shape = rows.num // rows.inner, rows.inner, x.shape[-1]
    in_order = x.as_strided(shape, (rows.outer_stride, rows.inner_stride, 1)).flatten(0, 1)
    assert in_order[:, 0].tolist() == sorted(x[..., 0].flatten().tolist())
    found = torch.empty_strided(x.shape, rows.out_strides, dtype=x.dtype)
    found.as_strided(in_order.shape, (x.shape[-1], 1)).copy_(in_order)
    assert torch.equal(found, x)


def test_a_row_does_not_see_another(impl, mirror):
    x, weight = problem((1, 5, 72))
    expected = run(x, weight, "rounded", impl, mirror)
    x[0, 2] = math.nan
    out = run(x, weight, "rounded", impl, mirror)
    assert torch.equal(out[0, [0, 1, 3, 4]], expected[0, [0, 1, 3, 4]])
    assert out[0, 2].isnan().all()


def test_no_rows_are_no_launch(impl, mirror):
    x, weight = problem((1, 5, 72))
    assert run(x[:, :0], weight, "rounded", impl, mirror).shape == (1, 0, 72)


def test_gradients_come_from_the_reference():
    x, weight = problem((1, 5, 72))
    (grad,) = torch.autograd.grad(rms_norm(x.requires_grad_(), weight, eps=EPS).sum(), x)
    assert grad.shape == x.shape


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (torch.zeros(2, 16385), torch.ones(16385), "16384 run"),
        (torch.zeros(2, 8, dtype=F16), torch.ones(8), "weight is torch.float32"),
        (torch.zeros(8, 2).T, torch.ones(8), "no two strides"),
        (torch.zeros(2, 8).double(), torch.ones(8).double(), "float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_kernel_refuses_unsupported_problems_with_a_reason(x, weight, reason):
    with pytest.raises(UnsupportedError, match=reason):
        rms_norm(*place(x, weight), eps=EPS, impl="triton")


@pytest.mark.interpret
def test_the_kernel_refuses_arguments_that_want_gradients():
    x, weight = place(*problem((1, 5, 72)))
    with pytest.raises(UnsupportedError, match="a gradient is wanted; the reference has one"):
        rms_norm(x.requires_grad_(), weight, eps=EPS, impl="triton")


@pytest.mark.interpret
def test_rows_that_lie_in_no_two_strides_are_refused():
    x, weight = place(torch.zeros(2, 3, 4, 5, 8), torch.ones(8))  # a copy would lie otherwise
    with pytest.raises(UnsupportedError, match="no two strides"):
        rms_norm(x[:, :2, :3, :4], weight, eps=EPS, impl="triton")


def test_wrong_arguments_are_named():
    with pytest.raises(ShapeError, match=r"weight is \[4\]"):
        rms_norm(torch.zeros(2, 3), torch.ones(4), eps=EPS)
    with pytest.raises(UnsupportedError, match="kind is 'llama'"):
        rms_norm(torch.zeros(2, 3), torch.ones(3), eps=EPS, kind="llama")
