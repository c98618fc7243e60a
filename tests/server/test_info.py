from __future__ import annotations

import asyncio
import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pagetile import SamplingParams
from pagetile.server import create_app
from pagetile.version import SOURCE_TREE


def test_models_health_and_version(http):
    [model] = http.get("/v1/models").json()["data"]
    assert model["id"] == "pagetile-demo"
    assert model["max_model_len"] == 2048
    assert http.get("/v1/models/pagetile-demo").json() == model
    assert http.get("/v1/models/other").status_code == 404
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    for path in ("/health", "/ready"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert http.get("/version").json().keys() == {"version"}
    assert http.get("/docs").status_code == 200


def test_a_server_that_is_not_installed_says_so(async_llm, http, monkeypatch):
    def find_nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", find_nothing)
    assert create_app(async_llm).version == SOURCE_TREE
    assert http.get("/version").json() == {"version": SOURCE_TREE}


def test_tokens_there_and_back(http, llm):
    text = "def add(a, b):\n    return a  # é€😀"
    ids = llm.engine.inputs.encode(text)
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == ids
    assert found["count"] == len(ids) == len(found["token_strs"])
    bare = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert http.post("/tokenize", json={}).status_code == 400
    messages = [{"role": "user", "content": "hi"}]
    found = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert "<|im_start|>assistant" in llm.engine.tokenizer.decode(found)
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert info["vocab_size"] == 4096


def test_single_tokens_join_to_the_bytes_of_the_text(llm):
    from pagetile.engine.token_text import TokenText

    words = TokenText(llm.engine.tokenizer)
    text = "def add(a, b):\n    return '€😀 é'\t# ok"
    ids = llm.engine.tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(words.bytes, ids)).decode() == text
    assert any(words.text(i).startswith("bytes:") for i in ids)


def samples(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_what_was_served(http, async_llm):
    def read():
        return samples(http.get("/metrics").text)

    before = read()
    asked = {"prompt": "def f", "max_tokens": 10, "n": 2, "ignore_eos": True}
    used = http.post("/v1/completions", json=asked).json()["usage"]
    after = read()

    def grew(*key):
        return after[key] - before.get(key, 0)

    assert grew("pagetile:generation_tokens_total") == 20
    assert grew("pagetile:prompt_tokens_total") == used["prompt_tokens"]
    assert grew("pagetile:request_success_total", "length") == 2
    assert grew("pagetile:time_to_first_token_seconds_count") == 1
    assert grew("pagetile:inter_token_latency_seconds_count") == 9
    assert grew("pagetile:e2e_request_latency_seconds_count") == 1
    states = [after["pagetile:blocks", state] for state in ("free", "cached", "held")]
    assert sum(states) == async_llm.engine.pool.num_blocks
    assert after["pagetile:num_requests_running",] == 0
    for what in ("drafts", "draft_tokens", "accepted_tokens"):
        count = getattr(async_llm.engine.counts, what)
        assert after[f"pagetile:spec_decode_num_{what}_total",] == count


def test_metrics_of_a_running_request(async_llm, http):
    async def main():
        stream = await async_llm.submit("x", SamplingParams(max_tokens=500, ignore_eos=True))
        await stream.take()
        found = await asyncio.to_thread(http.get, "/metrics")
        stream.close()
        return samples(found.text)

    found = asyncio.run(main())
    assert found["pagetile:num_requests_running",] == 1
    assert found["pagetile:blocks", "held"] >= 1


def test_every_response_names_its_request(http):
    assert len(http.get("/health").headers["x-request-id"]) == 24
    given = http.get("/nowhere", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    evil = http.get("/health", headers={"x-request-id": "a b"})
    assert evil.headers["x-request-id"] != "a b"


def test_requests_with_the_same_header_run_side_by_side(http):
    headers = {"x-request-id": "trace-1"}
    long = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=long, headers=headers) as first:
        lines = first.iter_lines()  # closes the response when it is collected
        next(lines)
        second = http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert second.status_code == 200, second.text
    assert second.headers["x-request-id"] == "trace-1"


def test_a_request_id_is_unique_and_in_the_response(http):
    asked = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "request_id": "mine"}
    with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as first:
        lines = first.iter_lines()
        assert json.loads(next(lines)[6:])["id"] == "cmpl-mine"
        second = http.post("/v1/completions", json=asked)
    assert second.status_code == 400
    assert "request_id='mine' is running" in second.json()["error"]["message"]
    messages = [{"role": "user", "content": "x"}]
    asked = {"messages": messages, "max_tokens": 1, "request_id": "mine-2"}
    assert http.post("/v1/chat/completions", json=asked).json()["id"] == "chatcmpl-mine-2"


def test_the_openapi_document_describes_the_bodies(http):
    document = http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    [schema] = body["content"].values()
    assert schema["schema"]["$ref"] in {
        f"#/components/schemas/{name}" for name in document["components"]["schemas"]
    }
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "top_k", "structured_outputs"} <= properties.keys()
    assert "503" in document["paths"]["/v1/completions"]["post"]["responses"]


def test_the_dashboard_asks_for_metrics_that_exist(http):
    dashboard = (Path(__file__).parents[2] / "docs/grafana-dashboard.json").read_text()
    asked = set(re.findall(r"pagetile:\w+", dashboard))
    offered = set(re.findall(r"^pagetile:\w+", http.get("/metrics").text, re.MULTILINE))
    labelled = {"pagetile:request_success_total"}  # without a sample until a request has ended
    assert len(asked) > 10
    assert asked - labelled <= offered
