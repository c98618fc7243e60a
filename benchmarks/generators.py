"""Three ways to generate greedily from lists of token ids, on the shipped checkpoint in float32."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from pagewise import LLM, SamplingParams
from pagewise.demo import path

__all__ = ["Generate", "Prompts", "continuous_batching", "load_llm", "ours", "padded"]

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
"""From prompts and a number of new tokens to the new tokens of each prompt."""

PAD = 0  # any token: the mask hides it
NO_TOKEN = -1  # ends nothing; None would become the model's own end of text
BLOCK_SIZE = 16


@functools.cache
def load_llm() -> LLM:
    """Our engine."""
    return LLM(dtype=torch.float32, block_size=BLOCK_SIZE)


def ours(prompts: Prompts, max_tokens: int) -> Prompts:
    """Our engine with its defaults; ids in, ids out, as the peers."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    results = load_llm().generate(prompts, params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def padded(prompts: Prompts, max_tokens: int) -> Prompts:
    """Transformers' ``generate`` on one batch, filled up to the longest prompt on the left."""
    width = max(map(len, prompts))
    gaps = [width - len(prompt) for prompt in prompts]
    pairs = list(zip(prompts, gaps, strict=True))
    tokens = _load_transformers().generate(
        torch.tensor([[PAD] * gap + prompt for prompt, gap in pairs]),
        attention_mask=torch.tensor([[0] * gap + [1] * len(prompt) for prompt, gap in pairs]),
        generation_config=_greedy(max_tokens),
    )
    result: Prompts = tokens[:, width:].tolist()
    return result


def continuous_batching(prompts: Prompts, max_tokens: int) -> Prompts:
    """Transformers' own continuous batching.

    Its defaults take most of the memory and seconds to set it up, so it gets the blocks that it
    needs. Small pages were the fastest of those tried (16, 64, 256), by 10 %.
    """
    from transformers import ContinuousBatchingConfig

    blocks = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt in prompts)
    results = _load_transformers().generate_batch(
        prompts,
        generation_config=_greedy(max_tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=BLOCK_SIZE, num_blocks=2 * blocks, max_batch_tokens=2048
        ),
    )
    return [list(result.generated_tokens) for result in results.values()]


@functools.cache
def _load_transformers() -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of texts that never end, which is what we ask for
    model = AutoModelForCausalLM.from_pretrained(
        path(), dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


def _greedy(max_tokens: int) -> Any:
    config = copy.deepcopy(_load_transformers().generation_config)
    config.do_sample, config.max_new_tokens = False, max_tokens
    config.eos_token_id, config.pad_token_id = NO_TOKEN, PAD
    return config
