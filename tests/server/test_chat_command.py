from __future__ import annotations

import io
import sys

import httpx2
import pytest
import typer

from pagetile.cli import main
from pagetile.server import ServerConfig

from .conftest import serving
from .test_load import wait_for


@pytest.fixture
def say(monkeypatch, capsys):
    def call(text, *args):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = main(["chat", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_conversation_with_a_server(url, say):
    args = ("--max-tokens", "6", "--temperature", "0", "--system", "Be brief.")
    code, out, _ = say("def f(\nreturn\n", url, *args)
    assert code == 0
    assert out.count("model > ") == 2
    assert all(line != "model > " for line in out.splitlines())
    assert say("def f(\nreturn\n", f"{url}/v1", *args)[1] == out


def test_ctrl_c_ends_an_answer_and_its_request_and_the_conversation_goes_on(
    url, async_llm, say, monkeypatch
):
    body = {"messages": [{"role": "user", "content": "class Stack:"}], "temperature": 0}
    whole = httpx2.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 160}, timeout=60)
    assert whole.json()["usage"]["completion_tokens"] == 160
    echo, pieces, num_steps = typer.echo, [], []
    async_llm.thread.observers.append(num_steps.append)

    def interrupted(text, **options):
        echo(text, **options)
        pieces.append(text)
        if len(pieces) == 4:  # the name, then three pieces of the answer
            raise KeyboardInterrupt

    monkeypatch.setattr(typer, "echo", interrupted)
    try:
        code, out, _ = say(
            "class Stack:\nreturn\n", url, "--max-tokens", "160", "--temperature", "0"
        )
        wait_for(lambda: async_llm.num_requests == 0)
    finally:
        async_llm.thread.observers.pop()
    first, second = out.split("model > ")[1:]
    assert code == 0
    assert first == "".join(pieces[1:4]) + " …\n"
    assert second.strip()
    assert len(num_steps) < 280, "the first answer was computed to its end"


class Typed(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self):
        return True


def test_empty_lines_are_skipped(url, say):
    args = (url, "--max-tokens", "4", "--temperature", "0")
    code, out, _ = say("\n  \ndef f(\n\nreturn\n", *args)
    assert code == 0
    assert out == say("def f(\nreturn\n", *args)[1]
    assert out.count("model > ") == 2


def test_a_typed_conversation_goes_on_after_an_error(url, say, monkeypatch):
    args = (url, "--max-tokens", "4", "--temperature", "0")
    long = "hello " * 3000
    code, out, err = say(f"{long}\ndef f(\n", *args)
    assert (code, out) == (2, "model > \n")
    assert "max_model_len" in err
    monkeypatch.setattr(io, "StringIO", Typed)
    code, out, err = say(f"{long}\ndef f(\n", *args)
    assert code == 0
    assert "max_model_len" in err
    assert out.count("model > ") == 2
    answer = say("def f(\n", *args)[1]
    assert out.endswith(answer.partition("model > ")[2])  # the message that failed was dropped


NO_SYSTEM_ROLE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ messages[0].content }}"
)


def test_a_template_without_a_system_role_says_what_to_leave_out(say, monkeypatch, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(NO_SYSTEM_ROLE)
    args = ("--chat-template", str(template), "--max-tokens", "4", "--device", "cpu")
    code, _, err = say("def f(\n", *args, "--system", "Be brief.")
    assert code == 2
    hint = "System role not supported. If it has no system role, leave out --system\n"
    assert err.endswith(hint)
    assert say("def f(\n", *args)[0] == 0
    monkeypatch.setattr(io, "StringIO", Typed)
    code, _, err = say("def f(\n", *args, "--system", "Be brief.")
    assert code == 0
    assert hint.split()[-1] in err


def test_what_a_server_s_template_refuses_is_told_from_other_errors(async_llm, say):
    with serving(async_llm, ServerConfig(chat_template=NO_SYSTEM_ROLE)) as url:
        code, _, err = say("def f(\n", url, "--system", "Be brief.")
        assert code == 2
        assert err.endswith("not supported. If it has no system role, leave out --system\n")
        code, _, err = say("def f(\n", url, "--system", "x", "--model", "template refuses")
        assert code == 2
        assert "template refuses" in err
        assert "leave out --system" not in err


def test_text_that_is_not_utf8_and_a_closed_input(url, say, monkeypatch):
    code, out, err = say("h\udcffllo\n", url)
    assert (code, out, err) == (2, "", "pagetile: standard input is not UTF-8 text\n")
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", url]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["http://127.0.0.1:port"], "http://127.0.0.1:port: expected an address such as http://"),
        (["http://[::1"], "http://[::1: expected an address such as http://"),
        (["http://"], "http://: expected an address such as http://"),
        (["http://127.0.0.1:9", "--device", "cpu"], "--device cpu is for a checkpoint"),
        (["http://127.0.0.1:9", "--api-key", "a\nb"], "the API key has a line break"),
    ],
)
def test_mistakes_in_options_are_one_line(args, message, say):
    code, _, err = say("hello\n", *args)
    assert code == 2
    assert err.startswith(f"pagetile: {message}")
    assert err.count("\n") == 1


def test_errors_are_one_line(url, say):
    code, _, err = say("hello\n", url, "--model", "gpt-5")
    assert code == 2
    assert "gpt-5" in err
    code, _, err = say("hello\n", "http://127.0.0.1:9")
    assert code == 2
    assert "cannot be reached" in err
    assert err.count("\n") == 1
