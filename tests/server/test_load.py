"""Load, disconnections, keys and the end of a process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from types import SimpleNamespace

import httpx2
import psutil
import pytest

from pagetile.engine.async_llm import AsyncLLM
from pagetile.server import Limits, create_app, serve
from pagetile.server.logs import log
from pagetile.testing.serve import server_process

from .conftest import chatty, opened, serving
from .test_completions import PROMPT

LONG = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def clients_of(async_llm, config=None):
    with (
        serving(async_llm, config) as url,
        httpx2.Client(base_url=url, timeout=30) as http,
    ):
        yield http


def in_engine(async_llm, function):
    return asyncio.run(async_llm.run_in_engine(function))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_request_within_two_steps(url, async_llm, is_streamed):
    pool = async_llm.engine.pool
    steps = []
    async_llm.thread.observers.append(lambda report: steps.append(pool.num_free))
    try:
        host, port = url.removeprefix("http://").split(":")
        client = socket.create_connection((host, int(port)))
        body = json.dumps({**LONG, "stream": is_streamed}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: len(steps) > 3)
        client.close()
        wait_for(lambda: async_llm.num_requests == 0)
        seen = len(steps)  # the server has noticed
        time.sleep(0.2)
        assert len(steps) - seen <= 2
        assert pool.num_free == pool.num_blocks
    finally:
        async_llm.thread.observers.pop()


def leave(url):
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{url}/v1/completions", json=LONG, timeout=0.3)


def leave_stream(url):
    with httpx2.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as response:
        next(response.iter_lines())


@pytest.mark.parametrize("call", [leave, leave_stream])
def test_a_client_that_has_left_is_no_failure_of_the_server(call, async_llm, capsys):
    log.is_on = True
    try:  # until the server has stopped: a line is written after its response
        with serving(async_llm) as url:
            call(url)
            wait_for(lambda: async_llm.num_requests == 0)
            metrics = httpx2.get(f"{url}/metrics").text
    finally:
        log.is_on = False
    written = capsys.readouterr().err
    assert "status=499" in written
    assert "failed" not in written
    assert "status=200" not in written
    assert 'pagetile:request_success_total{finished_reason="abort"} 1.0' in metrics
    assert "pagetile:request_failures_total 0.0" in metrics


def test_beyond_the_queue_comes_a_503_that_says_when_to_try_again(llm):
    with opened(llm, max_queued_seqs=0) as async_llm, clients_of(async_llm) as http:
        long = {**LONG, "n": 16, "stream": True}
        with http.stream("POST", "/v1/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            refused = http.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
            assert http.get("/ready").status_code == 503
            assert http.get("/health").status_code == 200
        wait_for(lambda: async_llm.num_requests == 0)
        assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        many = http.post("/v1/completions", json={"prompt": ["x"] * 17})
        assert many.status_code == 503


def test_a_failing_step_is_a_500_and_the_server_goes_on(http, async_llm, monkeypatch):
    forward = async_llm.engine.model.forward

    def fragile(step):
        if step.token_ids.shape[0] == 7:  # a prompt of seven tokens is unlucky
            raise RuntimeError("a cosmic ray")
        return forward(step)

    with monkeypatch.context() as patch:
        patch.setattr(async_llm.engine.model, "forward", fragile)
        bad = http.post("/v1/completions", json={"prompt": [5] * 7})
        good = http.post("/v1/completions", json={"prompt": [5] * 8})
    assert bad.status_code == 500
    assert "cosmic ray" in bad.json()["error"]["message"]
    assert good.status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(async_llm.engine.model, "forward", fragile)
        with http.stream(
            "POST", "/v1/completions", json={"prompt": [5] * 7, "stream": True}
        ) as late:
            assert late.status_code == 500


def test_keys_open_every_path_but_health(llm):
    config = chatty(api_keys=("alpha", "beta"))
    with opened(llm) as async_llm, clients_of(async_llm, config) as http:
        routes = http.get("/openapi.json", headers=bearer("alpha")).json()["paths"]
        assert [path for path in routes if routes[path].get("get", {}).get("security") == []] == [
            "/health"
        ]
        paths = [*routes, "/docs", "/openapi.json", "/redoc", "/", "/nowhere"]
        assert "/v1/chat/completions" in paths
        for path in paths:
            for headers in ({}, bearer("gamma"), {"authorization": "alpha"}):
                for method in ("GET", "POST"):
                    response = http.request(method, path, headers=headers)
                    expected = 401 if path != "/health" else None
                    assert expected in (None, response.status_code), path
        assert http.get("/health").status_code == 200
        for key in ("alpha", "beta"):
            assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert http.get("/v1/models", auth=("anyone", "beta")).status_code == 200
        assert "error" in http.get("/v1/models").json()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_keys_are_compared_as_a_whole_and_every_one_of_them(monkeypatch):
    from pagetile.server import middleware

    compared = []
    compare = middleware.hmac.compare_digest

    def watched(a, b):
        compared.append((len(a), len(b)))
        return compare(a, b)

    keys = middleware.ApiKeys(["a" * 50, "b", "c"])
    monkeypatch.setattr(middleware.hmac, "compare_digest", watched)
    for shown in (b"Bearer a", b"Bearer " + b"a" * 50, b"Bearer c", b""):
        keys.find(shown)
    # Digests of one length, three times a request, whichever fits.
    assert compared == [(32, 32)] * 12


def test_prefixes_are_not_shared_between_keys(llm):
    prompt = [7] * 100

    def cached(http, key, **more):
        body = {"prompt": prompt, "max_tokens": 1, **more}
        found = http.post("/v1/completions", json=body, headers=bearer(key)).json()
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    llm.reset_prefix_cache()
    config = chatty(api_keys=("alpha", "beta"))
    with opened(llm) as async_llm, clients_of(async_llm, config) as http:
        assert cached(http, "alpha") == 0
        assert cached(http, "alpha") == 96
        assert cached(http, "beta") == 0
        assert cached(http, "alpha", cache_salt="x") == 0
        assert cached(http, "alpha", cache_salt="x") == 96
        assert cached(http, "beta", cache_salt="x") == 0


def test_other_sites_may_call_only_if_they_were_named(llm):
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with opened(llm) as async_llm:
        for config in (chatty(), chatty(cors_origins=("https://a.example",), api_keys=("k",))):
            with serving(async_llm, config) as url, httpx2.Client(base_url=url) as http:
                found = http.options("/v1/completions", headers=ask)
                allowed = found.headers.get("access-control-allow-origin")
                assert allowed == (config.cors_origins or (None,))[0]


def test_sizes_are_limited(llm):
    limits = Limits(body_bytes=1000, num_headers=20, body_seconds=0.3)
    with opened(llm) as async_llm, serving(async_llm, chatty(limits=limits)) as url:
        with httpx2.Client(base_url=url, timeout=30) as http:
            big = json.dumps({"prompt": "x" * 2000}).encode()
            kind = {"content-type": "application/json"}
            assert http.post("/v1/completions", content=big, headers=kind).status_code == 413
            chunked = http.post("/v1/completions", content=iter([big]), headers=kind)
            assert chunked.status_code == 413
            many = {f"x-{number}": "1" for number in range(30)}
            assert http.get("/v1/models", headers=many).status_code == 431
            assert http.get("/v1/models").status_code == 200
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            slow.sendall(head)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def storm(async_llm, url, num_requests, num_connections, seconds):
    """Of the requests 30 % leave early, 10 % are invalid, 5 read slowly; all others complete.

    Returns the outcome of each; the requests are sent within ``seconds``.
    """
    draw = random.Random(7)

    async def one(http, number):
        await asyncio.sleep(draw.uniform(0, seconds))
        kind = draw.random()
        body = {
            "prompt": [draw.randrange(1, 4096) for _ in range(draw.randint(1, 60))],
            "max_tokens": draw.randint(1, 40),
            "n": draw.choice((1, 1, 1, 3)),
            "ignore_eos": True,
            "stream": draw.random() < 0.7,
        }
        if number >= 5 and kind < 0.1:
            body[draw.choice(("top_p", "n", "max_tokens"))] = -7
            response = await http.post("/v1/completions", json=body)
            return "invalid" if response.status_code == 400 else response.text
        if number >= 5 and kind < 0.4:
            try:
                async with asyncio.timeout(draw.uniform(0.0, seconds / 10)):
                    await http.post("/v1/completions", json={**body, "max_tokens": 1500})
            except TimeoutError:
                return "left"
            return "left"
        if not body["stream"] and number >= 5:
            response = await http.post("/v1/completions", json=body)
            count = response.json()["usage"]["completion_tokens"]
        else:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            lines = []
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    lines.append(line)
                    if number < 5:
                        await asyncio.sleep(0.05)
            assert lines[-2] == "data: [DONE]"
            count = json.loads(lines[-4][6:])["usage"]["completion_tokens"]
        return "whole" if count == body["max_tokens"] * body["n"] else f"{count} of {body}"

    async def main():
        limits = httpx2.Limits(max_connections=num_connections)
        async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
            return await asyncio.gather(*(one(http, number) for number in range(num_requests)))

    found = asyncio.run(main())
    engine = async_llm.engine
    wait_for(lambda: async_llm.num_requests == 0)
    wait_for(lambda: not in_engine(async_llm, lambda: engine.has_unfinished))
    assert engine.pool.num_free == engine.pool.num_blocks
    in_engine(async_llm, engine.check)
    assert engine._requests == {}
    return Counter(found)


def test_a_storm(llm):
    with opened(llm, max_queued_seqs=1000) as async_llm, serving(async_llm) as url:
        found = storm(async_llm, url, num_requests=200, num_connections=300, seconds=3)
    assert set(found) == {"whole", "left", "invalid"}
    assert found["left"] > 40


@pytest.mark.slow
def test_a_storm_beside_a_thousand_open_connections_leaves_nothing_behind(llm):
    """1000 connections stay half-way through a request's headers until the storm is over."""
    resource = pytest.importorskip("resource")
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(limit, 8192)), most))
    with (
        opened(llm, max_queued_seqs=6000) as async_llm,
        serving(async_llm) as url,
        ExitStack() as connections,
    ):
        host, port = url.removeprefix("http://").split(":")
        storm(async_llm, url, num_requests=1000, num_connections=1000, seconds=15)
        before = resident_bytes()
        waiting = []
        for _ in range(1000):
            client = connections.enter_context(socket.create_connection((host, int(port))))
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
            waiting.append(client)
        found = storm(async_llm, url, num_requests=2000, num_connections=1000, seconds=40)
        for client in waiting:
            client.sendall(b"\r\n")
            client.settimeout(30)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        connections.close()
        after = resident_bytes()
    assert set(found) == {"whole", "left", "invalid"}
    assert found["left"] > 500
    assert found["invalid"] > 150
    assert abs(after - before) < 0.05 * before, (before, after)


