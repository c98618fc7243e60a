from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from pagetile import SamplingParams
from pagetile.errors import (
    EngineDeadError,
    GenerationError,
    NoTokenLeftError,
    OverloadedError,
    RequestError,
)

from .conftest import opened

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
PROMPTS = ["def add(a, b):", "import os\n", "class Point:\n    def __init__(self", "for i in"]


async def last(iterator):
    return [item async for item in iterator][-1]


async def read(stream):
    while await stream.take():
        pass


async def idle(llm):
    """Wait until the engine has nothing left to do."""
    while await llm.run_in_engine(lambda: llm.engine.has_unfinished):
        await asyncio.sleep(0.01)


def test_what_coroutines_get_is_what_generate_returns(llm):
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    async def main(async_llm):
        return await asyncio.gather(*(last(async_llm.generate(p, GREEDY)) for p in PROMPTS))

    with opened(llm) as async_llm:
        found = asyncio.run(main(async_llm))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in expected]
    assert [o.prompt for o in found] == PROMPTS
    assert all(o.finished for o in found)


def test_a_sample_that_has_ended_says_so_while_others_run(async_llm):
    params = SamplingParams(n=3, seed=5, temperature=1.3, max_tokens=40, stop=["("])

    async def main():
        return [output async for output in async_llm.generate("def f(", params)]

    *_, earlier, final = asyncio.run(main())
    longest = max(len(sample.token_ids) for sample in final.outputs)
    ended = [sample for sample in final.outputs if len(sample.token_ids) < longest - 1]
    assert ended
    for sample in ended:
        found = earlier.outputs[sample.index]
        assert (found.finish_reason, found.stop_reason) == ("stop", "(")
    assert None in [sample.finish_reason for sample in earlier.outputs]


def test_deltas_join_to_the_text(async_llm):
    params = SamplingParams(n=3, max_tokens=20, seed=5)

    async def main():
        texts = ["", "", ""]
        stream = await async_llm.submit("def f", params)
        while deltas := await stream.take():
            for delta in deltas:
                texts[delta.index] += delta.text
        return texts, await stream.result()

    texts, output = asyncio.run(main())
    assert texts == [sample.text for sample in output.outputs]
    assert all(len(sample.token_ids) == 20 for sample in output.outputs)


def test_log_probabilities_of_a_stream_are_those_of_the_result(async_llm):
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=2)

    async def main():
        stream = await async_llm.submit("def f", params)
        seen = []
        while await stream.take():
            seen.append(len(stream.logprobs[0]))
        return seen, stream.logprobs[0], (await stream.result()).outputs[0].logprobs

    seen, streamed, whole = asyncio.run(main())
    assert streamed == whole.tokens
    assert seen[0] < 9  # they came as the tokens did
    assert len(whole) == 9


def test_prompts_are_those_of_llm(async_llm):
    ids = async_llm.engine.tokenizer.encode("def f")
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1)

    async def last(prompt):
        async for output in async_llm.generate(prompt, params):
            sample = output.outputs[0]
            assert len(sample.logprobs) == len(sample.token_ids)
            assert len(output.prompt_logprobs) == len(ids)
        return output

    async def main():
        prompts = ["def f", ids, {"prompt": "def f"}, {"prompt_token_ids": ids, "cache_salt": "x"}]
        outputs = [await last(prompt) for prompt in prompts]
        with pytest.raises(RequestError, match="neither text nor token ids"):
            await async_llm.submit({})
        with pytest.raises(RequestError, match="cache_salt is given twice"):
            await async_llm.submit({"prompt": "x", "cache_salt": "a"}, cache_salt="b")
        return outputs

    outputs = asyncio.run(main())
    for output in outputs:
        assert output.prompt_token_ids == tuple(ids)
        assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert output.metrics.time_in_queue > 0
    assert outputs[1].prompt is None
    assert outputs[2].prompt == "def f"
    assert outputs[3].num_cached_tokens == 0


