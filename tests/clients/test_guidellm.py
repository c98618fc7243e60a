"""``guidellm``: a short benchmark, with the shipped checkpoint's tokenizer and made-up prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagetile.demo import path

pytest.importorskip("guidellm", reason="make test-clients installs guidellm")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_short_benchmark(url, tmp_path, route):
    options = {
        "backend": f"kind=openai_http,target={url},model=pagetile-demo,request_format={route}",
        "tokenizer": f"kind=hf_auto,model={path()}",
        "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=8",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=12",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", value]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 12
    assert requests["errored"] == []
    assert {request["output_tokens"] for request in requests["successful"]} == {8}
