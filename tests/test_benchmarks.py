import dataclasses
import doctest
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
import torch
from benchmarks import __main__ as command_line
from benchmarks import (
    cases,
    gpu_inputs,
    gpu_peers,
    host_steps,
    prepare,
    shared_prefix,
    visible_blocks,
    vllm_ops,
    workload,
    workload_n,
)
from benchmarks.attention import AttentionCase
from benchmarks.block_sparse import BlockSparseCase
from benchmarks.cache_ops import CopyBlocksCase, WriteKVCase
from benchmarks.case import Check, Measurement, at_least, at_most, compile_effort
from benchmarks.document import Figure, fill, find_figures
from benchmarks.engine import EngineCase
from benchmarks.gate import check_calls, check_kernel
from benchmarks.generators import QWEN3
from benchmarks.gpu_attention import GpuDecodeCase, GpuPrefillCase
from benchmarks.gpu_inputs import Shape
from benchmarks.records import (
    RECORDS,
    RecordSpec,
    find_changes,
    find_changes_in_prose,
    find_loaded,
    find_machine,
    find_made,
    plan,
    run_script,
)
from benchmarks.report import record_line
from benchmarks.several_gpus import run_at_once, share_out
from benchmarks.shared_prefix import SharedPrefixCase
from benchmarks.tiles import ScoresCase, TiledCase
from benchmarks.visible_blocks import VisibleBlocksCase
from benchmarks.vllm_ops import VllmOpsCase
from benchmarks.window_workloads import WindowWorkloadsCase, find_workloads
from benchmarks.windows import WindowCase
from benchmarks.workload_n import (
    count_busy,
    draw_chats,
    draw_long,
    make_tokenizer,
    run_parts,
    serve,
    serve_in_turns,
    time_per_token,
    time_shared,
)
from typer.testing import CliRunner

from pagetile import BlockMask, PagedBatch, attention_scores, merge_states, paged_attention
from pagetile.analysis import timing
from pagetile.analysis.timing import Times, WallClock, admit, ratio, take_turns
from pagetile.integrations import vllm_ops as pagetile_ops
from pagetile.testing import PagedCase
from pagetile.tiles.state import AttentionOutput

TINY = AttentionCase(
    "tiny",
    PagedCase(query_lens=(1, 1), seq_lens=(30, 7), head_size=16),
    (at_least("x sdpa", 0.0), at_most("share of read bandwidth", 0.0)),
    versus=("block 4", PagedCase(query_lens=(1, 1), seq_lens=(30, 30), block_size=4)),
)


CLEAN_RUN = {
    "commit": "0123abcd",
    "date": "2026-01-02T03:04:05",
    "versions": dict.fromkeys(("torch", "numba", "transformers", "python"), "1"),
}


