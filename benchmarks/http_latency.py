"""Latency over HTTP compared with other servers, at half of the rate that saturates them.

All servers run the shipped checkpoint in float32, each in a process of its own, and answer the
same requests in turns. A signal stops the servers that wait for their turn, so that they take no
CPU time. The client (``http_client``) has its own process as well::

    start      every server; check that all give the same greedy text
    try        16 and 64 streams at a time, for each server: the number that gives more tokens/s
    saturate   turn 1 pagetile  transformers     turn 2 pagetile  transformers     …
    half       turn 1 pagetile  transformers  pagetile at half of its own rate     turn 2 …

A saturating rate is measured in a closed loop: each stream sends its next request as soon as one
has ended. At half of it requests arrive at random times (Poisson), the same for all servers in a
turn. The time to a first token counts from the moment at which its request was due.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from typing import IO, Any, NamedTuple

import psutil

from pagetile.demo import path

from .http import percentile
from .http_client import Load, Response, post, run
from .processes import tethered
from .report import REPEATS

_HEALTH_SECONDS = 2.0
_STOP_SECONDS = 5.0
_LOG_LINES = 15
# For a comparison with a time limit: what a run takes besides its seconds (the client's start, the
# last responses, parsing), the shortest useful turn, how long a stuck response may last, and how
# long after the limit the comparison is aborted.
_RUN_SECONDS, _LEAST_SECONDS, _LIMITED_TIMEOUT, _GRACE_SECONDS = 1.5, 0.6, 15.0, 5.0
_NO_TOKEN = -1  # an end of text that no model draws
Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """Model, lengths and durations of a comparison."""

    device: str = "cpu"
    turns: int = 4
    seconds: float = 20.0
    """Seconds of each server's turn at half of a rate."""
    saturated_seconds: float = 8.0
    """Seconds of a turn in a closed loop; its first quarter does not count."""
    num_streams: tuple[int, ...] = (16, 64)
    num_prompt: tuple[int, int] = (20, 200)
    num_new: tuple[int, int] = (20, 100)
    start_seconds: float = 180.0
    """Seconds after which a server that has not started has failed."""
    timeout: float = 60.0
    """Seconds after which a response that has not ended is aborted."""
    limit: float | None = None
    """Seconds in which the comparison has to end: servers have two thirds of them to start, and
    turns are shortened to fit; a little later it is aborted."""

    @property
    def about(self) -> str:
        """The problem in one line, without the server."""
        return (
            f"prompts of {self.num_prompt[0]} to {self.num_prompt[1]} tokens, {self.num_new[0]} "
            f"to {self.num_new[1]} new, greedy, shipped checkpoint, float32, {self.device}"
        )


# --- the workload -------------------------------------------------------------------------------


class Request(NamedTuple):
    """A prompt and its number of new tokens."""

    prompt: str
    num_new: int


def draw(setup: Setup, seed: int, num_requests: int) -> list[Request]:
    """Requests of random lengths, of words that are one token each, after a token at the start."""
    rng, words = random.Random(seed), _words()
    found = []
    for _ in range(num_requests):
        num_prompt, num_new = rng.randint(*setup.num_prompt), rng.randint(*setup.num_new)
        found.append(Request("".join(rng.choices(words, k=num_prompt - 1)), num_new))
    return found


@cache
def _words() -> list[str]:
    """Words of the checkpoint's vocabulary that are one token after any other."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    found = [f" {word[1:]}" for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{2,}", word)]
    return sorted(w for w in found if len(tokenizer.encode(w, add_special_tokens=False).ids) == 1)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Random times of requests, ``rate`` a second on average; at least two."""
    rng = random.Random(seed)
    due = [rng.expovariate(rate)]
    while due[-1] < seconds or len(due) < 3:
        due.append(due[-1] + rng.expovariate(rate))
    return due[:-1]


