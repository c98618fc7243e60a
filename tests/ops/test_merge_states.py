import itertools
import math

import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.ops.merge_states import merge_states
from pagetile.tiles.state import AttentionOutput

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def merge(request, mirror):
    def call(outs, lses):
        with mirror(outs, lses, impl=request.param) as there:
            result = merge_states(*there, impl=request.param)
        return AttentionOutput(result.out.cpu(), result.lse.cpu())

    return call


def states(num_states, num_tokens=5, num_heads=3, width=24, dtype=F32, spread=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(num_states, num_tokens, num_heads, width, generator=generator).to(dtype)
    return outs, spread * torch.randn(num_states, num_tokens, num_heads, generator=generator)


def merged_by_hand(outs, lses):
    """The formula in float64, a row at a time."""
    out = torch.zeros(outs.shape[1:], dtype=torch.float64)
    lse = torch.full(lses.shape[1:], -math.inf, dtype=torch.float64)
    for token, head in itertools.product(*map(range, lses.shape[1:])):
        terms = [float(x) for x in lses[:, token, head]]
        highest = max(terms, default=-math.inf)
        if highest == -math.inf:
            continue
        total = sum(math.exp(x - highest) for x in terms)
        lse[token, head] = highest + math.log(total)
        for state, x in enumerate(terms):
            if x > -math.inf:
                weight = math.exp(x - highest) / total
                out[token, head] += weight * outs[state, token, head].double()
    return out, lse


def assert_merged(result, outs, lses):
    """Within half an ulp of the type, and a few float32 ulps of what was added up."""
    out, lse = merged_by_hand(outs, lses)
    u, u32 = torch.finfo(outs.dtype).eps / 2, torch.finfo(F32).eps / 2
    largest = outs.double().nan_to_num(0).abs().max().item() if outs.numel() else 0.0
    assert result.out.dtype == outs.dtype
    assert result.lse.dtype == F32
    torch.testing.assert_close(result.out.double(), out, rtol=u, atol=32 * u32 * largest)
    torch.testing.assert_close(result.lse.double(), lse, rtol=4 * u32, atol=4 * u32)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [8, 16, 24, 64, 72, 256])
@pytest.mark.parametrize("num_states", [1, 2, 3, 7])
def test_merging_is_the_formula(merge, num_states, width, dtype):
    outs, lses = states(num_states, width=width, dtype=dtype)
    assert_merged(merge(outs, lses), outs, lses)


