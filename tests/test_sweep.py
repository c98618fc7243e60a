"""The sweep: shapes by seed, peers that agree, ratios of the best peer, and a record."""

import json
import math
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks import __main__ as command_line
from benchmarks import report, sweep, sweep_inputs, sweep_warming
from benchmarks.document import fill
from benchmarks.sweep import Finding, find_classes, measure, summarise
from benchmarks.sweep_inputs import SweepInputs, find_peers
from benchmarks.sweep_shapes import (
    CLASSES,
    SweepShape,
    draw_in_turns,
    draw_shapes,
    redraw_worst,
)
from benchmarks.sweep_warming import Warmed
from rich.console import Console
from typer.testing import CliRunner

from pagetile import attention

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
        elif name.startswith("decode-"):
            assert shape.head_size % 16 == 0
            assert shape.head_size == 80 or name == "decode-any-size"
            assert set(shape.query_lens) == {1}
            assert len(set(shape.seq_lens)) == 1
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


def test_a_peer_that_is_wrong_is_left_out(monkeypatch):
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
    """Whether a record's case meets its targets, by the worst and by the median."""
    line = report.record_line(case, "sweep", 0.0, {})
    return [target["reached"] for target in line["targets"]]


def test_a_class_reaches_its_aim_by_its_worst_and_its_median():
    kind, shape = CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16)

    def of(*ratios):
        findings = [Finding(shape, 0.0, {"pagetile": 1.0}, ratio, "peer") for ratio in ratios]
        return summarise(kind, random.Random(0).sample(findings, len(findings)))

    summary = of(0.96, 1.04, 1.2)
    assert (summary["worst"], summary["median"], summary["shapes"]) == (0.96, 1.04, 3)
    assert reached(summary) == [True, True]
    assert reached(of(0.94, 1.2, 1.2)) == [False, True]
    assert reached(of(0.96, 1.02, 1.2)) == [True, False]


def test_a_class_names_its_fastest_peers_and_why_others_are_left_out():
    kind, shape = CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16)
    seconds = {"pagetile": 1.0, "a": 2.0}
    findings = [
        Finding(shape, 0.1, seconds, 2.0, "a", {"b": "not installed", "c": "wrong: 1 off"}),
        Finding(shape, 0.1, seconds, 1.5, "b", {"b": "not installed"}),
        Finding(shape, 0.1, seconds, 1.1, "a", {"b": "not installed"}),
        Finding(shape, torch.inf, {}, 0.0, "float64"),
    ]
    summary = summarise(kind, findings)
    assert (summary["fastest: a"], summary["fastest: b"]) == (2, 1)
    assert summary["absent"] == {
        "b": "not installed, 3 of 4 shapes", "c": "wrong: 1 off, 1 of 4 shapes"
    }  # fmt: skip
    record = report.record_line(summary, "sweep", 0.0, {})
    assert [check["passed"] for check in record["checks"]] == [True, True, True, False]
    assert [shape["best peer"] for shape in record["details"]] == ["a", "b", "a", "float64"]
    assert record["metrics"]["worst"] == 0.0
    assert "Infinity" not in json.dumps(record)
    assert summarise(kind, findings[:3])["absent"]["b"] == "not installed"


def test_a_shape_whose_call_fails_has_the_ratio_0_and_the_next_one_is_measured(monkeypatch):
    kind = CLASSES["mixed"]
    failed = iter([True, False])

    def measured(kind, shape, device, without):
        if next(failed):
            raise RuntimeError("no such plan\nat line 3")
        return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")

    monkeypatch.setattr(sweep, "measure", measured)
    drawn = draw_in_turns([kind], 0, 2, TINY)
    findings = list(sweep.sweep(drawn, "cpu", Console(quiet=True)))[-1][1]
    assert [found.ratio for found in findings] == [0.0, 1.0]
    assert findings[0].best_peer == "failed: no such plan"


