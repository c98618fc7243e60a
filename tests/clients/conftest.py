"""The server that the clients talk to. ``make test-clients`` installs them and runs these tests.

Without the clients' packages, which the normal suite has not, each file is skipped and says why.
"""

from __future__ import annotations

import os

import pytest
from server.conftest import chatty, opened, serving

from pagetile.engine.llm import LLM

# Nothing here needs a hub, and nothing waits for one.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LANGSMITH_TRACING="false")


@pytest.fixture(scope="session")
def url():
    """A server with the shipped checkpoint, in float32, and a template that offers tools."""
    llm = LLM(dtype="float32", num_blocks=1024, max_num_seqs=32)
    with opened(llm) as async_llm, serving(async_llm, chatty(tool_call_parser="hermes")) as found:
        yield found
