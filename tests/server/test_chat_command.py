from __future__ import annotations

import io
import sys

import pytest

from pagetile.cli import main


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


def test_errors_are_one_line(url, say):
    code, _, err = say("hello\n", url, "--model", "gpt-5")
    assert code == 2
    assert "gpt-5" in err
    code, _, err = say("hello\n", "http://127.0.0.1:9")
    assert code == 2
    assert "cannot be reached" in err
    assert err.count("\n") == 1