def test_a_peer_that_cannot_be_captured_is_left_out(monkeypatch):
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
    """Each shape takes 10 s of 70, and classes take turns."""
    clock = [0.0]

    def measured(kind, shape, device, without):
        clock[0] += 10
        return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")

    monkeypatch.setattr(sweep, "measure", measured)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    kinds = [CLASSES[name] for name in ("mixed", "uneven", "short-queries")]

    def count(seconds):
        clock[0] = 0.0
        found = {}
        drawn = draw_in_turns(kinds, 0, 9, TINY)
        for kind, findings in sweep.sweep(drawn, "cpu", Console(quiet=True), seconds):
            found[kind.name] = len(findings)
        return list(found.values())

    assert count(70) == [3, 2, 2]
    assert count(0) == [1, 1, 1]
    assert count(math.inf) == [9, 9, 9]


def test_the_command_writes_a_record_that_the_pages_show(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "CPU_SCALE", TINY)

    def find(inputs, without):
        return {"flashinfer": inputs.attend}, {}

    monkeypatch.setattr(sweep, "find_peers", find)
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
    monkeypatch.setattr(command_line, "CPU_SCALE", TINY)
    shapes = iter([True, False])

    def measured(kind, shape, device, without):
        if next(shapes):
            return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "measure", measured)
    run("--class", "mixed", "--device", "cpu", "--out", "swept", "--into", tmp_path)
    [case] = json.loads((tmp_path / "swept.json").read_text())["cases"]
    assert case["metrics"]["shapes"] == 1


