"""Prometheus metrics under vLLM's names, with the prefix ``pagetile:``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..engine.async_llm import AsyncLLM
from ..engine.engine_thread import StepReport
from .page_map import PoolCounts, count_blocks

if TYPE_CHECKING:
    from ..engine.outputs import RequestOutput
    from ..engine.request_stream import RequestStream

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 40)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Metrics:
    """The metrics of one server."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"pagetile:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
            made = _Histogram(f"pagetile:{name}", text, buckets)
            self.registry.register(made)
            return made

        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of requests that produced a token."
        )
        self._output_tokens = counter("generation_tokens", "Tokens sampled.")
        self._finished = counter(
            "request_success", "Samples that ended, by how.", "finished_reason"
        )
        self._failed = counter("request_failures", "Requests that failed.")
        self._first = histogram("time_to_first_token_seconds", "From queued to token.", _FIRST)
        self._between = histogram(
            "inter_token_latency_seconds", "From one token of a request to its next.", _BETWEEN
        )
        self._whole = histogram("e2e_request_latency_seconds", "From queued to finished.", _WHOLE)
        self._step = histogram("step_seconds", "Of one step of the engine.", _STEP)
        self._step_tokens = histogram("iteration_tokens", "Tokens sampled in a step.", _TOKENS)
        self._prompt_sizes = histogram("request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Of a sample.", _TOKENS)
        info = Gauge(
            "pagetile:cache_config_info",
            "The cache.",
            ["num_gpu_blocks", "block_size"],
            registry=self.registry,
        )
        info.labels(llm.engine.pool.num_blocks, llm.engine.cache.block_size).set(1)
        self._engine = _EngineCollector(llm)
        self.registry.register(self._engine)
        llm.thread.observers.append(self._note_step)

    async def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if self._llm.is_alive:
            engine = self._llm.engine
            self._engine.blocks = await self._llm.run_in_engine(lambda: count_blocks(engine))
        return generate_latest(self.registry)

    def watch(self, stream: RequestStream) -> None:
        """Measure a request."""
        stream.on_first_token = self._note_first
        stream.on_end = self._note_end

    def _note_first(self, stream: RequestStream) -> None:
        assert stream.first_token is not None
        self._first.observe(stream.first_token - stream.arrived)
        self._prompt_tokens.inc(len(stream.prompt_token_ids))
        self._prompt_sizes.observe(len(stream.prompt_token_ids))

    def _note_end(self, stream: RequestStream, now: float) -> None:
        output: RequestOutput | None = stream.output
        self._whole.observe(now - stream.arrived)
        if output is None:
            self._failed.inc()
            return
        for sample in output.outputs:
            self._finished.labels(sample.finish_reason or "abort").inc()
            self._output_sizes.observe(len(sample.token_ids))

    def _note_step(self, report: StepReport) -> None:
        self._step.observe(report.seconds)
        self._step_tokens.observe(report.num_tokens)
        self._output_tokens.inc(report.num_tokens)
        for seconds, count in report.intervals.items():
            self._between.observe(seconds, count)


class _Histogram(Collector):
    """A histogram that takes many equal values at once; prometheus-client's takes 3 us for each.

    Values come from one thread. ``buckets`` are upper bounds, ascending.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    """Reads the engine's counts when metrics are scraped."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.blocks = PoolCounts(0, 0, 0, 0)

    def collect(self) -> Iterator[Metric]:
        engine, blocks = self._llm.engine, self.blocks
        counts, total = engine.counts, engine.pool.num_blocks
        scheduler = engine.scheduler
        gauges = {
            "num_requests_running": ("Sequences that run.", len(scheduler.running)),
            "num_requests_waiting": ("Sequences that wait for blocks.", len(scheduler.waiting)),
            "num_requests_accepted": ("Requests not finished.", self._llm.num_requests),
            "kv_cache_usage_perc": ("Share of the blocks that are held.", blocks.held / total),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"pagetile:{name}", text, value)
        family = GaugeMetricFamily("pagetile:blocks", "Cache blocks by state.", labels=["state"])
        for state in ("free", "cached", "held", "shared"):
            family.add_metric([state], getattr(blocks, state))
        yield family
        totals = {
            "prefix_cache_queries": ("Prompt tokens looked up.", counts.prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found cached.", counts.cached_tokens),
            "num_preemptions": ("Sequences that gave way.", counts.preemptions),
            "recomputed_tokens": ("Tokens computed again.", counts.recomputed_tokens),
            "copied_blocks": ("Blocks copied on write.", counts.copied_blocks),
            "spec_decode_num_drafts": ("Drafts verified.", counts.drafts),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", counts.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens kept.", counts.accepted_tokens),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"pagetile:{name}", text, value)
