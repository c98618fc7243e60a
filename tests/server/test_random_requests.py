"""Requests with fields drawn from the OpenAPI document: a short form of what schemathesis does.

``make test-clients`` runs schemathesis itself, which draws 2 000 of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

BODIES = {
    "/v1/completions": {"prompt": "x = ", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/responses": {"input": "x = ", "max_output_tokens": 3},
    "/tokenize": {"prompt": "x = "},
    "/detokenize": {"tokens": [5, 6]},
}
ANY = (None, True, -1, 0, 1, 2, 0.5, 2**40, -1e300, "", "x", "ü\ud83d\ude42\x00", [], {}, [None],
       [1, 2], ["a"], [["x"]], {"type": "text"}, {"a": {"b": []}})  # fmt: skip
MOST_TOKENS = 8


def value_of(draw, schema, components, depth=0):
    """A value that the schema describes, sometimes with a flaw."""
    if depth > 6 or draw.random() < 0.12:
        return draw.choice(ANY)
    if "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return value_of(draw, draw.choice(schema[union]), components, depth + 1)
    if "const" in schema or "enum" in schema:
        return draw.choice([schema["const"]] if "const" in schema else schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        known = schema.get("properties", {})
        chosen = [n for n in known if n in schema.get("required", ()) or draw.random() < 0.3]
        return {name: value_of(draw, known[name], components, depth + 1) for name in chosen}
    if kind == "array":
        items = schema.get("items", {})
        return [value_of(draw, items, components, depth + 1) for _ in range(draw.randint(0, 3))]
    if kind == "integer":
        return draw.choice([schema.get("minimum", 0), 1, 2, 5, schema.get("maximum", 7)])
    plain = {"number": [0, 0.3, 1.0], "string": ["x", "def f(", "auto"], "boolean": [True, False]}
    return draw.choice(plain.get(kind, ANY))


@pytest.mark.parametrize("path", BODIES)
def test_random_requests_are_answered_as_documented(http, async_llm, path):
    document = http.get("/openapi.json").json()
    components = document["components"]["schemas"]
    operation = document["paths"][path]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = components[reference.rpartition("/")[2]]["properties"]
    draw, statuses = random.Random(path), Counter()
    for _ in range(300):
        body = dict(BODIES[path])
        for name in draw.sample([*fields], min(draw.randint(1, 3), len(fields))):
            body[name] = value_of(draw, fields[name], components)
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), (int, float)) and body[name] > MOST_TOKENS:
                body[name] = MOST_TOKENS  # many tokens are no other case, but take long
        if body.get("max_tokens", 0) is None or body.get("max_output_tokens", 0) is None:
            continue  # likewise
        content = json.dumps(body).encode()
        response = http.post(path, content=content, headers={"content-type": "application/json"})
        statuses[response.status_code] += 1
        assert str(response.status_code) in operation["responses"], (body, response.text)
        assert response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"], body
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert '"error": {' not in response.text, (body, response.text)
        else:
            response.json()
    assert statuses[200] > 5
    assert statuses[400] > 5
    assert http.get("/health").status_code == 200
    assert async_llm.num_requests == 0