def test_a_stream_s_first_delta_has_the_prompt_s_logprobs(async_llm):
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)

    async def main():
        return (
            [delta async for delta in async_llm.stream("def f", params)],
            await last(async_llm.generate("def f", params)),
        )

    (first, *others), output = asyncio.run(main())
    assert first.prompt_logprobs == output.prompt_logprobs
    assert [delta.prompt_logprobs for delta in others] == [None, None]


def test_a_prompt_is_scored_as_transformers_scores_it(async_llm):
    text = "def add(a, b):\n    return a + b\n\n" * 20  # more than one chunk

    async def main():
        stream = await async_llm.submit(
            text, SamplingParams(max_tokens=1, prompt_logprobs=3), generates=False
        )
        await stream.result()
        return stream

    stream = asyncio.run(main())
    ids = torch.tensor([stream.prompt_token_ids])
    assert ids.shape[1] > 256
    model = async_llm.engine.model._model
    with torch.no_grad():
        logprobs = model(ids).logits.float().log_softmax(-1)[0]
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    found = torch.tensor([token.logprob for token in stream.prompt_logprobs[1:]])
    assert (found - expected).abs().max() < 1e-4
    assert stream.prompt_logprobs[0] is None
    best = [token.top_ids[0] for token in stream.prompt_logprobs[1:]]
    assert best == logprobs[:-1].argmax(-1).tolist()
    assert async_llm.engine.pool.num_free == async_llm.engine.pool.num_blocks


def test_a_closed_iterator_gives_its_blocks_back(async_llm):
    async def main():
        async for _ in async_llm.stream("def add", LONG):
            break
        await idle(async_llm)
        return async_llm.engine.pool.num_free

    assert asyncio.run(main()) == async_llm.engine.pool.num_blocks
    assert async_llm.num_requests == 0


def test_an_aborted_request_returns_what_it_has(async_llm):
    async def main():
        stream = await async_llm.submit("def add", LONG, request_id="mine")
        await stream.take()
        async_llm.abort("mine")
        async_llm.abort("another's")
        return await stream.result()

    output = asyncio.run(main())
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 1000


def test_the_last_deltas_of_an_aborted_stream_say_so(async_llm):
    async def main():
        texts, reasons = ["", ""], [None, None]
        params = replace(LONG, n=2, temperature=1.0, stop=["\n\n\n\n\n\n\n\n"])
        stream = await async_llm.submit("def add", params, request_id="mine")
        while deltas := await stream.take():
            async_llm.abort("mine")
            for delta in deltas:
                texts[delta.index] += delta.text
                reasons[delta.index] = delta.finish_reason
        return texts, reasons, (await stream.result()).outputs

    texts, reasons, samples = asyncio.run(main())
    assert reasons == ["abort", "abort"]
    assert texts == [sample.text for sample in samples]


def test_a_bad_request_raises_and_holds_nothing(async_llm):
    async def main():
        with pytest.raises(RequestError, match="empty"):
            await async_llm.submit("")
        with pytest.raises(RequestError, match="token id 99999"):
            await async_llm.submit([1, 99999])
        stream = await async_llm.submit("x", LONG, request_id="twice")
        with pytest.raises(RequestError, match="twice"):
            await async_llm.submit("x", LONG, request_id="twice")
        with pytest.raises(RequestError, match=r"request_id=\['a'\], expected text"):
            await async_llm.submit("x", LONG, request_id=["a"])
        stream.close()
        await idle(async_llm)

    asyncio.run(main())
    assert async_llm.num_requests == 0


def test_beyond_the_queue_requests_are_refused(llm):
    async def main(async_llm):
        accepted = [await async_llm.submit("x", LONG) for _ in range(18)]
        with pytest.raises(OverloadedError, match="18 sequences"):
            await async_llm.submit("x", LONG)
        accepted.pop().close()
        accepted.append(await async_llm.submit("x", GREEDY))
        for stream in accepted[:-1]:
            stream.close()
        return await accepted[-1].result()

    with opened(llm, max_queued_seqs=2) as async_llm:
        assert asyncio.run(main(async_llm)).finished


