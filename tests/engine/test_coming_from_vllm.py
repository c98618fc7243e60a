"""Code written for vLLM runs here, or raises an error that names the replacement."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path

import pytest
import torch

import pagetile
from pagetile import LLM, AsyncLLM, RequestError, SamplingParams, StructuredOutputsParams
from pagetile.device import default_device
from pagetile.engine import vllm_names
from pagetile.engine.keywords import ExplainsAbsentNames

PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n    def __init__(self):\n", "x ="]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from-vllm.md"


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", device="cpu", num_blocks=256, max_num_seqs=8)


# --- five scripts -------------------------------------------------------------------------------


def test_offline_batch(llm):
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, n=2, seed=1)
    outputs = llm.generate(PROMPTS, sampling_params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert output.finished
        for sample in output.outputs:
            assert sample.finish_reason in ("stop", "length")
            assert sample.stop_reason is None
            assert sample.cumulative_logprob is None
            tokenizer = llm.get_tokenizer()
            text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            assert text == sample.text
        token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        assert llm.get_tokenizer().decode(token_ids).endswith(output.outputs[0].text)


def test_chat(llm):
    conversation = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "Add two numbers."},
    ]
    template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    params = SamplingParams(max_tokens=8, temperature=0)
    [alone] = llm.chat(conversation, params, use_tqdm=False, chat_template=template)
    both = llm.chat([conversation] * 2, params, use_tqdm=False, chat_template=template)
    assert [output.outputs[0].text for output in both] == [alone.outputs[0].text] * 2
    assert llm.get_tokenizer().decode(alone.prompt_token_ids).endswith("# Add two numbers.\n")


@pytest.mark.parametrize("by_name", [False, True])
def test_async_streaming(llm, by_name):
    params = SamplingParams(max_tokens=8, temperature=0)
    [expected] = llm.generate(PROMPTS[0], params, use_tqdm=False)

    async def main():
        engine = AsyncLLM(llm)
        assert engine.get_tokenizer() is llm.get_tokenizer()
        if by_name:
            arguments = {"request_id": "r-1", "prompt": PROMPTS[0], "sampling_params": params}
            stream = engine.generate(**arguments)
        else:
            stream = engine.generate(PROMPTS[0], params, "r-1")
        seen = ""
        async for output in stream:
            assert output.request_id == "r-1"
            assert output.outputs[0].text.startswith(seen)
            seen = output.outputs[0].text
        assert output.finished
        deltas = [delta async for delta in engine.stream(PROMPTS[0], params, "r-2")]
        assert {delta.request_id for delta in deltas} == {"r-2"}
        await engine.close()
        return seen, "".join(delta.text for delta in deltas)

    assert asyncio.run(main()) == (expected.outputs[0].text,) * 2


def test_guided_json(llm):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "doors": {"enum": [3, 5]}},
        "required": ["name", "doors"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        max_tokens=128, temperature=0, structured_outputs=StructuredOutputsParams(json=schema)
    )
    [output] = llm.generate("car = ", params, use_tqdm=False)
    assert json.loads(output.outputs[0].text).keys() == {"name", "doors"}


def test_scoring(llm):
    """Which of two answers is likelier, as a harness for evaluations computes it."""
    context, answers = "for i in", [" range", " banana"]
    num_context = len(llm.get_tokenizer().encode(context))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    scores = []
    for output in llm.generate([context + a for a in answers], params, use_tqdm=False):
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
        assert pairs[0][1] is None
        scores.append(sum(found[token].logprob for token, found in pairs[num_context:]))
        [sample] = output.outputs
        [(token_id, best)] = list(sample.logprobs[0].items())
        assert token_id == sample.token_ids[0]
        assert (best.rank, best.decoded_token) == (1, llm.get_tokenizer().decode([token_id]))
        assert math.isclose(sample.cumulative_logprob, best.logprob)
    assert scores[0] > scores[1]


# --- errors -------------------------------------------------------------------------------------


def test_an_option_of_vllm_s_names_what_takes_its_place():
    with pytest.raises(TypeError, match="'gpu_memory_utilization', which is vLLM's: memory_frac"):
        LLM(gpu_memory_utilization=0.8)
    with pytest.raises(TypeError, match="'output_kind', which is vLLM's: AsyncLLM"):
        SamplingParams(output_kind=1)
    with pytest.raises(TypeError, match="'structural_tag', which is vLLM's: a grammar"):
        StructuredOutputsParams(structural_tag="{}")


def test_an_argument_of_vllm_s_calls_names_what_takes_its_place(llm):
    with pytest.raises(TypeError, match=r"LLM.chat has no option 'lora_request'.*merge them"):
        llm.chat([{"role": "user", "content": "x"}], lora_request=None)
    with pytest.raises(TypeError, match=r"LLM.chat has no option 'tool'; did you mean tools\?"):
        llm.chat([{"role": "user", "content": "x"}], tool=[])
    with pytest.raises(TypeError, match=r"'prompt_token_ids', which is vLLM's: prompts are text"):
        AsyncLLM.generate(None, prompt_token_ids=[[1]])
    with pytest.raises(TypeError, match=r"AsyncLLM.generate has no option 'priority'"):
        AsyncLLM.generate(None, "x", priority=1)


def test_an_import_from_vllm_names_what_takes_its_place():
    with pytest.raises(ImportError, match=r"no 'TokensPrompt', which is vLLM's: give a dictionary"):
        from pagetile import TokensPrompt  # noqa: F401
    with pytest.raises(ImportError, match=r"import it from pagetile\.engine\.outputs"):
        from pagetile import RequestOutput  # noqa: F401
    assert not hasattr(pagetile, "genarate")
    assert not {*vllm_names.MODULE_NAMES} & {*dir(pagetile)}


def test_what_only_vllm_has_is_explained(llm):
    with pytest.raises(AttributeError, match=r"LLM has no 'embed'.*prompt_logprobs=0"):
        llm.embed(["x"])
    with pytest.raises(AttributeError, match="LLM has no 'llm_engine', which is vLLM's: engine"):
        llm.llm_engine  # noqa: B018
    assert not hasattr(llm, "encode")
    with pytest.raises(AttributeError, match=r"^LLM has no 'encode', which is vLLM's: models here"):
        LLM.encode  # noqa: B018
    with pytest.raises(AttributeError, match=r"AsyncLLM has no 'from_engine_args'.*AsyncLLM.load"):
        AsyncLLM.from_engine_args  # noqa: B018
    with pytest.raises(AttributeError, match="type object 'LLM' has no attribute 'genarate'"):
        LLM.genarate  # noqa: B018
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'genarate'"):
        llm.genarate("x")

    async def main():
        async with AsyncLLM(llm) as engine:
            with pytest.raises(AttributeError, match=r"'shutdown', which is vLLM's: await close"):
                engine.shutdown()
            with pytest.raises(RequestError, match=r"sampling_params is {'temperature': 0}"):
                await engine.submit("x", {"temperature": 0})

    asyncio.run(main())


def test_an_error_within_a_property_is_not_taken_for_an_absent_name():
    class Broken(metaclass=ExplainsAbsentNames, of_vllm={}):
        @property
        def size(self):
            return self.absent

    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        Broken().size  # noqa: B018


@pytest.mark.parametrize("name", ["LLM_NAMES", "ASYNC_LLM_NAMES"])
def test_no_name_is_said_to_be_absent_that_is_there(name):
    cls = {"LLM_NAMES": LLM, "ASYNC_LLM_NAMES": AsyncLLM}[name]
    assert [absent for absent in getattr(vllm_names, name) if hasattr(cls, absent)] == []


def test_the_guide_has_every_name():
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", GUIDE.read_text()))))
    tables = [getattr(vllm_names, table) for table in vllm_names.__all__]
    assert sorted({name for table in tables for name in table} - words) == []


def test_an_async_llm_of_a_path_says_how_it_is_loaded():
    with pytest.raises(RequestError, match=r"llm is of type str.*AsyncLLM.load\(model"):
        AsyncLLM("qwen3")


def test_params_that_are_changed_say_how_others_are_made(llm):
    params = llm.get_default_sampling_params()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(params, max_tokens=5\)"):
        params.max_tokens = 5
    changed = dataclasses.replace(params, max_tokens=5)
    assert changed.max_tokens == 5
    assert pickle.loads(pickle.dumps(changed)) == copy.deepcopy(changed) == changed


# --- where models run ---------------------------------------------------------------------------


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_checkpoint_runs_on_a_gpu_where_there_is_one(has_gpu, device, monkeypatch):
    devices = []

    def load(model, *, device, **options):
        devices.append(device)
        raise InterruptedError

    monkeypatch.setattr("pagetile.engine.loading.default_device", default_device)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("pagetile.models.load_model", load)
    with pytest.raises(InterruptedError):
        pagetile.LLM()
    assert devices == [torch.device(device)]