@dataclasses.dataclass(frozen=True)
class Fake:
    """A case without work, right or wrong as asked."""

    name: str = "fake"
    about: str = "nothing"
    targets: tuple = (at_most("seconds", 2.0),)
    is_right: bool = True
    device: str = "cpu"

    def verify(self):
        return [Check("pagetile", self.is_right, "as told")]

    def measure(self, repeats):
        times = Times((1.0,) * (repeats or 1))
        return Measurement({"pagetile": times}, {"seconds": times.median})


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command line on made-up cases, writing to ``tmp_path``."""

    def call(*arguments, present=(Fake(),)):
        monkeypatch.setattr(cases, "CASES", present)
        monkeypatch.setattr(command_line, "RESULTS", tmp_path)
        monkeypatch.setattr(command_line, "describe_run", lambda: CLEAN_RUN)
        return CliRunner().invoke(command_line.app, arguments)

    return call


@pytest.mark.parametrize("module", [timing, workload])
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


def test_list_names_every_case_and_its_targets(run):
    result = run("list", present=cases.CASES)
    assert result.exit_code == 0
    assert all(case.name in result.stdout for case in cases.CASES)
    assert "share of read bandwidth >= 0.4" in result.stdout


def test_names_of_cases_differ_and_targets_name_a_metric_once():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    for case in cases.CASES:
        metrics = [target.metric for target in case.targets]
        assert len(set(metrics)) == len(metrics)


def test_what_needs_a_gpu_is_left_out_without_one_or_refused_by_name(run, monkeypatch):
    present = (Fake(), Fake("far", device="cuda"))
    monkeypatch.setattr(cases.torch.cuda, "is_available", lambda: False)
    assert "far" in run("list", present=present).stdout
    result = run("verify", present=present)
    assert result.exit_code == 0
    assert "far" not in result.stdout
    refused = run("verify", "fake", "far", present=present)
    assert refused.exit_code == 2
    assert "no CUDA device for far" in refused.output
    monkeypatch.setattr(cases.torch.cuda, "is_available", lambda: True)
    assert "far" in run("verify", present=present).stdout


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        WriteKVCase("tiny", 40, cache_dtype=torch.int8, scales="token"),
        WriteKVCase("plain", 40),
        CopyBlocksCase("tiny", 3, num_caches=2),
        CopyBlocksCase("host", 3, num_caches=2, where="from the host"),
    ],
    ids=lambda case: case.name,
)
def test_small_cases_of_cache_operations_are_right_and_have_their_metrics(case):
    assert all(check.passed for check in case.verify())
    metrics = case.measure(repeats=None).metrics
    assert {"share of copy bandwidth", "host, microseconds"} <= metrics.keys()


SMALL_MODEL = dataclasses.replace(
    QWEN3,
    sizes={
        **QWEN3.sizes,
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 5000,
    },
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_small_engine_case_with_random_weights_is_right_and_has_its_metrics(device):
    case = EngineCase(
        "tiny",
        num_prompts=5,
        shortest=3,
        longest=20,
        max_tokens=8,
        device=device,
        model=SMALL_MODEL,
        dtype=torch.bfloat16,
        peers=("padded generate",),
    )
    checks = case.verify()
    assert [check.what for check in checks] == ["logits of a few tokens", "tokens of 5 prompts"]
    assert all(check.passed for check in checks)
    metrics = case.measure(repeats=1).metrics
    assert {"tokens/s", "x padded generate", "KV waste"} <= metrics.keys()
    assert ("milliseconds a step, 1 sequence" in metrics) == (device == "cuda")
    assert "x continuous batching" not in metrics


def test_the_host_time_of_a_step_is_that_of_an_engine_whose_decode_steps_are_a_stub(monkeypatch):
    pytest.importorskip("triton")
    replayed = []
    replay = host_steps.StubGraphs.replay
    monkeypatch.setattr(
        host_steps.StubGraphs, "replay", lambda *args: replayed.append(args[1]) or replay(*args)
    )
    engine = host_steps.make_engine(8, 100)
    assert host_steps.time_step(engine, 3, 30, 1) > 0
    assert replayed == [4] * 50, "three rows, filled up, in all steps but the prompts'"
    engine.check()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_window_workloads_are_whole_windows_and_right_with_and_without_a_shift():
    models = find_workloads()
    assert all(len({case.name for case in stages}) == len(stages) for stages in models.values())
    workloads = [case for stages in models.values() for case in stages]
    assert len(workloads) > 50
    for case in workloads:
        assert not any(side % size for side, size in zip(case.grid, case.window, strict=True))
    several, one = (
        WindowCase(str(side), (side, side), (4, 4), 2, 8, 2, torch.float32, device="cpu")
        for side in (16, 4)
    )
    checks = WindowWorkloadsCase("small", "a model", (several, one), device="cpu").verify()
    assert [check.what for check in checks] == ["16, shifted: cpu", "16: cpu", "4: cpu"]
    assert all(check.passed for check in checks)


def test_a_small_attention_case_and_its_peers_are_right():
    checks = TINY.verify()
    kinds = [check.what.split(":")[0] for check in checks[:3]]
    assert kinds == ["poisoned", "cpu", "the timed call runs cpu"]
    assert not [check for check in checks if not check.passed]
    measurement = TINY.measure(repeats=1)
    assert measurement.absent == {}
    assert "sdpa, group packed" in measurement.times


DECODE = GpuDecodeCase("d", (700, 90, 33), Shape(4, 2, 32), device="cpu")
PREFILL = GpuPrefillCase("p", (64, 64), Shape(4, 2, 32), device="cpu")
E4M3 = Shape(4, 2, 32, kv_dtype=torch.float8_e4m3fn, scales="head")


@pytest.mark.parametrize(
    "case",
    [DECODE, PREFILL, dataclasses.replace(DECODE, shape=E4M3)],
    ids=["decode", "prefill", "8 bits"],
)
def test_cases_of_gpus_are_right_on_a_cpu_at_their_own_size(case):
    checks = case.verify()
    assert "cpu" in [check.what.split(":")[0] for check in checks]
    assert "the timed call runs cpu" in [check.what for check in checks]
    assert not [check for check in checks if not check.passed]


def _without_a_block(monkeypatch, case):
    """Make the timed call skip 16 keys in the middle of its longest sequence."""
    right = gpu_inputs.paged_attention

    def wrong(q, k_cache, v_cache, batch, **options):
        tables = batch.block_tables.clone()
        tables[0, 20] = tables[0, 3]
        batch = dataclasses.replace(batch, block_tables=tables)
        return right(q, k_cache, v_cache, batch, **options)

    monkeypatch.setattr(gpu_inputs, "paged_attention", wrong)
    return [check.what for check in case.verify() if not check.passed]


def test_a_block_that_is_read_twice_fails_the_gate(monkeypatch):
    """At the timed size: a problem of 33 keys would not have shown it."""
    assert _without_a_block(monkeypatch, DECODE) == [f"cpu: {DECODE.about}"]


def test_another_implementation_than_the_named_one_fails_the_gate(monkeypatch):
    right = gpu_inputs.paged_attention

    def timed(*arguments, impl="auto", **options):
        out, lse = right(*arguments, impl=impl, **options)
        if impl == "auto":  # one that rounds a number the other way
            out[0, 0, :1] = torch.nextafter(out[0, 0, :1], out.new_tensor([torch.inf]))
        return AttentionOutput(out, lse)

    monkeypatch.setattr(gpu_inputs, "paged_attention", timed)
    failed = [check.what for check in DECODE.verify() if not check.passed]
    assert failed == ["the timed call runs cpu"]


def _refuse_to_compile(monkeypatch):
    def refuse(length, device):
        raise NotImplementedError("no compiler here")

    monkeypatch.setattr(gpu_peers, "compile_flex", refuse)


def test_peers_that_differ_or_fail_are_named_with_the_reason(monkeypatch):
    _refuse_to_compile(monkeypatch)
    right = gpu_peers._call

    def call(backend, *qkv, **options):
        if backend == gpu_peers._BACKENDS["flash"]:
            return lambda: right(backend, *qkv, **options)() * 1.2
        return right(backend, *qkv, **options)

    monkeypatch.setattr(gpu_peers, "_call", call)
    measurement = dataclasses.replace(PREFILL, shape=Shape(4, 4, 32)).measure(repeats=1)
    assert measurement.absent["sdpa flash"] == "wrong: 0.2 off float64"
    assert measurement.absent["flex"] == "unsupported: no compiler here"
    assert measurement.absent["flashinfer BatchAttention"] == "not installed"
    assert measurement.absent["sdpa cudnn"].startswith("unsupported: ")
    assert {"pagetile", "pagetile, in order"} == set(measurement.times)


def test_decode_is_measured_in_turns_with_reading(monkeypatch):
    from benchmarks import gpu_attention

    _refuse_to_compile(monkeypatch)
    monkeypatch.setattr(gpu_attention, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_attention, "_HOST_ROUNDS", 1)
    case = dataclasses.replace(DECODE, seq_lens=(64, 64), versus=("even", (32, 32), DECODE.shape))
    assert [c.what for c in case.verify() if "2 x 32, " in c.what and c.passed] != []  # "even", too
    measurement = case.measure(repeats=2)
    assert {"share of read bandwidth", "x sdpa flash", "GB/s / even"} <= set(measurement.metrics)
    uneven = dataclasses.replace(DECODE, seq_lens=(64, 20)).measure(repeats=1)
    assert (
        uneven.absent["sdpa"]
        == uneven.absent["flex"]
        == ("unsupported: sequences of several lengths")
    )
    several = dataclasses.replace(case, versus=None, has_compiled_peers=False).measure(repeats=1)
    assert several.absent["flex"].startswith("left out: it compiles")
    assert {
        len(time.seconds) for name, time in measurement.times.items() if "host" not in name
    } == {2}


SMALL_CASES = {
    "block sparse": BlockSparseCase("b", 64, 2, 16, block=16, visible=0.5, device="cpu"),
    "visible blocks": VisibleBlocksCase("v", 3, 128, 4, 2, 32, visible=0.25, device="cpu"),
    "shared prefix": SharedPrefixCase("p", 3, 64, 20, 4, 2, 32, device="cpu"),
    "vllm_ops, 8 bits": VllmOpsCase(3, 40, 4, 2, 32, kv_dtype=torch.float8_e4m3fn, device="cpu"),
    "scores": ScoresCase("s", 3, 2, 20, 8, torch.float32, device="cpu"),
}


@pytest.mark.parametrize("name", SMALL_CASES)
def test_small_cases_are_right_and_are_measured(name, monkeypatch):
    case = SMALL_CASES[name]
    monkeypatch.setattr(BlockSparseCase, "_flex", lambda *_: lambda: 1 / 0)
    monkeypatch.setattr(vllm_ops, "read_all", lambda device, num_bytes: None)
    assert not [check for check in case.verify() if not check.passed]
    measurement = case.measure(repeats=1)
    assert measurement.metrics
    if name == "block sparse":
        assert measurement.absent == {"flex": "unsupported: division by zero"}
        assert "x dense" in measurement.metrics
    if name == "shared prefix":
        assert measurement.absent == {"flashinfer cascade": "not installed"}
        assert measurement.metrics.keys() == {"microseconds", "x plain"}


class Cascade:
    """FlashInfer's wrappers: they plan lists of pages; the library merges their results."""

    def __init__(self, *arguments, backend="auto", use_tensor_cores=False):
        self.backend = backend

    def plan(self, *arrays, q_data_type, kv_data_type, causal=False):
        *self.levels, heads, kv_heads, size, block_size = arrays
        assert (heads, kv_heads, size, block_size, causal) == (4, 2, 32, 16, False)
        assert q_data_type == kv_data_type == torch.bfloat16

    def attend(self, q, caches, starts, indptr, indices, last):
        lists = indices.tensor_split(indptr[1:-1].tolist())
        tables = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        lengths = ((indptr[1:] - indptr[:-1] - 1) * 16 + last).int()
        longest = int((starts[1:] - starts[:-1]).max())
        batch = PagedBatch(tables, lengths, starts, longest, int(lengths.max()))
        return paged_attention(q, *caches, batch, causal=False)

    def run(self, q, caches, out=None, lse=None, return_lse=False):
        if return_lse:
            arrays = self.levels if len(self.levels) == 4 else [each_starts(q), *self.levels]
            found = self.attend(q, caches, *arrays)
            return out.copy_(found.out), lse.copy_(found.lse)
        return merge_states(*map(torch.stack, zip(*(
            self.attend(q, caches, *level) for level in zip(*self.levels, strict=True)
        ), strict=True))).out  # fmt: skip


def each_starts(q):
    return torch.arange(len(q) + 1, dtype=torch.int32)


def merge_into(out, lse, other, other_lse):
    found = merge_states(torch.stack([out, other]), torch.stack([lse, other_lse]))
    out.copy_(found.out)


