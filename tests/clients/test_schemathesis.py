"""``schemathesis``: requests drawn from the OpenAPI document, and from what it excludes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from server.conftest import chatty, opened, serving

from pagetile.engine.llm import LLM

pytest.importorskip("schemathesis", reason="make test-clients installs schemathesis")

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
    *("negative_data_rejection", "unsupported_method", "allow_header_conformance"),
)


@pytest.fixture(scope="module", params=[(), ("a-key",)], ids=["open", "with a key"])
def server(request):
    """Its context is short, so that requests without max_tokens end soon."""
    llm = LLM(dtype="float32", num_blocks=256, max_num_seqs=32, max_model_len=64)
    config = chatty(tool_call_parser="hermes", api_keys=request.param)
    with opened(llm) as async_llm, serving(async_llm, config) as url:
        yield url, request.param


def test_every_answer_is_one_that_the_document_knows(server, tmp_path):
    url, keys = server
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    document = tmp_path / "openapi.json"
    document.write_bytes(httpx2.get(f"{url}/openapi.json", headers=headers).content)
    # A stream that does not end has a test of its own, in tests/server/test_pages.py.
    command = [str(Path(sys.executable).with_name("st")), "run", str(document), "--url", url,
               "--exclude-path", "/pages/frames", "--phases", "coverage,fuzzing",
               "--checks", ",".join(CHECKS), "--max-examples", "20" if keys else "100",
               "--seed", "1", "--request-timeout", "60", "--no-color"]  # fmt: skip
    for name, value in headers.items():
        command += ["--header", f"{name}:{value}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-1000:]
    [count] = re.findall(r"([\d,]+) generated, \1 passed", ran.stdout)
    assert int(count.replace(",", "")) >= (1000 if keys else 2000)
    assert httpx2.get(f"{url}/health").status_code == 200
