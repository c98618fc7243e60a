import math

import pytest
import torch
import torch.nn.functional as F

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.fused.instance_norm import instance_norm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
KINDS = {"none": (False, None), "plain": (True, None), "norm": (True, 1e-3)}


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request, monkeypatch):
    """Where Triton is interpreted, channels consist of several tiny chunks."""
    if request.param == "triton":
        from pagetile.fused.instance_norm import triton
        from pagetile.tiles.triton.launch import INTERPRETED

        if INTERPRETED:
            monkeypatch.setattr(triton, "TILE", 64)
            monkeypatch.setattr(triton, "ONE_TILE", dict.fromkeys(KINDS, 128))
    return request.param


def place(impl):
    return "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"


def by_hand(x, residual, residual_eps, eps=1e-4, slope=0.01):
    """The formula, as torch's simplest operations."""
    dims = tuple(range(2, x.ndim))

    def norm(x, eps):
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        return (x - mean) / (variance + eps).sqrt()

    y = norm(x, eps)
    if residual is not None:
        y = y + (residual if residual_eps is None else norm(residual, residual_eps))
    return torch.where(y >= 0, y, slope * y).to(x.dtype)


def problem(shape, kind, dtype=F32, residual_dtype=None):
    """``x``, perhaps a residual, and a gradient; far from mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    x, residual, grad = (torch.randn(shape, generator=generator) for _ in range(3))
    x, residual = (3 * x + 1).to(dtype), (2 * residual - 1).to(residual_dtype or dtype)
    has_residual, residual_eps = KINDS[kind]
    return [x] + [residual] * has_residual, residual_eps, grad.to(dtype)


def both_ways(function, tensors, grad):
    """Result and gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def run(impl, tensors, residual_eps, grad):
    def call(x, residual=None):
        return instance_norm(x, residual, eps=1e-4, residual_eps=residual_eps, impl=impl)

    there = [tensor.to(place(impl)) for tensor in tensors]
    return [found.cpu() for found in both_ways(call, there, grad.to(place(impl)))]


def check(impl, tensors, residual_eps, grad):
    """At most twice as far from float64 as the formula in the same type, plus rounding."""

    def formula(x, residual=None):
        return by_hand(x, residual, residual_eps)

    exact = both_ways(formula, [tensor.double() for tensor in tensors], grad.double())
    eager = both_ways(formula, tensors, grad)
    found = run(impl, tensors, residual_eps, grad)
    for found_one, expected_one, true in zip(found, eager, exact, strict=True):
        assert found_one.dtype == expected_one.dtype
        allowed = (
            2 * (expected_one.double() - true).norm()
            + torch.finfo(found_one.dtype).eps * true.norm()
        )
        assert (found_one.double() - true).norm() <= allowed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 9), (1, 2, 16, 16), (2, 2, 3, 3, 3), (1, 3, 65)])
