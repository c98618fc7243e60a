"""Requests that a server sends to itself, so that its page map shows what paged attention does.

A mix of: several questions with one long prefix (shared blocks), several samples of one prompt
(shared, then copied on write), short and long requests at once (continuous batching), clients that
disconnect early, and at times more requests than fit (preemption).
"""

from __future__ import annotations

import asyncio
import random

from ..engine.async_llm import AsyncLLM
from ..engine.sampling_params import SamplingParams
from ..errors import PagetileError

CALM_SECONDS, CROWD_SECONDS = 12.0, 6.0


class DemoTraffic:
    """A stream of random requests.

    The seed determines the requests.
    """

    def __init__(self, llm: AsyncLLM, *, seed: int = 0) -> None:
        self._llm = llm
        self._random = random.Random(seed)
        engine = llm.engine
        self._vocab_size = engine.model.vocab_size
        self._room = min(engine.max_model_len, 1024)
        self._capacity = engine.cache.num_blocks * engine.cache.block_size
        length = min(self._room // 3, 256)
        self._beginnings = [self._tokens(length) for _ in range(3)]
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send requests until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while self._llm.is_alive and not self._llm.is_draining:
                phase = loop.time() % (CALM_SECONDS + CROWD_SECONDS)
                is_crowded = phase > CALM_SECONDS
                if self._load() < (1.5 if is_crowded else 0.7):
                    self._start()
                await asyncio.sleep(self._random.expovariate(8.0 if is_crowded else 3.0))
        finally:
            for task in self._tasks:
                task.cancel()

    def _load(self) -> float:
        """Return the most tokens that all requests may hold, divided by the cache's size."""
        return len(self._tasks) * self._room * 0.5 / self._capacity

    def _start(self) -> None:
        draw = self._random
        kind = draw.choice(("shared", "shared", "samples", "short", "long"))
        n, max_tokens = 1, draw.randint(self._room // 16, self._room // 4)
        if kind == "shared":
            prompt = draw.choice(self._beginnings) + self._tokens(draw.randint(4, 24))
        elif kind == "samples":
            prompt, n = self._tokens(draw.randint(40, 120)), draw.randint(2, 4)
        elif kind == "short":
            prompt = self._tokens(draw.randint(4, 24))
        else:
            prompt, max_tokens = self._tokens(draw.randint(64, self._room // 3)), self._room // 2
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
        patience = draw.uniform(1.0, 6.0) if draw.random() < 0.15 else 600.0
        task = asyncio.get_running_loop().create_task(self._send(prompt, params, patience))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, prompt: list[int], params: SamplingParams, patience: float) -> None:
        try:
            stream = await self._llm.submit(prompt, params, cache_salt="demo", stream=False)
        except PagetileError:
            return
        try:
            await asyncio.wait_for(stream.result(), patience)
        except (asyncio.TimeoutError, PagetileError):
            pass  # it left early, or was aborted
        finally:
            stream.close()

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(1, self._vocab_size) for _ in range(count)]
