"""A forked process refuses its parent's engines at once: they would wait for threads forever."""

from __future__ import annotations

import asyncio
import os
import re
import select
from collections.abc import Callable

import pytest

from pagetile import LLM, AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=2)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def run_in_child(function: Callable[[], object], seconds: float = 20.0) -> str:
    """Return what a forked child's function returns or raises, as text."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write_end, answer.encode())
        os._exit(0)
    try:
        ready, *_ = select.select([read_end], [], [], seconds)
        return os.read(read_end, 4096).decode() if ready else "no answer"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_to_load_its_own_engine() -> None:
    llm = LLM(num_blocks=32, dtype="float32")
    [expected] = llm.generate("x =", PARAMS, use_tqdm=False)
    told = "EngineDeadError: .*loaded before this process was forked.* 'spawn'"
    for call in (
        lambda: llm.generate("x =", PARAMS, use_tqdm=False),
        lambda: list(llm.stream("x =", PARAMS)),
    ):
        assert re.match(told, run_in_child(call))
    [again] = llm.generate("x =", PARAMS, use_tqdm=False)
    assert again.outputs == expected.outputs


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_not_left_waiting_by_an_async_llm() -> None:
    llm = LLM(num_blocks=32, dtype="float32")

    async def serve() -> None:
        async with AsyncLLM(llm) as served:

            async def ask() -> None:
                assert not served.is_alive
                await served.submit("x =", PARAMS)

            # Of the parent's event loop the child knows nothing.
            answer = await asyncio.to_thread(run_in_child, lambda: asyncio.run(ask()))
            assert re.match("EngineDeadError: .*forked", answer)
            assert (await (await served.submit("x =", PARAMS)).result()).finished

    asyncio.run(asyncio.wait_for(serve(), 60))