def test_output_and_gradients_match_float64(impl, shape, dtype, kind):
    if impl == "reference" and dtype != F32:
        pytest.skip("torch rounds between its operations: that is its business")
    check(impl, *problem(shape, kind, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_give_the_same_bits(impl, kind):
    call = problem((2, 3, 11, 13), kind)
    assert all(map(torch.equal, run(impl, *call), run(impl, *call)))


def test_a_residual_of_another_type(impl):
    tensors, residual_eps, grad = problem((1, 2, 9, 9), "plain", F16, F32)
    out, grad_x, grad_residual = run(impl, tensors, residual_eps, grad)
    assert (out.dtype, grad_x.dtype, grad_residual.dtype) == (F16, F16, F32)
    if impl == "triton":
        check(impl, tensors, residual_eps, grad)


def test_an_unaligned_gradient(impl):
    """``cat`` returns a view of another tensor, here at an odd number of floats."""
    (x,), residual_eps, grad = problem((1, 3, 3, 3, 3), "none")
    expected = run(impl, [x], residual_eps, grad)[1]
    x = x.to(place(impl)).requires_grad_()
    head = torch.zeros(1, 1, 3, 3, 3, device=x.device)
    out = torch.cat((head, instance_norm(x, eps=1e-4, impl=impl)), 1)
    (found,) = torch.autograd.grad(out, x, torch.cat((head, grad.to(x.device)), 1))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("lay_out", ["channels last", "part", "odd address"])
def test_any_strides(impl, lay_out):
    (x,), residual_eps, grad = problem((2, 3, 8, 8), "none")
    expected = run(impl, [x], residual_eps, grad)
    x = x.to(place(impl))
    if lay_out == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif lay_out == "part":
        x = torch.cat((x, x), 3)[..., :8]
    else:
        x = torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    out = instance_norm(x, eps=1e-4, impl=impl)
    assert out.is_contiguous()
    torch.testing.assert_close(out.cpu(), expected[0])


def test_a_channel_does_not_see_another(impl):
    tensors, residual_eps, grad = problem((2, 3, 9, 9), "norm")
    expected = run(impl, tensors, residual_eps, grad)
    for tensor in (*tensors, grad):
        tensor[1, 2] = math.nan
    found = run(impl, tensors, residual_eps, grad)
    for found_one, before in zip(found, expected, strict=True):
        assert found_one[1, 2].isnan().all()
        assert torch.equal(found_one.flatten(0, 1)[:5], before.flatten(0, 1)[:5])


def test_a_channel_of_one_number_everywhere(impl):
    """Its output is zero, where a leaky ReLU's gradient is its slope."""
    x, grad = torch.full((1, 2, 5, 5), 7.0), torch.randn(1, 2, 5, 5)
    out, grad_x = run(impl, [x], None, grad)
    assert torch.equal(out, torch.zeros_like(x))
    expected = 0.01 * (grad - grad.mean((2, 3), keepdim=True)) / 1e-4**0.5
    torch.testing.assert_close(grad_x, expected)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(("size", "offset"), [(100, 0), (1, 100)])
def test_a_large_residual_keeps_digits(impl, size, offset, dtype):
    if impl == "reference" and dtype != F32:
        pytest.skip("torch rounds between its operations: that is its business")
    tensors, residual_eps, grad = problem((2, 3, 11, 13), "plain", dtype)
    tensors[1] = tensors[1] * size + offset
    check(impl, tensors, residual_eps, grad)


@pytest.mark.interpret
def test_batched_gradients_are_refused():
    x = torch.randn(1, 1, 4, 4, device=place("triton"), requires_grad=True)
    out = instance_norm(x, impl="triton")
    with pytest.raises(UnsupportedError, match="does not support batched gradients"):
        torch.autograd.grad(out, x, torch.stack((out, out)).detach(), is_grads_batched=True)


def test_tensors_on_two_devices_are_refused():
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(ShapeError, match="residual is on meta but x is on cpu"):
        instance_norm(x, x.to("meta"))


def test_gradients_of_gradients_are_refused(impl):
    x = torch.randn(1, 1, 4, 4, device=place(impl), requires_grad=True)
    (grad,) = torch.autograd.grad(instance_norm(x, impl=impl).sum(), x, create_graph=True)
    if impl == "reference":
        grad.sum().backward()
    else:
        with pytest.raises(UnsupportedError, match="cannot be differentiated"):
            grad.sum().backward()


def test_compiling_uses_torchs_operations():
    tensors, residual_eps, grad = problem((1, 2, 4, 4), "norm")

    def call(x, residual):
        return instance_norm(x, residual, eps=1e-4, residual_eps=residual_eps)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected = both_ways(call, tensors, grad)
    for found_one, expected_one in zip(both_ways(compiled, tensors, grad), expected, strict=True):
        torch.testing.assert_close(found_one, expected_one)
    torch._dynamo.reset()


def test_a_cpu_runs_torchs_operations():
    (x, residual), residual_eps, _ = problem((1, 2, 4, 4), "norm")
    found = instance_norm(x, residual, eps=1e-4, residual_eps=residual_eps, negative_slope=0.2)
    y = F.instance_norm(x, eps=1e-4) + F.instance_norm(residual, eps=residual_eps)
    assert torch.equal(found, F.leaky_relu(y, 0.2))


WRONG = [
    (lambda x: instance_norm("x"), DTypeError, "x is of type str, expected a torch.Tensor"),
    (lambda x: instance_norm(x, "r"), DTypeError, "residual is of type str"),
    (lambda x: instance_norm(x.int()), DTypeError, "x is int32, expected"),
    (lambda x: instance_norm(x[0, 0]), ShapeError, "x has 2 dimensions, expected at least 3"),
    (lambda x: instance_norm(x, eps="e"), DTypeError, "eps is 'e', expected a number"),
    (lambda x: instance_norm(x, negative_slope="s"), DTypeError, "negative_slope is 's'"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(2, 3, 4, 4))


def test_a_residual_of_another_shape_is_refused():
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(ShapeError, match=r"residual is \[1, 2, 4\], expected \[1, 2, 4, 4\]"):
        instance_norm(x, x[..., 0])


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: (x.double(), {}), "x is float64"),
        (lambda x: (x[..., :1, :1].contiguous(), {}), "nothing to normalise"),
        (lambda x: (x, {"negative_slope": 0.0}), "negative_slope is 0.0; from 0.0001 on"),
        (lambda x: (x, {"residual": x.to(torch.complex64)}), "residual is complex64"),
    ],
)
def test_unsupported_calls_say_why(change, reason):
    x, options = change(torch.randn(1, 2, 4, 4, device=place("triton")))
    with pytest.raises(UnsupportedError, match=reason):
        instance_norm(x, **options, impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [(2, 3, 30, 31, 29), (1, 48, 24, 24, 24), (2, 4, 3, 3, 3)])
def test_a_gpu_at_working_size(shape, dtype, kind):
    check("triton", *problem(shape, kind, dtype))
