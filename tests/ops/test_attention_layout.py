"""``attention(layout=...)``: SDPA's order of dimensions is accepted by name, and warned of."""

import math
import warnings

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagetile import ShapeError, attention, explain_attention

BATCH, NUM_HEADS, NUM_KV_HEADS, LENGTH, SIZE = 2, 4, 2, 50, 16


def bhsd(heads=NUM_HEADS, length=LENGTH, **options):
    return torch.randn(BATCH, heads, length, SIZE, **options)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_bhsd_is_what_torch_computes(causal, impl):
    q, k, v = bhsd(), bhsd(NUM_KV_HEADS), bhsd(NUM_KV_HEADS)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    result = attention(*leaves, causal=causal, layout="BHSD", impl=impl)
    expected = scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(result.out, expected, rtol=1e-5, atol=1e-5)
    assert result.lse.shape == (BATCH, NUM_HEADS, LENGTH)
    d_out = torch.randn_like(expected)
    for got, wanted in zip(
        torch.autograd.grad(result.out, leaves, d_out),
        torch.autograd.grad(expected, leaves, d_out),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_layouts_agree_in_every_bit():
    q, k, v = bhsd(), bhsd(), bhsd()
    here = attention(q, k, v, causal=True, layout="BHSD")
    transposed = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    there = attention(*transposed, causal=True, layout="BSHD")
    assert torch.equal(here.out, there.out.transpose(1, 2))
    assert torch.equal(here.lse, there.lse.transpose(1, 2))


def test_explain_takes_a_layout():
    assert "cpu: yes" in explain_attention(bhsd(), bhsd(2), bhsd(2), layout="BHSD")


WRONG = [
    # In [batch, heads, length, size] with 50 queries and 70 keys: 50 "heads" for 70 "KV heads".
    (bhsd(4, 50), bhsd(4, 70), bhsd(4, 70), {}, 'pass layout="BHSD"'),
    (bhsd(4, 50), bhsd(4, 70), bhsd(4, 70), {"layout": "BSHD"}, 'pass layout="BHSD"'),
    # 3 heads are not a multiple of 2 KV heads either way.
    (bhsd(3, 50), bhsd(2, 70), bhsd(2, 70), {}, r"50, expected a multiple of k's num_kv_heads=70$"),
    (bhsd(), bhsd(), bhsd(), {"layout": "SBHD"}, "layout is 'SBHD', expected 'BSHD' or 'BHSD'"),
    (bhsd()[0], bhsd()[0], bhsd()[0], {"layout": "BHSD"}, r"q has 3 dimensions"),
]


@pytest.mark.parametrize(("q", "k", "v", "options", "message"), WRONG, ids=lambda x: None)
def test_a_wrong_argument_is_named(q, k, v, options, message):
    with pytest.raises(ShapeError, match=message):
        attention(q, k, v, **options)


def test_a_ragged_batch_has_one_layout():
    rows = torch.randn(9, 4, 16)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"layout is 'BHSD' but cu_seqlens_q is given"):
        attention(rows, rows, rows, cu_seqlens_q=starts, layout="BHSD")


def test_shapes_that_look_like_bhsd_are_warned_of():
    with pytest.warns(UserWarning, match=r'layout="BHSD".*layout="BSHD"'):
        attention(bhsd(), bhsd(2), bhsd(2))


@pytest.mark.parametrize(
    ("shape", "options"),
    [((4, 50), {"layout": "BSHD"}), ((4, 50), {"layout": "BHSD"}), ((50, 4), {}), ((1, 32), {})],
    ids=str,
)
def test_other_shapes_are_not_warned_of(shape, options):
    x = bhsd(*shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(x, x, x, **options)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_is_finite(scale):
    with pytest.raises(ShapeError, match=f"softmax_scale is {scale}, expected a finite number"):
        attention(bhsd(50, 4), bhsd(50, 4), bhsd(50, 4), softmax_scale=scale)
