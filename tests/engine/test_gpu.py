"""The engine on a GPU: recorded decode steps, and a host that waits only for tokens."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from host_sampling import sample
from tiny_models import tiny_model

from pagetile import LLM, SamplingParams, demo
from pagetile.device import DeviceInfo
from pagetile.engine import triton as engine_triton
from pagetile.engine.cuda_graphs import StepGraphs
from pagetile.engine.prefix_groups import PrefixGrouper
from pagetile.engine.sampling_rows import SamplingInput
from pagetile.ops.paged_attention import PagedBatch, shared_prefixes
from pagetile.ops.paged_attention import triton as paged_attention_triton
from pagetile.ops.paged_attention.hopper_decode import decode_kernel

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n    def __init__(self):\n", "x =", "#"]


@contextmanager
def counting_waits() -> Iterator[list[str]]:
    """Every time that torch makes the host wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # torch calls it a prototype
        waits: list[str] = []
        yield waits
        torch.cuda.set_sync_debug_mode(before)
        waits += [str(w.message) for w in caught if "synchronizing" in str(w.message)]


@pytest.fixture(scope="module")
def recorded() -> LLM:
    return LLM(dtype="float32", device="cuda", num_blocks=256, max_num_seqs=8)


@pytest.fixture(scope="module")
def eager() -> LLM:
    return LLM(dtype="float32", device="cuda", num_blocks=256, max_num_seqs=8, enforce_eager=True)


def tokens(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[output.token_ids for output in request.outputs] for request in outputs]


def test_the_demo_checkpoint_generates_what_transformers_does(recorded: LLM) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo.path(), dtype=torch.float32).to(CUDA)
    for prompt, [computed] in zip(PROMPTS, tokens(recorded, PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([recorded.engine.inputs.encode(prompt)], device=CUDA)
        reference = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=GREEDY.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(computed) == reference[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "phi3", "deepseek_v3"])
def test_models_with_our_norms_and_rotary_embeddings_generate_the_same(family: str) -> None:
    model = tiny_model(family).to(CUDA)
    llm = LLM(model, device="cuda", num_blocks=64, max_num_seqs=4)
    assert any(name == "forward" for _, name, _ in llm.engine._runner.model._attributes)
    prompts = [[5, 9, 20, 33], [70, 3], [8, 8, 41, 1, 12, 60, 11]]
    params = replace(GREEDY, max_tokens=20, detokenize=False)
    results = llm.generate(prompts, params, use_tqdm=False)
    model.set_attn_implementation("eager")
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt], device=CUDA)
        reference = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(result.outputs[0].token_ids) == reference[0, len(prompt) :].tolist()


