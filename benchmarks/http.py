"""Generation over HTTP compared with ``LLM.generate``: the CPU time that the server adds.

Three processes: ``pagetile serve``, an engine that calls ``LLM.generate``, and this one, which
sends the requests and does nothing else meanwhile. Both serve the same prompts in turns::

    turn        1 generate   1 HTTP      2 generate   2 HTTP      …     then at half of that rate
    this        ·            streams     ·            streams           streams at random times

A turn's overhead is the CPU time a token of the server's process less that of the engine's. It is
meaningful on a busy machine too, unlike a rate.
"""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import psutil

from pagetile import LLM, SamplingParams
from pagetile.testing.serve import server_process


@dataclass(frozen=True)
class Workload:
    """Streams of equal lengths: random prompts, greedy, new prompts in every turn."""

    num_streams: int = 64
    num_prompt: int = 64
    num_new: int = 128
    model: str | None = None
    device: str = "cpu"

    @property
    def about(self) -> str:
        """The problem in one line."""
        lengths = f"prompts of {self.num_prompt} tokens, {self.num_new} new each"
        model = self.model or "shipped checkpoint"
        return f"{self.num_streams} streams, {lengths}, greedy, {model}, {self.device}"

    @property
    def num_tokens(self) -> int:
        """New tokens of a turn."""
        return self.num_streams * self.num_new

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at the same time: all."""
        return max(128, self.num_streams)

    def prompts(self, turn: int, num_prompts: int | None = None) -> list[list[int]]:
        """Token ids of a turn's prompts."""
        rng = random.Random(turn)
        count = self.num_streams if num_prompts is None else num_prompts
        return [[rng.randrange(1, 4096) for _ in range(self.num_prompt)] for _ in range(count)]

    def request(self, prompt: list[int]) -> bytes:
        """The HTTP request of a stream."""
        return post(
            {"prompt": prompt, "max_tokens": self.num_new, "temperature": 0, "ignore_eos": True}
        )


def post(fields: dict[str, Any]) -> bytes:
    """The HTTP request of a stream that ends with its usage."""
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(streamed).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# --- the client ---------------------------------------------------------------------------------


@dataclass
class Stream:
    """A response as it arrived.

    Attributes:
        sent: When the request was sent, in seconds of ``time.perf_counter``.
        pieces: What each read returned, and when.
    """

    sent: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """All of it, its head included."""
        return b"".join(data for _, data in self.pieces)

    @property
    def num_tokens(self) -> int:
        """New tokens, as the server counts them; 0 if the response is not whole."""
        found = re.search(rb'"completion_tokens": ?(\d+)', self.body)
        return int(found[1]) if found and b"data: [DONE]" in self.body else 0

    @property
    def times(self) -> list[float]:
        """When each event with text arrived.

        Mostly one a token; a token without whole characters has none, and a server that is behind
        joins tokens.
        """
        return [at for at, data in self.pieces for _ in range(data.count(b'"text": '))]


def send(address: tuple[str, int], requests: Sequence[bytes], due: Sequence[float]) -> list[Stream]:
    """Send requests, each on a connection of its own, and read their responses to the end.

    Reads are only stored with their time, about 5 us each; everything else is done afterwards.

    Args:
        address: Host and port.
        requests: In the order of ``due``.
        due: Seconds from now at which each is sent, ascending.
    """
    streams = [Stream() for _ in requests]
    num_sent = num_open = 0
    start = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        while num_sent < len(requests) or num_open:
            now = time.perf_counter() - start
            while num_sent < len(requests) and due[num_sent] <= now:
                connection = socket.create_connection(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                streams[num_sent].sent = time.perf_counter()
                connection.sendall(requests[num_sent])
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, streams[num_sent])
                num_sent, num_open = num_sent + 1, num_open + 1
            wait = due[num_sent] - now if num_sent < len(requests) else None
            for key, _ in selector.select(wait):
                connection = key.fileobj  # type: ignore[assignment]
                data = connection.recv(1 << 16)
                key.data.pieces.append((time.perf_counter(), data))
                if not data:
                    selector.unregister(connection)
                    connection.close()
                    num_open -= 1
    return streams


# --- the engine by itself -----------------------------------------------------------------------

_engine: LLM


def _load_engine(workload: Workload) -> None:
    global _engine
    _engine = LLM(
        workload.model, device=workload.device, max_num_seqs=workload.max_num_seqs, use_tqdm=False
    )


