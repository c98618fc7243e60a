"""The short way to operators with gradients: when nobody watches, and the same numbers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagewise import attention, window_attention
from pagewise.ops.eager import is_plain


class Watch(TorchDispatchMode):
    """Counts pagewise's operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pagewise":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def call(name):
    """A call with gradients: results and gradients."""
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
def test_both_ways_give_the_same_bits(name):
    short = call(name)
    with Watch() as watch:
        long = call(name)
    assert watch.seen == [name, f"{name}_backward"]
    assert all(torch.equal(*pair) for pair in zip(short, long, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_who_watches_sees_the_operator():
    x = torch.randn(1, 2, 17, 16)
    assert is_plain(x, None, 1.0, torch.nn.Parameter(x))
    assert not is_plain(x, x.as_subclass(Subclass))
    with Watch():
        assert not is_plain(x)
    with FakeTensorMode() as mode:
        assert not is_plain(mode.from_tensor(x))
    answers = []
    torch.func.vmap(lambda row: answers.append(is_plain(row)) or row)(x)
    torch.fx.experimental.proxy_tensor.make_fx(
        lambda row: answers.append(is_plain(row)) or row, pre_dispatch=True
    )(x)
    torch.jit.trace(lambda row: answers.append(is_plain(row)) or row, x, check_trace=False)
    assert answers == [False] * 3
    assert torch.equal(torch.compile(lambda row: row + is_plain(row), backend="eager")(x), x)


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_a_gradient_of_a_gradient_is_refused(name):
    x = torch.randn(1, 2, 17, 16).requires_grad_()
    op = attention if name == "attention" else window_attention
    out = op(x, x, x).out
    assert type(out.grad_fn).__name__ in ("AttentionBackward", "WindowAttentionBackward")
    for loss in (out.square().sum(), out.sum()):  # the second one's gradient has no gradient itself
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_who_watches_only_the_gradient_sees_its_operator(name):
    x = torch.randn(1, 2, 17, 16).requires_grad_()
    out = (attention if name == "attention" else window_attention)(x, x, x).out
    with Watch() as watch:
        out.sum().backward()
    assert watch.seen == [f"{name}_backward"]


@pytest.mark.parametrize("name", ["attention", "window_attention"])
def test_results_of_what_is_not_learned_may_be_changed(name):
    x, learned = torch.randn(1, 2, 17, 16), torch.ones(()).requires_grad_()
    out = (attention if name == "attention" else window_attention)(x, x, x).out
    before = out.sum()
    out.mul_(learned).sum().backward()
    torch.testing.assert_close(learned.grad, before)


def test_a_checkpoint_computes_once_more():
    x = torch.randn(1, 3, 17, 16).requires_grad_()
    direct = torch.autograd.grad(window_attention(x, x, x).out.square().sum(), x)
    again = torch.utils.checkpoint.checkpoint(
        lambda y: window_attention(y, y, y).out, x, use_reentrant=False
    )
    assert torch.equal(*direct, *torch.autograd.grad(again.square().sum(), x))
