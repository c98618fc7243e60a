"""On a GPU, requests of any sampling parameters share the graphs of decode steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetile import LLM, SamplingParams
from pagetile.engine.sampler import Sampler
from pagetile.engine.sampling_rows import SamplingInput

pytestmark = pytest.mark.gpu

PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n    def __init__(self):\n", "x ="]
FORMS = [
    {"top_p": 0.9, "logprobs": 1},
    {"top_k": 5, "min_tokens": 4},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.5},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 20},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 9: -3.0}, "logprobs": 0},
    {"allowed_token_ids": [*range(3, 200, 2)], "min_p": 0.05},
]


def run(llm: LLM, forms: list[dict]) -> list:
    params = [
        SamplingParams(**{"temperature": 0.8, **form}, seed=i, max_tokens=30, ignore_eos=True)
        for i, form in enumerate(forms)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(forms))]
    return [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]


def test_recorded_steps_of_mixed_forms_generate_what_each_form_does_alone_and_eager() -> None:
    options = {"dtype": "float32", "device": "cuda", "num_blocks": 256, "max_num_seqs": 8}
    recorded, eager = LLM(**options), LLM(**options, enforce_eager=True)
    together = run(recorded, FORMS)
    assert all(samples for _, samples, *_ in recorded.engine._runner.kernels.graphs._recorded)
    for found, expected in zip(together, run(eager, FORMS), strict=True):
        assert found.token_ids == expected.token_ids
        assert (found.logprobs is None) == (expected.logprobs is None)
        for mine, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
            assert mine.keys() == other.keys()
            assert [p.rank for p in mine.values()] == [p.rank for p in other.values()]
            wanted = pytest.approx([p.logprob for p in other.values()], abs=1e-4)
            assert [p.logprob for p in mine.values()] == wanted


def test_a_row_that_starts_anew_has_tables_of_its_own() -> None:
    """The memory of a row's tables is reused while earlier steps are in flight."""
    device, vocab_size = torch.device("cuda"), 5000
    logits = torch.zeros(1, vocab_size, device=device)
    sampler = Sampler(1, vocab_size, device)
    where = torch.zeros(1, dtype=torch.int64, device=device)
    drawn = []
    for turn in range(50):
        params = SamplingParams(temperature=0.0, logit_bias={turn: 5.0}, presence_penalty=1.0)
        sampler.start([0], [SamplingInput(params, [], [turn] * 3, turn, 0)])
        drawn.append(sampler.sample(logits, where, [0]).tokens)
    torch.cuda.synchronize()
    assert np.concatenate(drawn).tolist() == [*range(50)]
