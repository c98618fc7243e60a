"""Measures one run of the engine: speed, peak of held blocks, and a table of both."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..analysis.page_map import PageMap
from .output import aligned

if TYPE_CHECKING:
    from ..engine.core import Engine
    from ..engine.llm import LLM
    from ..engine.outputs import Delta


def load(**options: Any) -> LLM:
    """Load a model with options of ``LLM``."""
    from ..engine.llm import LLM

    return LLM(**options)


class Run:
    """Measures an engine while prompts are continued.

    Args:
        engine: A new engine, whose request ids are the prompts' numbers.
        prompts: The prompts' texts.
        n: Samples of each prompt.
        max_tokens: The most tokens of each sample.
        watch: Whether to keep a page map.

    Attributes:
        keys: (prompt, sample) of every continuation, in order.
        num_output_tokens: Tokens so far.
        seconds: Time so far.
        first_tokens: Seconds from the start to each prompt's first token.
        errors: Failed samples, and why.
        num_cut: Continuations that had no room for ``max_tokens``.
        num_steps: Steps of the engine so far.
        page_map: The page map of the last step with the most held blocks.
        peak_step: That step's number, counted from 1.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[str], n: int, *, max_tokens: int, watch: bool
    ) -> None:
        self.prompts = prompts
        self.keys = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(n)]
        self.num_output_tokens, self.seconds = 0, 0.0
        self.first_tokens: dict[int, float] = {}
        self.errors: list[str] = []
        self.num_steps = self.peak_step = self.num_cut = 0
        self.page_map: PageMap | None = None
        self._engine, self._n, self._max_tokens = engine, n, max_tokens
        self._lengths = Counter[tuple[int, int]]()
        if watch:
            engine.on_step = self._look

    def name(self, prompt: int, sample: int) -> str:
        """Return the name of a continuation, numbered from 0."""
        words = [f"prompt {prompt}"] if len(self.prompts) > 1 or self._n == 1 else []
        words += [f"sample {sample}"] if self._n > 1 else []
        return ", ".join(words)

    def measure(self, deltas: Iterator[Delta]) -> Iterator[Delta]:
        """Yield deltas, and count them."""
        start = time.perf_counter()
        for delta in deltas:
            self.seconds = time.perf_counter() - start
            if delta.token_id is not None:
                self.num_output_tokens += 1
                self.first_tokens.setdefault(delta.request_id, self.seconds)
                self._lengths[delta.request_id, delta.index] += 1
            if delta.finish_reason == "length":
                length = self._lengths[delta.request_id, delta.index]
                self.num_cut += length < self._max_tokens
            if delta.error is not None:
                self.errors.append(f"{self.name(delta.request_id, delta.index)}: {delta.error}")
            yield delta

    def _look(self) -> None:
        self.num_steps += 1
        pool = self._engine.pool
        held = pool.num_blocks - pool.num_free
        if self.page_map is not None and held < self.page_map.num_held:
            return
        running = [
            (sequence.request.request_id, sequence.index, sequence.table)
            for sequence in self._engine.scheduler.running
        ]
        running.sort(key=lambda entry: entry[:2])
        tables = {self.name(prompt, sample): table for prompt, sample, table in running}
        self.page_map = PageMap.of(pool, tables, self._engine.scheduler.index)
        self.peak_step = self.num_steps


def cache_report(engine: Engine, run: Run) -> Text:
    """Return the counts of the cache and the speed, in two aligned columns."""
    counts, size = engine.counts, engine.cache.block_size
    rows = {
        "blocks in use": f"{counts.peak_blocks:,} of {engine.pool.num_blocks:,} at the peak, "
        f"{size} token{'s' * (size > 1)} each",
        "shared": f"{counts.shared_blocks:,} at the peak",
        "reused": f"{counts.cached_tokens:,} of {counts.prompt_tokens:,} prompt tokens, "
        "from equal beginnings",
        "copied on write": f"{counts.copied_blocks:,} block{'s' * (counts.copied_blocks != 1)}",
        "wasted": f"{counts.waste:.1%} of the slots in use held no token, on average",
        "preempted": f"{counts.preemptions:,} times, "
        f"{counts.recomputed_tokens:,} tokens recomputed",
        "input": _rate(counts.prompt_tokens, max(run.first_tokens.values(), default=run.seconds)),
        "output": _rate(run.num_output_tokens, run.seconds),
        "first token": _first_token(list(run.first_tokens.values())),
    }
    if counts.draft_tokens:
        rows["speculated"] = (
            f"{counts.accepted_tokens:,} of {counts.draft_tokens:,} drafted tokens accepted"
        )
    if run.num_cut:
        rows["cut short"] = f"{run.num_cut:,} by max_model_len={engine.max_model_len:,}"
    return aligned(rows)


def _rate(num_tokens: int, seconds: float) -> str:
    rate = num_tokens / max(seconds, 1e-9)
    digits = 1 if rate < 100 else 0
    return f"{num_tokens:,} token{'s' * (num_tokens != 1)}, {rate:,.{digits}f} a second"


def _first_token(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return f"after {seconds[0]:.3f} s" if seconds else "none"
    mean = sum(seconds) / len(seconds)
    return f"after {mean:.3f} s on average, {max(seconds):.3f} s at the latest"
