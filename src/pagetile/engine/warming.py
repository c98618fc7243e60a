"""Compiles kernels and captures CUDA graphs before the first request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .core import Engine


def warm_up(engine: Engine, show: Callable[[Any], Any] = iter) -> None:
    """Compile kernels and capture CUDA graphs, so that the first request is fast."""
    kernels = engine._runner.kernels
    if kernels is not None:
        kernels.warm_up(show)
        run_made_up(engine, 3 * engine.scheduler.max_num_batched_tokens)


def run_made_up(engine: Engine, num_tokens: int) -> None:
    """Run random prompts of ``num_tokens`` tokens in all, and remove all traces of them."""
    rng, scheduler, num_new = random.Random(0), engine.scheduler, 8
    params = SamplingParams(seed=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
    longest = min(engine.max_model_len, engine.cache.num_tokens // 2) - num_new
    num_left = min(num_tokens, engine.cache.num_tokens // 2)
    request_ids = []
    while num_left > 0 and longest > 0:
        length = min(rng.randint(100, 1024) if num_left > 2048 else num_left, longest)
        num_left -= length
        prompt = [rng.randrange(engine.model.vocab_size) for _ in range(length)]
        named = "warm up", num_left
        request_ids.append(engine.add_request(prompt, params, request_id=named))
    while engine.has_unfinished:
        engine.step()
    for request_id in request_ids:
        engine.take_output(request_id)
    engine.reset_prefix_cache()
    scheduler.counts = type(scheduler.counts)()
    scheduler.chunks = type(scheduler.chunks)()  # times of steps that compile are useless
