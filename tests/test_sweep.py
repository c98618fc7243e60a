"""The sweep: shapes by seed, peers that agree, ratios of the best peer, and a record."""

import json
import random

import pytest
import torch
from benchmarks import __main__ as command_line
from benchmarks import sweep, sweep_inputs
from benchmarks.sweep import Finding, find_classes, measure, summarise
from benchmarks.sweep_inputs import SweepInputs, find_peers
from benchmarks.sweep_shapes import CLASSES, SweepShape, draw_shapes
from typer.testing import CliRunner

TINY = 1 / 256


@pytest.fixture
def run(monkeypatch):
    def call(*arguments):
        return CliRunner().invoke(command_line.app, ["sweep", *map(str, arguments)])

    monkeypatch.setattr(sweep, "_ROUNDS", 1)
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
    kind = next(kind for kind in CLASSES.values() if kind.against == against)
    finding = measure(kind, draw_shapes(kind, 0, 1, TINY)[0], "cpu")
    others = {name: time for name, time in finding.seconds.items() if name != "pagetile"}
    assert finding.ratio == min(others.values()) / finding.seconds["pagetile"]
    assert others[finding.best_peer] == min(others.values())


def test_a_class_reaches_its_aim_by_its_worst_and_its_median():
    kind, shape = CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16)

    def of(*ratios):
        findings = [Finding(shape, 0.0, {"pagetile": 1.0}, ratio, "peer") for ratio in ratios]
        return summarise(kind, random.Random(0).sample(findings, len(findings)))

    summary = of(0.96, 1.04, 1.2)
    assert (summary["worst"], summary["median"], summary["reached"]) == (0.96, 1.04, True)
    assert not of(0.94, 1.2, 1.2)["reached"]
    assert not of(0.96, 1.02, 1.2)["reached"]


def test_the_command_writes_a_record(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "RESULTS", tmp_path)
    monkeypatch.setattr(sweep, "CPU_SCALE", TINY)
    done = run("--class", "mixed", "--shapes", 2, "--seed", 5, "--device", "cpu", "--out", "swept")
    assert done.exit_code in (0, 1), done.output
    record = json.loads((tmp_path / "swept.json").read_text())
    assert record["seed"] == 5
    assert {"machine", "commit", "versions"} <= record.keys()
    (found,) = record["classes"].values()
    assert len(found["shapes"]) == 2
    assert found["worst"] <= found["median"]
    assert (done.exit_code == 0) == found["reached"]
    assert "worst" in done.output


def test_an_unknown_class_is_one_clear_line(run):
    done = run("--class", "nothing")
    assert done.exit_code == 2
    assert "no class is called 'nothing'" in done.output


def test_a_cpu_sweeps_what_is_for_a_cpu():
    assert [kind.name for kind in find_classes(None, "cpu")] == ["scores"]
    assert "scores" not in [kind.name for kind in find_classes(None, "cuda")]
