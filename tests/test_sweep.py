"""The sweep: shapes by seed, peers that agree, ratios of the best peer, and a record."""

import json
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks import __main__ as command_line
from benchmarks import report, sweep, sweep_inputs
from benchmarks.document import fill
from benchmarks.sweep import Finding, find_classes, measure, summarise
from benchmarks.sweep_inputs import SweepInputs, find_peers
from benchmarks.sweep_shapes import CLASSES, SweepShape, draw_shapes
from rich.console import Console
from typer.testing import CliRunner

from pagetile import PagedBatch, paged_attention

TINY = 1 / 256


@pytest.fixture
def run(monkeypatch):
    def call(*arguments):
        return CliRunner().invoke(command_line.app, ["sweep", *map(str, arguments)])

    monkeypatch.setattr(sweep, "_ROUNDS", 1)
    monkeypatch.setattr(sweep, "_CPU_ROUNDS", 1)
    return call


@pytest.mark.parametrize("name", CLASSES)
def test_shapes_are_those_of_the_seed_and_of_the_class(name):
    shapes = draw_shapes(CLASSES[name], 3, 20)
    assert shapes == draw_shapes(CLASSES[name], 3, 20)
    assert shapes[:5] == draw_shapes(CLASSES[name], 3, 5)
    assert shapes != draw_shapes(CLASSES[name], 4, 20)
    assert len(set(shapes)) > 10
    for shape in shapes:
        assert shape.num_heads % shape.num_kv_heads == 0
        assert all(q <= k for q, k in zip(shape.query_lens, shape.seq_lens, strict=True))
        group = shape.num_heads // shape.num_kv_heads
        if name == "chunked-prefill":
            assert min(shape.query_lens) >= 1024
            assert group > 1
            assert all(k >= 3 * q for q, k in zip(shape.query_lens, shape.seq_lens, strict=True))
        elif name == "short-queries":
            assert min(shape.query_lens) * group > 16
        elif name == "narrow-values":
            assert (shape.head_size, shape.v_head_size) == (192, 128)
        elif name == "decode-any-size":
            assert shape.head_size % 16 == 0
            assert set(shape.query_lens) == {1}
        elif name == "mixed":
            assert min(shape.query_lens) == 1 < max(shape.query_lens)
        elif name == "uneven":
            assert group == 7
        elif name == "long-and-few":
            assert shape.num_kv_heads == 1
            assert min(shape.seq_lens) >= 65536
        # What a call needs fits beside its peers on a GPU of 80 GB.
        assert shape.kv_bytes < 20e9, str(shape)


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "scores"])
def test_tiny_shapes_are_right_and_so_are_their_peers(name):
    shape = draw_shapes(CLASSES[name], 1, 1, TINY)[0]
    inputs = SweepInputs(shape, "cpu")
    out = inputs.attend().out
    assert inputs.error(out) < 2**-5
    assert list(find_peers(inputs)[0]) == ["sdpa"]
    wrong = out.clone()
    wrong.view(-1, *out.shape[-2:])[0, 0, 0] += 2 * out.abs().max()
    assert inputs.error(wrong) > 2**-5
    assert inputs.error(torch.full_like(out, torch.nan)) == torch.inf


def test_a_peer_that_is_wrong_takes_no_part(monkeypatch):
    inputs = SweepInputs(SweepShape((3, 1), (20, 9), 4, 2, 32, 32, 16), "cpu")
    zeros = torch.zeros_like(inputs.q)
    monkeypatch.setattr(sweep_inputs, "_sdpa", lambda inputs: lambda: zeros)
    assert find_peers(inputs) == ({}, {"sdpa": "wrong: 1 off float64"})


def test_a_wrong_result_has_the_ratio_0(monkeypatch):
    monkeypatch.setattr(SweepInputs, "error", lambda self, out: 1.0)
    finding = measure(CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16), "cpu")
    assert (finding.ratio, finding.best_peer, finding.seconds) == (0.0, "float64", {})


@pytest.mark.parametrize("against", ["peers", "bf16", "bandwidth", "matmul"])
def test_a_ratio_is_the_best_peers_time_by_ours(against, monkeypatch):
    monkeypatch.setattr(sweep, "_ROUNDS", 1)
    monkeypatch.setattr(sweep, "_CPU_ROUNDS", 1)
    kind = next(kind for kind in CLASSES.values() if kind.against == against)
    finding = measure(kind, draw_shapes(kind, 0, 1, TINY)[0], "cpu")
    others = {name: time for name, time in finding.seconds.items() if name != "pagetile"}
    assert finding.ratio == min(others.values()) / finding.seconds["pagetile"]
    assert others[finding.best_peer] == min(others.values())


