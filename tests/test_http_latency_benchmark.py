"""``python -m benchmarks http-latency`` and its client, against servers of made-up responses."""

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from benchmarks import http_latency
from benchmarks.http_client import Load, Response, drive, run
from benchmarks.http_latency import (
    Request,
    Server,
    Setup,
    arrivals,
    compare_latency,
    draw,
    start,
)
from benchmarks.report import record_line

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b'data: {"choices": [{"text": ""}], "usage": {"completion_tokens": 3}}\n\n'

# Answers as a server does that makes a token in 10 ms: ``max_tokens`` words, each in its own event.
# A prompt that begins with a word below is answered as it says.
FAKE = r"""
import asyncio, json, sys

async def answer(reader, writer):
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET /health"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        return writer.close()
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    fields = json.loads(await reader.readexactly(length))
    kind, num_tokens = fields["prompt"].split()[0], fields["max_tokens"]
    if kind == "busy":
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        return writer.close()
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    async def send(event):
        data = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
    for number in range(num_tokens):
        await asyncio.sleep(0.01)
        text = sys.argv[2] if len(sys.argv) > 2 else f" {number}"
        await send({"choices": [{"text": text}]})
        if kind == "lost":
            return writer.transport.abort()
        if kind == "stuck":
            await asyncio.sleep(60)
    await send({"choices": [{"text": ""}], "usage": {"completion_tokens": num_tokens}})
    writer.write(b"0\r\n\r\n")
    writer.close()

async def main():
    async with await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def fake(name="fake", *arguments):
    return Server(name, ("-c", FAKE, "{port}", *arguments))


@pytest.fixture
def running():
    with start(fake(), 30) as running:
        yield running


def encode(prompts, num_new=3):
    return [fake().encode(Request(prompt, num_new)) for prompt in prompts]


# --- what was noted -----------------------------------------------------------------------------


def event(text):
    return b'data: {"choices": [{"text": "%b"}]}\n\n' % text


def test_events_have_the_time_at_which_their_last_byte_came():
    whole = event(b"b")
    pieces = [(1.0, HEAD), (2.0, event(b"a") + whole[:9]), (3.0, whole[9:]), (4.0, END)]
    response = Response(0, 0.0, pieces=pieces)
    assert response.times == [2.0, 3.0]
    assert (response.text, response.num_tokens, response.failure) == ("ab", 3, None)


def test_chunks_are_taken_apart_wherever_reads_and_events_are_cut():
    body = event(b"a") + event(b"b") + END
    cut = len(event(b"a")) + 9  # a chunk ends within the second event
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]))
    raw = CHUNKED + chunks + b"0\r\n\r\n"
    pieces = [(float(at), raw[at : at + 1]) for at in range(len(raw))]
    response = Response(0, 0.0, pieces=pieces)
    assert (response.text, response.num_tokens, response.failure) == ("ab", 3, None)
    assert response.times == [float(raw.index(mark) + len(mark) - 1) for mark in (
        event(b"a"), event(b"b")[9:],
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        (b"", "no response"),
        (b"HTTP/1.1 503 Busy\r\n\r\n", "status 503"),
        (HEAD + event(b"a"), "the stream broke off"),
        (HEAD + event(b"a") + b'data: {"error": "no blocks"}\n\n', "an error in the stream"),
        (CHUNKED + b"%x\r\n%b" % (len(END), END[:-9]), "the stream broke off"),
    ],
)
def test_a_response_that_is_not_whole_is_named(raw, failure):
    assert Response(0, 0.0, pieces=[(1.0, raw)]).failure == failure


# --- the client ---------------------------------------------------------------------------------


def test_the_client_reads_streams_in_a_process_of_its_own(running):
    due = [0.0, 0.2]
    responses = run(Load(running.address, encode(["a", "b"]), due))
    assert [response.text for response in responses] == [" 0 1 2"] * 2
    assert responses[1].due - responses[0].due == pytest.approx(0.2)
    for response in responses:
        assert response.due <= response.sent < response.times[0]
        assert len(response.times) == response.num_tokens == 3


def test_lost_failed_and_stuck_requests_are_counted_and_named(running):
    prompts = ["a", "busy", "lost", "stuck", "busy", "a"]
    load = Load(running.address, encode(prompts), due=[0.0] * 6, timeout=1.0)
    responses, findings = drive(load), http_latency._Findings()
    assert [each.failure for each in responses][:5] == [
        None, "status 503", "the stream broke off", "no end within 1 s", "status 503",
    ]  # fmt: skip
    findings.add([Request(prompt, 3) for prompt in prompts], responses, 0.0)
    metrics, check = findings.metrics(), findings.check()
    assert (metrics["requests"], metrics["failed requests"]) == (6, 4)
    assert not check["passed"]
    assert check["detail"].startswith("2 × status 503, 1 × ")


def test_a_turn_is_refused_if_too_few_requests_were_answered(running):
    responses = drive(Load(running.address, encode(["a", "busy"]), due=[0.0] * 2))
    with pytest.raises(RuntimeError, match=r"1 of 2 requests .* 1 × status 503"):
        http_latency._Findings().add([Request("a", 3)] * 2, responses, 0.0)


def test_figures_are_medians_of_turns_that_are_kept(running):
    findings = http_latency._Findings()
    for _ in range(3):
        responses = drive(Load(running.address, encode(["a", "b"]), due=[0.0] * 2))
        findings.add([Request("a", 3)] * 2, responses, cpu_seconds=0.6)
    first, second, loaded = findings.first
    findings.first = [[1.0] * 2, [3.0] * 2, [500.0] * 2]
    metrics = findings.metrics()
    assert all(0 < value < 1000 for value in first + second + loaded)
    assert metrics["ms to the first token, p99"] == 3.0
    assert metrics["ms to the first token, p99, each turn"] == [1.0, 3.0, 500.0]
    assert metrics["CPU ms a token"] == pytest.approx(100.0)
    assert metrics["tokens an event"] == 1


def test_a_connection_that_is_refused_is_a_failure_of_its_request():
    with start(fake(), 30) as running:
        address = running.address
    assert drive(Load(address, encode(["a"]), [0.0]))[0].failure == "ConnectionRefusedError"


def test_a_closed_loop_keeps_its_streams_busy_and_ends(running):
    load = Load(running.address, encode(["a"] * 1000), num_streams=4, seconds=0.5)
    responses = drive(load)
    assert all(response.failure is None for response in responses)
    assert 4 < len(responses) <= 4 * 17  # 30 ms each
    assert max(response.due for response in responses) - responses[0].due < 0.5
    ends = {response.pieces[-1][0] for response in responses[:4]}
    assert responses[4].due >= min(ends)  # the fifth request waits for a stream


# --- the workload -------------------------------------------------------------------------------


def test_arrivals_are_the_same_for_a_seed_and_have_the_rate():
    due = arrivals(50.0, 100.0, seed=3)
    assert due == arrivals(50.0, 100.0, seed=3) != arrivals(50.0, 100.0, seed=4)
    assert due == sorted(due)
    assert due[-1] < 100.0
    assert len(due) == pytest.approx(5000, rel=0.05)
    assert len(arrivals(0.001, 1.0, seed=3)) == 2
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1 / e


def test_requests_are_the_same_for_a_seed_and_as_long_as_drawn():
    from tokenizers import Tokenizer

    from pagetile.demo import path

    setup = Setup(num_prompt=(5, 40), num_new=(2, 9))
    requests = draw(setup, 1, 50)
    assert requests == draw(setup, 1, 50) != draw(setup, 2, 50)
    tokenizer = Tokenizer.from_file(str(path() / "tokenizer.json"))
    lengths = [len(tokenizer.encode(request.prompt).ids) for request in requests]
    assert 5 <= min(lengths) < max(lengths) <= 40
    assert {request.num_new for request in requests} == set(range(2, 10))


# --- the comparison -----------------------------------------------------------------------------

SHORT = Setup(
    turns=2, seconds=0.5, saturated_seconds=0.4, num_streams=(1, 4), num_prompt=(3, 5),
    num_new=(4, 6), start_seconds=30,
)  # fmt: skip


def test_servers_are_compared_and_what_is_absent_is_named():
    missing = Server("other serve", ("-c", ""), package="no_such_package")
    broken = Server("broken serve", ("-c", "raise SystemExit('no model')"), package="rich")
    said = []
    servers = [fake("pagetile serve"), fake("peer serve"), missing, broken]
    lines = compare_latency(SHORT, said.append, servers)
    absent = {"other serve": "not installed", "broken serve": "no model"}
    assert all(line["absent"] == absent for line in lines)
    assert [line["what"] for line in lines[:2]] == ["pagetile serve", "peer serve"]
    assert any("broken serve ended with code 1" in line for line in said)
    for line in lines:
        case = record_line(json.loads(json.dumps(line)), "latency", 0.0, {})
        assert all(check["passed"] for check in case["checks"])
        metrics = case["metrics"]
        assert 0 < metrics["tokens/s, saturated"] < 450  # four streams, 10 ms a token
        assert metrics["streams, saturated"] == 4
        assert 0 < metrics["ms between tokens, p50"] <= metrics["ms between tokens, p99"]
        assert metrics["failed requests"] == metrics["responses of another length"] == 0
        assert len(case["repeats"]["ms to the first token, p99"]) == 2
    assert lines[0]["requests/s sent"] == lines[1]["requests/s sent"]
    slower = min(line["requests/s, saturated"] for line in lines[:2])
    assert lines[0]["requests/s sent"] == pytest.approx(slower / 2)
    name = "ms between tokens, p99"
    assert (name, lines[1][name], "<=") in lines[0]["targets"]


def test_nothing_is_timed_if_texts_differ():
    servers = [fake("pagetile serve"), fake("peer serve", "wrong")]
    with pytest.raises(RuntimeError, match="not so, and nothing was timed: the same greedy text"):
        compare_latency(SHORT, lambda what: None, servers)


def test_a_server_that_does_not_start_is_an_error_with_what_it_printed():
    broken = Server("pagetile serve", ("-c", "raise SystemExit('port taken')"))
    with pytest.raises(RuntimeError, match="pagetile serve ended with code 1:\nport taken"):
        compare_latency(SHORT, lambda what: None, [broken])


def test_a_comparison_with_a_limit_is_shorter_and_leaves_out_a_peer_that_hangs(monkeypatch):
    """It is healthy but answers no request, and may take only the time to start."""
    monkeypatch.setattr(http_latency, "_LIMITED_TIMEOUT", 2.0)
    monkeypatch.setattr(http_latency, "_RUN_SECONDS", 0.5)
    monkeypatch.setattr(http_latency, "_LEAST_SECONDS", 0.2)
    stuck = Server("stuck serve", ("-c", FAKE.replace("length = ", "return; ")), package="rich")
    stuck = replace(stuck, command=(*stuck.command, "{port}"))
    servers = [fake("pagetile serve"), fake("peer serve"), stuck]
    setup = replace(
        SHORT, turns=9, seconds=30.0, saturated_seconds=30.0, limit=14.0, start_seconds=3.0
    )
    said, begin = [], time.monotonic()
    lines = compare_latency(setup, said.append, servers)
    assert time.monotonic() - begin < 19
    assert [line["what"] for line in lines[:2]] == ["pagetile serve", "peer serve"]
    assert lines[0]["absent"] == {
        "stuck serve": "stuck serve, its first requests: no end within 2 s"
    }
    assert any(re.search(r"s left: [1-8] turns, \d\.", each) for each in said)


def test_a_limit_that_leaves_no_turn_or_passes_is_an_error():
    with pytest.raises(RuntimeError, match="only 3 s are left after the servers' start"):
        http_latency._fit(Setup(limit=10.0), 2, 3.0, lambda what: None)
    silent = Server("pagetile serve", ("-c", "import time; time.sleep(60)"))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="pagetile serve did not answer in 1 s"):
        compare_latency(replace(SHORT, limit=2.0), lambda what: None, [silent])
    assert time.monotonic() - begin < 20


def test_turns_that_last_longer_than_planned_are_fewer(monkeypatch):
    clock = itertools.count(100.0, 8.0)  # a turn takes eight seconds
    monkeypatch.setattr(http_latency.time, "monotonic", lambda: next(clock))
    said = []

    def count(end):
        return [*http_latency._turns(Setup(turns=4), end, said.append)]

    assert count(math.inf) == [0, 1, 2, 3]
    assert said == []
    clock = itertools.count(100.0, 8.0)
    assert count(133.0) == [0, 1]
    assert said == ["no time for more than 2 of 4 turns"]
    clock = itertools.count(100.0, 8.0)
    assert count(0.0) == [0]


def test_turns_fit_into_what_is_left():
    def fit(left, **changed):
        setup = replace(Setup(limit=100.0), **changed)
        found = http_latency._fit(setup, 2, left, lambda what: None)
        tries = len(setup.num_streams) * 2
        needed = (tries / 2 + found.turns * 2) * found.saturated_seconds
        needed += found.turns * 3 * found.seconds
        return found, needed + http_latency._RUN_SECONDS * (tries + found.turns * 5)

    assert fit(1000.0)[0].seconds == 20.0
    for left in (45.0, 60.0, 150.0):
        found, needed = fit(left)
        assert needed <= left + 1e-6
        assert found.seconds >= 2.0
        assert found.seconds < 20.0
        assert found.timeout < Setup().timeout


def test_a_server_that_never_answers_is_given_up_and_ended():
    silent = Server("silent", ("-c", "import time; print('up', flush=True); time.sleep(60)"))
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="silent did not answer in 1 s:\nup"), start(silent, 1):
        pass
    assert time.monotonic() - begin < 20


def test_a_server_ends_with_the_block_even_if_it_was_stopped():
    with start(fake(), 30) as running:
        running.signal(signal.SIGSTOP)
        assert running.process.poll() is None
    assert running.process.poll() is not None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_server_ends_with_a_benchmark_that_is_killed():
    code = (
        "import sys; from benchmarks.http_latency import Server, start\n"
        "with start(Server('fake', ('-c', sys.argv[1], '{port}')), 30) as running:\n"
        "    print(running.process.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, FAKE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(http_latency.__file__).parent.parent,
    ) as process:
        server = psutil.Process(int(process.stdout.readline()))
        process.kill()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