def resident_bytes():
    gc.collect()
    with suppress(OSError, AttributeError):  # not of every C library
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_what_is_loaded_is_not_looked_through_for_garbage_while_it_serves():
    class Idle:
        num_requests, death, thread = 0, None, SimpleNamespace()

        async def drain(self, timeout):
            return True

        async def close(self):
            pass

    async def app(scope, receive, send):
        raise AssertionError("no request was sent")

    gc.unfreeze()  # what conftest.py has frozen
    counts = []

    def on_start(url):
        counts.append(gc.get_freeze_count())
        signal.raise_signal(signal.SIGTERM)

    assert asyncio.run(serve(app, Idle(), host="127.0.0.1", port=0, on_start=on_start)) == 0
    assert counts[0] > 10_000
    assert gc.get_freeze_count() == 0


def test_a_lost_device_fails_health_and_ends_the_process_with_code_3(llm, monkeypatch):
    def lost(step):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async_llm, found = AsyncLLM(llm), []

    def ask(url):
        for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/health", None)):
            method = "GET" if body is None else "POST"
            found.append(httpx2.request(method, url + path, json=body, timeout=30).status_code)

    def on_start(url):
        threading.Thread(target=ask, args=(url,), daemon=True).start()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "forward", lost)
        app = create_app(async_llm, chatty())
        assert asyncio.run(serve(app, async_llm, host="127.0.0.1", port=0, on_start=on_start)) == 3
    assert found[1] == 503
    assert found[0] >= 500
    for request_id in list(llm.engine._requests):
        llm.engine.abort(request_id)
        llm.engine.take_output(request_id)
    llm.engine.check()


