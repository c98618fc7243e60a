"""The cache of validated and dispatched calls."""

import copy
import gc
import pickle
import weakref
from dataclasses import fields
from fractions import Fraction

import pytest
import torch

from pagetile import PagedBatch, ShapeError, paged_attention, shapes
from pagetile.errors import DTypeError
from pagetile.ops.paged_attention import api, problem
from pagetile.shapes import recogniser

FORMS = {
    "the same": lambda x: x,
    "another of its kind": torch.clone,
    "a longer one": lambda x: torch.cat([x, x]),
    "other strides": lambda x: torch.stack([x, x], -2).flatten(-2)[..., : x.shape[-1]],
    "transposed": lambda x: x.transpose(0, 1),
    "another type": torch.Tensor.half,
    "another device": lambda x: x.to("meta"),
    "fewer dimensions": lambda x: x[0],
    "no tensor": lambda x: x.tolist(),
    "None": lambda x: None,
}


def changed_guards(*tensors):
    """The guards of another release of torch."""


@pytest.mark.parametrize("guards", [shapes._Guards, None, changed_guards])
@pytest.mark.parametrize("change", FORMS)
def test_forms_are_recognised(change, guards, monkeypatch):
    monkeypatch.setattr(shapes, "_Guards", guards)
    x, y = torch.randn(3, 3, 8), torch.randn(3, 5)
    is_like = recogniser(x, y)
    changed = FORMS[change](x)
    expected = change in ("the same", "another of its kind")
    assert says(is_like, changed, y) is expected
    assert says(is_like, y, x) is False


def says(is_like, *others):
    """Whether a call is recognised; other objects than tensors may also raise."""
    try:
        return bool(is_like(*others))
    except AttributeError:
        return False


def test_this_release_has_the_guards_of_compiled_code():
    x = torch.randn(3, 8)
    assert "TensorGuards" in repr(recogniser(x, x.clone()))


def test_one_tensor_may_come_twice():
    x = torch.randn(3, 8)
    assert recogniser(x, x)(x, x)
    assert recogniser(x, x)(x, x.clone())
    assert not recogniser(x, x)(x, x.T)


def decode(**changes):
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    arguments = {
        "q": torch.randn(2, 4, 16),
        "k_cache": torch.randn(2, 8, 2, 16),
        "v_cache": torch.randn(2, 8, 2, 16),
        "batch": PagedBatch.decode(tables, lengths, max_seq_len=5),
    }
    return arguments | changes


def test_calls_of_one_key_and_other_forms_are_distinguished():
    generator = torch.Generator().manual_seed(0)
    shared = decode()["batch"]
    for _ in range(3):
        for heads, size, block_size in [(4, 16, 8), (8, 16, 8), (4, 32, 8), (4, 16, 16)]:
            q = torch.randn(2, heads, size, generator=generator)
            k, v = torch.randn(2, 2, block_size, 2, size, generator=generator).unbind(0)
            out = paged_attention(q, k, v, shared, impl="cpu").out
            expected = paged_attention(q, k, v, shared, impl="reference").out
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_wrong_call_after_a_cached_one_is_checked():
    good = decode()
    paged_attention(**good)
    for name, bad in {
        "q": torch.randn(2, 3, 16),
        "k_cache": torch.randn(2, 8, 2, 24),
        "v_cache": torch.randn(3, 8, 2, 16),
    }.items():
        with pytest.raises(ShapeError, match=name):
            paged_attention(**good | {name: bad})
    longer = PagedBatch.decode(torch.zeros(2, 0, dtype=torch.int32), good["batch"].seq_lens, 5)
    with pytest.raises(ShapeError, match="block_tables"):
        paged_attention(**good | {"batch": longer})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_calls_are_recognised_in_any_mode(mode, monkeypatch):
    batch = decode()["batch"]
    with mode():
        for _ in range(2):  # the second one records the form in this mode
            paged_attention(**decode(batch=batch))
        monkeypatch.setattr(api, "_find_call", None)
        paged_attention(**decode(batch=batch))


def test_a_form_is_recorded_when_it_comes_again(monkeypatch):
    recorded = []
    monkeypatch.setattr(problem, "recogniser", lambda *x: recorded.append(x) or recogniser(*x))
    batch = decode()["batch"]
    one, other = (decode(batch=batch, q=torch.randn(2, heads, 24)) for heads in (4, 8))
    for call in (one, other, one, other):  # of a model whose layers differ
        with pytest.raises(ShapeError, match="head_size=16"):
            paged_attention(**call)
    one, other = (decode(batch=batch, q=torch.randn(2, heads, 16)) for heads in (4, 8))
    for call in (one, other, one, other):
        paged_attention(**call)
    assert not recorded
    for _ in range(3):
        paged_attention(**other)
    assert len(recorded) == 1


def test_each_call_uses_its_own_scale():
    call = decode()
    expected = paged_attention(**call, impl="reference").out
    with pytest.raises(TypeError):
        paged_attention(**call, softmax_scale=Fraction(1, 4), impl="reference")
    for scale in (0.25, None):
        assert torch.equal(
            paged_attention(**call, softmax_scale=scale, impl="reference").out, expected
        )


def test_refused_calls_are_not_cached():
    call, large = decode(), torch.zeros(1000)
    for name in ("softmax_scale", "logits_soft_cap", "plan"):
        with pytest.raises(DTypeError):
            paged_attention(**call, **{name: large})
    assert not call["batch"].calls
    known = weakref.ref(large)
    del large
    gc.collect()
    assert known() is None


def test_a_batch_caches_a_bounded_number_of_calls():
    call = decode()
    for at in range(150):
        paged_attention(**call, softmax_scale=1 + at / 100)
    assert 0 < len(call["batch"].calls) <= 64


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_used_batch_can_be_copied(copied):
    arguments = decode()
    expected = paged_attention(**arguments).out
    batch = copied(arguments["batch"])
    assert vars(batch).keys() == {field.name for field in fields(batch)}
    assert torch.equal(paged_attention(**arguments | {"batch": batch}).out, expected)


@pytest.mark.parametrize("impl", ["cpu", pytest.param("triton", marks=pytest.mark.interpret)])
def test_a_scale_in_a_tensor_is_read_at_every_call(impl):
    """A prepared launch keeps the number, which may change in the tensor."""
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    caches = torch.randn(2, 4, 16, 2, 32, device=device).unbind(0)
    batch = PagedBatch.of([[3, 1]], [30], device=device)
    q, scale = torch.randn(1, 4, 32, device=device), torch.tensor(0.1)

    def attend(softmax_scale):
        return paged_attention(q, *caches, batch, softmax_scale=softmax_scale, impl=impl).lse

    for _ in range(3):
        attend(scale)
    scale.fill_(2.0)
    assert torch.equal(attend(scale), attend(2.0))
