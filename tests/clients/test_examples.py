"""The examples of clients in docs/guides/serving.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm", reason="make test-clients installs the clients")
GUIDE = Path(__file__).parents[2] / "docs/guides/serving.md"
SECTION = GUIDE.read_text(encoding="utf-8").partition("## Clients")[2].partition("\n## ")[0]
EXAMPLES = re.findall(
    r"\*\*([\w-]+)\*\*[^`]*(?:`[^`\n]+`[^`]*)*```(py|sh)\n(.*?)```", SECTION, re.S
)


def test_every_client_has_an_example():
    clients = ["openai", "langchain-openai", "instructor", "lm-eval", "guidellm", "schemathesis"]
    assert [name for name, _, _ in EXAMPLES] == clients


@pytest.mark.parametrize(
    ("language", "source"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES]
)
def test_an_example_runs(url, tmp_path, language, source):
    source = source.replace("http://127.0.0.1:8000", url)
    command = [sys.executable, "-c", source] if language == "py" else ["sh", "-c", source]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
