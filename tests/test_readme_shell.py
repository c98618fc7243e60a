"""The shell lines of the README run in this process, except those listed here."""

from __future__ import annotations

import os
import queue
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest

from pagetile.cli import main
from pagetile.demo import path as demo_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = re.findall(r"^    ((?:make|pip|pagetile) .*?)(?: +#.*)?$", README, re.MULTILINE)
NOT_RUN = {
    "make test": "it runs this test",
    "pip install -e .": "it installs",
    "pip install -e '.[engine,plots]'": "it installs",
    "pip install -e '.[serve]'": "it installs",
}
SERVE = "pagetile serve"
SHORT = "--query-len 40 --num-heads 2 --head-size 8 --iterations 2 --warmup 0 --device cpu"
# Options added to a line, so that it is quick or runs anywhere, and its output.
RUN = {
    "make demo": ("", r"^\d sequences hold \d+ of "),
    'pagetile generate "class Stack:" --n 2 --show-pages': (
        "--max-tokens 8",
        r"^2 sequences hold ",
    ),
    "pagetile plan --model path/to/checkpoint --memory 16GiB": ("", r"^sequences +[\d,]+ of "),
    "pagetile explain pages": ("--out pages.svg", r"pages\.svg"),
    "pagetile bench attention": (SHORT, r"attention"),
}


def words_of(line: str) -> list[str]:
    """The arguments of ``pagetile`` in a line, or in the recipe of a target of make."""
    if line.startswith("make "):
        recipe = rf"^{line[5:]}:.*\n\t@\$\(BIN\)/python -m (.*)$"
        makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
        line = re.findall(recipe, makefile, re.MULTILINE)[0]
    words = shlex.split(line.partition("<")[0].replace("path/to/checkpoint", str(demo_path())))
    assert words[0] == "pagetile"
    return words[1:]


def test_every_shell_line_is_run_or_listed() -> None:
    assert sorted(LINES) == sorted([*NOT_RUN, *RUN, SERVE])


@pytest.mark.parametrize("line", RUN)
def test_a_line_runs(line, tmp_path, monkeypatch, capsys) -> None:
    added, printed = RUN[line]
    monkeypatch.chdir(tmp_path)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main([*words_of(line), *added.split()]) == 0
    captured = capsys.readouterr()
    assert re.search(printed, captured.out + captured.err, re.MULTILINE)


def test_the_server_answers_and_ends(monkeypatch, capsys) -> None:
    httpx2 = pytest.importorskip("httpx2")
    from pagetile import server
    from pagetile.server.logs import log

    urls: queue.Queue[str] = queue.Queue()
    answers = []
    serve = server.serve

    def serve_and_tell(*args, on_start, **options):
        def announce(url):
            on_start(url)
            urls.put(url)

        return serve(*args, on_start=announce, **options)

    def ask():
        try:
            url = urls.get(timeout=60)
            body = {"prompt": "class Stack:", "max_tokens": 4}
            answers.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json())
            answers.append(httpx2.get(f"{url}/pages", timeout=60).text)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the server's own way to end

    monkeypatch.setattr(server, "serve", serve_and_tell)
    monkeypatch.setattr(log, "is_on", log.is_on)  # the command sets both
    monkeypatch.setattr(log, "as_json", log.as_json)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        client = threading.Thread(target=ask)
        client.start()
        words = [*words_of(SERVE), "--port", "0", "--num-blocks", "64", "--quiet"]
        assert main(words) == 0
        client.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    completion, page = answers
    assert completion["usage"]["completion_tokens"] == 4
    assert "<html" in page
    assert "pages at http://127.0.0.1:" in capsys.readouterr().err.replace("\n", " ")