def reached(case):
    """Whether a record's case reaches its aims, by its worst and by its median."""
    line = report.record_line(case, "sweep", 0.0, {})
    return [target["reached"] for target in line["targets"]]


def test_a_class_reaches_its_aim_by_its_worst_and_its_median():
    kind, shape = CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16)

    def of(*ratios):
        findings = [Finding(shape, 0.0, {"pagetile": 1.0}, ratio, "peer") for ratio in ratios]
        return summarise(kind, random.Random(0).sample(findings, len(findings)), 0)

    summary = of(0.96, 1.04, 1.2)
    assert (summary["worst"], summary["median"], summary["shapes"]) == (0.96, 1.04, 3)
    assert reached(summary) == [True, True]
    assert reached(of(0.94, 1.2, 1.2)) == [False, True]
    assert reached(of(0.96, 1.02, 1.2)) == [True, False]


def test_a_class_names_its_fastest_peers_and_why_others_take_no_part():
    kind, shape = CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16)
    seconds = {"pagetile": 1.0, "a": 2.0}
    findings = [
        Finding(shape, 0.1, seconds, 2.0, "a", {"b": "not installed", "c": "wrong: 1 off"}),
        Finding(shape, 0.1, seconds, 1.5, "b", {"b": "not installed"}),
        Finding(shape, 0.1, seconds, 1.1, "a", {"b": "not installed"}),
        Finding(shape, torch.inf, {}, 0.0, "float64"),
    ]
    summary = summarise(kind, findings, 7)
    assert (summary["fastest: a"], summary["fastest: b"]) == (2, 1)
    assert summary["absent"] == {
        "b": "not installed, 3 of 4 shapes", "c": "wrong: 1 off, 1 of 4 shapes"
    }  # fmt: skip
    record = report.record_line(summary, "sweep", 0.0, {})
    assert [check["passed"] for check in record["checks"]] == [True, True, True, False]
    assert [shape["best peer"] for shape in record["details"]] == ["a", "b", "a", "float64"]
    assert record["metrics"]["worst"] == 0.0
    assert "Infinity" not in json.dumps(record)
    assert summarise(kind, findings[:3], 7)["absent"]["b"] == "not installed"


def test_a_shape_whose_call_fails_has_the_ratio_0_and_the_next_one_is_measured(monkeypatch):
    kind = CLASSES["mixed"]
    failed = iter([True, False])

    def measured(kind, shape, device):
        if next(failed):
            raise RuntimeError("no such plan\nat line 3")
        return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")

    monkeypatch.setattr(sweep, "measure", measured)
    findings = list(sweep.sweep([kind], 0, 2, "cpu", Console(quiet=True)))[-1][1]
    assert [found.ratio for found in findings] == [0.0, 1.0]
    assert findings[0].best_peer == "failed: no such plan"


def test_a_peer_that_cannot_be_captured_takes_no_part(monkeypatch):
    def prepare(self, call):
        if call() == "captured":
            return lambda: "replayed"
        raise RuntimeError("operation not permitted when stream is capturing\nat line 3")

    monkeypatch.setattr(sweep.GraphClock, "prepare", prepare)
    calls = {"pagetile": lambda: "captured", "a": lambda: "captured", "b": lambda: ""}
    replays, refused = sweep._capture(calls)
    assert [call() for call in replays.values()] == ["replayed", "replayed"]
    reason = "cannot be captured: operation not permitted when stream is capturing"
    assert refused == {"b": reason}
    with pytest.raises(RuntimeError, match="not permitted"):
        sweep._capture({"pagetile": lambda: ""})


def test_time_is_shared_by_the_classes_and_each_has_a_shape(monkeypatch):
    """Each shape takes 10 s of 70: three for the first class, and 30 s are left for two."""
    clock = [0.0]

    def measured(kind, shape, device):
        clock[0] += 10
        return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")

    monkeypatch.setattr(sweep, "measure", measured)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    kinds = [CLASSES[name] for name in ("mixed", "uneven", "short-queries")]

    def count(seconds):
        clock[0] = 0.0
        found = {}
        for kind, findings in sweep.sweep(kinds, 0, 9, "cpu", Console(quiet=True), seconds):
            found[kind.name] = len(findings)
        return list(found.values())

    assert count(70) == [3, 2, 2]
    assert count(0) == [1, 1, 1]
    assert count(math.inf) == [9, 9, 9]


