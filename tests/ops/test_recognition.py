"""What a call looks up instead of being checked again."""

import pickle

import pytest
import torch

from pagewise import PagedBatch, ShapeError, paged_attention, shapes
from pagewise.shapes import recogniser

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


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("change", FORMS)
def test_forms_are_recognised(change, guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(shapes, "_Guards", None)
    x, y = torch.randn(3, 3, 8), torch.randn(3, 5)
    is_like = recogniser(x, y)
    changed = FORMS[change](x)
    expected = change in ("the same", "another of its kind")
    assert says(is_like, changed, y) is expected
    assert says(is_like, y, x) is False


def says(is_like, *others):
    """What is no tensor may also raise, which the caller expects of it."""
    try:
        return bool(is_like(*others))
    except AttributeError:
        return False


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


def test_calls_of_one_key_and_other_forms_are_told_apart():
    generator = torch.Generator().manual_seed(0)
    shared = decode()["batch"]
    for _ in range(3):
        for heads, size, block_size in [(4, 16, 8), (8, 16, 8), (4, 32, 8), (4, 16, 16)]:
            q = torch.randn(2, heads, size, generator=generator)
            k, v = torch.randn(2, 2, block_size, 2, size, generator=generator).unbind(0)
            out = paged_attention(q, k, v, shared, impl="cpu").out
            expected = paged_attention(q, k, v, shared, impl="reference").out
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_call_like_a_good_one_is_checked():
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


def test_batches_of_one_form_are_one_kind():
    one, other = decode()["batch"], decode()["batch"]
    assert one.kind is other.kind
    assert PagedBatch.decode(one.block_tables, one.seq_lens, 6).kind is not one.kind
    assert PagedBatch.decode(one.block_tables[:1], one.seq_lens[:1], 5).kind is not one.kind


def test_a_used_batch_can_be_pickled():
    arguments = decode()
    expected = paged_attention(**arguments).out
    copy = pickle.loads(pickle.dumps(arguments["batch"]))
    assert torch.equal(paged_attention(**arguments | {"batch": copy}).out, expected)
