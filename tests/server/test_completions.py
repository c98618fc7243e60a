from __future__ import annotations

import json

import httpx2
import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagetile import LLM, SamplingParams

from .conftest import opened, serving

PROMPT = "def add(a, b):"


def stream(http, path, **body):
    """The chunks of a stream, which ends as it should."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_completion_is_what_generate_returns(post, llm):
    ids = llm.engine.inputs.encode(PROMPT)
    status, body = post("/v1/completions", prompt=PROMPT, temperature=0, max_tokens=16)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "pagetile-demo"
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["usage"]["completion_tokens"] == 16
    again = post("/v1/completions", prompt=ids, temperature=0, max_tokens=16)[1]
    assert again["choices"][0]["text"] == choice["text"]


def test_a_stream_joins_to_the_completion(http, post):
    asked = {"prompt": PROMPT, "max_tokens": 24, "seed": 3, "n": 2, "logprobs": 1}
    whole = post("/v1/completions", **asked)[1]
    chunks = stream(http, "/v1/completions", **asked, stream_options={"include_usage": True})
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 48
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [item for c in own for item in c["logprobs"][field]]
            assert joined == choice["logprobs"][field]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": PROMPT}),
        ("completions", {"prompt": PROMPT, "n": 2, "logprobs": 1, "return_token_ids": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": PROMPT}],
                "logprobs": True,
                "top_logprobs": 1,
            },
        ),
    ],
)
def test_a_stream_that_the_server_aborts_says_so(http, async_llm, path, fields):
    asked = {**fields, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    reasons = {}
    with http.stream("POST", f"/v1/{path}", json=asked) as response:
        lines = [line for line in response.iter_lines() if line and not _abort_all(async_llm)]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        for choice in json.loads(line[6:])["choices"]:
            assert reasons.get(choice["index"]) is None
            reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == dict.fromkeys(range(fields.get("n", 1)), "abort")


def _abort_all(async_llm):
    for request_id in list(async_llm._streams):
        async_llm.abort(request_id)


def test_several_prompts_with_several_samples_are_numbered(post):
    prompts = [PROMPT, "import os", "x = 1"]
    _, body = post("/v1/completions", prompt=prompts, n=2, max_tokens=4, temperature=0)
    assert sorted(choice["index"] for choice in body["choices"]) == [0, 1, 2, 3, 4, 5]
    one = post("/v1/completions", prompt="import os", max_tokens=4, temperature=0)[1]
    assert body["choices"][2]["text"] == one["choices"][0]["text"]


def test_echo_with_logprobs_scores_the_prompt_as_lm_eval_asks(post, llm):
    import torch

    ids = llm.engine.inputs.encode("for i in range(10):\n    print(i)\n")
    _, body = post(
        "/v1/completions", prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1
    )
    found = body["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert len(found["tokens"]) == len(ids) + 1
    with torch.no_grad():
        logits = llm.engine.model._model(torch.tensor([ids])).logits[0].float()
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    scored = torch.tensor(found["token_logprobs"][1 : len(ids)])
    assert (scored - expected).abs().max() < 1e-4
    for token, own, top in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        assert top[token] == pytest.approx(own)
        assert max(top.values()) >= own


def test_echo_alone_returns_the_prompt(post):
    _, body = post("/v1/completions", prompt=PROMPT, echo=True, max_tokens=0, logprobs=0)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    assert body["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    _, body = post("/v1/completions", prompt=PROMPT, echo=True, max_tokens=2, temperature=0)
    assert body["choices"][0]["text"].startswith(PROMPT)
    _, body = post("/v1/completions", prompt=PROMPT, echo=None, max_tokens=2, temperature=0)
    assert not body["choices"][0]["text"].startswith(PROMPT)


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("options", [{}, {"skip_special_tokens": False}])
def test_offsets_are_where_the_tokens_are_in_the_text(http, post, llm, as_ids, options):
    prompt = "# für π, 漢字 und 🎉\n" + PROMPT
    ids = llm.engine.inputs.encode(prompt)
    words = llm.engine.token_text
    assert ids[0] in words.special_ids
    bias = {str(ids[0]): 10.0}  # many of the output's tokens are special, too
    asked = {"prompt": ids if as_ids else prompt, "echo": True, "logprobs": 0, "max_tokens": 40,
             "seed": 1, "logit_bias": bias, "ignore_eos": True, **options}  # fmt: skip
    [choice] = post("/v1/completions", **asked)[1]["choices"]
    chunks = [chunk["choices"][0] for chunk in stream(http, "/v1/completions", **asked)]
    offsets = choice["logprobs"]["text_offset"]
    assert [at for c in chunks for at in c["logprobs"]["text_offset"]] == offsets
    shows_first = as_ids and bool(options)
    assert offsets[:2] == ([0, len(words.text(ids[0]))] if shows_first else [0, 0])
    hidden = {words.text(i) for i in words.special_ids} if not options else set()
    found = 0
    for number, (token, at) in enumerate(zip(choice["logprobs"]["tokens"], offsets, strict=True)):
        if (number or shows_first) and token not in hidden and not token.startswith("bytes:"):
            assert choice["text"].startswith(token, at), (number, token)
            found += 1
    assert found > 30
    assert choice["logprobs"]["tokens"].count(words.text(ids[0])) > 5


@pytest.mark.parametrize("with_stream", [False, True])
def test_offsets_count_the_marks_of_broken_characters(http, post, llm, with_stream):
    words = llm.engine.token_text
    vocabulary = range(llm.engine.model.vocab_size)
    ids = [next(i for i in vocabulary if words.bytes(i) == byte) for byte in (b"\xa9", b"x")]
    asked = {"prompt": PROMPT, "logprobs": 0, "max_tokens": 12, "seed": 3, "temperature": 9,
             "allowed_token_ids": ids, "ignore_eos": True}  # fmt: skip
    if with_stream:
        choices = [chunk["choices"][0] for chunk in stream(http, "/v1/completions", **asked)]
    else:
        choices = post("/v1/completions", **asked)[1]["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert {*text} == {"x", "\ufffd"}
    assert [at for choice in choices for at in choice["logprobs"]["text_offset"]] == [*range(12)]


def test_offsets_where_a_tokenizer_puts_a_space_before_the_text():
    """As SentencePiece's: the first token has a space that the text has not."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0)], 0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    llm = LLM(tiny_model("llama"), tokenizer=tokenizer, num_blocks=8)
    asked = {"prompt": "the the", "echo": True, "logprobs": 0, "max_tokens": 1}
    with opened(llm) as async_llm, serving(async_llm) as url:
        body = httpx2.post(f"{url}/v1/completions", json={**asked, "allowed_token_ids": [1]}).json()
    [choice] = body["choices"]
    assert choice["text"] == "the the the"
    assert choice["logprobs"]["tokens"] == [" the"] * 3
    assert choice["logprobs"]["text_offset"] == [0, 3, 7]