def test_requests_that_come_together_are_counted_together(llm):
    """All of them have room in the queue before the first prompt has been tokenized."""

    async def main(async_llm):
        asked = [async_llm.submit("x", GREEDY) for _ in range(20)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [error for error in found if isinstance(error, OverloadedError)]
        for stream in found:
            if stream not in refused:
                assert (await stream.result()).finished
        return len(refused)

    with opened(llm, max_queued_seqs=2) as async_llm:
        assert asyncio.run(main(async_llm)) == 2


def test_a_salt_in_the_prompt_keeps_its_prefix_apart(llm):
    text = "def add(a, b):\n    return a + b\n\n" * 8  # several blocks

    async def main(async_llm):
        prompts = [text, {"prompt": text, "cache_salt": "a"}, {"prompt": text, "cache_salt": "a"}]
        outputs = [await last(async_llm.generate(prompt, GREEDY)) for prompt in prompts]
        outputs.append(await last(async_llm.generate(text, GREEDY, cache_salt="b")))
        return [output.num_cached_tokens > 0 for output in outputs]

    llm.reset_prefix_cache()
    with opened(llm) as async_llm:
        assert asyncio.run(main(async_llm)) == [False, False, True, False]


def test_draining_ends_what_runs_and_refuses_what_comes(llm):
    async def main(async_llm):
        short = await async_llm.submit("x", GREEDY)
        drained = asyncio.create_task(async_llm.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="shutting down"):
            await async_llm.submit("x", GREEDY)
        return await drained, (await short.result()).outputs[0].finish_reason

    with opened(llm) as async_llm:
        assert asyncio.run(main(async_llm)) == (True, "length")


def test_draining_aborts_what_takes_too_long(llm):
    async def main(async_llm):
        long = await async_llm.submit("x", LONG)
        drained = await async_llm.drain(0.05)
        return drained, (await long.result()).outputs[0].finish_reason

    with opened(llm) as async_llm:
        assert asyncio.run(main(async_llm)) == (False, "abort")


def test_a_failing_step_fails_its_own_requests_only(llm, monkeypatch):
    model = llm.engine.model
    forward = model.forward
    is_broken = False

    def fragile(step):
        if is_broken:
            raise RuntimeError("a cosmic ray")
        return forward(step)

    monkeypatch.setattr(model, "forward", fragile)

    async def main(async_llm):
        nonlocal is_broken
        victim = await async_llm.submit("def add", LONG)
        await victim.take()

        def break_it():
            nonlocal is_broken
            is_broken = True

        await async_llm.run_in_engine(break_it)
        with pytest.raises(GenerationError, match="cosmic ray"):
            await read(victim)
        is_broken = False
        return await last(async_llm.generate("def add", GREEDY))

    with opened(llm) as async_llm:
        assert len(asyncio.run(main(async_llm)).outputs[0].token_ids) == 12


def test_a_failing_step_fails_no_request_that_waits(llm, monkeypatch):
    model, num_rows = llm.engine.model, llm.engine.scheduler.max_num_seqs
    forward, failures = model.forward, []

    def fragile(step):
        if failures:
            raise failures.pop()
        return forward(step)

    monkeypatch.setattr(model, "forward", fragile)

    async def main(async_llm):
        victims = [await async_llm.submit("def add", LONG) for _ in range(num_rows)]
        for victim in victims:
            await victim.take()
        waiting = await async_llm.submit("def add", GREEDY)
        await async_llm.run_in_engine(lambda: failures.append(RuntimeError("a cosmic ray")))
        for victim in victims:
            with pytest.raises(GenerationError, match="cosmic ray"):
                await read(victim)
        return await waiting.result()

    with opened(llm) as async_llm:
        assert len(asyncio.run(main(async_llm)).outputs[0].token_ids) == 12


def test_a_request_that_leaves_no_token_raises_an_error_of_its_own(llm):
    params = SamplingParams(allowed_token_ids=[0], min_tokens=3)  # 0 is the end of text

    async def main(async_llm):
        with pytest.raises(NoTokenLeftError, match="sample 0 failed: the request's parameters"):
            await last(async_llm.generate("def add", params))
        return await last(async_llm.generate("def add", GREEDY))

    with opened(llm) as async_llm:
        [sample] = asyncio.run(main(async_llm)).outputs
    assert len(sample.token_ids) == 12
    [failed] = llm.generate("def add", params, use_tqdm=False)[0].outputs
    assert failed.error_type is NoTokenLeftError


def test_a_lost_device_ends_the_engine_and_says_so(llm, monkeypatch):
    def lost(step):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    deaths = []

    async def main(async_llm):
        async_llm.thread.on_death = deaths.append
        stream = await async_llm.submit("def add", LONG)
        with pytest.raises(EngineDeadError, match="illegal memory"):
            await read(stream)
        with pytest.raises(EngineDeadError):
            await async_llm.submit("def add", LONG)

    from pagetile.engine.async_llm import AsyncLLM

    async_llm = AsyncLLM(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "forward", lost)
        asyncio.run(main(async_llm))
        assert not async_llm.is_alive
        asyncio.run(async_llm.close())
    assert len(deaths) == 1
    assert not llm.engine._requests
    llm.engine.check()


def lose(*arguments):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_what_waits_when_the_device_is_lost_is_answered(llm, monkeypatch):
    """An abort that reads the lost device, and a request behind it in the inbox."""

    async def main(async_llm):
        gate = threading.Event()
        first = await async_llm.submit("def add", LONG)
        assert await first.take()
        async_llm.thread.post(gate.wait)
        async_llm.thread.post(lose)
        async_llm.abort(first.request_id)
        second = await async_llm.submit("def add", GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "abort", lose)
            gate.set()
            for stream in (first, second):
                with pytest.raises(EngineDeadError):
                    await asyncio.wait_for(read(stream), 20)

    run_to_the_end(llm, main)


def test_a_request_that_comes_as_the_engine_ends_is_answered(llm, monkeypatch):
    async def main(async_llm):
        async_llm.thread.post(lose)
        await asyncio.to_thread(async_llm.thread._thread.join)
        # Both checks were passed a moment before.
        monkeypatch.setattr(async_llm, "check_capacity", lambda num_seqs=1: None)
        stream = await async_llm.submit("def add", GREEDY)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(read(stream), 20)

    run_to_the_end(llm, main)


def run_to_the_end(llm, main):
    """Run a coroutine with an ``AsyncLLM`` that dies, and clear the engine."""
    from pagetile.engine.async_llm import AsyncLLM

    async def run():
        async with AsyncLLM(llm) as async_llm:
            await main(async_llm)

    try:
        asyncio.run(run())
    finally:
        for request_id in list(llm.engine._requests):
            llm.engine.abort(request_id)
            llm.engine.take_output(request_id)
    llm.engine.check()


def test_what_runs_when_it_is_closed_is_not_left_to_the_llm(llm):
    async def main(async_llm):
        stream = await async_llm.submit("def add", LONG)
        assert await stream.take()
        await async_llm.close()
        with pytest.raises(EngineDeadError):
            await read(stream)
        [output] = llm.generate("def add", GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12

    run_to_the_end(llm, main)


def test_the_event_loop_is_not_blocked_by_steps(async_llm):
    async def main():
        longest = 0.0
        stream = await async_llm.submit("def add", SamplingParams(max_tokens=60, ignore_eos=True))
        loop = asyncio.get_running_loop()
        while stream.output is None:
            start = loop.time()
            await asyncio.sleep(0)
            longest = max(longest, loop.time() - start)
            await asyncio.sleep(0.001)
        return longest

    assert asyncio.run(main()) < 0.5