def test_a_cascade_reads_the_prefix_once_and_the_own_keys_of_each(monkeypatch):
    library = SimpleNamespace(
        MultiLevelCascadeAttentionWrapper=Cascade, BatchPrefillWithPagedKVCacheWrapper=Cascade,
        BatchDecodeWithPagedKVCacheWrapper=Cascade, merge_state_in_place=merge_into,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(shared_prefix, "find_spec", lambda name: name)
    measurement = SMALL_CASES["shared prefix"].measure(repeats=1)
    assert measurement.absent == {}
    forms = ["flashinfer cascade", "flashinfer cascade parts", "flashinfer cascade fa2"]
    assert list(measurement.times) == ["pagetile", "plain", *forms]
    fastest = min(measurement.times[name].median for name in forms)
    own = measurement.times["pagetile"].median
    assert measurement.metrics["x cascade"] == pytest.approx(fastest / own)
    monkeypatch.setattr(library, "merge_state_in_place", lambda *states: None)
    absent = SMALL_CASES["shared prefix"].measure(repeats=1).absent
    assert list(absent) == forms[1:]
    assert all(reason.startswith("wrong: ") for reason in absent.values())


class VllmOperators:
    """vLLM's operators, called by their names; the first gives wrong results."""

    @staticmethod
    def paged_attention_v1(out, *arguments):
        out.zero_()

    @staticmethod
    def paged_attention_v2(*arguments):
        pagetile_ops.paged_attention_v2(*arguments)


def test_vllms_own_operators_are_compared_where_they_are_right(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=VllmOperators))
    monkeypatch.setattr(vllm_ops, "read_all", lambda device, num_bytes: None)
    measurement = SMALL_CASES["vllm_ops, 8 bits"].measure(repeats=1)
    assert measurement.absent == {"vllm v1": "wrong: 1 off float64"}
    own = min(measurement.times[name].median for name in ("v1", "v2"))
    vllm = measurement.times["vllm v2"].median
    assert measurement.metrics["x vllm"] == pytest.approx(vllm / own)
    assert {target.metric for case in vllm_ops.VLLM_CASES for target in case.targets} == {"x vllm"}


def test_a_visible_block_that_is_left_out_fails_the_gate(monkeypatch):
    right = visible_blocks.paged_attention

    def wrong(*arguments, visible_blocks, **options):
        hidden = visible_blocks.clone()
        hidden[..., -1] = -1
        return right(*arguments, visible_blocks=hidden, **options)

    monkeypatch.setattr(visible_blocks, "paged_attention", wrong)
    failed = [check.what for check in SMALL_CASES["visible blocks"].verify() if not check.passed]
    assert failed == [f"cpu: {SMALL_CASES['visible blocks'].about}"]


def test_a_prefix_that_ends_too_early_fails_the_gate(monkeypatch):
    right = shared_prefix.paged_attention

    def wrong(q, k_cache, v_cache, batch, **options):
        shorter = dataclasses.replace(batch, seq_lens=batch.seq_lens - 4)
        return right(q, k_cache, v_cache, shorter, **options)

    monkeypatch.setattr(shared_prefix, "paged_attention", wrong)
    case = SMALL_CASES["shared prefix"]
    failed = [check.what for check in case.verify() if not check.passed]
    assert failed == [f"pagetile, auto: {case.about}", f"plain, cpu: {case.about}"]


def test_a_target_of_what_was_not_measured_is_not_reached():
    assert at_least("x", 1).is_reached({"x": 1.0})
    assert not at_least("x", 1).is_reached({})
    assert not at_most("x", 1).is_reached({})


def test_the_reference_in_place_of_a_kernel_fails_the_gate():
    q = torch.randn(1, 2, 20, 8)
    names = {"cpu": True, "reference": False}
    for impl, passed in names.items():
        check = check_kernel(
            "attention_scores", lambda impl=impl: attention_scores(q, q, impl=impl)
        )
        assert (check.what, check.passed) == (f"the timed call runs {impl}", passed)


@pytest.fixture
def check_attentions():
    """Run the gate on a model's step that calls window attention twice, on a CPU."""
    from pagetile.integrations.swin import attend
    from pagetile.ops.window_attention import operator

    q = torch.randn(3, 2, 9, 8, requires_grad=True)

    def check(step=lambda: [attend.window_attention(q, q, q) for _ in range(2)]):
        return check_calls("attentions", step, attend, "window_attention", operator, at_least=2)

    return check


def test_the_implementation_inside_a_models_step_is_named_and_verified(check_attentions):
    check = check_attentions()
    assert (check.what, check.passed) == ("attentions of the timed step run cpu (2)", True)
    check = check_attentions(lambda: None)
    assert (check.what, check.passed) == ("attentions of the timed step run nothing", False)


def test_the_reference_inside_a_models_step_fails_the_gate(check_attentions, monkeypatch):
    from pagetile.ops.window_attention import operator

    monkeypatch.setattr(operator, "IMPLEMENTATIONS", ("reference",))
    check = check_attentions()
    assert (check.what, check.passed) == ("attentions of the timed step run reference (2)", False)


def test_other_bits_than_the_named_implementations_fail_the_gate(check_attentions, monkeypatch):
    from pagetile.integrations.swin import attend

    right = attend.window_attention

    def wrong(*arguments, impl="auto"):
        out, lse = right(*arguments, impl=impl)
        return AttentionOutput(out * (1 + 1e-6) if impl == "auto" else out, lse)

    monkeypatch.setattr(attend, "window_attention", wrong)
    assert not check_attentions().passed


def test_a_visible_tile_that_is_left_out_fails_the_gate(monkeypatch):
    from benchmarks import block_sparse

    right = block_sparse.attention

    def wrong(q, k, v, *, block_mask, **options):
        hidden = block_mask.mask.clone()
        hidden[0, 0, :, int(hidden[0, 0, 0].int().argmax())] = False
        mask = BlockMask(hidden, block_mask.block_q, block_mask.block_k)
        return right(q, k, v, block_mask=mask, **options)

    monkeypatch.setattr(block_sparse, "attention", wrong)
    case = SMALL_CASES["block sparse"]
    failed = [check.what for check in case.verify() if not check.passed]
    assert failed == [f"cpu: {case.about}"]


def test_a_wrong_gradient_of_dense_attention_fails_the_gate(monkeypatch):
    case = TiledCase("t", 2, 60, 4, 2, 16, dtype=torch.float32, device="cpu")
    assert all(check.passed for check in case.verify())
    right = TiledCase._run

    def wrong(self, *arguments):
        out, dq, dk, dv = right(self, *arguments)
        return [out, dq, dk * 1.001, dv]

    monkeypatch.setattr(TiledCase, "_run", wrong)
    failed = [check.what for check in case.verify() if not check.passed]
    assert failed == [f"cpu: dk, {case.about}"]


def test_a_measurement_has_every_metric_that_a_target_names(monkeypatch):
    from benchmarks import attention

    monkeypatch.setattr(attention, "read_all", lambda *_: None)  # a gigabyte is not for tests
    measurement = TINY.measure(repeats=1)
    assert {target.metric for target in TINY.targets} <= set(measurement.metrics)
    assert "time / block 4" in measurement.metrics


def test_a_wrong_case_is_not_timed(run, tmp_path):
    result = run("run", "--out", "red", present=(Fake(is_right=False),))
    assert result.exit_code == 1
    assert "median" not in result.stdout
    assert json.loads((tmp_path / "red.json").read_text())["cases"] == []
    assert run("verify", present=(Fake(is_right=False),)).exit_code == 1


def test_an_archive_knows_its_commit(monkeypatch, tmp_path):
    """A copy that is measured elsewhere has no git history."""
    from benchmarks import machine

    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "benchmarks" / "machine.py"))
    (tmp_path / "benchmarks" / "archived.txt").write_text("0123abcd\n")
    assert machine.describe_run()["commit"] == "0123abcd"
    (tmp_path / "benchmarks" / "archived.txt").write_text("$Format:%H$\n")
    assert machine.describe_run()["commit"] is None  # no repository there
    assert not machine.is_clean(None)
    assert not machine.is_clean("0123abcd and changes")


