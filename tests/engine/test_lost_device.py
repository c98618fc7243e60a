"""A lost device ends an engine: every waiting caller is answered, and later calls fail at once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from test_one_step_ahead import GREEDY, alone, finish, make_engine

from pagetile import LLM, AsyncLLM, SamplingParams
from pagetile.engine import Engine
from pagetile.errors import EngineDeadError

LOST = "the GPU has fallen off the bus"
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def lose(*_: Any) -> Any:
    raise RuntimeError(LOST)


def lose_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing can be launched, read or waited for."""
    for name in ("run", "read", "wait"):
        monkeypatch.setattr(engine._runner, name, lose)


def assert_dead(engine: Engine) -> None:
    """Nothing is in flight, and every call that needs the device raises the reason."""
    assert str(engine.death) == LOST
    assert not engine._in_flight
    engine.check()
    for call in (engine.step, lambda: engine.add_request([5, 6], GREEDY)):
        with pytest.raises(EngineDeadError, match=LOST) as caught:
            call()
        assert caught.value.__cause__ is engine.death
    engine.check()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("where", ["run", "read"])
def test_a_step_that_cannot_be_waited_for_is_the_last(
    where: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a launch fails first, or a read."""
    engine = make_engine(is_ahead=is_ahead)
    requests = [engine.add_request([5, 6, 7 + n], replace(GREEDY, n=2)) for n in range(3)]
    returned = [delta for _ in range(3) for delta in engine.step()]
    for name in (where, "wait"):
        monkeypatch.setattr(engine._runner, name, lose)
    with pytest.raises(EngineDeadError, match=LOST):
        engine.step()
    assert_dead(engine)
    for request_id in requests:
        engine.abort(request_id)
        for output in engine.take_output(request_id).outputs:
            assert output.finish_reason == "abort"
            key = request_id, output.index
            known = [d.token_id for d in returned if (d.request_id, d.index) == key]
            assert list(output.token_ids) == known
    assert not engine.has_unfinished
    assert engine.pool.num_free == engine.pool.num_blocks
    assert_dead(engine)


def test_an_abort_that_finds_the_device_lost_answers_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the step in flight, which computes only what has ended."""
    engine = make_engine()
    request_id = engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    lose_device(engine, monkeypatch)
    engine.abort(request_id)
    assert engine.take_output(request_id).outputs[0].finish_reason == "abort"
    assert engine.pool.num_free == engine.pool.num_blocks
    assert_dead(engine)


def test_a_read_that_fails_once_in_an_abort_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    request_id = engine.add_request([5, 6, 7], GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "read", lose)
        engine.abort(request_id)
    assert engine.death is None
    assert not engine.has_unfinished
    assert engine.pool.num_free == engine.pool.num_blocks
    other = engine.add_request([8, 9], GREEDY)
    finish(engine)
    assert engine.take_output(other).outputs == alone((8, 9), GREEDY).outputs


def test_an_interruption_while_a_failed_step_is_waited_for_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    engine = make_engine()
    request_id = engine.add_request([5, 6, 7], GREEDY)
    deltas = engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lose)
        patch.setattr(engine._runner, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.death is None
    engine.check()
    deltas += finish(engine)
    output = engine.take_output(request_id).outputs[0]
    assert output == alone((5, 6, 7), GREEDY).outputs[0]
    assert tuple(delta.token_id for delta in deltas) == output.token_ids


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("x =", LONG, use_tqdm=False),
        lambda llm: list(llm.stream("x =", LONG)),
    ],
    ids=["generate", "stream"],
)
def test_an_llm_says_why_it_is_dead_and_says_it_again_at_once(
    call: Callable[[LLM], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, num_steps = LLM(num_blocks=64, dtype="float32", async_scheduling=True), 0
    run = llm.engine._runner.run

    def some(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            lose_device(llm.engine, monkeypatch)
            lose()
        return run(*arguments)

    monkeypatch.setattr(llm.engine._runner, "run", some)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=LOST):
            call(llm)
        assert not llm.engine.has_unfinished
        assert not llm.engine._requests
        llm.engine.check()
    assert num_steps == 4


def test_an_async_llm_dies_answers_all_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's text does not say that the device is lost."""
    llm = LLM(num_blocks=64, dtype="float32", max_num_seqs=2, async_scheduling=True)
    deaths: list[BaseException] = []

    async def main() -> None:
        served = AsyncLLM(llm)
        served.thread.on_death = deaths.append
        streams = [await served.submit([5, 6, 7 + n], LONG) for n in range(4)]  # two of them wait
        assert await streams[0].take()
        await served.run_in_engine(lambda: lose_device(llm.engine, monkeypatch))
        for stream in streams:
            with pytest.raises(EngineDeadError, match=LOST):
                await stream.result()
        assert not served.is_alive
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=LOST):
                await served.submit("x =", LONG)
        await served.close()
        assert not served.thread._thread.is_alive()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert [str(death) for death in deaths] == [LOST]
    assert_dead(llm.engine)
    with pytest.raises(EngineDeadError, match=LOST):
        AsyncLLM(llm)
    assert not llm.engine.in_use.locked()


def test_the_memory_of_a_dead_engine_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def use() -> weakref.ref[Engine]:
        llm = LLM(num_blocks=64, dtype="float32", async_scheduling=True)

        async def main() -> None:
            async with AsyncLLM(llm) as served:
                stream = await served.submit("x =", LONG)
                assert await stream.take()
                await served.run_in_engine(lambda: lose_device(llm.engine, monkeypatch))
                with pytest.raises(EngineDeadError, match=LOST):
                    await stream.result()

        asyncio.run(asyncio.wait_for(main(), 60))
        return weakref.ref(llm.engine)

    engine = use()
    monkeypatch.undo()
    gc.collect()
    assert engine() is None


def test_an_async_llm_dies_of_an_abort_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step would notice it, since nothing is left to compute."""
    llm = LLM(num_blocks=64, dtype="float32", async_scheduling=True)

    async def main() -> None:
        async with AsyncLLM(llm) as served:
            stream = await served.submit("x =", LONG)
            assert await stream.take()

            def lose_and_abort() -> None:
                lose_device(llm.engine, monkeypatch)
                served.thread._abort(stream)

            await served.run_in_engine(lose_and_abort)
            assert (await stream.result()).outputs[0].finish_reason == "abort"
            while served.thread.death is None:
                await asyncio.sleep(0.01)
            assert str(served.death) == LOST

    asyncio.run(asyncio.wait_for(main(), 20))
