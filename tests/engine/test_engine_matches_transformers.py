"""Greedy tokens equal those of Transformers' generate under every setting of the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import ADAPTED, FAMILIES, tiny_model

from pagetile import LLM, SamplingParams

NEW_TOKENS = 12


@dataclass(frozen=True)
class Setting:
    """Options of an engine and of its requests."""

    name: str
    block_size: int = 4
    num_blocks: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True

    def llm(self, model: Any) -> LLM:
        return LLM(
            model,
            device=model.device,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            async_scheduling=True,
        )


PLAIN = Setting("plain", enable_prefix_caching=False)
CHUNKED = Setting("chunks of 5 tokens", max_num_seqs=4, max_num_batched_tokens=5, block_size=3)
PREFIXES = Setting("prefix caching")
# One sequence takes up to 10 blocks of 4: two cannot be there in full at the same time.
TINY_POOL = Setting("a pool of 14 blocks", num_blocks=14, max_num_batched_tokens=16)


@cache  # by what is passed: a default that is also passed would be kept twice
def _model(family: str, device: str) -> Any:
    model = tiny_model(family).to(device)
    model.set_attn_implementation("eager")  # some releases' others leave out soft caps
    return model


@cache
def _prompts(family: str) -> tuple[tuple[int, ...], ...]:
    """Six prompts, three of which share their first 13 tokens."""
    rng = random.Random(family)
    vocab_size = _model(family, "cpu").config.get_text_config().vocab_size

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocab_size) for _ in range(n))

    shared = tokens(13)
    return (tokens(1), tokens(9), shared + tokens(4), shared + tokens(11), shared, tokens(26))


@cache
def _expected(family: str, prompt: tuple[int, ...], device: str) -> list[int]:
    """The tokens that the model's own generate continues a prompt with, alone."""
    with torch.inference_mode():
        output = _model(family, device).generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def _run(llm: LLM, arrivals: dict[int, list[tuple[tuple[int, ...], SamplingParams]]]) -> dict:
    """Add requests at given steps and check the pool after each; results by prompt."""
    engine, results, step = llm.engine, {}, 0
    waiting = dict(arrivals)
    added: dict[int, tuple[int, ...]] = {}
    while waiting or engine.has_unfinished:
        for prompt, params in waiting.pop(step, ()):
            added[engine.add_request(prompt, params)] = prompt
        engine.step()
        engine.check()
        step += 1
        assert step < 2000, "the engine does not come to an end"
    for request_id, prompt in added.items():
        output = engine.take_output(request_id)
        results.setdefault(prompt, []).extend(list(o.token_ids) for o in output.outputs)
    assert engine.pool.num_free == engine.pool.num_blocks, "a block leaked"
    return results


GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


SETTINGS = [PLAIN, CHUNKED, PREFIXES, TINY_POOL]


def settings_of_families() -> Iterator[Any]:
    """All pairs; on a CPU each family under two settings in turn, the others with ``-m slow``."""
    for number, family in enumerate([*FAMILIES, *ADAPTED]):
        for at, setting in enumerate(SETTINGS):
            rare = [pytest.mark.slow] * (number % 2 != at % 2)
            for device, marks in (("cpu", rare), ("cuda", [pytest.mark.gpu])):
                name = f"{setting.name}-{family}-{device}"
                yield pytest.param(family, setting, device, marks=marks, id=name)


@pytest.mark.parametrize(("family", "setting", "device"), [*settings_of_families()])
def test_greedy_tokens_equal_generate_run_alone(family: str, setting: Setting, device: str) -> None:
    prompts = _prompts(family)
    llm = setting.llm(_model(family, device))
    rng = random.Random(setting.name)
    arrivals: dict[int, list] = {}
    for prompt in prompts:
        arrivals.setdefault(rng.randrange(6), []).append((prompt, GREEDY))
    # Again when the first are done, so that whole prompts are found in the cache; and as forks.
    arrivals.setdefault(70, []).append((prompts[3], GREEDY))
    arrivals.setdefault(71, []).append((prompts[2], replace(GREEDY, n=3)))

    results = _run(llm, arrivals)

    for prompt in prompts:
        for tokens in results[prompt]:
            assert tokens == _expected(family, prompt, device)
    assert len(results[prompts[2]]) == 4
    counts = llm.engine.counts
    assert (counts.cached_tokens > 0) == setting.enable_prefix_caching
    assert counts.copied_blocks > 0, "the forks share a partly filled block"
    assert (counts.preemptions > 0) == (setting is TINY_POOL)


def test_the_expected_tokens_tell_prompts_apart() -> None:
    for family in (*FAMILIES, *ADAPTED):
        continuations = {tuple(_expected(family, prompt, "cpu")) for prompt in _prompts(family)}
        assert len(continuations) >= 4, family