def test_flash_attention_3_is_compared_without_pages(monkeypatch):
    shape = SweepShape((9, 9), (9, 9), 4, 4, 48, 32, 0)
    inputs = SweepInputs(shape, "cpu")

    def attend(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, **how):
        assert how == {"causal": True, "fa_version": 3, "softmax_scale": 48**-0.5}
        assert max_seqlen_q == max_seqlen_k == 9
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 9, 18]
        return attention(*(x.unflatten(0, (2, 9)) for x in (q, k, v)), causal=True).out

    library = SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setattr(sweep_inputs, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", library)
    found, absent = sweep_inputs._dense_flash_attn_3(inputs)
    assert absent == {}
    assert [inputs.judge(name, call()) for name, call in found.items()] == [None]


def test_a_library_that_cannot_be_loaded_is_named_with_its_reason(monkeypatch):
    inputs = SweepInputs(SweepShape((9, 9), (9, 9), 4, 4, 48, 32, 0), "cpu")
    monkeypatch.setattr(sweep_inputs, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", None)
    _, absent = sweep_inputs._dense_flash_attn_3(inputs)
    assert absent["vllm flash_attn 3"].startswith("unsupported: import of vllm.vllm_flash_attn")


def test_an_unknown_class_is_one_clear_line(run):
    done = run("--class", "nothing")
    assert done.exit_code == 2
    assert "no class is called 'nothing'" in done.output


def test_a_cpu_sweeps_what_is_for_a_cpu():
    assert [kind.name for kind in find_classes([], "cpu")] == ["scores"]
    assert "scores" not in [kind.name for kind in find_classes([], "cuda")]


KIND, SHAPE = CLASSES["mixed"], SweepShape((1,), (9,), 2, 2, 32, 32, 16)


def found(ratio, number, **seconds):
    return Finding(SHAPE, 0.0, seconds, ratio, "peer", seed=4, number=number)


def test_shapes_that_were_compiled_ahead_come_first_and_libraries_that_were_not_are_left_out(
    monkeypatch,
):
    kinds = [CLASSES["mixed"], CLASSES["uneven"]]
    drawn = draw_in_turns(kinds, 0, 3, TINY)
    ready = {one.shape for one in drawn if one.number != 0}
    module = sweep_warming.module_of(drawn[2].shape, "flashinfer")
    warmed = Warmed(frozenset(ready), {module: "nvcc failed"}, {})
    seen = []

    def measured(kind, shape, device, without):
        seen.append((kind.name, without))
        return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")

    monkeypatch.setattr(sweep, "measure", measured)
    swept = list(sweep.sweep(drawn, "cpu", Console(quiet=True), math.inf, warmed))
    numbers = {kind.name: [found.number for found in of_kind] for kind, of_kind in swept}
    assert numbers == {"mixed": [1, 2, 0], "uneven": [1, 2, 0]}
    assert [name for name, _ in seen[:4]] == ["mixed", "uneven"] * 2
    assert seen[0][1] == {"flashinfer": "nvcc failed"}
    assert all(not without for name, without in seen if name == "uneven")


def test_a_library_that_is_left_out_is_not_even_planned(monkeypatch):
    """It is for GPUs; here FlashInfer's absence shows whether it was imported."""
    inputs = SweepInputs(SHAPE, "cpu")
    reasons = {"flashinfer": "was not compiled in time"}
    monkeypatch.setattr("benchmarks.libraries.find_spec", lambda name: name)
    _, absent = sweep_inputs.find_libraries(inputs, reasons)
    assert absent["flashinfer"] == "was not compiled in time"
    assert absent["flashinfer BatchAttention"].startswith("unsupported: ")
    with pytest.raises(RuntimeError, match="unsupported: "):
        sweep_inputs.plan_library(inputs, "flashinfer")


def test_peers_that_are_clearly_slower_have_one_turn_and_the_sum_is_no_peer(monkeypatch):
    medians = {"pagetile": 2.0, "a": 1.6, "b": 1.9, "c": 2.1, "sum of 1 GiB": 1.0}
    rounds = []

    def time_in_turns(calls, device, *, repeats, rest, captured):
        rounds.append((sorted(calls), repeats, rest, captured))
        late = len(rounds) > 1  # as if the first turn were slower
        return {name: SimpleNamespace(median=medians[name] - 0.1 * late) for name in calls}

    monkeypatch.setattr(sweep, "time_in_turns", time_in_turns)
    calls = dict.fromkeys(medians, lambda: None)
    seconds = sweep._race(calls, "cuda", is_decode=False)
    assert [names for names, *_ in rounds] == [
        sorted(medians), ["a", "b", "pagetile", "sum of 1 GiB"]
    ]  # fmt: skip
    assert [rest for *_, rest, _ in rounds] == [0.01, 0.05]
    assert not any(captured for *_, captured in rounds)  # the calls are replays of graphs
    assert seconds == pytest.approx({**{n: s - 0.1 for n, s in medians.items()}, "c": 2.1})
    finding = sweep._compare(SHAPE, 0.0, seconds)
    assert (finding.best_peer, finding.ratio) == ("a", pytest.approx(1.5 / 1.9))
    assert finding.share_of_sum == pytest.approx(0.9 / 1.9)


def test_short_calls_have_short_rests(monkeypatch):
    rests = []

    def race(seconds, is_decode):
        def time_in_turns(calls, device, *, repeats, rest, captured):
            rests.append(rest)
            return {name: SimpleNamespace(median=seconds) for name in calls}

        monkeypatch.setattr(sweep, "time_in_turns", time_in_turns)
        sweep._race({"pagetile": None, "a": None}, "cuda", is_decode=is_decode)

    for seconds in (1e-4, 1e-3, 1e-2):
        for is_decode in (False, True):
            race(seconds, is_decode)
    assert rests[1::2] == pytest.approx([0.01, 0.01, 0.016, 0.016, 0.05, 0.02])


def test_a_class_beside_reading_reports_the_share_of_a_sum_too():
    kind = CLASSES["decode-80"]
    times = ({"pagetile": 1.0, "sum of 1 GiB": 0.5}, {"pagetile": 1.0, "sum of 1 GiB": 0.7})
    findings = [found(0.9, number, **seconds) for number, seconds in enumerate(times)]
    summary = summarise(kind, findings)
    assert (summary["worst of a sum of 1 GiB"], summary["median of a sum of 1 GiB"]) == (0.5, 0.6)
    assert not any("sum" in name for name in summarise(KIND, [found(1.0, 0, pagetile=1.0)]))


def test_the_worst_shapes_are_listed_with_seconds_and_peer():
    findings = [
        found(r, n, pagetile=2e-5, peer=r * 2e-5) for n, r in enumerate((1.1, 0.8, 0.9, 1.0))
    ]
    findings.append(Finding(SHAPE, math.inf, {}, 0.0, "failed: no plan", seed=4, number=9))
    console = Console(record=True, width=200, soft_wrap=True, quiet=False)
    with console.capture() as text:
        sweep.print_summary(console, [summarise(KIND, findings)])
    listed = [line for line in text.get().splitlines() if "seed 4 number" in line]
    assert listed == [
        f"mixed seed 4 number 9: 0.000, failed: no plan; {SHAPE}",
        f"mixed seed 4 number 1: 0.800, 20.0 us, peer 16.0 us; {SHAPE}",
        f"mixed seed 4 number 2: 0.900, 20.0 us, peer 18.0 us; {SHAPE}",
    ]


def test_a_record_is_replayed_from_its_worst_shapes(run, tmp_path, monkeypatch):
    drawn = draw_in_turns([KIND], 4, 4, TINY)
    findings = [
        Finding(one.shape, 0.0, {"pagetile": 1.0}, ratio, "peer", seed=4, number=one.number)
        for one, ratio in zip(drawn, (1.1, 0.8, 0.9, 1.0), strict=True)
    ]
    path = tmp_path / "before.json"
    line = report.record_line(summarise(KIND, findings), "sweep", 0.0, {})
    report.save(path, {"machine": {}, "cases": [line]})
    again = redraw_worst(report.load(path), [KIND, CLASSES["uneven"]], 2, TINY)
    assert again == [drawn[1], drawn[2]]
    monkeypatch.setattr(command_line, "CPU_SCALE", TINY)
    seen = []

    def measured(kind, shape, device, without):
        seen.append(shape)
        return Finding(shape, 0.0, {"pagetile": 1.0, "a": 1.0}, 1.0, "a")

    monkeypatch.setattr(sweep, "measure", measured)
    done = run("--class", "mixed", "--replay", path, "--shapes", 2, "--device", "cpu")
    assert done.exit_code in (0, 1), done.output
    assert seen == [drawn[1].shape, drawn[2].shape]
    del line["details"][0]["number"]
    report.save(path, {"machine": {}, "cases": [line]})
    done = run("--class", "mixed", "--replay", path, "--device", "cpu")
    assert done.exit_code == 2
    assert "before.json" in done.output
    with pytest.raises(ValueError, match="make the record again"):
        redraw_worst(report.load(path), [KIND], 2, TINY)


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "scores"])
def test_what_is_compiled_over_a_few_pages_is_the_same_call(name):
    """Kernels are chosen by sizes, types and strides; results are right as well."""
    kind = CLASSES[name]
    shape = draw_shapes(kind, 1, 1, TINY)[0]
    whole, few = SweepInputs(shape, "cpu"), SweepInputs(shape, "cpu", pages=2)
    assert len(few.k_cache) == 2
    assert few.tables.shape == whole.tables.shape
    for tensor in ("q", "k_cache", "v_cache", "tables"):
        a, b = getattr(whole, tensor), getattr(few, tensor)
        assert (a.stride(), a.dtype, a.shape[1:]) == (b.stride(), b.dtype, b.shape[1:])
    assert int(few.tables.max()) == (1 if few.tables.numel() > 1 else int(few.tables))
    calls = sweep_inputs.find_own_calls(kind.against, few)
    assert few.error(calls["pagetile"].call().out) < 2**-5
    assert ("bfloat16 cache" in calls) == (kind.against == "bf16")