def _generate(workload: Workload, turn: int) -> tuple[float, float]:
    """Seconds and CPU seconds of one turn."""
    params = SamplingParams(temperature=0, max_tokens=workload.num_new, ignore_eos=True)
    start, cpu = time.perf_counter(), time.process_time()
    _engine.generate(workload.prompts(turn), params, use_tqdm=False)
    return time.perf_counter() - start, time.process_time() - cpu


@contextmanager
def _generator(workload: Workload) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_load_engine, initargs=(workload,)
    ) as pool:
        yield pool


# --- the server ---------------------------------------------------------------------------------


@contextmanager
def _server(workload: Workload) -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    arguments = [workload.model] if workload.model is not None else []
    arguments += ["--quiet", "--device", workload.device]
    arguments += ["--max-num-seqs", str(workload.max_num_seqs)]
    with server_process(*arguments) as server:
        yield psutil.Process(server.process.pid), server.address


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# --- both ---------------------------------------------------------------------------------------


def compare(workload: Workload, turns: int = 5, seconds: float = 10.0) -> dict[str, Any]:
    """Measure; the keys of the result say what each figure is.

    Args:
        workload: Prompts and lengths.
        turns: Turns of each, after one to warm up.
        seconds: How long requests are sent at half of the saturating rate; 0 leaves this out.

    Raises:
        RuntimeError: A response was incomplete.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does
    shares, overheads, rates = [], [], []
    own_cpu = 0.0
    with _generator(workload) as generator, _server(workload) as (server, address):
        for turn in range(turns + 1):
            engine_seconds, engine_cpu = generator.submit(_generate, workload, turn).result()
            requests = [workload.request(prompt) for prompt in workload.prompts(turn)]
            start, cpu, own = time.perf_counter(), _cpu_seconds(server), time.process_time()
            streams = send(address, requests, [0.0] * len(requests))
            server_seconds, own = time.perf_counter() - start, time.process_time() - own
            server_cpu = _cpu_seconds(server) - cpu
            _check(streams, workload)
            if turn:
                own_cpu += own / turns
                rates.append((workload.num_tokens / engine_seconds, server_seconds))
                shares.append(engine_seconds / server_seconds)
                overheads.append((server_cpu - engine_cpu) / workload.num_tokens)
        rate = statistics.median(workload.num_tokens / s for _, s in rates)
        found = {
            "tokens/s, LLM.generate": statistics.median(rate for rate, _ in rates),
            "tokens/s, LLM.generate, each turn": [round(rate, 1) for rate, _ in rates],
            "tokens/s, HTTP": rate,
            "tokens/s, HTTP, each turn": [round(workload.num_tokens / s, 1) for _, s in rates],
            "share of LLM.generate": statistics.median(shares),
            "share of LLM.generate, each turn": [round(share, 3) for share in shares],
            "server's CPU us a token": 1e6 * statistics.median(overheads),
            "server's CPU us a token, each turn": [round(1e6 * o, 1) for o in overheads],
            "client's CPU us a token": 1e6 * own_cpu / workload.num_tokens,
        }
        if seconds > 0:
            found |= _at_half_rate(workload, address, rate / workload.num_new / 2, seconds)
    return found


def _at_half_rate(
    workload: Workload, address: tuple[str, int], rate: float, seconds: float
) -> dict[str, Any]:
    """Latencies of requests sent at random times, ``rate`` a second."""
    rng, due = random.Random(0), [0.0]
    while due[-1] < seconds:
        due.append(due[-1] + rng.expovariate(rate))
    prompts = workload.prompts(-1, len(due))
    streams = send(address, [workload.request(prompt) for prompt in prompts], due)
    _check(streams, workload)
    first = [1e3 * (stream.times[0] - stream.sent) for stream in streams]
    between = [
        1e3 * (later - earlier)
        for stream in streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
    ]
    return {
        "requests/s at half": rate,
        "ms to the first token, p50": percentile(first, 50),
        "ms to the first token, p99": percentile(first, 99),
        "ms between tokens, p50": percentile(between, 50),
        "ms between tokens, p99": percentile(between, 99),
    }


def percentile(values: list[float], percent: int) -> float:
    """A percentile, interpolated between two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _check(streams: Sequence[Stream], workload: Workload) -> None:
    for stream in streams:
        if stream.num_tokens != workload.num_new:
            raise RuntimeError(f"a response is not whole: {stream.body[-2000:]!r}")
