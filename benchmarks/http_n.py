"""Workload N over HTTP compared with ``LLM.generate``: 256 streams at once from one GPU.

Two processes. The engine's serves as well, since two engines would share the memory and the GPU::

    engine   generate   stream   serve ──────┐   generate   …
    client                       256 streams ┘

``stream`` steps the engine directly with requests that stream, which includes detokenising and
prefill in chunks: the upper bound for the server. The client only stores each read and its time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch

from pagetile import LLM, SamplingParams

from .generators import QWEN3, Model
from .http import Stream, percentile, post, send
from .report import REPEATS
from .workload_n import Requests, draw_n, generate


@dataclass(frozen=True)
class Setup:
    """The engine, and the requests of a turn."""

    model: Model = QWEN3
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    num_prompts: int = 256
    longest: int = 1024
    """Prompts and outputs are truncated to so many tokens."""

    @property
    def about(self) -> str:
        """The problem in one line."""
        return (
            f"N over HTTP: {self.num_prompts} streams of prompts in token ids, temperature 0.6, "
            f"{self.model.about}, {self.device}"
        )

    def requests(self) -> Requests:
        """The requests of N."""
        vocab_size = 10000 if self.model.sizes is None else self.model.sizes["vocab_size"]
        drawn = draw_n(self.num_prompts, min(10000, vocab_size - 1))
        return [(prompt[: self.longest], min(n, self.longest)) for prompt, n in drawn]

    def load(self) -> LLM:
        """The engine, with a tokenizer that has some text for every token."""
        assert self.model.sizes is not None
        return LLM(
            self.model.load(self.dtype, self.device),
            tokenizer=make_byte_tokenizer(self.model.sizes["vocab_size"]),
            device=self.device,
            max_num_seqs=self.num_prompts,
            max_model_len=4 * self.longest,
        )


def make_byte_tokenizer(vocab_size: int) -> Any:
    """A byte-level tokenizer, as Qwen3's is, with a word for every token id."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE({f"Ġw{i}": i for i in range(vocab_size)}, []))
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def compare_n(setup: Setup, turns: int = 5) -> dict[str, Any]:
    """Measure; the keys of the result say what each figure is.

    Args:
        setup: The engine and the requests.
        turns: Turns of each, after one that compiles.

    Raises:
        RuntimeError: A response was incomplete.
    """
    requests = setup.requests()
    num_tokens = sum(n for _, n in requests)
    bodies = [
        post({"prompt": prompt, "max_tokens": n, "temperature": 0.6, "ignore_eos": True})
        for prompt, n in requests
    ]
    found: list[dict[str, float]] = []
    with _engine_process(setup) as (pid, pipe):
        for turn in range(turns + 1):
            by_ids = _ask(pipe, "generate")
            by_deltas = _ask(pipe, "stream") if turn else by_ids
            address = _ask(pipe, "serve")
            over_http = _send_all(address, bodies, [n for _, n in requests], pid)
            os.kill(pid, signal.SIGTERM)  # ends the server; the process waits for a command
            _ask(pipe, None)
            if turn:
                found.append(_figures(num_tokens, by_ids, by_deltas, over_http))
    return _summary(found)


def _figures(
    num_tokens: int,
    by_ids: tuple[float, float],
    by_deltas: tuple[float, float],
    over_http: dict[str, float],
) -> dict[str, float]:
    """The figures of one turn, from seconds and CPU seconds."""
    seconds, cpu = over_http.pop("seconds"), over_http.pop("cpu")
    return {
        "tokens/s, LLM.generate": num_tokens / by_ids[0],
        "tokens/s, engine that streams": num_tokens / by_deltas[0],
        "tokens/s, HTTP": num_tokens / seconds,
        "share of LLM.generate": by_ids[0] / seconds,
        "share of the engine that streams": by_deltas[0] / seconds,
        "CPU us a token, LLM.generate": 1e6 * by_ids[1] / num_tokens,
        "CPU us a token, engine that streams": 1e6 * by_deltas[1] / num_tokens,
        "CPU us a token, HTTP": 1e6 * cpu / num_tokens,
        "server's CPU us a token": 1e6 * (cpu - by_ids[1]) / num_tokens,
        "CPU us a token of the event loop's thread": 1e6 * over_http.pop("loop") / num_tokens,
        "client's CPU us a token": 1e6 * over_http.pop("client") / num_tokens,
        "client's share of a core": over_http.pop("client share"),
        **over_http,
    }