def test_recorded_steps_generate_what_eager_ones_do(recorded: LLM, eager: LLM) -> None:
    for params in (GREEDY, replace(GREEDY, temperature=1.0, top_p=0.9, seed=4, n=2, max_tokens=30)):
        for prompts in (PROMPTS[:1], PROMPTS[:3]):
            assert tokens(recorded, prompts, params) == tokens(eager, prompts, params)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_prompts_beside_running_sequences_change_nothing(eager: LLM, num_drafts: int) -> None:
    rng = random.Random(num_drafts)
    prompts = [[rng.randrange(200) for _ in range(rng.choice((3, 40, 150)))] for _ in range(12)]
    params = [replace(GREEDY, max_tokens=rng.randint(1, 60), detokenize=False) for _ in prompts]
    options = {"speculative": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else {}
    llm = LLM(
        dtype="float32", device="cuda", num_blocks=256, max_num_seqs=8,
        max_num_batched_tokens=64, **options,
    )  # fmt: skip
    replayed, graphs = [], llm.engine._runner.kernels.prompt_graphs
    replay = graphs.replay
    graphs.replay = lambda size: replayed.append(size) or replay(size)
    assert tokens(llm, prompts, params) == [
        tokens(eager, [p], q)[0] for p, q in zip(prompts, params, strict=True)
    ]
    assert len(set(replayed)) > 1, "no step with a prompt was a graph replay"
    llm.engine.check()


def test_a_recording_leaves_the_rows_and_the_cache_as_they_are() -> None:
    llm = LLM(dtype="float32", device="cuda", num_blocks=64, max_num_seqs=8, use_tqdm=False)
    tokens(llm, PROMPTS[:3], GREEDY)
    runner = llm.engine._runner
    state = [
        runner._tables, runner.sampler.lengths, runner.sampler.last_tokens,
        *runner.cache.k, *runner.cache.v,
    ]  # fmt: skip
    before = [tensor.nan_to_num() for tensor in state]
    with torch.inference_mode():
        graphs = runner.kernels.graphs
        for size in graphs.sizes:  # the inbox holds the rows of a step of another size
            assert graphs.ensure(size, False, True)
    torch.cuda.synchronize()
    assert all(torch.equal(now.nan_to_num(), then) for now, then in zip(state, before, strict=True))


@pytest.mark.parametrize("name", ["prompt_graphs", "graphs"])
def test_a_step_that_fails_leaves_no_copy_on_its_way(
    recorded: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Steps after it would write to the host memory that the copy still reads."""
    engine = recorded.engine
    expected = tokens(recorded, PROMPTS, GREEDY)
    ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    if name == "graphs":
        engine.step()  # the prompts, and a decode step that is in flight now
    with monkeypatch.context() as patch:

        def fail(*form: object) -> None:
            torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
            raise RuntimeError("once")

        patch.setattr(getattr(engine._runner.kernels, name), "replay", fail)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
    assert torch.cuda.current_stream().query()
    while engine.has_unfinished:
        engine.step()
        engine.check()
    found = [[output.token_ids for output in engine.take_output(i).outputs] for i in ids]
    assert found == expected


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "gpt_neo"])
def test_steps_may_have_more_tokens_than_a_model_has_positions(family: str) -> None:
    """Steps have up to 8192 tokens by default, and each looks up a table of positions."""
    prompts = [[5, 9, 20, 33], [70, 3], [8, 8, 41, 1, 12, 60, 11]]
    params = replace(GREEDY, max_tokens=20, detokenize=False)
    found = []
    for enforce_eager in (False, True):
        llm = LLM(
            tiny_model(family).to(CUDA), device="cuda", num_blocks=64, max_num_seqs=4,
            max_num_batched_tokens=1024, enforce_eager=enforce_eager,
        )  # fmt: skip
        found.append(tokens(llm, prompts, params))
    assert found[0] == found[1]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The decode launches by Hopper's kernel: their rows, and whether they read early."""
    find, found = paged_attention_triton._find_launcher, []

    def watched(kernel: Any, problem: Any, *args: Any) -> Any:
        launcher = find(kernel, problem, *args)
        if launcher.kernel is decode_kernel and problem.max_query_len == 1:
            found.append((problem.num_seqs, launcher.constants["EARLY"]))
        return launcher

    monkeypatch.setattr(paged_attention_triton, "_find_launcher", watched)
    return found


def test_early_reads_change_no_token_of_dozens_of_sequences(
    launches: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode loads lengths, tables and old keys while preceding kernels run (decision 31)."""
    if DeviceInfo.of(CUDA).capability[0] != 9:
        pytest.skip("only Hopper's decode reads early")
    model = tiny_model(
        "qwen3", dtype=torch.bfloat16, hidden_size=256, head_dim=64, intermediate_size=256,
        max_position_embeddings=1024,
    ).to(CUDA)  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(96) for _ in range(rng.randint(60, 700))] for _ in range(48)]
    params = [
        replace(
            GREEDY, temperature=0.8 * (at % 2), seed=at, max_tokens=60 + at // 4, detokenize=False
        )
        for at in range(len(prompts))
    ]

    def run() -> list[list[tuple[int, ...]]]:
        # All prompts in one step: otherwise the sizes of chunks depend on measured times.
        llm = LLM(
            model, device="cuda", num_blocks=2400, max_num_seqs=64,
            max_num_batched_tokens=1 << 15, enable_prefix_caching=False,
        )  # fmt: skip
        runner, sizes = llm.engine._runner, []
        assert all(reason is None for reason in runner.model.fused_layers.values())
        graphs = runner.kernels.graphs
        replay = graphs.replay
        monkeypatch.setattr(
            graphs, "replay", lambda size, *form: sizes.append(size) or replay(size, *form)
        )
        found = tokens(llm, prompts, params)
        assert sizes.count(48) > 40, "most steps have all sequences"
        return found

    early = run()
    assert {is_early for rows, is_early in launches if rows >= 40} == {True}
    launches.clear()
    monkeypatch.setattr(
        engine_triton,
        "PagedBatch",
        lambda *args, **options: PagedBatch(*args, **{**options, "allows_early_reads": False}),
    )
    assert run() == early
    assert {is_early for rows, is_early in launches if rows >= 40} == {False}
    assert len({tuple(output) for [output] in early}) == len(prompts)


def test_eager_engines_record_nothing(eager: LLM) -> None:
    assert eager.engine._runner.kernels.graphs is None
    assert eager.engine._runner.kernels.prompt_graphs is None


@pytest.mark.parametrize("kind", ["recorded", "eager"])
def test_a_step_waits_for_the_event_of_its_tokens_and_for_nothing_else(
    kind: str, request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(kind)
    tokens(llm, PROMPTS, GREEDY)  # compiles and records
    params = replace(GREEDY, max_tokens=8, temperature=0.8, top_k=5, top_p=0.9, n=2, logprobs=1)
    for prompt in PROMPTS[:3]:
        llm.engine.add_request(prompt, params)
    while llm.engine.has_unfinished:
        with counting_waits() as waits:
            llm.engine.step()
        assert not waits, "an event is waited for, and nothing else"


def test_sampling_waits_for_its_results_only() -> None:
    logits = torch.randn(6, 1000, device=CUDA)
    options = [
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 0.5, "logprobs": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    ]
    rows = [SamplingInput(SamplingParams(**o), [1, 2], [3, 3], seed=1, index=0) for o in options]
    rows += [
        replace(row, params=replace(row.params, min_tokens=9), end_token_ids=(7,))
        for row in rows[:2]
    ]
    sample(logits, rows)
    with counting_waits() as waits:
        sample(logits, rows)
    assert len(waits) <= 3, "tokens, best logits and log-probabilities come back"


def test_samples_of_one_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "saves_time", lambda *_: True)
    rng = random.Random(1)
    head = [rng.randrange(200) for _ in range(120)]
    prompts = [head, [*head[:70], 5], [*head, 7, 8], [1, 2, 3]]
    found = []
    for min_saved in (10**9, 1):
        llm = LLM(dtype="float32", device="cuda", num_blocks=400, max_num_seqs=32)
        engine = llm.engine
        engine._runner.kernels.min_saved_tokens = min_saved
        engine.scheduler.grouper = PrefixGrouper(engine.pool.block_size, min_saved)
        params = replace(GREEDY, max_tokens=40, temperature=0.8, seed=3, n=6)
        found.append(tokens(llm, prompts, params))
        forms = engine._runner.kernels.graphs._recorded
        assert any(shares for _, _, shares in forms) == (min_saved == 1)
    assert found[0] == found[1]


# --- recordings by themselves ---------------------------------------------------------------


@torch.inference_mode()
def test_a_step_that_waits_for_the_device_is_not_recorded() -> None:
    numbers = torch.zeros(4, device=CUDA)

    def step(size: int, samples: bool) -> torch.Tensor:
        assert int(numbers.max()) >= 0
        return numbers[:size]

    graphs = StepGraphs(step, lambda size: None, [1, 2, 4])
    assert not graphs.ensure(2, True)
    assert "waits for the device" in graphs.reasons[2, True]
    assert not graphs.ensure(2, True)
    assert graphs.recorded_sizes == []


def test_only_sizes_of_many_tokens_of_a_mixture_in_float32_are_not_recorded() -> None:
    prompts = [[5, 9, 20, 33], [70, 3] * 40, [8, 8, 41, 1, 12, 60, 11] * 200]
    params = replace(GREEDY, max_tokens=12, detokenize=False)
    found = []
    for enforce_eager in (False, True):
        llm = LLM(
            tiny_model("mixtral", max_position_embeddings=2048).to(CUDA), device="cuda",
            num_blocks=256, max_num_seqs=4, max_num_batched_tokens=2048,
            enforce_eager=enforce_eager,
        )  # fmt: skip
        found.append(tokens(llm, prompts, params))
        graphs = llm.engine._runner.kernels.prompt_graphs
        if graphs is not None:
            recorded = [size for size in graphs.sizes if 2 * size <= 2048]  # experts of a token
            assert graphs.recorded_sizes == recorded != graphs.sizes
    assert found[0] == found[1]


def test_all_sizes_are_recorded_before_the_first_request(recorded: LLM) -> None:
    graphs = recorded.engine._runner.kernels.graphs
    assert graphs is not None
    assert not graphs.reasons
    assert graphs.recorded_sizes == graphs.sizes == [1, 2, 4, 8]
    graphs = recorded.engine._runner.kernels.prompt_graphs
    assert graphs.recorded_sizes == graphs.sizes
    assert graphs.sizes[-1] == recorded.engine.scheduler.max_num_batched_tokens == 8192


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_an_engine_runs_on_another_gpu_than_the_current_one(recorded: LLM) -> None:
    other = LLM(dtype="float32", device="cuda:1", num_blocks=256, max_num_seqs=8)
    assert torch.cuda.current_device() == 0
    assert tokens(other, PROMPTS, GREEDY) == tokens(recorded, PROMPTS, GREEDY)