# --- the servers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """How to start a server, and the fields of its requests besides prompt and length.

    Attributes:
        name: Name of its row in the table.
        command: Arguments of Python; ``{port}`` is replaced.
        fields: Fields of a request.
        package: A package that the server needs; without it, it is left out.
    """

    name: str
    command: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    package: str | None = None

    @property
    def label(self) -> str:
        """Name and version of its package."""
        return f"{self.name} {version(self.package)}" if self.package else self.name

    def encode(self, request: Request) -> bytes:
        """The HTTP request of a stream."""
        common = {"max_tokens": request.num_new, "temperature": 0, "stream": True}
        return post("/v1/completions", {"prompt": request.prompt, **common, **self.fields})


def _servers(setup: Setup) -> list[Server]:
    """Return pagetile and its peers, each in the best mode found on two CPU cores."""
    at = ("--host", "127.0.0.1", "--port", "{port}")
    model, most = str(path()), str(max(128, *setup.num_streams))
    as_vllm = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    own = ("-m", "pagetile", "serve", *at, "--quiet", "--device", setup.device)
    # Its attention reads the whole cache under a mask, so the smallest sufficient cache is fastest
    # on a CPU; by default it takes most of the memory, and 45 s for the first request.
    small = ("--cb-block-size", "64", "--cb-num-blocks", "200", "--cb-max-batch-tokens", "512")
    memory = small if setup.device == "cpu" else ("--cb-max-memory-percent", "0.3")
    transformers = (
        "-c", "from transformers.cli.transformers import main; main()", "serve", model, *at,
        "--continuous-batching", "--device", setup.device, "--dtype", "float32", *memory,
    )  # fmt: skip
    vllm = (
        "-m", "vllm.entrypoints.cli.main", "serve", model, *at, "--dtype", "float32",
        "--max-num-seqs", most, "--gpu-memory-utilization", "0.3",
    )  # fmt: skip
    no_end = {"do_sample": False, "eos_token_id": _NO_TOKEN, "pad_token_id": 0}
    return [
        Server("pagetile serve", (*own, "--dtype", "float32", "--max-num-seqs", most), as_vllm),
        Server(
            "transformers serve", transformers,
            {"generation_config": json.dumps(no_end)}, "transformers",
        ),
        Server("vllm serve", vllm, as_vllm, "vllm"),
    ]  # fmt: skip


class Running(NamedTuple):
    """A server process that accepts requests."""

    server: Server
    address: tuple[str, int]
    process: subprocess.Popen[bytes]

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the server and of the processes that it started, so far."""
        one = psutil.Process(self.process.pid)
        seconds = 0.0
        for each in (one, *one.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has ended; its parent's time includes it
                times = each.cpu_times()
                seconds += times.user + times.system
                seconds += times.children_user + times.children_system
        return seconds

    def signal(self, number: int) -> None:
        """Send a signal to the server and to the processes that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@contextmanager
def start(server: Server, seconds: float) -> Iterator[Running]:
    """Run a server until the block ends.

    Raises:
        RuntimeError: It ended, or did not answer within so many seconds; the message has the end of
            its output.
    """
    with _launch(server) as starting:
        _wait_until_healthy(starting, time.monotonic() + seconds)
        yield starting.running


class _Starting(NamedTuple):
    """A server process that may not accept requests yet."""

    running: Running
    log: IO[bytes]
    begin: float


@contextmanager
def _launch(server: Server) -> Iterator[_Starting]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    command = [part.replace("{port}", str(address[1])) for part in server.command]
    # As pagetile's command line does: threads that spin would slow each other down.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            tethered([sys.executable, *command]),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        running = Running(server, address, process)
        try:
            yield _Starting(running, log, time.monotonic())
        finally:
            _stop(running)


def _wait_until_healthy(starting: _Starting, end: float) -> None:
    running, log = starting.running, starting.log
    while not _is_healthy(running.address):
        code = running.process.poll()
        if code is None and time.monotonic() < end:
            time.sleep(0.1)
            continue
        seconds = time.monotonic() - starting.begin
        what = (
            f"ended with code {code}" if code is not None else f"did not answer in {seconds:.0f} s"
        )
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        printed = "\n".join(lines[-_LOG_LINES:]) or "it printed nothing"
        raise RuntimeError(f"{running.server.name} {what}:\n{printed}")


def _is_healthy(address: tuple[str, int]) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=_HEALTH_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(running: Running) -> None:
    running.signal(signal.SIGCONT)
    running.signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        running.process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):  # also processes that the server left running
        os.killpg(running.process.pid, signal.SIGKILL)


def _start_all(
    setup: Setup, servers: Sequence[Server], stack: ExitStack, say: Say
) -> tuple[list[Running], dict[str, str]]:
    """Start the installed servers at the same time; only pagetile, the first, has to start."""
    starting, started, absent = [], [], {}
    end = time.monotonic() + setup.start_seconds
    for server in servers:
        if server.package and not find_spec(server.package):
            absent[server.name] = "not installed"
            say(f"{server.name} is left out: not installed")
            continue
        say(f"starting {server.label}")
        starting.append(stack.enter_context(_launch(server)))
    for each in starting:
        running = each.running
        try:
            _wait_until_healthy(each, end)
            _warm_up(setup, running, end)
        except RuntimeError as reason:
            if not running.server.package:
                raise
            running.signal(signal.SIGKILL)  # it must take no CPU time from the others
            say(str(reason))
            absent[running.server.name] = str(reason).splitlines()[-1].strip()
            continue
        say(f"{running.server.name} answered after {time.monotonic() - each.begin:.0f} s")
        started.append(running)
        running.signal(signal.SIGSTOP)
    return started, absent


# --- phases -------------------------------------------------------------------------------------


@contextmanager
def _its_turn(running: Running) -> Iterator[None]:
    running.signal(signal.SIGCONT)
    try:
        yield
    finally:
        running.signal(signal.SIGSTOP)


def _warm_up(setup: Setup, running: Running, end: float | None = None) -> list[Response]:
    """Send the first eight requests, one after another, until ``end`` or soon after."""
    requests = draw(setup, 0, 8)
    encoded = [running.server.encode(request) for request in requests]
    seconds = setup.timeout if end is None else max(_LIMITED_TIMEOUT, end - time.monotonic())
    responses = run(Load(running.address, encoded, seconds=seconds, timeout=seconds))
    for response in responses:
        if response.failure:
            raise RuntimeError(f"{running.server.name}, its first requests: {response.failure}")
    if len(responses) < len(requests):
        raise RuntimeError(
            f"{running.server.name} answered {len(responses)} of its first {len(requests)} "
            f"requests in {seconds:.0f} s"
        )
    return responses


def _check_texts(setup: Setup, started: Sequence[Running]) -> list[dict[str, Any]]:
    """Whether all servers' greedy texts and numbers of tokens are the same."""
    expected: list[tuple[str, int]] = []
    checks = []
    for running in started:
        with _its_turn(running):
            found = [(each.text, each.num_tokens) for each in _warm_up(setup, running)]
        if not expected:
            expected = found
            continue
        wrong = [
            at for at, pair in enumerate(zip(expected, found, strict=True)) if len(set(pair)) > 1
        ]
        checks.append(
            {
                "what": f"the same greedy text as {running.server.name}'s, {len(found)} prompts",
                "passed": not wrong,
                "detail": f"prompts {wrong} differ" if wrong else "",
            }
        )
    return checks


@dataclass
class _Findings:
    """Results of one server at one rate, by turn."""

    first: list[list[float]] = field(default_factory=list)
    between: list[list[float]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    num_events: int = 0
    num_short: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def add(
        self, requests: Sequence[Request], responses: Sequence[Response], cpu_seconds: float
    ) -> None:
        """Add a turn, during which the server took ``cpu`` seconds of CPU time.

        Raises:
            RuntimeError: Fewer than two of its requests were answered.
        """
        whole = [each for each in responses if each.failure is None and len(each.times) > 1]
        self.num_requests += len(responses)
        self.failures.update(each.failure for each in responses if each.failure is not None)
        if len(whole) < 2:
            raise RuntimeError(
                f"{len(whole)} of {len(responses)} requests were answered with tokens to time, at "
                f"least 2 are needed: {describe(self.failures) or 'let them come for longer'}"
            )
        self.first.append([1e3 * (each.times[0] - each.due) for each in whole])
        self.between.append([1e3 * (b - a) for each in whole for a, b in pairwise(each.times)])
        self.late += [1e3 * (response.sent - response.due) for response in whole]
        num_tokens = sum(response.num_tokens for response in whole)
        self.cpu.append(1e3 * cpu_seconds / num_tokens)
        self.num_tokens += num_tokens
        self.num_events += sum(len(response.times) for response in whole)
        self.num_short += sum(each.num_tokens != requests[each.index].num_new for each in whole)

    def metrics(self) -> dict[str, Any]:
        """Percentiles of each turn, and their medians, so that one loaded turn does not decide."""
        found: dict[str, Any] = {}
        for what, turns in (("to the first token", self.first), ("between tokens", self.between)):
            for percent in (50, 99):
                name = f"ms {what}, p{percent}"
                each = [percentile(turn, percent) for turn in turns]
                found[name] = statistics.median(each)
                found[name + REPEATS] = [round(value, 3) for value in each]
        return found | {
            "CPU ms a token": statistics.median(self.cpu),
            "CPU ms a token" + REPEATS: [round(each, 3) for each in self.cpu],
            "requests": self.num_requests,
            "failed requests": sum(self.failures.values()),
            "responses of another length": self.num_short,
            "tokens an event": self.num_tokens / max(1, self.num_events),
            "client's ms late, p99": percentile(self.late, 99),
        }

    def check(self) -> dict[str, Any]:
        """Whether all requests were answered."""
        return {
            "what": f"{self.num_requests} requests answered to the end",
            "passed": not self.failures,
            "detail": describe(self.failures),
        }


def describe(failures: Counter[str]) -> str:
    """The kinds of failures with their counts, the most frequent first."""
    return ", ".join(f"{count} × {what}" for what, count in failures.most_common())


def _saturate(
    setup: Setup, running: Running, num_streams: int, seconds: float, seed: int
) -> tuple[float, Counter[str]]:
    """Tokens a second that arrive in a closed loop after its first quarter, and the failures."""
    requests = draw(setup, seed, 8000)
    encoded = [running.server.encode(request) for request in requests]
    load = Load(
        running.address, encoded, num_streams=num_streams, seconds=seconds, timeout=setup.timeout
    )
    with _its_turn(running):
        responses = run(load)
    failures = Counter(each.failure for each in responses if each.failure is not None)
    begin = min(response.due for response in responses)
    # A server that joins tokens sends fewer events: each counts as an equal part of the tokens.
    tokens = sum(
        response.num_tokens / len(response.times)
        for response in responses
        for at in response.times
        if response.failure is None and begin + seconds / 4 <= at <= begin + seconds
    )
    if not tokens:
        raise RuntimeError(f"{running.server.name} made no token: {describe(failures)}")
    return tokens / (0.75 * seconds), failures


def _at_rate(setup: Setup, running: Running, rate: float, seed: int, findings: _Findings) -> None:
    due = arrivals(rate, setup.seconds, seed)
    requests = draw(setup, seed, len(due))
    encoded = [running.server.encode(request) for request in requests]
    with _its_turn(running):
        cpu = running.cpu_seconds
        responses = run(Load(running.address, encoded, due, timeout=setup.timeout))
        findings.add(requests, responses, running.cpu_seconds - cpu)


# --- the comparison -----------------------------------------------------------------------------


@dataclass
class _Saturated:
    """A server's saturating rates."""

    num_streams: int
    tokens: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    def metrics(self, mean_new: float) -> dict[str, Any]:
        """The median, and each turn."""
        tokens = statistics.median(self.tokens)
        return {
            "tokens/s, saturated": tokens,
            "tokens/s, saturated" + REPEATS: [round(each, 1) for each in self.tokens],
            "requests/s, saturated": tokens / mean_new,
            "streams, saturated": self.num_streams,
            "failed requests, saturated": sum(self.failures.values()),
        }


def compare_latency(
    setup: Setup, say: Say, servers: Sequence[Server] | None = None
) -> list[dict[str, Any]]:
    """Measure; return an object for each server and rate, as ``report.record_line`` takes it.

    Args:
        setup: Model, lengths and durations.
        say: Called with a description of each step.
        servers: Servers in place of pagetile and its peers; the first is compared with the others.

    Raises:
        RuntimeError: A server did not start or answered no request.
    """
    begin = time.monotonic()
    if setup.limit is not None:
        setup = replace(setup, start_seconds=min(setup.start_seconds, setup.limit * 2 / 3))
    with ExitStack() as stack:
        stack.enter_context(_given_up_after(setup.limit))
        servers = _servers(setup) if servers is None else servers
        started, absent = _start_all(setup, servers, stack, say)
        say("comparing greedy texts")
        checks = _check_texts(setup, started)
        if setup.limit is not None:
            setup = _fit(setup, len(started), setup.limit - (time.monotonic() - begin), say)
        if wrong := [check["what"] for check in checks if not check["passed"]]:
            raise RuntimeError(f"not so, and nothing was timed: {', '.join(wrong)}")
        # Turns that take longer than planned, on a loaded machine, become fewer.
        end = math.inf if setup.limit is None else begin + setup.limit
        at_half = (len(started) + 1) * (setup.seconds + 2 * _RUN_SECONDS)
        saturated = _find_saturation(setup, started, say, end - at_half)
        mean_new = sum(setup.num_new) / 2
        rates = [statistics.median(each.tokens) / mean_new for each in saturated]
        shared, own = _at_half(setup, started, min(rates) / 2, rates[0] / 2, say, end)
    lines = []
    heads = [each.metrics(mean_new) for each in saturated]
    for running, head, findings in zip(started, heads, shared, strict=True):
        sent = {"requests/s sent": min(rates) / 2}
        lines.append(_line(setup, running.server.label, head | sent, findings))
    lines[0]["checks"] = checks + lines[0]["checks"]
    lines[0]["targets"] = _no_worse(lines[1:])
    if own is not None:
        label = f"{started[0].server.label} at half of its own rate"
        lines.append(_line(setup, label, heads[0] | {"requests/s sent": rates[0] / 2}, own))
    return [{**line, "absent": absent} for line in lines]


@contextmanager
def _given_up_after(limit: float | None) -> Iterator[None]:
    """Raise in the block if it has not ended a little after the limit, wherever it waits."""
    if limit is None:
        yield
        return

    def give_up(number: int, frame: Any) -> None:
        raise RuntimeError(f"given up: it did not end within {limit:g} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit + _GRACE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _fit(setup: Setup, num_servers: int, left: float, say: Say) -> Setup:
    """Shorten turns to the time that is left; make them fewer if they would be too short.

    Raises:
        RuntimeError: Not even one turn fits.
    """
    for turns in range(setup.turns, 0, -1):
        tries = len(setup.num_streams) * num_servers
        runs = tries + turns * (2 * num_servers + 1)
        # A trial lasts half as long as a turn in a closed loop.
        asked = (tries / 2 + turns * num_servers) * setup.saturated_seconds
        asked += turns * (num_servers + 1) * setup.seconds
        share = min(1.0, (left - runs * _RUN_SECONDS) / asked)
        seconds, saturated = share * setup.seconds, share * setup.saturated_seconds
        if share == 1.0 or min(seconds, saturated / 2) >= _LEAST_SECONDS:
            say(f"{left:.0f} s left: {turns} turns, {seconds:.1f} s at a rate, {saturated:.1f} s "
                "saturated")  # fmt: skip
            return replace(setup, turns=turns, seconds=seconds, saturated_seconds=saturated,
                           timeout=min(setup.timeout, _LIMITED_TIMEOUT))  # fmt: skip
    raise RuntimeError(f"only {left:.0f} s are left after the servers' start: raise the limit")


def _turns(setup: Setup, end: float, say: Say) -> Iterator[int]:
    """Count turns; after the first, only those that end in time if they take as long as it."""
    begin = time.monotonic()
    for turn in range(setup.turns):
        now = time.monotonic()
        if turn and now + (now - begin) / turn > end:
            say(f"no time for more than {turn} of {setup.turns} turns")
            return
        yield turn


def _find_saturation(
    setup: Setup, started: Sequence[Running], say: Say, end: float
) -> list[_Saturated]:
    found = []
    for running in started:
        rates = {}
        for num_streams in setup.num_streams:
            say(f"trying {num_streams} streams at a time: {running.server.name}")
            seconds = setup.saturated_seconds / 2
            rates[num_streams] = _saturate(setup, running, num_streams, seconds, -num_streams)[0]
        found.append(_Saturated(max(rates, key=lambda count: rates[count])))
    for turn in _turns(setup, end, say):
        for running, each in zip(started, found, strict=True):
            say(f"turn {turn + 1} of {setup.turns}, saturating: {running.server.name}")
            tokens, failures = _saturate(
                setup, running, each.num_streams, setup.saturated_seconds, 1000 + turn
            )
            each.tokens.append(tokens)
            each.failures += failures
    return found


def _at_half(
    setup: Setup, started: Sequence[Running], shared: float, own: float, say: Say, end: float
) -> tuple[list[_Findings], _Findings | None]:
    """Run all servers at the shared rate, and the first at its own rate if that is another."""
    found, at_own = [_Findings() for _ in started], _Findings()
    for turn in _turns(setup, end, say):
        head = f"turn {turn + 1} of {setup.turns}"
        for running, findings in zip(started, found, strict=True):
            say(f"{head}, {shared:.2f} requests/s: {running.server.name}")
            _at_rate(setup, running, shared, 2000 + turn, findings)
        if own > shared:
            say(f"{head}, {own:.2f} requests/s: {started[0].server.name}")
            _at_rate(setup, started[0], own, 3000 + turn, at_own)
    return found, at_own if own > shared else None


def _line(setup: Setup, label: str, head: dict[str, Any], findings: _Findings) -> dict[str, Any]:
    return {
        "what": re.sub(r" [\d.]+\S*", "", label),
        "about": f"{label}, {setup.about}",
        "checks": [findings.check()],
        **head,
        **findings.metrics(),
    }


def _no_worse(peers: Sequence[dict[str, Any]]) -> list[tuple[str, float, str]]:
    """Targets of the first server: the best of its peers' figures."""
    if not peers:
        return []
    least = [
        f"ms {what}, p{p}" for what in ("to the first token", "between tokens") for p in (50, 99)
    ]
    most = "tokens/s, saturated"
    return [
        (most, max(peer[most] for peer in peers), ">="),
        *((name, min(peer[name] for peer in peers), "<=") for name in least),
    ]