def test_a_changed_tree_makes_no_record_and_documents_none(run, tmp_path, monkeypatch):
    changed = CLEAN_RUN | {"commit": "0123abcd and changes"}
    run("run", "--out", "r")
    monkeypatch.setattr(command_line, "describe_run", lambda: changed)
    refused = CliRunner().invoke(command_line.app, ["run", "--out", "s"])
    assert refused.exit_code == 2
    assert "commit what is changed" in refused.output
    assert not (tmp_path / "s.json").exists()
    page = "<!-- table: r fake | seconds -->\n<!-- end -->"
    assert "| **1** |" in fill(page, tmp_path)
    record = json.loads((tmp_path / "r.json").read_text())
    record["cases"][0]["commit"] = changed["commit"]
    (tmp_path / "r.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="fake ran on code that is in no commit"):
        fill(page, tmp_path)


def test_a_result_holds_machine_versions_commit_and_cases(run, tmp_path):
    assert run("run", "--out", "one", "--repeats", "3").exit_code == 0
    result = json.loads((tmp_path / "one.json").read_text())
    assert set(result) == {"machine", "cases"}
    assert {"cpu", "cores"} <= set(result["machine"])
    [case] = result["cases"]
    assert {"commit", "date"} <= set(case)
    assert {"torch", "numba", "transformers", "python"} <= set(case["versions"])
    assert case["targets"] == [{"metric": "seconds", "bound": 2.0, "sign": "<=", "reached": True}]
    assert 0 <= case["share_of_other_processes"] <= 1
    assert case["times"]["pagetile"]["repeats"] == 3
    assert case["times"]["pagetile"]["seconds"] == [1.0, 1.0, 1.0]
    assert case["absent"] == {}
    assert str(Path.home()) not in json.dumps(result)


def test_a_run_of_some_cases_keeps_what_a_record_has_of_others(run, tmp_path):
    path = tmp_path / "all.json"
    one, two, three = (Fake(name) for name in ("one", "two", "three"))

    def names():
        return [case["name"] for case in json.loads(path.read_text())["cases"]]

    run("run", "three", "one", "--out", "all", present=(one, two, three))
    assert names() == ["one", "three"]
    run("run", "two", "--out", "all", present=(one, two, three))
    assert names() == ["one", "two", "three"]
    run("run", "two", "--out", "all", present=(one, Fake("two", is_right=False), three))
    assert names() == ["one", "three"]
    run("run", "one", "--out", "all", present=(one,))
    assert names() == ["one"]  # no case of the other name is left


def test_a_record_of_another_machine_is_left_alone(run, tmp_path):
    path = tmp_path / "all.json"
    run("run", "--out", "all")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"machine": {"cpu": "another"}}))
    refused = run("run", "--out", "all")
    assert refused.exit_code == 2
    assert "all.json is of another machine" in refused.output
    assert json.loads(path.read_text())["machine"] == {"cpu": "another"}


def test_records_whose_cases_share_a_date_can_be_read(run, tmp_path):
    run("run", "--out", "new")
    record = json.loads((tmp_path / "new.json").read_text())
    shared = {name: record["cases"][0].pop(name) for name in ("commit", "date", "versions")}
    (tmp_path / "old.json").write_text(json.dumps(shared | record))
    (tmp_path / "none.json").write_text(json.dumps(record | {"cases": []}))
    paths = {name: str(tmp_path / f"{name}.json") for name in ("new", "old", "none")}
    assert run("compare", paths["old"], paths["new"]).exit_code == 0
    assert "never" in run("compare", paths["none"], paths["new"]).output
    run("run", "--out", "old")
    assert (tmp_path / "old.json").read_text().count("versions") == 1


def test_a_record_names_files_but_not_folders_of_its_machine():
    reason = "no 'a/b' (/opt/x-1/lib/python3: /tmp/y/z.h:4 and https://host/a/b failed)"
    line = {"what": "one", "absent": {"p": reason}}
    [recorded] = record_line(line, "case", 0.0, {})["absent"].values()
    assert recorded == "no 'a/b' (python3: z.h:4 and https://host/a/b failed)"


def test_a_table_says_when_its_cases_were_measured(tmp_path):
    one = {
        "name": "a-1", "about": "one: 4, f16", "date": "2026-01-02T03:04:05",
        "versions": {"torch": "2.1"}, "commit": "abcdef012",
        "absent": {"p": "out of memory", "r": "out of memory", "s": "wrong " * 40},
        "times": {"q": {"median": 2e-3, "repeats": 9}, "q b": {"median": 1e-3, "repeats": 27}},
        "metrics": {"x": 1.5}, "targets": [],
    }  # fmt: skip
    two = one | {"date": "2026-01-04T00:00:00", "versions": {"torch": "2.2"}, "absent": {}}
    two |= {"about": "one: 5, f16"}
    record = {"machine": {"cpu": "CPU", "cores": 2}, "cases": [one, two]}
    (tmp_path / "r.json").write_text(json.dumps(record))
    page = fill("<!-- table: r a- | x | time: q -->\n<!-- end -->", tmp_path)
    alone = fill("<!-- table: r a-1, | x -->\n<!-- end -->", tmp_path)
    assert "Unless" not in page + alone
    caption = "torch 2.1 and 2.2, 2026-01-02 to 2026-01-04, commit abcdef0, 9–27 repeats. "
    assert f"2 cores of an CPU, {caption}All rows: one: f16. " in page
    assert "Left out: p, r (out of memory; 1 of 2 rows); s (wrong wrong" in page
    assert "wrong …; 1 of 2 rows). Times in ms.\n" in page
    assert "| 4 | 1.5 | 1 |\n| 5 | 1.5 | 1 |\n" in page


@pytest.mark.parametrize(
    ("seconds", "unit", "cells"),
    [
        ((26.94e-6, 1.4949e-3), "µs", ["26.9", "1490"]),
        ((1.5, 12345.6), "s", ["1.5", "12 300"]),
        ((9e-4, 1e-3), "µs", ["900", "1000"]),
        ((2e-10, 1e-9), "ns", ["0.2", "1"]),
        ((None, 2e-3), "ms", ["", "2"]),
    ],
)
def test_all_times_of_a_table_have_the_unit_of_the_shortest(seconds, unit, cells, tmp_path):
    times = [{} if time is None else {"q": {"median": time, "repeats": 9}} for time in seconds]
    case = {"name": "a", "versions": {}, "commit": "abcdef0", "date": "2026-01-02T03:04:05",
            "metrics": {}, "targets": []}  # fmt: skip
    record = {"machine": {"cpu": "CPU", "cores": 2}}
    record["cases"] = [case | {"about": str(i), "times": time} for i, time in enumerate(times)]
    (tmp_path / "r.json").write_text(json.dumps(record))
    page = fill("<!-- table: r a | time: q -->\n<!-- end -->", tmp_path)
    assert f" Times in {unit}.\n\n" in page
    assert re.findall(r"\| \d \| (.*) \|", page) == cells


@pytest.mark.parametrize(
    ("abouts", "said", "rows"),
    [
        (["p: 4, f16, [1, 8]", "p: 5, f16, [1, 8]", "p: 5, f32, [1, 8]", "p: 5, f16, [1, 8], cap"],
         "All rows: p: [1, 8]. Unless a row says otherwise: f16.", ["4", "5", "5, f32", "5, cap"]),
        # Half of the rows are not most, and the first part stays in its row.
        (["p: 4, f16", "p: 4, f16", "p: 4, f32", "p: 5, f32"],
         "All rows: p.", ["4, f16", "4, f16", "4, f32", "5, f32"]),
        # A row without the part would be read as having it.
        (["p: 4, cap", "p: 5, cap", "p: 6, cap", "p: 7"],
         "All rows: p.", ["4, cap", "5, cap", "6, cap", "7"]),
    ],
)  # fmt: skip
def test_a_caption_says_what_most_rows_share(abouts, said, rows, tmp_path):
    common = {"name": "a", "versions": {}, "commit": "abcdef0", "date": "2026-01-02T03:04:05",
              "times": {}, "metrics": {"x": 1.5}, "targets": []}  # fmt: skip
    record = {"machine": {"cpu": "CPU", "cores": 2}}
    record["cases"] = [common | {"about": about} for about in abouts]
    (tmp_path / "r.json").write_text(json.dumps(record))
    page = fill("<!-- table: r a | x -->\n<!-- end -->", tmp_path)
    assert f" {said}\n\n" in page
    assert re.findall(r"\| (.+) \| 1.5 \|", page) == rows