def _summary(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in found[0]:
        values = [each[name] for each in found]
        result[name] = statistics.median(values)
        result[name + REPEATS] = [round(value, 4) for value in values]
    return result


# --- the client ---------------------------------------------------------------------------------


def _send_all(
    address: tuple[str, int], bodies: Sequence[bytes], num_new: Sequence[int], pid: int
) -> dict[str, float]:
    """Send all requests at once; times of the turn, and when its tokens arrived."""
    server = psutil.Process(pid)
    cpu, loop, client = sum(server.cpu_times()[:2]), _main_thread(server), time.process_time()
    start = time.perf_counter()
    streams = send(address, bodies, [0.0] * len(bodies))
    seconds = time.perf_counter() - start
    client = time.process_time() - client
    cpu, loop = sum(server.cpu_times()[:2]) - cpu, _main_thread(server) - loop
    for stream, expected in zip(streams, num_new, strict=True):
        if stream.num_tokens != expected:
            raise RuntimeError(f"a response is not whole: {stream.body[-2000:]!r}")
    return {
        "seconds": seconds,
        "cpu": cpu,
        "loop": loop,
        "client": client,
        "client share": client / seconds,
        **_latencies(streams, sum(num_new)),
    }


def _main_thread(process: psutil.Process) -> float:
    """CPU seconds of the event loop's thread; 0 where the kernel does not report them."""
    try:
        threads = process.threads()
    except (psutil.Error, OSError):
        return 0.0
    return float(sum(t.user_time + t.system_time for t in threads if t.id == process.pid))


def _latencies(streams: Sequence[Stream], num_tokens: int) -> dict[str, float]:
    times = [stream.times for stream in streams]
    first = [1e3 * (own[0] - stream.sent) for own, stream in zip(times, streams, strict=True)]
    between = [1e3 * (b - a) for own in times for a, b in pairwise(own)]
    return {
        "tokens an event": num_tokens / sum(map(len, times)),
        "events a read": sum(map(len, times)) / sum(len(stream.pieces) for stream in streams),
        "ms to the first token, p50": percentile(first, 50),
        "ms to the first token, p99": percentile(first, 99),
        "ms between events, p50": percentile(between, 50),
        "ms between events, p99": percentile(between, 99),
    }


# --- the process of the engine ------------------------------------------------------------------


@contextmanager
def _engine_process(setup: Setup) -> Iterator[tuple[int, Connection]]:
    context = get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=_run_engine, args=(setup, end))
    process.start()
    end.close()
    assert process.pid is not None
    try:
        yield process.pid, pipe
        pipe.send("end")
        process.join(30)
    finally:
        process.kill()


def _ask(pipe: Connection, command: str | None) -> Any:
    """Send a command, if there is one, and return the process's next answer."""
    if command is not None:
        pipe.send(command)
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError("the process of the engine was killed") from None
    if isinstance(answer, _Failure):
        raise RuntimeError(f"the process of the engine failed: {answer.reason}")
    return answer


@dataclass(frozen=True)
class _Failure:
    """The answer of a process that ends with an exception."""

    reason: str


def _run_engine(setup: Setup, pipe: Connection) -> None:
    try:
        _run_commands(setup, pipe)
    except BaseException as error:
        pipe.send(_Failure(f"{type(error).__name__}: {error}"))
        raise


def _run_commands(setup: Setup, pipe: Connection) -> None:
    """Load the engine and execute commands until ``"end"``."""
    llm, requests = setup.load(), setup.requests()
    while (command := pipe.recv()) != "end":
        llm.reset_prefix_cache()  # or a turn would reuse the prompts of the one before
        if command == "serve":
            asyncio.run(_serve(llm, pipe))
            pipe.send("ended")
            continue
        cpu = time.process_time()
        seconds = generate(llm, requests) if command == "generate" else _stream(llm, requests)
        pipe.send((seconds, time.process_time() - cpu))


def _stream(llm: LLM, requests: Requests) -> float:
    """Seconds that the engine takes for streamed requests."""
    engine, start = llm.engine, time.perf_counter()
    for prompt, n in requests:
        params = SamplingParams(max_tokens=n, temperature=0.6, ignore_eos=True)
        engine.add_request(prompt, params, stream=True)
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.finish_reason is not None:
                engine.take_output(delta.request_id)
    return time.perf_counter() - start


async def _serve(llm: LLM, pipe: Connection) -> None:
    """Serve until a signal arrives; the address is sent as soon as connections are accepted."""
    from pagetile.engine.async_llm import AsyncLLM
    from pagetile.server import create_app, serve
    from pagetile.server.logs import log

    log.is_on = False

    def on_start(url: str) -> None:
        parts = urlsplit(url)
        pipe.send((parts.hostname, parts.port))

    async_llm = AsyncLLM(llm)
    try:
        await serve(create_app(async_llm), async_llm, host="127.0.0.1", port=0, on_start=on_start)
    finally:
        llm.engine.on_step = None
