"""Linear modules of few tokens on a CPU."""

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from pagetile import LLM, SamplingParams
from pagetile.models import linears, load_model
from pagetile.models.linears import find_linears, forward_of_few

WIDE = {"hidden_size": 512, "intermediate_size": 768, "vocab_size": 1024}


def run(forward, x):
    with torch.no_grad():
        return forward(x)


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of ``x`` and the weight of each product that is not torch's."""
    seen, own = [], linears.small_linear

    def watched(x, weight, **options):
        seen.append((tuple(x.shape), tuple(weight.shape)))
        return own(x, weight, **options)

    monkeypatch.setattr(linears, "small_linear", watched)
    return seen


def test_modules_whose_weights_are_large_are_found():
    model = tiny_model("qwen3", **WIDE)
    found = {id(module) for module, name, _ in find_linears(model) if name == "forward"}
    large = [
        module for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight.nbytes >= 1 << 18
    ]  # fmt: skip
    assert len(large) >= 7
    assert found == {id(module) for module in large}


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Described(nn.Linear):
    def forward(self, x):
        """The same as its base class's."""
        return super().forward(x)


def test_a_subclass_that_computes_the_same_is_replaced():
    module = Described(512, 512)
    x = torch.randn(1, 3, 512)
    torch.testing.assert_close(run(forward_of_few(module, "cpu"), x), run(module, x))


def test_other_modules_are_left_alone():
    for module in (
        nn.Embedding(1024, 512), nn.LayerNorm(1 << 18), Doubled(512, 512), nn.Linear(64, 64),
        nn.Linear(500, 1024), nn.Linear(512, 512, dtype=torch.float64),
    ):  # fmt: skip
        assert forward_of_few(module, "cpu") is None


def test_few_rows_are_ours_and_many_torchs(shapes):
    module = nn.Linear(512, 1100)
    forward = forward_of_few(module, "cpu")
    few, many = torch.randn(1, 64, 512), torch.randn(1, 65, 512)
    torch.testing.assert_close(run(forward, few), run(module, few))
    assert shapes == [((1, 64, 512), (1100, 512))]
    assert torch.equal(run(forward, many), run(module, many))
    assert len(shapes) == 1


def test_changed_weights_are_seen(shapes):
    module = nn.Linear(512, 512)
    forward, x = forward_of_few(module, "cpu"), torch.randn(1, 3, 512)
    module.weight.data.mul_(3)
    torch.testing.assert_close(run(forward, x), run(module, x))
    module.weight = nn.Parameter(torch.randn(640, 512) / 512)
    module.bias = nn.Parameter(torch.randn(640))
    torch.testing.assert_close(run(forward, x), run(module, x))
    assert len(shapes) == 2
    module.weight = nn.Parameter(torch.randn(512, 640).T / 512)
    assert torch.equal(run(forward, x), run(module, x))
    assert len(shapes) == 2


def test_tokens_are_those_of_transformers(shapes):
    """Prompts of more and fewer tokens than a product here takes, and batches of several sizes."""
    model = tiny_model("qwen3", **WIDE)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 1024, (n,), generator=generator).tolist() for n in (3, 70, 17)]
    expected = []
    for prompt in prompts:
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
        )
        expected.append(found[0, len(prompt) :].tolist())
    llm = LLM(model, device="cpu", num_blocks=60)
    shapes.clear()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert [list(result.outputs[0].token_ids) for result in results] == expected
    assert {x[-2] for x, _ in shapes} & {1, 2, 3}
    assert not any("forward" in vars(module) for module in model.modules())


def test_logits_of_bfloat16_pass_the_check_at_loading(shapes):
    load_model(tiny_model("llama", dtype=torch.bfloat16, **WIDE))
    assert shapes
