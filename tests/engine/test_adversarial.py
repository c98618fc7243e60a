"""Misuse, and use at the limits: each call is answered, and the engine is as before afterwards."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_one_step_ahead import GREEDY, alone, finish, is_same, make_engine

from pagetile import LLM, AsyncLLM, RequestError, SamplingParams
from pagetile.engine.outputs import Delta, RequestOutput
from pagetile.engine.request_stream import RequestStream
from pagetile.errors import EngineDeadError

LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


@pytest.fixture(scope="module")
def shared() -> LLM:
    return LLM(num_blocks=64, dtype="float32", max_num_seqs=4, async_scheduling=True)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    shared.engine.check()
    assert not shared.engine.has_unfinished
    assert not shared.engine._requests
    assert shared.engine.pool.num_free == shared.engine.pool.num_blocks


def test_a_callers_autocast_changes_neither_a_model_nor_its_tokens() -> None:
    """Keys of another type than the cache's were refused, in loading and in each step."""
    [expected] = LLM(num_blocks=32, dtype="float32").generate("x =", GREEDY, use_tqdm=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [found] = LLM(num_blocks=32, dtype="float32").generate("x =", GREEDY, use_tqdm=False)
        assert torch.is_autocast_enabled("cpu")
    assert found.outputs == expected.outputs


# --- names -------------------------------------------------------------------------------------


def test_numbers_that_a_caller_gave_to_requests_are_passed_over() -> None:
    engine = make_engine()
    for number in (0, 1, 3):
        engine.add_request([5, 6, 7 + number], GREEDY, request_id=number)
    assert [engine.add_request([8, 9], GREEDY) for _ in range(3)] == [2, 4, 5]
    with pytest.raises(RequestError, match="request_id=4 is in use"):
        engine.add_request([8, 9], GREEDY, request_id=4)
    finish(engine)
    for request_id in (2, 4, 5):
        assert engine.take_output(request_id).outputs == alone((8, 9), GREEDY).outputs


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_a_request_that_fails_to_start_takes_those_before_it_along(
    method: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would wait for steps that no call runs, and later calls would be refused."""
    add, num_added = llm.engine.add_request, 0

    def some(**options: Any) -> Any:
        nonlocal num_added
        num_added += 1
        if num_added == 3:
            raise KeyboardInterrupt
        return add(**options)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add_request", some)
        with pytest.raises(KeyboardInterrupt):
            list(getattr(llm, method)(["x =", "y =", "z ="], GREEDY))
    assert not llm.engine.has_unfinished
    assert llm.generate("x =", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_lists_without_a_prompt_are_answered_with_none(llm: LLM) -> None:
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.generate([], [], use_tqdm=False) == []
    assert list(llm.stream([], GREEDY)) == []
    for empty in ("", [""], [[]], [{"prompt_token_ids": []}]):
        with pytest.raises(RequestError, match="prompt 0: the prompt is empty"):
            llm.generate(empty, GREEDY, use_tqdm=False)


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
def test_as_many_samples_as_rows_in_a_pool_that_holds_few_of_them(is_ahead: bool) -> None:
    """Each alone fits; together they preempt each other, and lose nothing."""
    engine = make_engine(num_blocks=10, is_ahead=is_ahead)
    params = SamplingParams(seed=4, n=8, max_tokens=20, ignore_eos=True, logprobs=1)
    ids = [engine.add_request([5, 6, 7, 8, 9], params) for _ in range(2)]
    with pytest.raises(RequestError, match="n=9 is more than max_num_seqs=8"):
        engine.add_request([5], replace(params, n=9))
    deltas = finish(engine)
    assert engine.counts.preemptions > 4
    expected = alone((5, 6, 7, 8, 9), params).outputs
    for request_id in ids:
        outputs = engine.take_output(request_id).outputs
        assert all(map(is_same, outputs, expected))
        for output in outputs:
            key = request_id, output.index
            found = [d.token_id for d in deltas if (d.request_id, d.index) == key]
            assert tuple(found) == output.token_ids


def test_a_prompt_as_long_as_the_pool_gets_its_one_token() -> None:
    engine = make_engine(num_blocks=9, max_num_batched_tokens=8)
    prompt = tuple(3 + n * 7 % 90 for n in range(35))
    params = replace(GREEDY, max_tokens=None, prompt_logprobs=1, logprobs=1)
    ids = [engine.add_request(prompt, params) for _ in range(3)]
    for too_long in ([5] * 36, [5] * 100_000):
        with pytest.raises(RequestError, match=f"the prompt has {len(too_long)} tokens"):
            engine.add_request(too_long, params)
    finish(engine)
    for request_id in ids:
        [output] = engine.take_output(request_id).outputs
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
        assert is_same(output, alone(prompt, replace(params, max_tokens=1)).outputs[0])


# --- parameters beside each other --------------------------------------------------------------

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 3.0},
    "bias": {"logit_bias": {50: 3.0, 70: -100}},
    "allowed": {"allowed_token_ids": [*range(3, 96, 5)]},
    "bad words": {"bad_words": ["zb", "Q", "%&", "!"]},
    "many logprobs": {"logprobs": 30},
    "late end": {"stop_token_ids": [*range(3, 96, 2)], "min_tokens": 9},
    "stop": {"stop": ["a", "b", "c", "d", "e", "f", "gh"]},
}


@pytest.mark.parametrize("is_ahead", [False, True])
def test_each_parameter_changes_its_own_request_and_no_other(is_ahead: bool) -> None:
    """Rows are reused, most sequences are preempted, and a third are forks."""
    engine, rng = make_engine(num_blocks=14, is_ahead=is_ahead, max_num_seqs=4), random.Random(3)
    common = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "seed": 7, "logprobs": 1}
    prompt, asked = (11, 12, 13, 14, 15), {}
    for name in [*PARAMETERS, *rng.sample([*PARAMETERS], 6)]:
        params = SamplingParams(**{**common, **PARAMETERS[name]}, n=rng.choice([1, 1, 3]))
        asked[engine.add_request(prompt, params)] = name, params
    finish(engine)
    assert engine.counts.preemptions > 2
    tokens = {}
    for request_id, (name, params) in asked.items():
        outputs = engine.take_output(request_id).outputs
        assert all(map(is_same, outputs, alone(prompt, params).outputs)), name
        tokens[name] = outputs[0].token_ids
    assert tokens["many logprobs"] == tokens["seed"]
    assert len({*tokens.values()}) == len(PARAMETERS) - 1, "each other one changes something"


# --- coroutines --------------------------------------------------------------------------------


def serve(llm: LLM, main: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Run a coroutine for at most a minute; the engine is idle afterwards."""

    async def run() -> Any:
        async with AsyncLLM(llm, **options) as served:
            result = await main(served)
            while await served.run_in_engine(lambda: llm.engine.has_unfinished):
                await asyncio.sleep(0.01)
            assert not served.num_requests
            return result

    return asyncio.run(asyncio.wait_for(run(), 60))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def read(stream: RequestStream) -> list[Delta]:
    deltas = []
    while new := await stream.take():
        deltas += new
    return deltas


@pytest.mark.parametrize("name", ["on_first_token", "on_deltas", "on_end"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_callback_that_raises_leaves_no_caller_waiting(
    name: str, is_aborted: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_output, ends = llm.engine.take_output, {}

    def fail(*_: Any) -> Any:
        raise ValueError("not today")

    def watched(request_id: Any) -> RequestOutput:
        output = take_output(request_id)
        ends[request_id] = output.outputs[0].finish_reason
        return output

    monkeypatch.setattr(llm.engine, "take_output", watched)

    async def main(served: AsyncLLM) -> RequestStream:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it is told of it
        stream = await served.submit("x =", LONG if is_aborted else GREEDY)
        setattr(stream, name, fail)
        tasks = asyncio.ensure_future(read(stream)), asyncio.ensure_future(stream.result())
        other = await served.submit("y =", GREEDY)
        await other.result()
        if is_aborted:
            served.abort(stream.request_id)
        await asyncio.wait(tasks)
        assert stream.is_closed
        for task in tasks:
            if task.exception() is not None:
                assert str(task.exception()) == "not today"
        return stream

    stream = serve(llm, main)
    if is_aborted:
        assert ends[stream.engine_id] == "abort", "it was computed to its end, for no caller"


def test_several_tasks_may_wait_for_one_request(llm: LLM) -> None:
    async def main(served: AsyncLLM) -> None:
        stream = await served.submit("x =", GREEDY)
        impatient = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0)
        impatient.cancel()
        one, deltas, other = await asyncio.gather(stream.result(), read(stream), stream.result())
        assert one is other
        assert tuple(delta.token_id for delta in deltas) == one.outputs[0].token_ids

    serve(llm, main)


def test_who_waits_for_a_request_is_answered_when_another_closes_it(llm: LLM) -> None:
    """Before the engine has heard of it, too."""

    async def main(served: AsyncLLM) -> None:
        gate = threading.Event()
        served.thread.post(lambda: gate.wait() and None)
        stream = await served.submit("x =", replace(LONG, n=2))
        with pytest.raises(RequestError, match="is running: choose another"):
            await served.submit("y =", GREEDY, stream.request_id)
        waiting = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0)
        stream.close()
        gate.set()
        sample, *_ = (await waiting).outputs
        assert sample.finish_reason == "abort"

    serve(llm, main)


def test_more_samples_than_can_ever_run_are_not_told_to_come_later(llm: LLM) -> None:
    async def main(served: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="n=50 is more than max_num_seqs=4"):
            await served.submit("x =", replace(GREEDY, n=50))

    serve(llm, main, max_queued_seqs=10)


def test_an_event_loop_that_has_gone_takes_no_engine_along(llm: LLM) -> None:
    """It asked for something and did not wait for the answer."""

    async def main(served: AsyncLLM) -> None:
        async def ask() -> None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(served.run_in_engine(lambda: 1), 0.01)

        gate = threading.Event()
        served.thread.post(lambda: gate.wait() and None)
        await asyncio.to_thread(lambda: asyncio.run(ask()))
        gate.set()
        assert await served.run_in_engine(lambda: 2) == 2

    serve(llm, main)


def test_a_prompt_that_waits_for_a_thread_is_refused_when_the_engine_closes(llm: LLM) -> None:
    """Not cancelled: a task that no caller has cancelled would seem to be."""

    async def main() -> None:
        served, gate = AsyncLLM(llm, num_threads=1), threading.Event()
        beside = asyncio.ensure_future(served.run_in_worker(gate.wait))
        asked = asyncio.ensure_future(last(served.generate("x =", GREEDY)))
        await asyncio.sleep(0.01)
        await served.close()
        gate.set()
        with pytest.raises(EngineDeadError):
            await asked
        await beside

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_llm_has_one_user_at_a_time_and_the_others_are_told(llm: LLM) -> None:
    """Else two threads would step one scheduler."""
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("x =", GREEDY, use_tqdm=False),
        lambda: llm.stream("x =", GREEDY),
        lambda: next(early.pop()),  # a stream starts when its first delta is taken
        lambda: AsyncLLM(llm),
        lambda: AsyncLLM(llm.engine),
        llm.reset_prefix_cache,
    ]
    early = [llm.stream("x =", GREEDY) for _ in range(5)]

    def refuse_all() -> None:
        num_threads, on_step = threading.active_count(), llm.engine.on_step
        for call in calls:
            with pytest.raises(RequestError, match=r"AsyncLLM.*close"):
                call()
        assert (threading.active_count(), llm.engine.on_step) == (num_threads, on_step)

    async def main() -> Any:
        async with AsyncLLM(llm) as served:
            running = asyncio.ensure_future(last(served.generate("y =", GREEDY)))
            await asyncio.to_thread(refuse_all)
            await running
            refuse_all()  # idle, but open
            return running.result().outputs[0].token_ids

    for _ in range(2):  # closed, it is free again
        found = asyncio.run(asyncio.wait_for(main(), 60))
    stream = llm.stream("x =", LONG)
    next(stream)
    refuse_all()
    stream.close()
    assert llm.generate("y =", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == found


def test_generators_dropped_half_way_give_their_blocks_back(llm: LLM) -> None:
    for where in ("here", "in another thread"):
        holder = [llm.stream(["x =", "y ="], LONG)]
        next(holder[0])
        if where == "here":
            holder.clear()
        else:
            thread = threading.Thread(target=holder.clear)
            thread.start()
            thread.join()
        gc.collect()
        assert not llm.engine.has_unfinished

    async def main(served: AsyncLLM) -> None:
        for method in (served.generate, served.stream):
            iterator = method("x =", LONG)
            await anext(iterator)
            del iterator
        gc.collect()

    serve(llm, main)


def test_an_observer_that_raises_ends_the_engine_and_answers_all(llm: LLM) -> None:
    def fail(report: Any) -> None:
        raise ValueError("not today")

    async def main() -> None:
        served = AsyncLLM(llm)
        served.thread.observers.append(fail)
        asked = [last(served.generate("x =", LONG)) for _ in range(6)]
        for found in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(found, EngineDeadError)
            assert "not today" in str(found)
        await served.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_crowd_that_leaves_in_every_way_leaves_nothing_behind(llm: LLM) -> None:
    """Tasks are cancelled, iterators closed, names used twice and aborted, in two event loops."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True, n=2)
    prompts = [f"def f{n}(x):\n    return" for n in range(5)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    num_whole = 0

    async def one(served: AsyncLLM, number: int, rng: random.Random) -> None:
        nonlocal num_whole
        at, way = rng.randrange(5), rng.choice(["all", "all", "close", "abort", "cancel"])
        name = f"{id(rng)}-{number}"
        iterator = served.generate(prompts[at], params, name)
        outputs, most = [], rng.randrange(6)
        async for output in iterator:
            outputs.append(output)
            num_read = len(outputs)
            if num_read == 1:
                with suppress(RequestError):  # unless it has ended meanwhile
                    (await served.submit(prompts[at], params, name)).close()
            if num_read == most and way == "close":
                return await iterator.aclose()
            if num_read == most and way == "abort":
                served.abort(name)
                served.abort("unknown")
            if num_read == most and way == "cancel":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
        for found, wanted in zip(outputs[-1].outputs, expected[at].outputs, strict=False):
            if found.finish_reason == "abort":
                assert found.token_ids == wanted.token_ids[: len(found.token_ids)]
            else:
                assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
        num_whole += outputs[-1].outputs[0].finish_reason == "length"

    async def crowd(served: AsyncLLM, seed: int) -> None:
        rng = random.Random(seed)
        tasks = []
        for number in range(20):
            tasks.append(asyncio.ensure_future(one(served, number, rng)))
            await asyncio.sleep(rng.random() * 0.01)
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert found is None or isinstance(found, asyncio.CancelledError), found

    async def main(served: AsyncLLM) -> None:
        beside = asyncio.to_thread(lambda: asyncio.run(crowd(served, 1)))
        await asyncio.gather(crowd(served, 0), beside)

    serve(llm, main)
    assert num_whole > 8