def test_compare_prints_both_results_and_their_ratio(run, tmp_path):
    run("run", "--out", "before")
    run("run", "--out", "after")
    paths = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
    result = run("compare", *paths)
    assert result.exit_code == 0
    assert re.search(r"fake +pagetile, ms +1000 +1000 +1\.000", result.stdout)


def test_an_unknown_case_is_one_clear_line_and_exit_code_2(run):
    result = run("verify", "nosuchcase")
    assert result.exit_code == 2
    assert "nosuchcase" in result.output


def test_contestants_take_turns_and_preparations_are_not_timed():
    log = []
    calls = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    before = {"a": lambda: log.append("before a")}
    times = take_turns(calls, repeats=3, warmup=1, before=before, clock=WallClock(rest=0))
    assert {name: len(t.seconds) for name, t in times.items()} == {"a": 3, "b": 3}
    turns = [word for word in log if word in "ab"]
    assert all(set(turns[i : i + 2]) == {"a", "b"} for i in range(0, 8, 2))
    assert all(log[i - 1] == "before a" for i, word in enumerate(log) if word == "a")


def test_a_ratio_is_taken_round_by_round():
    # The second round was slow for both: it says nothing about either.
    assert ratio(Times((2.0, 20.0, 2.0)), Times((1.0, 10.0, 1.0))) == 2.0


def test_peers_left_out_are_named_with_the_reason():
    def out_of_memory():
        raise torch.OutOfMemoryError("tried to allocate")

    calls = {"right": lambda: 1, "wrong": lambda: 2, "large": out_of_memory}
    found, absent = admit(calls, lambda name, one: None if one == 1 else "wrong: 1 off")
    assert list(found) == ["right"]
    assert absent == {"wrong": "wrong: 1 off", "large": "out of memory"}


def test_a_plan_of_records_keeps_their_order_and_what_fits():
    specs = [
        RecordSpec(name, "cpu", seconds) for name, seconds in (("-a", 50), ("-b", 60), ("-c", 9))
    ]
    fitting, left = plan("cpu", 60, specs)
    assert [spec.ending for spec in fitting] == ["-a", "-c"]
    assert [spec.ending for spec in left] == ["-b"]


def test_every_case_is_in_one_record_and_a_gpu_takes_25_minutes_two_cores_28():
    for case in cases.CASES:
        specs = [spec.ending for spec in RECORDS if spec.find([case])]
        assert len(specs) == 1, case.name
    preparing = 200
    assert plan("cuda", 25 * 60 - preparing)[1] == plan("cpu", 28 * 60)[1] == []


def test_a_machine_is_known_by_its_records(run, tmp_path):
    assert re.fullmatch(r"[a-z0-9-]+", find_machine(tmp_path))
    run("run", "--out", "mine")
    run("run", "--out", "mine-tiles")
    assert find_machine(tmp_path) == "mine"