SMALL = ("--num-blocks", "128", "--max-num-seqs", "8")


def test_kill_leaves_nothing_behind_and_sigterm_lets_requests_finish():
    asked = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        server_process(*SMALL) as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=asked) as response,
    ):
        assert "2,048 tokens (128 blocks of 16)" in server.printed
        lines = response.iter_lines()
        next(lines)
        server.process.kill()
        with pytest.raises(httpx2.RemoteProtocolError):
            list(lines)

    asked["max_tokens"] = 400
    with (
        server_process(*SMALL, "--drain-seconds", "20") as server,
        httpx2.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=asked) as response,
    ):
        lines, url = response.iter_lines(), server.url
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx2.get(f"{url}/ready").status_code == 503)
        assert httpx2.get(f"{url}/health").status_code == 200
        late = httpx2.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert late.status_code == 503
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0


@pytest.fixture(scope="module")
def server():
    """A process that no test before the last one that takes it ends."""
    with server_process(*SMALL) as found:
        yield found


def test_an_idle_connection_outlives_the_pools_of_clients(server):
    """httpx keeps a connection for 5 s: a server that closed it then lost requests under load."""
    with closing(HTTPConnection(*server.address)) as http:
        for seconds in (0.0, 5.5):
            time.sleep(seconds)
            http.request("GET", "/health")
            assert http.getresponse().read()
            assert http.sock is not None, "closed by the server"
            http.auto_open = False  # no second connection


