"""What a GPU does before the first request, so that it is fast: graphs are recorded, and requests
that are made up compile what runs beside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .core import Engine
    from .runner import Runner

__all__ = ["record_steps", "run_made_up"]


def record_steps(runner: Runner, show: Callable[[Any], Any]) -> None:
    """Record the steps of every size.

    Args:
        runner: Where they are kept.
        show: Wraps the list of recordings, for a progress bar.
    """
    sampler, graphs, prompt_graphs = runner.sampler, runner.graphs, runner.prompt_graphs
    sampler.compiles_masks = True
    if graphs is None or prompt_graphs is None:
        return
    decode = [(graphs, size, True, False) for size in graphs.sizes]
    decode += [(graphs, size, True, True) for size in runner.shared_sizes()]
    prompts = [(prompt_graphs, size) for size in prompt_graphs.sizes]
    with torch.inference_mode():
        for kept, *form in show([*reversed(prompts), *reversed(decode)]):
            kept.ensure(*form)
        if prompt_graphs.reason is None:
            from .triton_draw import FEWEST_ROWS  # with which a program scores several tiles

            size = prompt_graphs.fit(min(FEWEST_ROWS, prompt_graphs.sizes[-1]))
            runner.prompt_buffers.clear(size)
            sampler.compile_masks(prompt_graphs.replay(size)[0])


def run_made_up(engine: Engine, num_tokens: int) -> None:
    """Run random prompts of so many tokens in all, and leave no trace of them."""
    rng, scheduler = random.Random(0), engine.scheduler
    num_new = 8
    params = SamplingParams(seed=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    longest = min(engine.max_model_len, engine.cache.num_tokens // 2) - num_new
    num_left = min(num_tokens, engine.cache.num_tokens // 2)
    request_ids = []
    while num_left > 0 and longest > 0:
        length = min(rng.randint(100, 1024) if num_left > 2048 else num_left, longest)
        num_left -= length
        prompt = [rng.randrange(engine.model.vocab_size) for _ in range(length)]
        request_id = "warm up", num_left
        request_ids.append(engine.add_request(prompt, params, request_id=request_id))
    while engine.has_unfinished:
        engine.step()
    for request_id in request_ids:
        engine.take_output(request_id)
    engine.reset_prefix_cache()
    scheduler.counts = type(scheduler.counts)()
    scheduler.chunks = type(scheduler.chunks)()  # steps that compile tell nothing
