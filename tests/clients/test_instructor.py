"""``instructor``: answers as Pydantic models, through calls of tools and through JSON."""

from __future__ import annotations

import openai
import pytest

from .test_langchain import Weather

instructor = pytest.importorskip("instructor", reason="make test-clients installs instructor")
ASKED = {
    "model": "pagetile-demo",
    "messages": [{"role": "user", "content": "Rome?"}],
    "response_model": Weather,
    "max_tokens": 400,
    "max_retries": 0,
    "seed": 1,
}


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_answer_is_a_model(client, mode):
    asking = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    assert isinstance(asking.chat.completions.create(**ASKED), Weather)


def test_json_mode_asks_for_any_object(client):
    """The server makes it JSON but enforces no schema, so here every field may be absent."""
    asking = instructor.from_openai(client, mode=instructor.Mode.JSON)

    class Anything(openai.BaseModel):
        pass

    found = asking.chat.completions.create(**{**ASKED, "response_model": Anything})
    assert isinstance(found, Anything)


def test_an_answer_grows_field_by_field(client):
    asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    pieces = list(asking.chat.completions.create_partial(**ASKED))
    assert len(pieces) > 2
    assert Weather.model_validate(pieces[-1].model_dump())