def test_a_second_signal_answers_what_runs_with_a_503(server):
    """It ends the process."""
    asked = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
    with httpx2.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(http.post, "/v1/completions", json=asked) for _ in range(8)]
        wait_for(lambda: "num_requests_running 8.0" in httpx2.get(f"{server.url}/metrics").text)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: httpx2.get(f"{server.url}/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        for answer in answers:
            assert answer.result().status_code == 503
            assert answer.result().json()["error"]["code"] == "engine_dead"


def test_a_server_process_is_read_to_its_end_and_ends_with_its_block(tmp_path, monkeypatch):
    """The program starts, and logs more than a pipe holds, as a server does."""
    program, done = tmp_path / "server", tmp_path / "done"
    program.write_text(
        "#!/bin/sh\necho serving at http://127.0.0.1:12345/v1\n"
        f"head -c 200000 /dev/zero\ntouch {done}\nexec sleep 600\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with server_process() as server:
        assert server.url == "http://127.0.0.1:12345"
        assert server.address == ("127.0.0.1", 12345)
        wait_for(done.exists)
        assert server.process.poll() is None
    assert server.process.poll() is not None


def test_a_server_process_that_does_not_start_says_why():
    with (
        pytest.raises(RuntimeError, match="'nonsense' is not one of 'text', 'json'"),
        server_process("--log-format", "nonsense"),
    ):
        raise AssertionError("it started")


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_ends_when_its_client_reads_nothing_or_leaves(leaves):
    from pagetile.server.streaming import ClientGone, EventStream

    ended = []

    async def pieces():
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            ended.append("pieces")

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)  # its buffers are full

    async def receive():
        await asyncio.sleep(0.1 if leaves else 3600)
        return {"type": "http.disconnect"}

    seconds = 3600 if leaves else 0.2
    response = EventStream(pieces(), send_seconds=seconds, on_end=lambda: ended.append("stream"))
    start = time.monotonic()
    with pytest.raises(ClientGone):
        asyncio.run(response({"type": "http"}, receive, send))
    assert time.monotonic() - start < 5
    assert ended == ["pieces", "stream"]
