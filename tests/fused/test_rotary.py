import math

import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.fused.rotary import rotate

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def place(*tensors):
    """Put tensors where the kernel can run."""
    return [x.cuda() if torch.cuda.is_available() else x for x in tensors]


def problem(num_tokens=5, heads=(4, 2), size=32, n=32, dtype=F32):
    """Queries and keys as views of projections; the second half of the angles is not the first."""
    generator = torch.Generator().manual_seed(size)
    q, k = (torch.randn(1, num_tokens, h, size, generator=generator).to(dtype) for h in heads)
    cos, sin = (torch.randn(1, num_tokens, n, generator=generator).to(dtype) for _ in range(2))
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


def by_hand(x, cos, sin, is_shared):
    """As Transformers' modules compute it, in the type of ``x``."""
    if is_shared:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    n = cos.shape[-1]
    x, rest = x[..., :n], x[..., n:]
    half = torch.cat((-x[..., n // 2 :], x[..., : n // 2]), -1)
    return torch.cat((x * cos[:, None] + half * sin[:, None], rest), -1)


def run(tensors, impl, mirror, *, is_shared=False):
    with mirror(*tensors, impl=impl) as there:
        return [x.cpu() for x in rotate(*there, is_shared=is_shared, impl=impl)]


def check(found, tensors, *, is_shared=False):
    """At most twice as far from float64 as the formula in the same type, plus rounding."""
    *given, cos, sin = tensors
    for computed, x in zip(found, given, strict=True):
        true = by_hand(x.double(), cos.double(), sin.double(), is_shared)
        own = by_hand(x, cos, sin, is_shared).double()
        assert (computed.dtype, computed.shape) == (x.dtype, x.shape)
        allowed = 2 * (own - true).norm() + torch.finfo(x.dtype).eps * true.norm()
        assert (computed.double() - true).norm() <= allowed


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("size", "n", "is_shared"),
    [
        (32, 32, False),
        (128, 128, False),
        (80, 80, False),
        (80, 20, False),
        (24, 8, False),
        (64, 32, True),
        (24, 12, True),
        (2, 1, True),
        (40, 6, True),
    ],
)
def test_every_head_is_rotated_by_the_formula(impl, size, n, is_shared, dtype, mirror):
    tensors = problem(size=size, n=n, dtype=dtype)
    check(run(tensors, impl, mirror, is_shared=is_shared), tensors, is_shared=is_shared)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 700])
def test_large_models_heads_are_rotated_by_the_formula(num_tokens, dtype, mirror):
    tensors = problem(num_tokens, (32, 8), 128, 128, dtype)
    check(run(tensors, "triton", mirror), tensors)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (2, 5)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_any_number_of_heads_and_tokens(impl, num_tokens, heads, mirror):
    tensors = problem(num_tokens, heads, 16, 16)
    check(run(tensors, impl, mirror), tensors)


def test_any_strides(impl, mirror):
    q, k, cos, sin = problem(dtype=F16)
    wide = torch.cat((q, k, k), 1).transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.cat((k.flatten()[:1], k.flatten()))[1:].view(k.shape)
    angles = torch.cat((cos, sin), -1)
    for tensors in (
        (wide[:, :4], wide[:, 4:6], cos, sin),
        (q.contiguous(), odd, *angles.chunk(2, -1)),
        (q, k, cos[:, :1].expand(cos.shape), sin),
    ):
        check(run(tensors, impl, mirror), tensors)


@pytest.mark.interpret
def test_the_output_is_contiguous_token_by_token(mirror):
    q, k, cos, sin = problem()
    for x in run((q.contiguous(), k, cos, sin), "triton", mirror):
        assert x.squeeze(0).transpose(0, 1).is_contiguous()  # as attend() passes it on


def test_a_token_does_not_see_another(impl, mirror):
    tensors = problem()
    expected = run(tensors, impl, mirror)
    tensors[0][:, :, 2] = tensors[1][:, :, 2] = math.nan
    for computed, before in zip(run(tensors, impl, mirror), expected, strict=True):
        others = [0, 1, 3, 4]
        assert torch.equal(computed[:, :, others], before[:, :, others])


def test_no_tokens_are_no_launch(impl, mirror):
    q, k = run(problem(num_tokens=0), impl, mirror)
    assert (q.shape, k.shape) == ((1, 4, 0, 32), (1, 2, 0, 32))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.double(), "float64"),
        (lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), "not contiguous"),
    ],
)
def test_the_kernel_refuses_unsupported_problems_with_a_reason(change, reason):
    with pytest.raises(UnsupportedError, match=reason):
        rotate(*map(change, place(*problem())), impl="triton")


def test_wrong_arguments_are_named():
    q, k, cos, sin = problem()
    with pytest.raises(ShapeError, match="num_tokens"):
        rotate(q, k[:, :, :3], cos, sin)
    with pytest.raises(ShapeError, match="turns 64 numbers of a head of 32"):
        rotate(q, k, cos, sin, is_shared=True)
    with pytest.raises(ShapeError, match="q has"):
        rotate(torch.cat((q, q)), k, cos, sin)
    with pytest.raises(DTypeError, match="cos is float16"):
        rotate(q, k, cos.half(), sin)
