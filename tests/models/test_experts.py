"""Experts of a mixture, replaced by a computation that never waits for the routing on the host."""

from __future__ import annotations

import pytest
import torch
from tiny_models import EXPERTS, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pagetile.models.attention import collect_configs, driven
from pagetile.models.experts import find_experts

TOKENS = torch.arange(40)[None] * 31 % 90 + 3


class WaitingError(Exception):
    """An operation that would make the host wait for a GPU."""


class RefusingToWait(TorchDispatchMode):
    """Raises if the host needs an operation's result to continue."""

    WAITS = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        where_of_one = name == "where" and len(args) == 1
        if where_of_one or any(name.startswith(word) for word in self.WAITS):
            raise WaitingError(name)
        return operator(*args, **(kwargs or {}))


def run(model, replacements=()) -> torch.Tensor:
    with torch.no_grad(), driven(collect_configs(model), "eager", replacements):
        return model(input_ids=TOKENS, use_cache=False).logits[0]


def mixtures(model) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "experts")]


def set_experts(model, name: str) -> None:
    """The implementation with which Transformers computes its experts."""
    for config in collect_configs(model):
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation_internal = name


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("family", EXPERTS)
def test_logits_are_the_models_own(family, implementation):
    model = tiny_model(family)
    set_experts(model, implementation)
    found = find_experts(model, "reference")
    assert {id(module) for module, _, _ in found} == {id(m.experts) for m in mixtures(model)}
    torch.testing.assert_close(run(model, found), run(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_of_16_bits_are_recognised(family, dtype):
    model = tiny_model(family, dtype=dtype)
    assert len(find_experts(model, "reference")) == len(mixtures(model)) > 0


@pytest.mark.parametrize("family", EXPERTS)
def test_nothing_in_a_mixture_waits(family):
    model = tiny_model(family)
    set_experts(model, "eager")
    module = mixtures(model)[0]
    x = torch.randn(1, 5, model.config.hidden_size)
    with (
        torch.no_grad(),
        pytest.raises(WaitingError),
        RefusingToWait(),
    ):
        module(x)
    replacements = find_experts(model, "reference")
    with torch.no_grad(), driven([], "eager", replacements), RefusingToWait():
        module(x)


def test_numbers_of_gpt_oss_are_its_own():
    model = tiny_model("gpt_oss")
    before = run(model)
    for module in mixtures(model):
        module.experts.alpha, module.experts.limit = 0.9, 0.3
    assert (run(model) - before).abs().max() > 0.1
    found = find_experts(model, "reference")
    assert found
    torch.testing.assert_close(run(model, found), run(model), rtol=1e-4, atol=1e-4)


def gelu(experts) -> None:
    experts.act_fn = nn.GELU()


def exchanged(experts) -> None:
    class Exchanged(type(experts)):
        def _apply_gate(self, both):
            up, gate = both.chunk(2, dim=-1)
            return self.act_fn(gate) * up

    experts.__class__ = Exchanged


def clamped_far_away(experts) -> None:
    class Clamped(type(experts)):
        def _apply_gate(self, both):
            return super()._apply_gate(both.clamp(max=200.0))

    experts.__class__ = Clamped


def scaled(experts) -> None:
    class Scaled(type(experts)):
        def forward(self, *arguments):
            return 1.1 * super().forward(*arguments)

    experts.__class__ = Scaled


def patched(experts) -> None:
    own = experts.forward
    experts.forward = lambda *arguments: 1.1 * own(*arguments)


def with_another_parameter(experts) -> None:
    experts.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "change", [gelu, exchanged, clamped_far_away, scaled, patched, with_another_parameter]
)
def test_experts_that_compute_something_else_are_left_alone(change):
    model = tiny_model("mixtral")
    experts = mixtures(model)[1].experts
    change(experts)
    replaced = [module for module, _, _ in find_experts(model, "reference")]
    assert len(replaced) == 2
    assert all(module is not experts for module in replaced)


def test_weights_that_moved_are_read_where_they_are():
    model = tiny_model("mixtral")
    found = find_experts(model, "reference")
    for module in mixtures(model):
        module.experts.down_proj.data = 2 * module.experts.down_proj.data
    torch.testing.assert_close(run(model, found), run(model), rtol=1e-4, atol=1e-4)


def test_a_long_prefill_is_the_modules_own(monkeypatch):
    model = tiny_model("mixtral")
    experts = mixtures(model)[0].experts
    _, _, forward = find_experts(model, "reference")[0]
    calls = []
    monkeypatch.setattr("pagetile.models.experts.moe_experts", lambda *a, **o: calls.append(a))
    x, chosen, weights = torch.randn(1025, 48), torch.zeros(1025, 2).long(), torch.rand(1025, 2)
    with torch.no_grad():
        forward(x[1:], chosen[1:], weights[1:])
        assert len(calls) == 1
        assert torch.equal(forward(x, chosen, weights), experts(x, chosen, weights))
    assert len(calls) == 1