def test_one_state_is_its_own_merge(merge):
    outs, lses = states(1)
    result = merge(outs, lses)
    torch.testing.assert_close(result.out, outs[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.lse, lses[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_state_that_saw_nothing_vanishes_whatever_it_holds(merge, dtype):
    outs, lses = states(4, dtype=dtype)
    expected = merge(outs[[0, 2]], lses[[0, 2]])
    for garbage in (math.nan, math.inf, -math.inf, 3e38):
        outs[1], outs[3], lses[1], lses[3] = garbage, garbage, -math.inf, -math.inf
        result = merge(outs, lses)
        assert torch.equal(result.out, expected.out)
        assert torch.equal(result.lse, expected.lse)


def test_some_rows_may_have_seen_nothing_anywhere(merge):
    outs, lses = states(3)
    lses[:, 1], lses[:2, 2], lses[0, 3, 1] = -math.inf, -math.inf, -math.inf
    outs[lses == -math.inf] = math.nan
    result = merge(outs, lses)
    assert (result.out[1] == 0).all()
    assert (result.lse[1] == -math.inf).all()
    assert_merged(result, outs, lses)


def test_a_nan_shows_in_its_row_and_in_no_other(merge):
    outs, lses = states(3)
    expected = merge(outs, lses)
    lses[1, 2], lses[:, 4, 1], outs[:, 4, 1] = (
        math.nan,
        torch.tensor([math.nan, *[-math.inf] * 2]),
        1,
    )
    result = merge(outs, lses)
    for got, wanted in zip(result, expected, strict=True):
        assert got[2].isnan().all()
        assert got[4, 1].isnan().all()
        got[2], got[4, 1] = wanted[2], wanted[4, 1]
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("spread", [0.0, 100.0, 1e4, 1e30])
def test_far_and_large_denominators_do_not_overflow(merge, spread):
    outs, lses = states(4, spread=spread)
    assert_merged(merge(outs, lses), outs, lses)


@pytest.mark.parametrize("shape", [(3, 0, 2, 8), (3, 2, 0, 8), (0, 2, 2, 8)])
def test_nothing_merges_to_nothing(merge, shape):
    outs, lses = torch.empty(shape), torch.empty(shape[:-1])
    result = merge(outs, lses)
    assert result.out.shape == shape[1:]
    assert (result.out == 0).all()
    assert (result.lse == -math.inf).all()


def test_merging_commutes_and_associates_up_to_rounding(merge):
    outs, lses = states(5)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 7):
        order = list(order)
        assert_merged(merge(outs[order], lses[order]), outs, lses)
        left, right = (merge(outs[half], lses[half]) for half in (order[:2], order[2:]))
        both = merge(torch.stack([left.out, right.out]), torch.stack([left.lse, right.lse]))
        assert_merged(both, outs, lses)


def test_strides_do_not_matter(merge):
    outs, lses = states(3, width=24)
    expected = merge(outs, lses)
    result = merge(outs.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0), lses.mT.clone().mT)
    assert torch.equal(result.out, expected.out)
    assert torch.equal(result.lse, expected.lse)
    equal = merge(outs[:1].expand(2, -1, -1, -1), lses[:1].expand(2, -1, -1))
    torch.testing.assert_close(equal.out, outs[0])
    torch.testing.assert_close(equal.lse, lses[0] + math.log(2))


def test_inputs_are_never_written(merge):
    outs, lses = states(3)
    before = outs.clone(), lses.clone()
    merge(outs, lses)
    assert torch.equal(outs, before[0])
    assert torch.equal(lses, before[1])


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ((2, 5, 3, 8), (3, 5, 3), ShapeError, r"lses has num_states=3 but outs has 2"),
        ((2, 5, 3, 8), (2, 5, 4), ShapeError, r"lses has num_heads=4 but outs has 3"),
        ((2, 5, 3, 8), (2, 5, 3, 1), ShapeError, r"lses has 4 dimensions"),
        ((5, 3, 8), (2, 5, 3), ShapeError, r"outs has 3 dimensions"),
    ],
)
def test_a_wrong_shape_is_named(outs, lses, error, message):
    with pytest.raises(error, match=message):
        merge_states(torch.zeros(outs), torch.zeros(lses))


def test_a_wrong_type_is_named():
    outs, lses = states(2)
    with pytest.raises(DTypeError, match=r"lses is float64, expected float32"):
        merge_states(outs, lses.double())
    with pytest.raises(DTypeError, match=r"outs is int32, expected float32"):
        merge_states(outs.int(), lses)
    with pytest.raises(UnsupportedError, match=r"cpu cannot run this: outs is float64"):
        merge_states(outs.double(), lses, impl="cpu")
    assert merge_states(outs.double(), lses).out.dtype == torch.float64


def test_gradients_are_there_and_what_saw_nothing_has_none():
    outs, lses = (x.double().requires_grad_() for x in states(3, width=8))
    # float32 log-sum-exps are the contract: the check's differences need them coarse.
    single = lses.detach().float().requires_grad_()

    def by_formula(outs, lses):
        weights = torch.softmax(lses, dim=0)[..., None]
        return (outs * weights).sum(0), torch.logsumexp(lses, 0)

    def gradients(merged, at):
        out, lse = merged
        generator = torch.Generator().manual_seed(1)
        weighted_sum = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return torch.autograd.grad(
            (out * weighted_sum).sum() + (lse * weighted_sum[..., 0]).sum(), at
        )

    expected = gradients(by_formula(outs, lses), (outs, lses))
    found = gradients(merge_states(outs, single), (outs, single))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)

    with torch.no_grad():
        single[1], single[:, 2] = -math.inf, -math.inf
        outs[1], outs[:, 2] = math.nan, math.inf
    of_outs, of_lses = gradients(merge_states(outs, single), (outs, single))
    assert of_outs.isfinite().all()
    assert of_lses.isfinite().all()
    assert not of_outs[1].any()
    assert not of_lses[:, 2].any()


def test_an_implementation_without_gradients_refuses_them():
    outs, lses = states(3, width=16)
    with pytest.raises(UnsupportedError, match="a gradient is wanted; the reference has one"):
        merge_states(outs.requires_grad_(), lses, impl="cpu")
    with torch.no_grad():
        assert not merge_states(outs, lses).out.requires_grad