def test_prompt_logprobs_are_dictionaries_by_token(post, llm):
    ids = llm.engine.inputs.encode(PROMPT)
    _, body = post("/v1/completions", prompt=PROMPT, prompt_logprobs=2, max_tokens=1)
    found = body["choices"][0]["prompt_logprobs"]
    assert len(found) == len(ids)
    assert found[0] is None
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        assert str(token_id) in entry
        assert {e["rank"] for e in entry.values()} >= {1, 2}


def test_stop_strings_and_their_names(post):
    text = post("/v1/completions", prompt=PROMPT, max_tokens=30, temperature=0)[1]
    text = text["choices"][0]["text"]
    stop = text[10:13]
    _, body = post("/v1/completions", prompt=PROMPT, max_tokens=30, temperature=0, stop=stop)
    choice = body["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    asked = {"stop": [stop], "include_stop_str_in_output": True}
    _, body = post("/v1/completions", prompt=PROMPT, max_tokens=30, temperature=0, **asked)
    assert body["choices"][0]["text"].endswith(stop)


def test_the_same_seed_gives_the_same_text(post):
    texts = [
        post("/v1/completions", prompt=PROMPT, max_tokens=16, seed=seed)[1]["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_token_ids_and_truncated_prompts(post, llm):
    ids = llm.engine.inputs.encode(PROMPT)
    asked = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    _, body = post("/v1/completions", prompt=PROMPT, truncate_prompt_tokens=4, **asked)
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == ids[-4:]
    [expected] = llm_tokens(post, ids[-4:])
    assert choice["token_ids"] == expected


def llm_tokens(post, ids):
    asked = {"max_tokens": 3, "temperature": 0, "return_token_ids": True}
    _, body = post("/v1/completions", prompt=ids, **asked)
    return [choice["token_ids"] for choice in body["choices"]]


def test_logit_bias_reaches_the_sampler(post):
    _, body = post(
        "/v1/completions", prompt=PROMPT, logit_bias={"65": 100}, max_tokens=3, temperature=0,
        return_token_ids=True,
    )  # fmt: skip
    assert body["choices"][0]["token_ids"] == [65, 65, 65]


REFUSED = {
    "max_token": ({"max_token": 3}, "did you mean max_tokens"),
    "guided_json": ({"guided_json": {}}, "did you mean structured_outputs.json"),
    "best_of": ({"best_of": 3}, "best_of"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "temperature": ({"temperature": -1}, "temperature"),
    "temperature is text": ({"temperature": "hot"}, "temperature"),
    "n": ({"n": 0}, "n"),
    "n is huge": ({"n": 10**9}, "n: 1000000000, at most 128"),
    "n beyond the engine": ({"n": 100}, "max_num_seqs"),
    "top_p": ({"top_p": 2}, "top_p"),
    "max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "no output": ({"max_tokens": 0}, "echo"),
    "logprobs": ({"logprobs": 1000}, "at most 20"),
    "logit_bias": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "a biased token": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "stop": ({"stop": ["a"] * 99}, "stop"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a stop token": ({"stop_token_ids": [999999]}, "stop_token_ids"),
    "priority": ({"priority": 3}, "priority"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream=true"),
    "an unknown option": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation: expected False, not True",
    ),
    "no prompt": ({"prompt": []}, "prompt"),
    "an empty prompt": ({"prompt": ""}, "empty"),
    "an empty prompt of several": ({"prompt": ["a", ""]}, "empty"),
    "a mixed prompt": ({"prompt": ["a", 1]}, "prompt: expected a string, a list of strings"),
    "half a token": ({"max_tokens": 2.5}, "max_tokens: expected a valid integer, not 2.5"),
    "fewer than one": ({"n": 0}, "n: expected a number greater than or equal to 1, not 0"),
    "an unknown token": ({"prompt": [5, 10**9]}, "token id"),
    "a negative token": ({"prompt": [-1]}, "token id"),
    "a long prompt": ({"prompt": "x" * 10**5}, "max_model_len"),
    "many tokens": ({"prompt": [5] * 3000}, "max_model_len"),
    "many prompts": ({"prompt": ["a"] * 2000}, "at most 1024"),
    "truncation to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "add_special_tokens": ({"add_special_tokens": False}, "add_special_tokens"),
    "a streamed score": ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    "half a character": ({"prompt": "a\ud800"}, ""),
    "NaN": ({"temperature": float("nan")}, "temperature"),
    "a huge seed": ({"seed": 2**70}, "seed"),
    "min_tokens": ({"min_tokens": 20, "max_tokens": 4}, "min_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_served_is_a_400_with_the_reason(http, async_llm, name):
    fields, words = REFUSED[name]
    text = json.dumps({"prompt": PROMPT, **fields})
    headers = {"content-type": "application/json"}
    response = http.post("/v1/completions", content=text, headers=headers)
    if name == "a huge seed" and response.status_code == 200:
        return  # any whole number is a seed
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    [*named, field] = (error["param"] or "").split(".")
    assert not named or named[0] in fields
    named_first = ("temperature", "top_p", "an empty stop", "min_tokens", "NaN")
    if name in (*named_first, "a biased token", "a stop token"):
        assert field == next(iter(fields))
    assert async_llm.num_requests == 0


def test_other_bodies_and_paths(http):
    json_type = {"content-type": "application/json"}
    for text in ("", "{", "[1]", "null", '"x"', "[" * 100_000, "{" * 50 + "}"):
        response = http.post("/v1/completions", content=text, headers=json_type)
        assert response.status_code == 400, text[:20]
    response = http.post("/v1/completions", content="prompt=x", headers={"content-type": "text/x"})
    assert response.status_code == 415
    assert "curl -H 'Content-Type: application/json'" in response.json()["error"]["message"]
    response = http.get("/v1/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "GET /v1/completions: expected POST"
    response = http.get("/nowhere")
    assert response.status_code == 404
    assert "GET /nowhere: no such path; /docs lists all" in response.json()["error"]["message"]
    assert http.get("/nowhere").json()["error"]["type"] == "not_found_error"
    response = http.post("/v1/completions", json={"prompt": "x", "model": "gpt-5"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_params_are_those_of_the_body(async_llm):
    from pagetile.server import ServerConfig
    from pagetile.server.schemas.completions import CompletionRequest

    config = ServerConfig(sampling_defaults={"temperature": 0.6, "top_k": 20})
    body = CompletionRequest(prompt="x", top_k=5, min_p=0.1, ignore_eos=True)
    params = body.sampling_params(config, max_tokens=7, logprobs=None)
    expected = SamplingParams(temperature=0.6, top_k=5, min_p=0.1, ignore_eos=True, max_tokens=7)
    assert params == expected
