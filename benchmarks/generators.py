"""Three ways to generate greedily from lists of token ids: our engine, and two of Transformers'."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from pagetile import LLM, SamplingParams
from pagetile.demo import path

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
"""Called with prompts and a number of new tokens; returns the new tokens of each prompt."""

PAD = 0  # any token: it is masked
NO_TOKEN = -1  # an end of text that no model draws; None would mean the model's own
BLOCK_SIZE = 16


@dataclass(frozen=True, eq=False)
class Model:
    """A model by its configuration, or the shipped checkpoint."""

    about: str
    sizes: Mapping[str, Any] | None = None
    """Sizes in its configuration, for random weights; ``None``: the shipped checkpoint."""
    family: str = "qwen3"
    """The configuration's model type in Transformers."""

    def load(self, dtype: torch.dtype, device: str) -> Any:
        """The model as Transformers runs it; random weights are the same every time."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # it warns that texts never end, which is intended here
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
        if self.sizes is None:
            return AutoModelForCausalLM.from_pretrained(path(), **options).to(device).eval()
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(0)
            config = AutoConfig.for_model(self.family, **self.sizes)
            return AutoModelForCausalLM.from_config(config, **options).eval()


SHIPPED = Model("shipped checkpoint")
QWEN3 = Model(
    "Qwen3-0.6B's sizes, random weights",
    {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)
LLAMA = Model(
    "Llama-8B's sizes, random weights",
    {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "llama",
)


class Generators:
    """The three ways to generate with one model.

    Args:
        model: The model.
        dtype: Type of its weights.
        device: ``"cpu"`` or ``"cuda"``.
        **options: Of our engine.

    Attributes:
        llm: Our engine. It compares its logits with the model's when it loads.
        peer: The model as Transformers runs it.
    """

    def __init__(self, model: Model, dtype: torch.dtype, device: str, **options: Any) -> None:
        self.peer = model.load(dtype, device)
        source = None if model.sizes is None else self.peer
        self.llm = LLM(source, dtype=dtype, device=device, block_size=BLOCK_SIZE, **options)

    def pagetile(self, prompts: Prompts, max_tokens: int) -> Prompts:
        """Our engine, from token ids to token ids, as the peers."""
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def padded(self, prompts: Prompts, max_tokens: int) -> Prompts:
        """Transformers' ``generate`` on one batch, padded on the left to the longest prompt."""
        width = max(map(len, prompts))
        gaps = [width - len(prompt) for prompt in prompts]
        pairs = list(zip(prompts, gaps, strict=True))
        mask = [[0] * gap + [1] * len(prompt) for prompt, gap in pairs]
        tokens = self.peer.generate(
            torch.tensor([[PAD] * gap + prompt for prompt, gap in pairs], device=self.peer.device),
            attention_mask=torch.tensor(mask, device=self.peer.device),
            generation_config=self._greedy(max_tokens),
        )
        result: Prompts = tokens[:, width:].tolist()
        return result

    def continuous_batching(self, prompts: Prompts, max_tokens: int) -> Prompts:
        """Transformers' own continuous batching.

        Its defaults take most of the memory and seconds to allocate it, so it gets as many blocks
        as it needs. Small pages were the fastest of those tried on a CPU (16, 64, 256), by 10 %.
        """
        from transformers import ContinuousBatchingConfig

        blocks = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for prompt in prompts)
        names = signature(ContinuousBatchingConfig).parameters
        page = (
            "page_size" if "page_size" in names else "block_size"
        )  # Transformers 5.17 and earlier
        results = self.peer.generate_batch(
            prompts,
            generation_config=self._greedy(max_tokens),
            continuous_batching_config=ContinuousBatchingConfig(
                **{page: BLOCK_SIZE}, num_blocks=2 * blocks, max_batch_tokens=2048
            ),
        )
        return [list(result.generated_tokens) for result in results.values()]

    def _greedy(self, max_tokens: int) -> Any:
        config = copy.deepcopy(self.peer.generation_config)
        config.do_sample, config.max_new_tokens = False, max_tokens
        config.eos_token_id, config.pad_token_id = NO_TOKEN, PAD
        return config


@functools.cache
def load(model: Model, dtype: torch.dtype, device: str, **options: Any) -> Generators:
    """The generators of a model, once a process."""
    return Generators(model, dtype, device, **options)