def test_readers_read_every_word_of_whole_tiles_once(monkeypatch):
    """The length of all sequences is a multiple of nothing."""
    reading = pytest.importorskip("benchmarks.reading")
    touched = []

    class Read:
        def __getitem__(self, grid):
            def launch(
                out, k_cache, v_cache, tables, num_tiles, stride, block_size, heads, words, columns,
                tile, num_warps,
            ):  # fmt: skip
                for program in range(grid[0]):
                    head, at = program % heads, program // heads
                    seq, at = at // num_tiles, at % num_tiles
                    for key in range(at * tile, (at + 1) * tile):
                        block = int(tables[seq, key // block_size])
                        row = (block * block_size + key % block_size) * heads + head
                        touched.append(range(row * words, (row + 1) * words))
                assert words <= columns
                assert k_cache.shape == v_cache.shape == (len(k_cache), block_size, heads, words)

            return launch

    monkeypatch.setattr(reading, "_read", Read())
    for size, heads, block_size, length in ((48, 4, 64, 1111), (32, 1, 16, 700), (80, 8, 128, 800)):
        shape = SweepShape((1, 1), (length,) * 2, heads, heads, size, size, block_size)
        inputs = SweepInputs(shape, "cpu")
        readers = reading.make_readers(inputs.k_cache, inputs.v_cache, inputs.batch)
        assert list(readers) == ["reading by heads", "reading by pages"]
        for call, num_bytes in readers.values():
            touched.clear()
            call()
            words = [word for span in touched for word in span]
            assert len(set(words)) == len(words)
            assert 2 * 4 * len(words) == num_bytes
            assert shape.kv_bytes * 0.6 < num_bytes <= shape.kv_bytes


@pytest.mark.filterwarnings("ignore:attention reads q")  # lengths are tiny, heads are not
def test_a_sweep_of_a_gpu_is_rehearsed_without_one(run, tmp_path, monkeypatch):
    """All of the command but the GPU: tensors are on the CPU, and times are made up."""

    class Inputs(SweepInputs):
        def __init__(self, shape, device, seed=0, pages=None):
            super().__init__(shape, "cpu", seed, pages)

    def run_in_this_process(function, tasks, processes, seconds, meanwhile):
        meanwhile()
        found = {}
        for number, task in enumerate(tasks):
            try:
                found[number] = function(task)
            except RuntimeError as error:
                found[number] = str(error)
        return found

    def time_in_turns(calls, device, *, repeats, rest, captured):
        for call in calls.values():
            call()
        slow = {"pagetile": 1.0, "reading by pages": 0.8, "sum of 1 GiB": 0.1}
        return {name: SimpleNamespace(median=slow.get(name, 1.1)) for name in calls}

    def make_readers(k_cache, v_cache, batch):
        num_bytes = (k_cache.numel() + v_cache.numel()) // 8
        return {"reading by pages": (lambda: k_cache.sum(), num_bytes)}

    def find_own_calls(against, inputs):
        inputs.device = "cuda"
        try:
            return sweep_inputs.find_own_calls(against, inputs)
        finally:
            inputs.device = "cpu"

    monkeypatch.setattr(sweep, "SweepInputs", Inputs)
    monkeypatch.setattr(sweep, "find_own_calls", find_own_calls)
    monkeypatch.setattr(sweep, "read_all", lambda device, num_bytes: None)
    monkeypatch.setattr(sweep, "time_in_turns", time_in_turns)
    monkeypatch.setattr(sweep, "import_libraries", lambda: None)
    monkeypatch.setattr(sweep.GraphClock, "prepare", lambda self, call: call)
    monkeypatch.setattr(sweep_warming, "run_ahead", run_in_this_process)
    monkeypatch.setattr(sweep_inputs, "SweepInputs", Inputs)
    monkeypatch.setattr("benchmarks.reading.make_readers", make_readers)
    for name in ("set_per_process_memory_fraction", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 40)

    def draw_small(kinds, seed, count, scale):
        assert scale == 1.0
        return draw_in_turns(kinds, seed, count, TINY)

    monkeypatch.setattr(command_line, "draw_in_turns", draw_small)
    options = ["--shapes", 2, "--device", "cuda", "--out", "swept", "--into", tmp_path]
    done = run(*options)
    assert done.exit_code == 0, done.exception or done.output
    assert "compiled ahead for" in done.output
    assert "not installed" in done.output
    record = json.loads((tmp_path / "swept.json").read_text())
    cases = {case["name"].removeprefix("sweep-"): case for case in record["cases"]}
    assert cases.keys() == CLASSES.keys() - {"scores"}
    for name, case in cases.items():
        assert all(check["passed"] for check in case["checks"]), (name, case["checks"])
        assert [detail["number"] for detail in case["details"]] == [0, 1]
    reads = cases["decode-80"]["details"][0]
    assert reads["best peer"] == "reading by pages"
    assert reads["seconds"]["reading by pages"] > 0.8  # of fewer bytes than the shape has
    assert cases["prefill-8-bit"]["metrics"]["worst"] == 1.1
    assert cases["decode-80"]["metrics"]["worst of a sum of 1 GiB"] < 0.1
