"""Prompt-lookup speculation: one sequence with drafts and without, in turns, and the same tokens.

``python -m benchmarks.speculation`` prints JSON, a line for each kind of text:

- ``copy``: the output is the prompt with one token in 25 replaced. The model computes as ever, and
  then the logits of that text's tokens are raised: the shipped checkpoint is too small to copy.
- ``rewrite``: the same with two tokens in five replaced, so that few drafts are accepted.
- ``free``: what the model says by itself, greedily; small models soon repeat themselves.

Ratios are medians over turns. That of CPU time depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pagetile import LLM, SamplingParams
from pagetile.models.forward_batch import ForwardBatch

from .report import REPEATS

COPY = "the prompt again, one token in 25 replaced"
REWRITE = "the prompt again, two tokens in five replaced"
FREE = "what the model says"


class Run(NamedTuple):
    """One generation."""

    token_ids: tuple[int, ...]
    seconds: float
    cpu_seconds: float
    num_steps: int


def make_prompt(llm: LLM, num_tokens: int) -> list[int]:
    """Python code of so many tokens."""
    token_ids = llm.engine.inputs.encode(inspect.getsource(textwrap)[: 8 * num_tokens])
    return token_ids[:num_tokens]


def edit(token_ids: Sequence[int], share: float = 0.04, seed: int = 0) -> list[int]:
    """A copy with that share of the tokens replaced by others of them."""
    rng = random.Random(seed)
    return [rng.choice(token_ids) if rng.random() < share else token for token in token_ids]


@contextmanager
def forced(llm: LLM, text: Sequence[int]) -> Iterator[None]:
    """Have a model say ``text``, prompt included, whatever it computes."""
    model, tokens = llm.engine.model, torch.tensor(text, device=llm.engine.model.device)
    forward = model.forward

    def raised(step: ForwardBatch) -> torch.Tensor:
        following = step.positions[step.logits_rows] + 1
        return forward(step).scatter(1, tokens[following][:, None], 1e4)

    model.forward = raised  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.forward = forward  # type: ignore[method-assign]


def run_once(llm: LLM, prompt: list[int], max_tokens: int) -> Run:
    """Generate, greedily, with nothing cached."""
    llm.reset_prefix_cache()
    num_steps, engine = 0, llm.engine

    def count() -> None:
        nonlocal num_steps
        num_steps += 1

    engine.on_step = count
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start, cpu_start = time.perf_counter(), time.process_time()
    [output] = llm.generate(prompt, params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    engine.on_step = None
    return Run(output.outputs[0].token_ids, seconds, cpu_seconds, num_steps)


def compare(
    plain: LLM, drafted: LLM, prompt: list[int], max_tokens: int, turns: int
) -> dict[str, Any]:
    """Medians of both over turns, after one that is not counted.

    Raises:
        AssertionError: The tokens differ.
    """
    drafted.engine.scheduler.counts = type(drafted.engine.counts)()
    runs = [
        [run_once(llm, prompt, max_tokens) for llm in (plain, drafted)] for _ in range(turns + 1)
    ]
    assert len({run.token_ids for pair in runs for run in pair}) == 1, "drafts changed the tokens"
    without, with_drafts = zip(*runs[1:], strict=True)
    counts = drafted.engine.counts

    def both(name: str, repeats: list[float]) -> dict[str, Any]:
        return {
            name: statistics.median(repeats),
            name + REPEATS: [float(f"{repeat:.4g}") for repeat in repeats],
        }

    def ratios(field: str) -> list[float]:
        return [getattr(a, field) / getattr(b, field) for a, b in runs[1:]]

    return {
        "checks": ["drafts do not change the tokens"],
        "tokens": max_tokens,
        "steps": with_drafts[0].num_steps,
        "accepted": counts.accepted_tokens / max(counts.draft_tokens, 1),
        **both("tokens/s without", [max_tokens / run.seconds for run in without]),
        **both("tokens/s", [max_tokens / run.seconds for run in with_drafts]),
        **both("x", ratios("seconds")),
        **both("x CPU time", ratios("cpu_seconds")),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one JSON object a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a checkpoint; the shipped one by default")
    parser.add_argument("--num-tokens", type=int, default=256, help="of prompt, and of output")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args(arguments)
    plain, drafted = (
        LLM(asked.model, dtype="float32", device="cpu", max_num_seqs=1, speculative=speculative)
        for speculative in (None, "ngram")
    )
    prompt = make_prompt(plain, asked.num_tokens)
    for name, about, share in (("copy", COPY, 0.04), ("rewrite", REWRITE, 0.4)):
        text = prompt + edit(prompt, share)
        with forced(plain, text), forced(drafted, text):
            _print(name, about, compare(plain, drafted, prompt, asked.num_tokens, asked.turns))
    _print("free", FREE, compare(plain, drafted, prompt, asked.num_tokens, asked.turns))


def _print(name: str, about: str, found: dict[str, Any]) -> None:
    print(json.dumps({"what": name, "about": about, **found}), flush=True)


if __name__ == "__main__":
    main()