def test_whole_records_are_renewed_on_another_host_of_the_same_gpu_only(run, tmp_path):
    present = (Fake("decode-x"),)
    run("run", "--out", "m", present=present)
    record = json.loads((tmp_path / "m.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps(record | {"machine": {"cpu": "another"}}))
    result = run("all", "--machine", "m", "--minutes", "5.5", present=present)
    assert "missing: m: the record is of another machine" in result.output
    other_host = record["machine"] | {"torch_threads": 99}
    (tmp_path / "m.json").write_text(json.dumps(record | {"machine": other_host}))
    run("all", "--machine", "m", "--minutes", "5.5", present=present)
    assert json.loads((tmp_path / "m.json").read_text())["machine"] == record["machine"]


def _record_of(median, spread=0.01):
    times = {"median": median, "p10": median * (1 - spread), "p90": median * (1 + spread)}
    return {"cases": [{"name": "a-1", "times": {"pagetile": times}, "metrics": {"x": 1 / median}}]}


def test_a_table_names_the_fastest_peer_and_says_where_it_wins(tmp_path):
    medians = {
        "pagetile": 2.0, "sdpa cudnn": 1.5, "flex": 4.0, "reading alone": 0.5,
        "host, pagetile": 0.1, "pagetile, clean cache": 1.0, "flex, clean cache": 1.25,
    }  # fmt: skip
    case = {
        **CLEAN_RUN, "name": "a", "about": "x", "share_of_other_processes": 0.0, "metrics": {},
        "targets": [], "times": {k: {"median": v, "repeats": 1} for k, v in medians.items()},
    }  # fmt: skip
    record = {"machine": {"gpu": "G"}, "cases": [case]}
    (tmp_path / "r.json").write_text(json.dumps(record))
    page = "<!-- table: r a | x fastest peer | x fastest peer, clean cache -->\n<!-- end -->"
    assert "| x | 0.75 (sdpa cudnn) | 1.25 (flex) |" in fill(page, tmp_path)
    figure = Figure("r", "a", "x fastest peer", "2 digits")
    assert figure.of(record) == "0.75"


def test_documented_figures_that_change_beyond_noise_are_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: r a- | x | time: pagetile -->\n<!-- end -->")
    before = _record_of(1.0)
    assert find_changes([page], "r", before, _record_of(1.02)) == []
    assert find_changes([page], "other", before, _record_of(2.0)) == []
    found = find_changes([page], "r", before, _record_of(1.1))
    assert [change.column for change in found] == ["x", "time: pagetile"]
    assert str(found[1]).startswith("page.md: a-1, time: pagetile: 1 to 1.1 (+10.0%, noise 3.0%)")
    assert find_changes([page], "r", _record_of(1.0, 0.1), _record_of(1.1)) == []


def _record_with(*values):
    cases = [
        {"name": f"a-{i}", "commit": "0123abcd", "times": {}, "metrics": {"x": x, "y": 2 * x}}
        for i, x in enumerate(values)
    ]
    return {"machine": {"cpu": "CPU", "cores": 2}, "cases": cases}


@pytest.mark.parametrize(
    ("column", "style", "text"),
    [
        ("x", "2 digits", "1.3 to 2.7"),
        ("x", "least 2 digits", "1.2"),
        ("x", "most 2 digits", "2.7"),
        ("x", "%", "126 to 266 %"),
        ("x", "3 digits µs", "1 260 000 to 2 660 000 µs"),
        ("y over x", "3 digits", "2.00"),
        ("y less x", "2 digits", "1.3 to 2.7"),
    ],
)
def test_a_figure_in_a_sentence_is_that_of_the_record(tmp_path, column, style, text):
    (tmp_path / "r.json").write_text(json.dumps(_record_with(1.26, 2.66)))
    page = f"It is <!-- figure: r a- | {column} | {style} -->?<!-- /figure --> so."
    filled = fill(page, tmp_path)
    assert filled == page.replace("?", text)
    assert fill(filled, tmp_path) == filled


def test_a_figure_in_a_sentence_of_a_case_that_was_not_run_is_refused():
    with pytest.raises(ValueError, match="r has no case whose name begins with b-"):
        Figure("r", "b-", "x", "2 digits").of(_record_with(1.0))
    with pytest.raises(ValueError, match="r has no 'z' of a-"):
        Figure("r", "a-", "z", "2 digits").of(_record_with(1.0))
    with pytest.raises(ValueError, match="written as 'two'"):
        Figure("r", "a-", "x", "two").of(_record_with(1.0))


def test_sentences_that_a_new_record_changes_are_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- figure: r a- | x | 2 digits -->1.0<!-- /figure -->")
    before = _record_with(1.0)
    assert find_changes_in_prose([page], "r", before, _record_with(1.01)) == []
    assert find_changes_in_prose([page], "other", before, _record_with(2.0)) == []
    found = find_changes_in_prose([page], "r", before, _record_with(1.0, 2.0))
    assert found == ["page.md, in a sentence: 1.0 to 1.0 to 2.0"]


def test_a_table_of_a_script_waits_for_its_record(tmp_path):
    page = "<!-- table: s s- | x | until recorded: python -m s -->\n<!-- end -->"
    waiting = fill(page, tmp_path)
    assert "Not recorded yet: `python -m s` prints it." in waiting
    (tmp_path / "r.json").write_text(json.dumps(_record_with(1.0)))
    other = page.replace("table: s s-", "table: r b-")
    assert "Not recorded yet" in fill(other, tmp_path), "the record has none of the cases"
    spec = RecordSpec("-s", "cpu", 1, script=("s",))
    _run_printing(spec, tmp_path / "s.json", {"what": "A b", "x": 1.5, "x, each turn": [1, 1.5, 2]})
    assert "2026-01-02, commit 0123abc, 3 repeats." in fill(waiting, tmp_path)
    assert "| A b | 1.5 |" in fill(waiting, tmp_path)


def _run_printing(spec, path, line):
    """Run a record's script that prints a line."""
    code = f"print({json.dumps(line)!r}); print('and more')"
    printing = dataclasses.replace(spec, script=("code", code))
    assert _run(printing, path) == []


def _run(spec, path, made=(), timeout=30.0):
    """Run a record's script, given as code, which finds the names of its parts in sys.argv."""
    from unittest import mock

    real = subprocess.Popen

    def start(command, **options):
        at = command.index("-m")
        _, _, code, *parts = command[at:]
        return real([*command[:at], "-c", code, *parts], **options)

    with mock.patch.object(subprocess, "Popen", start):
        return run_script(spec, path, timeout, CLEAN_RUN, made)


def test_a_record_of_a_script_keeps_repeats_and_shows_changes_beyond_their_spread(tmp_path):
    spec, path = RecordSpec("-s", "cpu", 1, script=("s",)), tmp_path / "r.json"
    line = {"what": "A b", "about": "words", "x": 2.0, "y": 1.0, "x, each turn": [1.0, 2.0, 3.0]}
    line |= {"targets": [["x", 1.5, ">="]], "checks": ["right"]}
    records = []
    for factor in (1.0, 1.5):
        _run_printing(spec, path, line | {"x": 2 * factor, "y": factor})
        records.append(json.loads(path.read_text()))
    [case] = records[0]["cases"]
    assert (case["name"], case["about"], case["commit"]) == ("s-a-b", "words", "0123abcd")
    assert case["metrics"] == {"x": 2.0, "y": 1.0}
    assert case["repeats"] == {"x": [1.0, 2.0, 3.0]}
    assert case["targets"] == [{"metric": "x", "bound": 1.5, "sign": ">=", "reached": True}]
    assert case["checks"] == [{"what": "right", "passed": True, "detail": ""}]
    page = tmp_path / "page.md"
    page.write_text("<!-- table: r s- | x | y -->\n<!-- end -->")
    assert [change.column for change in find_changes([page], "r", *records)] == ["y"]
    assert 0 <= case["share_of_other_processes"] <= 1


def test_each_script_of_a_record_is_a_module_that_exists():
    from importlib.util import find_spec

    scripts = {spec.ending: spec.script for spec in RECORDS if spec.script}
    assert {"-workload-n", "-speculation", "-http", "-latency"} == scripts.keys()
    parts = {part for spec in RECORDS for part, _ in spec.parts}
    assert parts == workload_n.CASES.keys()
    assert all(find_spec(script[0]) for script in scripts.values())


PARTS = RecordSpec(
    "-s", "cpu", 1,
    script=("code", """
import json, sys, time
for part in sys.argv[1:]:
    if part == "bad":
        raise SystemExit("it is bad")
    print(json.dumps({"what": "The " + part, "x": len(sys.argv)}), flush=True)
    time.sleep(60 * (part == "slow"))
"""),
    parts=(("a", "The a"), ("bad", "The bad"), ("slow", "The slow"), ("c", "The c")),
    apart=("bad", "c"),
)  # fmt: skip


def test_parts_of_a_script_are_kept_as_they_come_and_made_once(tmp_path):
    path = tmp_path / "m-s.json"
    failures = _run(dataclasses.replace(PARTS, parts=PARTS.parts[:2] + PARTS.parts[3:]), path)
    assert [failure.rpartition(": ")[2] for failure in failures] == ["it is bad"]
    cases = json.loads(path.read_text())["cases"]
    assert [case["name"] for case in cases] == ["s-the-a", "s-the-c"], "each in a process"
    assert cases[0]["command"].startswith("python -m code")
    assert find_made(path, CLEAN_RUN["commit"]) == {"s-the-a", "s-the-c"}
    assert find_made(path, "another") == find_made(path, None) == set()
    left = list(PARTS.commands(find_made(path, CLEAN_RUN["commit"])))
    assert [arguments[2:] for arguments in left] == [("slow",), ("bad",)]


def test_what_a_script_printed_before_its_time_was_up_is_kept(tmp_path):
    path = tmp_path / "m-s.json"
    failures = _run(PARTS, path, made={"s-the-bad", "s-the-c"}, timeout=3.0)
    assert failures[0].endswith("it took longer than 3 s")
    names = [case["name"] for case in json.loads(path.read_text())["cases"]]
    assert names == ["s-the-a", "s-the-slow"]


def test_cases_on_a_loaded_machine_are_named():
    record = {
        "cases": [{"name": n, "share_of_other_processes": s} for n, s in (("a", 0.5), ("b", 0))]
    }
    assert find_loaded(record) == ["a: other processes took 50%"]


def test_all_renews_the_records_of_this_machine_and_says_what_is_missing(run, tmp_path):
    present = (
        Fake("decode-x"),
        Fake("tiled-x", is_right=False),
        Fake("gpu-decode-x", device="cuda"),
    )
    result = run("all", "--machine", "m", "--minutes", "5.5", present=present)
    assert result.exit_code == 1
    assert [case["name"] for case in json.loads((tmp_path / "m.json").read_text())["cases"]] == [
        "decode-x"
    ]
    early, _, late = result.output.partition("m-tiles ends")
    assert "missing: m-tiles: tiled-x is wrong" in early
    assert "missing: m-tiles: tiled-x is wrong" in late
    assert "missing: m-engine: no time for its 660 s" in result.output
    assert "documented figures changed" in result.output


def _names(path):
    return [case["name"] for case in json.loads(path.read_text())["cases"]]


def test_all_goes_on_where_it_stopped(run, tmp_path):
    measured = []

    class Counted(Fake):
        def measure(self, repeats):
            measured.append(self.name)
            if self.name == "decode-b" and measured.count(self.name) == 1:
                raise RuntimeError("no memory")
            return super().measure(repeats)

    present = tuple(Counted(f"decode-{letter}") for letter in "abc")
    options = ["all", "--machine", "m", "--only", "", "--minutes", "5.5"]
    first = run(*options, present=present)
    assert "missing: m: decode-b failed: no memory" in first.output
    assert _names(tmp_path / "m.json") == ["decode-a", "decode-c"]
    assert run(*options, "--but", "decode-b", present=present).exit_code == 0
    assert measured == ["decode-a", "decode-b", "decode-c"], "left out, and made before"
    assert run(*options, present=present).exit_code == 0
    assert measured == ["decode-a", "decode-b", "decode-c", "decode-b"]
    assert _names(tmp_path / "m.json") == ["decode-a", "decode-b", "decode-c"]
    refused = run(*options, "--only", "nothing", present=present)
    assert refused.exit_code == 2
    assert "no record ends with -nothing" in refused.output


def test_a_lost_device_is_left_and_the_rest_goes_on_in_another_process(run, monkeypatch):
    class Crashing(Fake):
        def measure(self, repeats):
            raise RuntimeError("illegal memory access")

    def lost():
        raise RuntimeError("illegal memory access")

    commands = []
    monkeypatch.setattr(command_line.torch.cuda, "synchronize", lost)
    monkeypatch.setattr(command_line.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command_line, "default_jobs", lambda: 0)
    monkeypatch.setattr(command_line, "_free_memory", lambda: None)
    monkeypatch.setattr(command_line.report, "describe", lambda: {"gpu": "G"})
    monkeypatch.setattr(command_line.subprocess, "call", lambda c: commands.append(c) or 0)
    present = (Crashing("gpu-decode-a", device="cuda"), Fake("gpu-decode-b", device="cuda"))
    result = run("all", "--machine", "m", "--only", "decode", "--minutes", "9", present=present)
    assert "gpu-decode-a lost the device" in result.output
    [[_, _, *command]] = commands
    assert command[:2] == ["benchmarks", "all"]
    assert {"--only=decode", "--but=gpu-decode-a", "--jobs=0", "--machine=m"} <= set(command)


@dataclasses.dataclass(frozen=True)
class Compiling(Fake):
    """A case with compiled peers that stores whether they are compared when it is measured."""

    has_compiled_peers: bool = True
    measured: ClassVar[list] = []

    def measure(self, repeats):
        self.measured.append((self.name, self.has_compiled_peers))
        return super().measure(repeats)


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(Compiling, "measured", found := [])
    return found


def test_a_case_whose_compiled_peers_lost_the_device_is_measured_without_them(
    run, tmp_path, measured
):
    present = (Compiling("decode-a"), Compiling("decode-b"), Fake("decode-c"))
    options = ("all", "--machine", "m", "--only", "-", "--into", tmp_path)
    without = ("--without-compiled", "decode-b")
    done = run(*options, *without, present=present)
    assert done.exit_code == 0
    assert measured == [("decode-a", True), ("decode-b", False)]
    made = json.loads((tmp_path / "m.json").read_text())["cases"]
    assert [case["absent"] for case in made] == [{}, {"compiled": "lost the device"}, {}]
    for name in ("decode-c", "decode-"):  # else a record would say what is not so
        refused = run(*options, "--without-compiled", name, present=present)
        assert refused.exit_code == 2
        assert f"no case with compiled peers is called {name}" in " ".join(refused.output.split())


def test_cases_are_prepared_in_processes_of_their_own_and_keep_their_checks(monkeypatch):
    said = []
    names = ["tiled-2x1024-gqa", "nothing"]
    monkeypatch.setenv("PYTHONPATH", str(Path(command_line.ROOT) / "src"))
    # Other modules than benchmarks start at once.
    commands = [("benchmarks", "prepare", *names), ("timeit", "--no-option")]
    found = prepare.prepare(commands, 2, 60.0, said.append)
    assert list(found) == ["tiled-2x1024-gqa"]
    assert [check.passed for check in found["tiled-2x1024-gqa"]] == [True] * 5
    assert len(said) == 2
    [failed] = [line for line in said if "no-option" in line]
    assert re.fullmatch(r"prepared \d of 2: timeit --no-option: .+", failed)
    assert prepare.prepare(commands[:1], 1, 0.0, said.append) == {}
    assert said[-1].endswith(": no time")
    assert prepare.prepare(commands[:1], 1, 0.5, said.append) == {}
    assert said[-1].endswith(": the time for preparing was over")
    line = "import time; time.sleep(1); print('prepared: [\"late\", []]')"
    slow = ("timeit", "-n", "1", "-r", "1", line)
    late = prepare.prepare([slow, ("benchmarks", "list")], 1, 0.5, said.append, 60.0)
    assert late == {"late": []}  # it had begun; the other had not
    assert said[-1] == "prepared 2 of 2: benchmarks list: no time"


def test_what_compiles_longest_is_prepared_first_and_without_what_lost_the_device(
    run, monkeypatch, measured
):
    by_name = {case.name: case for case in (*cases.CASES, *cases.SWIN_CASES)}
    efforts = {name: compile_effort(case) for name, case in by_name.items()}
    assert {efforts[name] for name in LONGEST} == {2}
    commands = [command[2:] for command in prepare.list_commands(list(by_name.values()), 9)]
    assert sorted(name for names in commands for name in names) == sorted(by_name)
    found = [max(efforts[name] for name in names) for names in commands]
    assert found == sorted(found, reverse=True)
    assert [names for names in commands if len(names) > 1 and efforts[names[0]]] == []
    assert len({type(by_name[name]) for [name] in commands[:5]}) == 5

    asked = []
    monkeypatch.setattr(command_line, "prepare", lambda commands, *_: asked.extend(commands) or {})
    present = (Compiling("decode-a"), Compiling("decode-b"))
    options = ["all", "--machine", "m", "--only", "", "--minutes", "9", "--jobs", "1"]
    assert run(*options, "--without-compiled", "decode-b", present=present).exit_code == 0
    assert asked == [
        ("benchmarks", "prepare", "decode-a"),
        ("benchmarks", "prepare", "decode-b", "--without-compiled=decode-b"),
    ]
    measured.clear()
    for _, *command in asked:
        assert run(*command, present=present).exit_code == 0
    assert measured == [("decode-a", True), ("decode-b", False)]


LONGEST = (
    "gpu-prefill-1x8192-cap-size-256", "gpu-prefill-1x16384-size-256",
    "gpu-prefill-1x16384-size-192", "gpu-tiled-1x16384", "gpu-engine-64", "windows-2744x3x343x16",
    "swin-unetr-96-fs24",
)  # fmt: skip


def test_compiling_goes_on_where_the_records_leave_time():
    limits = command_line._limit_preparing
    assert limits(26 * 60, 1300) == (240, 120)  # all records: what has begun ends soon
    assert limits(26 * 60, 50) == (240, 635)
    assert limits(400, 350) == (100, 50)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_what_prepares_ends_with_a_benchmark_that_is_killed():
    sleeping = ("timeit", "-n1", "-r1", "__import__('time').sleep(60)")  # it prints nothing before
    code = f"from benchmarks.prepare import prepare; prepare([{sleeping}], 1, 90.0, print)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=command_line.ROOT) as process:
        children, end = [], time.monotonic() + 60
        while not children and time.monotonic() < end:
            time.sleep(0.05)
            children = [
                child
                for child in psutil.Process(process.pid).children()
                if child.cmdline()[1:3] == ["-m", "timeit"]  # it is tied by then
            ]
        process.kill()
    assert children
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_case_that_is_checked_is_timed_without_another_check(run, tmp_path, monkeypatch):
    checks = [Check("elsewhere", True, "beside others"), Check("twice", True, "")]
    found = {"decode-a": checks, "decode-b": [Check("disturbed", False, "")]}
    monkeypatch.setattr(command_line, "prepare", lambda commands, *_: found)
    present = tuple(Fake(f"decode-{letter}") for letter in "abc")
    options = ["all", "--machine", "m", "--only", "", "--minutes", "5.5", "--jobs", "2"]
    assert run(*options, present=present).exit_code == 0
    record = json.loads((tmp_path / "m.json").read_text())
    kept = {case["name"]: [check["what"] for check in case["checks"]] for case in record["cases"]}
    assert kept == {
        "decode-a": ["elsewhere", "twice"], "decode-b": ["pagetile"], "decode-c": ["pagetile"],
    }  # fmt: skip


def test_what_chooses_by_timing_is_prepared_alone_and_keeps_no_choice(monkeypatch):
    kept = []
    monkeypatch.setattr(prepare, "_keep_no_choices", lambda: kept.append(True))
    present = [Fake(str(number)) for number in range(5)]
    assert list(prepare.prepare_here(present[:1])) == [
        'prepared: ["0", [["pagetile", true, "as told"]]]'
    ]
    assert kept == []
    choosing = WindowCase("w", (16, 16), (4, 4), 2, 8, 2, device="none", has_compiled_peers=True)
    [line] = prepare.prepare_here([choosing])
    assert line.startswith("w failed: RuntimeError")
    assert kept == [True]
    commands = prepare.list_commands([*present, choosing], 1)
    assert [command[2:] for command in commands] == [
        ("w",), ("0", "4"), ("1",), ("2",), ("3",),
    ]  # fmt: skip


def test_quantiles_are_interpolated():
    times = Times((4.0, 1.0, 2.0, 3.0, 5.0))
    assert (times.quantile(0.0), times.median, times.quantile(0.9)) == (1.0, 3.0, 4.6)


@pytest.mark.parametrize("path", command_line.QUOTING_PAGES, ids=lambda path: path.stem)
def test_the_figures_of_the_documentation_are_those_of_the_records(path):
    page = path.read_text(encoding="utf-8")
    assert page.count("<!-- table:") == page.count("<!-- end -->")
    assert page.count("<!-- figure:") == page.count("<!-- /figure -->") == len(find_figures(page))
    assert fill(page, command_line.RESULTS) == page


def test_performance_pages_have_tables_of_at_most_seven_columns():
    for path in command_line.PAGES:
        page = path.read_text(encoding="utf-8")
        assert "<!-- table:" in page or path.stem in ("README", "index"), path
        widths = [line.count("|") - 1 for line in page.splitlines() if line.startswith("| ")]
        assert max(widths, default=0) <= 7, path


def test_a_table_of_cases_that_were_not_run_is_refused():
    page = "<!-- table: h200-decode nothing- | GB/s -->\n<!-- end -->"
    with pytest.raises(ValueError, match="h200-decode has no case whose name begins with nothing-"):
        fill(page, command_line.RESULTS)


def test_workloads_of_chats_are_served_and_measured():
    from tiny_models import tiny_model

    from pagetile import LLM

    llm = LLM(tiny_model("llama"), max_model_len=120, num_blocks=200)
    sizes = {"per_second": 1000.0, "lens": (2, 6), "vocab_size": 96}
    chats = draw_chats(12, system_lens=(40, 60), **sizes)
    beside = draw_long(2, 8, long_lens=(80, 100), **sizes)
    assert len(beside) == 10
    assert sum(len(arrival.prompt) > 70 for arrival in beside) == 2
    for arrivals in (chats, beside):
        measured = serve(llm, arrivals)
        assert measured["tokens/s"] > 0
        for name in ("ms to the first token", "ms between tokens"):
            assert 0 < measured[f"{name}, median"] <= measured[f"{name}, p99"]
        llm.reset_prefix_cache()
    assert serve(llm, chats)["cached"] > 0.1, "system prompts are found"
    turns = serve_in_turns(llm, draw_chats, 3, num_chats=3, system_lens=(40, 60), **sizes)
    assert turns["tokens/s"] == pytest.approx(sorted(turns["tokens/s, each turn"])[1], rel=1e-4)
    assert len(turns["ms between tokens, p99, each turn"]) == 3


def test_variants_of_n_print_their_share_and_hold_one_engine_at_a_time(capsys, monkeypatch):
    import weakref

    from tiny_models import tiny_model

    from pagetile import LLM

    loaded = []

    def load(**options):
        assert all(engine() is None for engine, _ in loaded)
        model = tiny_model("llama", dtype=torch.bfloat16)  # whose kernels other tests compile, too
        llm = LLM(model, tokenizer=make_tokenizer(96), max_model_len=64, num_blocks=64, **options)
        loaded.append((weakref.ref(llm.engine), options))
        return llm

    requests = [([number, 2, 3], 6 + 2 * number) for number in range(8)]
    monkeypatch.setattr(workload_n, "NUM_TURNS", 2)
    run_parts(["n4", "stop", "logprobs", "fp8"], load, requests)
    lines = {line["what"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(lines) == ["start", "N", "n4", "stop", "logprobs", "fp8"]
    shares = dict.fromkeys(("n4", "stop", "logprobs"), "tokens/s of N")
    for name, base in shares.items():
        pairs = zip(*(lines[name][f"{n}, each turn"] for n in ("tokens/s", base)), strict=True)
        ratios = [a / b for a, b in pairs]
        assert len(ratios) == 2
        assert lines[name]["share of N"] == pytest.approx(sum(ratios) / 2, rel=1e-3)
    share = lines["fp8"]["tokens/s"] / lines["N"]["tokens/s"]
    assert lines["fp8"]["share of N"] == pytest.approx(share)
    assert len(lines["N"]["tokens/s, each turn"]) == 2
    assert [options for _, options in loaded] == [{}, {"kv_cache_dtype": "fp8"}]
    totals = {name: line["tokens"] for name, line in lines.items() if "tokens" in line}
    assert totals == {"N": 104, "n4": 4 * 7, "stop": 52, "logprobs": 52, "fp8": 104}


def test_samples_of_one_prompt_are_timed_with_and_without_sharing():
    from tiny_models import tiny_model

    from pagetile import LLM
    from pagetile.engine.prefix_groups import PrefixGrouper

    llm = LLM(tiny_model("llama"), max_model_len=64, num_blocks=64, max_num_seqs=4)
    grouper = llm.engine.scheduler.grouper = PrefixGrouper(16, 1)
    measured = time_shared(llm, num_prompt=20, num_new=4, turns=2)
    assert measured["x read by each"] > 0
    assert len(measured["x read by each, each turn"]) == 2
    assert llm.engine.scheduler.grouper is grouper


def test_a_tokenizer_without_a_model_has_a_word_for_every_token():
    assert make_tokenizer(96).decode([5, 95, 0]) == "w5w95w0"


def test_a_step_s_time_is_of_runs_that_both_compute_their_prompts():
    class Engine:
        def __init__(self):
            self.calls = []

        def reset_prefix_cache(self):
            self.calls.append("reset")

        def generate(self, prompts, params, use_tqdm):
            self.calls.append(params[0].max_tokens)

    engine = Engine()
    assert len(time_per_token(engine, 3, num_prompt=2, num_new=4, turns=2)) == 2
    assert engine.calls == ["reset", 8, "reset", 12] * 2


def test_kernels_that_overlap_are_busy_once():
    assert count_busy([(1, 3), (0, 2), (0, 1), (5, 6)]) == 4
    assert count_busy([]) == 0


def test_records_are_shared_by_gpus_evenly_and_once(monkeypatch):
    seconds = {spec.ending: spec.seconds for spec in RECORDS if spec.device == "cuda"}
    shares = share_out(seconds, 4)
    assert sorted(name for share in shares for name in share) == sorted(seconds)
    loads = [sum(map(seconds.get, share)) for share in shares]
    assert max(loads) <= max(1.1 * sum(loads) / 4, max(seconds.values()))
    assert share_out({"decode": 1.0}, 4) == [["decode"]]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = CliRunner().invoke(command_line.app, ["all", "--gpus", "2", "--into", "/tmp"])
    assert found.exit_code == 2
    assert "2 GPUs are asked for, and torch sees 1" in " ".join(found.output.split())


def test_processes_at_the_same_time_have_their_own_gpu_and_cores(monkeypatch, tmp_path, capsys):
    (tmp_path / "says_where.py").write_text(
        "import os, sys\n"
        "print(sys.argv[1], os.environ['CUDA_VISIBLE_DEVICES'], sorted(os.sched_getaffinity(0)))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    assert run_at_once([["says_where", "a", "0"], ["says_where", "b", "3"]]) == 3
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        f"GPU 2 | b 2 {cores[middle:]}",
        f"GPU 5 | a 5 {cores[:middle] or cores}",
    ]