def test_the_command_writes_a_record_that_the_pages_show(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "CPU_SCALE", TINY)
    monkeypatch.setattr(sweep, "find_peers", lambda inputs: ({"flashinfer": inputs.attend}, {}))
    options = ["--shapes", 2, "--seed", 5, "--device", "cpu", "--out", "swept", "--into", tmp_path]
    done = run("--class", "mixed", "--class", "uneven", *options)
    assert done.exit_code in (0, 1), done.output
    record = json.loads((tmp_path / "swept.json").read_text())
    assert [case["name"] for case in record["cases"]] == ["sweep-uneven", "sweep-mixed"]
    assert {"machine", "cases"} == record.keys()
    for case in record["cases"]:
        assert {"commit", "versions", "share_of_other_processes"} <= case.keys()
        assert case["about"].endswith("shapes of seed 5")
        assert len(case["details"]) == case["metrics"]["shapes"] == 2
        assert case["metrics"]["worst"] <= case["metrics"]["median"]
    reached = all(t["reached"] for case in record["cases"] for t in case["targets"])
    assert (done.exit_code == 0) == reached
    assert "worst" in done.output
    for case in record["cases"]:
        case |= {"commit": "0123abcd", "versions": {"torch": "1", "flashinfer-python": "2"}}
    (tmp_path / "swept.json").write_text(json.dumps(record))
    page = fill("<!-- table: swept sweep- | shapes | worst | median -->\n<!-- end -->", tmp_path)
    assert "All rows: sweep: shapes of seed 5." in page
    assert "| prompts and decodes in one call | 2 |" in page
    record["machine"]["gpu"] = "GPU"
    (tmp_path / "swept.json").write_text(json.dumps(record))
    page = fill("<!-- table: swept sweep- | worst -->\n<!-- end -->", tmp_path)
    assert "flashinfer-python 2" in page


def test_a_record_is_written_after_every_shape(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "CPU_SCALE", TINY)
    shapes = iter([True, False])

    def measured(kind, shape, device):
        if next(shapes):
            return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "measure", measured)
    run("--class", "mixed", "--device", "cpu", "--out", "swept", "--into", tmp_path)
    [case] = json.loads((tmp_path / "swept.json").read_text())["cases"]
    assert case["metrics"]["shapes"] == 1


class FlashAttention3:
    """As vLLM ships it; a schedule must be the call's own, and serve more than one call."""

    @staticmethod
    def get_scheduler_metadata(
        batch_size, max_q, max_k, heads, kv_heads, size, seq_lens, dtype, v_size, starts, *,
        page_size, causal,
    ):  # fmt: skip
        assert (batch_size, max_q, max_k, causal) == (2, 3, 20, True)
        assert (heads, kv_heads, size, v_size, page_size) == (4, 2, 32, 32, 16)
        return seq_lens

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, causal, fa_version,
        softmax_scale, block_table, out, scheduler_metadata,
    ):  # fmt: skip
        batch = PagedBatch(block_table, seqused_k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
        assert (fa_version, causal, softmax_scale) == (3, True, 32**-0.5)
        assert scheduler_metadata is None or torch.equal(scheduler_metadata, seqused_k)
        return out.copy_(paged_attention(q, k, v, batch).out)


def test_vllms_flash_attention_takes_part_with_and_without_a_schedule(monkeypatch):
    inputs = SweepInputs(SweepShape((3, 1), (20, 9), 4, 2, 32, 32, 16), "cpu")
    monkeypatch.setattr(sweep_inputs, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", FlashAttention3)
    found, absent = sweep_inputs._vllm_flash_attn_3(inputs)
    assert list(found) == ["vllm flash_attn 3", "vllm flash_attn 3 scheduled"]
    assert absent == {}
    assert [inputs.judge(name, call()) for name, call in found.items()] == [None, None]


def test_a_library_that_cannot_be_loaded_is_named_with_its_reason(monkeypatch):
    inputs = SweepInputs(SweepShape((3, 1), (20, 9), 4, 2, 32, 32, 16), "cpu")
    monkeypatch.setattr(sweep_inputs, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)
    _, absent = sweep_inputs._vllm_flash_attn_3(inputs)
    assert absent["vllm flash_attn 3"].startswith("unsupported: import of vllm.vllm_flash_attn")


def test_an_unknown_class_is_one_clear_line(run):
    done = run("--class", "nothing")
    assert done.exit_code == 2
    assert "no class is called 'nothing'" in done.output


def test_a_cpu_sweeps_what_is_for_a_cpu():
    assert [kind.name for kind in find_classes([], "cpu")] == ["scores"]
    assert "scores" not in [kind.name for kind in find_classes([], "cuda")]
