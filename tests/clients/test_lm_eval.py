"""``lm-eval``: its ``local-completions`` finds the log-likelihoods that Transformers computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagetile.demo import path

completions = pytest.importorskip(
    "lm_eval.models.openai_completions", reason="make test-clients installs lm-eval"
)
PAIRS = [
    ("def add(a, b):\n", "    return a + b\n"),
    ("import ", "os"),
    ("class Stack:", "\n    def __init__(self):\n        self.items = []"),
    ("x = 'ünï日本'", " # 🙂"),
]


@pytest.fixture
def model(url):
    return completions.LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="pagetile-demo", tokenizer=str(path()),
        tokenizer_backend="huggingface", num_concurrent=2, batch_size=2, max_length=2048,
    )  # fmt: skip


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=number)
        for number, pair in enumerate(arguments)
    ]


def test_loglikelihoods_are_those_of_transformers(model):
    oracle = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32)
    tokenizer = model.tokenizer
    prompt = torch.tensor([tokenizer.encode("def add(a, b):", add_special_tokens=False)])
    likeliest = oracle.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    pairs = [*PAIRS, ("def add(a, b):", tokenizer.decode(likeliest))]
    found = model.loglikelihood(instances("loglikelihood", pairs))
    for pair, (score, is_greedy) in zip(pairs, found, strict=True):
        given, continued = model._encode_pair(*pair)
        with torch.no_grad():
            logits = oracle(torch.tensor([given + continued])).logits[0, len(given) - 1 : -1]
        expected = logits.double().log_softmax(-1).gather(1, torch.tensor(continued)[:, None])
        assert score == pytest.approx(expected.sum().item(), abs=1e-4), pair
        assert is_greedy == (logits.argmax(-1).tolist() == continued)
    assert [is_greedy for _, is_greedy in found] == [False] * len(PAIRS) + [True]


def test_generate_until_stops(model):
    asked = [("def add(a, b):\n    return", {"until": ["\n"], "max_gen_toks": 30})] * 3
    found = model.generate_until(instances("generate_until", asked))
    assert len(found) == 3
    assert len(set(found)) == 1
    assert "\n" not in found[0]
