"""Which calls run directly and which as operators, and that both give the same numbers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from pagetile import (
    UnsupportedError,
    attention,
    attention_scores,
    merge_states,
    shifted_window_attention,
    window_attention,
)
from pagetile.ops.eager import has_dispatch_observers


class Watch(TorchDispatchMode):
    """Counts pagetile's operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pagetile":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def call(name):
    """Run a call with gradients: results and gradients."""
    torch.manual_seed(0)
    if name == "attention":
        leaves = [torch.randn(2, 9, heads, 16).requires_grad_() for heads in (4, 2, 2)]
        out, lse = attention(*leaves, causal=True)
    else:
        leaves = [torch.randn(2, 3, 17, 16).requires_grad_() for _ in range(3)]
        leaves.append(torch.randn(2, 3, 17, 17).requires_grad_())
        out, lse = window_attention(*leaves[:3], bias=leaves[3])
    loss = (out.sin().sum() + lse.cos().sum()).requires_grad_()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_direct_and_operator_calls_give_the_same_bits(name):
    short = call(name)
    with Watch() as watch:
        long = call(name)
    assert watch.seen == [name, f"{name}_backward"]
    assert all(torch.equal(*pair) for pair in zip(short, long, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_observers_see_the_operator():
    x = torch.randn(1, 2, 17, 16)
    assert not has_dispatch_observers(x, None, 1.0, torch.nn.Parameter(x))
    assert has_dispatch_observers(x, x.as_subclass(Subclass))
    with Watch():
        assert has_dispatch_observers(x)
    with FakeTensorMode() as mode:
        assert has_dispatch_observers(mode.from_tensor(x))
    answers = []
    torch.func.vmap(lambda row: answers.append(has_dispatch_observers(row)) or row)(x)
    torch.fx.experimental.proxy_tensor.make_fx(
        lambda row: answers.append(has_dispatch_observers(row)) or row, pre_dispatch=True
    )(x)
    torch.jit.trace(
        lambda row: answers.append(has_dispatch_observers(row)) or row, x, check_trace=False
    )
    assert answers == [True] * 3
    compiled = torch.compile(lambda row: row + has_dispatch_observers(row), backend="eager")
    assert torch.equal(compiled(x), x + 1)


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_a_gradient_of_a_gradient_is_refused(name):
    x = torch.randn(1, 2, 17, 16).requires_grad_()
    op = attention if name == "attention" else window_attention
    out = op(x, x, x).out
    assert type(out.grad_fn).__name__ in ("AttentionBackward", "WindowAttentionBackward")
    for loss in (out.square().sum(), out.sum()):  # the second one's gradient has no gradient itself
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(UnsupportedError, match="differentiate once"):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_an_observer_of_the_gradient_alone_sees_its_operator(name):
    x = torch.randn(1, 2, 17, 16).requires_grad_()
    out = (attention if name == "attention" else window_attention)(x, x, x).out
    with Watch() as watch:
        out.sum().backward()
    assert watch.seen == [f"{name}_backward"]


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_results_without_gradients_may_be_changed_in_place(name):
    x, weight = torch.randn(1, 2, 17, 16), torch.ones(()).requires_grad_()
    out = (attention if name == "attention" else window_attention)(x, x, x).out
    before = out.sum()
    out.mul_(weight).sum().backward()
    torch.testing.assert_close(weight.grad, before)


def test_a_checkpoint_recomputes():
    x = torch.randn(1, 3, 17, 16).requires_grad_()
    direct = torch.autograd.grad(window_attention(x, x, x).out.square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(
        lambda y: window_attention(y, y, y).out, x, use_reentrant=False
    )
    assert torch.equal(*direct, *torch.autograd.grad(again.square().sum(), x))


DIFFERENTIABLE = {
    "attention": lambda x: attention(x, x, x.detach(), causal=True).out,
    "window_attention": lambda x: window_attention(x, x, x).out,
    "shifted_window_attention": lambda x: (
        shifted_window_attention(x[:, :, :, None].expand(-1, -1, -1, 3, -1, -1), window=(2, 3)).out
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_of_torch_func_differentiate(name):
    function = DIFFERENTIABLE[name]
    shape = (2, 3, 4, 2, 16) if name == "shifted_window_attention" else (2, 3, 9, 16)
    xs = torch.randn(3, *shape)

    def loss(x):
        return function(x).square().sum()

    expected = [torch.autograd.grad(loss(x), x)[0] for x in xs.clone().requires_grad_()]
    for x, gradient in zip(xs, expected, strict=True):
        torch.testing.assert_close(torch.func.grad(loss)(x), gradient)
        result, pull = torch.func.vjp(function, x)
        torch.testing.assert_close(pull(2 * result)[0], gradient)
        with pytest.raises(
            UnsupportedError, match=r"pagetile::\w+ has no derivative: differentiate"
        ):
            torch.func.grad(lambda y: torch.func.grad(loss)(y).square().sum())(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own
def test_gradients_sample_by_sample():
    xs = torch.randn(3, 2, 3, 9, 16)
    gradient = torch.func.grad(lambda x: attention(x, x, x).out.square().sum())
    expected = torch.stack([gradient(x) for x in xs])
    torch.testing.assert_close(torch.func.vmap(gradient)(xs), expected)


def tangents(function, x, t):
    """Tangents of a function, in both of torch's ways."""
    with forward_ad.dual_level():
        yield forward_ad.unpack_dual(function(forward_ad.make_dual(x, t))).tangent
    yield torch.func.jvp(function, (x,), (t,))[1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("name", ["attention", "window_attention", "shifted_window_attention"])
def test_a_tangent_is_refused_and_not_lost(name):
    x, t = torch.randn(2, 1, 4, 3, 2, 16)
    calls = {
        "attention": lambda q: attention(q.flatten(1, 2), *[x.flatten(1, 2)] * 2).out,
        "window_attention": lambda q: window_attention(q[0], x[0], x[0]).out,
        "shifted_window_attention": lambda q: (
            shifted_window_attention(
                q[0, :, :, None].expand(-1, -1, 3, -1, -1)[None], window=(2, 3)
            ).out
        ),
    }
    with pytest.raises(UnsupportedError, match=f"{name} has no forward-mode derivative"):
        list(tangents(calls[name], x, t))
    with pytest.raises(UnsupportedError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(calls[name], (x,), (t,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_tangents_of_what_torch_computes():
    x, t = torch.randn(2, 3, 20, 2, 16)
    weights = torch.randn(3, 20, 2)
    for tangent in tangents(lambda outs: merge_states(outs, weights).out, x, t):
        torch.testing.assert_close(tangent, merge_states(t, weights).out)
    k = torch.randn(3, 20, 24, 16)
    for tangent in tangents(lambda q: attention_scores(q, k), x, t):
        torch.testing.assert_close(tangent, attention_scores(t, k))


@pytest.mark.parametrize("op", [attention_scores, merge_states])
def test_operations_without_an_operator_are_compiled(op):
    x = torch.randn(2, 5, 20, 16)
    y = x if op is attention_scores else torch.randn(2, 5, 20)
    expected, found = op(x, y), torch.compile(op, backend="eager")(x, y)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)


def test_tensors_without_memory_have_shapes():
    x = torch.empty(2, 9, 4, 16, device="meta")
    assert attention(x, x, x).out.shape == x.shape
    assert window_attention(x, x, x).lse.shape == (2, 9, 4)
