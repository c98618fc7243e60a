"""A mistake in the oracle, or in the eager code that sets its tolerance, fails by itself."""

import random
from dataclasses import replace

import pytest
import torch

from pagetile.ops.paged_attention.checks import validate
from pagetile.ops.paged_attention.problem import Arguments, form_of
from pagetile.testing import PagedCase, make_inputs, paged_oracle, random_case

CASE = PagedCase(
    (3, 1), (40, 33), num_heads=4, num_kv_heads=2, head_size=32, sliding_window=9,
    logits_soft_cap=5.0, has_alibi=True, dtype=torch.bfloat16,
)  # fmt: skip


def test_the_two_agree_where_neither_is_wrong():
    allowed = paged_oracle.tolerance(make_inputs(CASE))
    assert 0 < allowed.out < 0.2


@pytest.mark.parametrize(
    "mistake",
    [
        {"sliding_window": 10},
        {"logits_soft_cap": 5.5},
        {"logits_soft_cap": None},
        {"softmax_scale": 0.1},
        {"alibi_slopes": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["eager", "oracle"])
def test_a_mistake_in_one_of_the_two_is_found(mistake, where, monkeypatch):
    inputs = make_inputs(CASE)
    wrong = replace_options(inputs, mistake)
    if where == "oracle":
        expected = paged_oracle.oracle(wrong)
    else:
        expected = paged_oracle.oracle(inputs)
        own = paged_oracle._arguments
        monkeypatch.setattr(paged_oracle, "_arguments", lambda _: own(wrong))
    with pytest.raises(AssertionError, match="one of the two computes something else"):
        paged_oracle.tolerance(inputs, expected)


def replace_options(inputs, changes):
    return replace(inputs, options={**inputs.options, **changes})


@pytest.mark.parametrize("seed", range(40))
def test_drawn_inputs_name_the_problem_that_a_call_of_them_is(seed):
    inputs = make_inputs(random_case(random.Random(seed)))
    options = {**inputs.options, "softmax_scale": 0.5}
    call = Arguments(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)
    assert inputs.problem == validate(form_of(call))
