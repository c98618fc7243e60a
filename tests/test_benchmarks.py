import dataclasses
import doctest
import json
import re
from pathlib import Path

import pytest
import torch
from benchmarks import __main__ as command_line
from benchmarks import cases, timing, workload
from benchmarks.attention import AttentionCase
from benchmarks.cache_ops import CopyBlocksCase, WriteKVCase
from benchmarks.case import Check, Measurement, at_least, at_most
from benchmarks.document import fill
from benchmarks.engine import EngineCase
from benchmarks.generators import QWEN3
from benchmarks.timing import Contestant, Times, ratio, take_turns
from benchmarks.window_workloads import WindowWorkloadsCase, find_workloads
from benchmarks.windows import WindowCase
from typer.testing import CliRunner

from pagetile.testing import PagedCase

TINY = AttentionCase(
    "tiny",
    PagedCase(query_lens=(1, 1), seq_lens=(30, 7), head_size=16),
    (at_least("x sdpa", 0.0), at_most("share of read bandwidth", 0.0)),
    beside=("block 4", PagedCase(query_lens=(1, 1), seq_lens=(30, 30), block_size=4)),
)


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


def test_window_workloads_are_whole_windows_and_right_with_and_without_a_shift():
    workloads = list(find_workloads())
    assert len({case.name for case in workloads}) == len(workloads) > 50
    for case in workloads:
        assert not any(side % size for side, size in zip(case.grid, case.window, strict=True))
    several, one = (
        WindowCase(str(side), (side, side), (4, 4), 2, 8, 2, torch.float32, device="cpu")
        for side in (16, 4)
    )
    checks = WindowWorkloadsCase("small", (several, one), device="cpu").verify()
    assert [check.what for check in checks] == ["16, shifted: cpu", "16: cpu", "4: cpu"]
    assert all(check.passed for check in checks)


def test_a_small_attention_case_and_its_peers_are_right():
    checks = TINY.verify()
    assert [check.what.split(",")[0] for check in checks[:2]] == ["pagetile", "sdpa"]
    assert not [check for check in checks if not check.passed]


def test_a_wrong_result_fails_the_gate(monkeypatch):
    from benchmarks import attention

    right = attention.to_tokens
    monkeypatch.setattr(attention, "to_tokens", lambda results: right(results) + 1e-3)
    assert {check.what.split(",")[0]: check.passed for check in TINY.verify()} == {
        "pagetile": True,
        "sdpa": False,
        "gather + sdpa": False,
    }


def test_a_measurement_has_every_metric_that_a_target_names(monkeypatch):
    from benchmarks import attention

    monkeypatch.setattr(attention, "read_all", lambda: None)  # a gigabyte is not for tests
    measurement = TINY.measure(repeats=1)
    assert {target.metric for target in TINY.targets} <= set(measurement.metrics)
    assert "time / block 4" in measurement.metrics


def test_a_wrong_case_gets_no_speed(run, tmp_path):
    result = run("run", "--out", "red", present=(Fake(is_right=False),))
    assert result.exit_code == 1
    assert "median" not in result.stdout
    assert json.loads((tmp_path / "red.json").read_text())["cases"] == []
    assert run("verify", present=(Fake(is_right=False),)).exit_code == 1


def test_an_archive_knows_its_commit(monkeypatch, tmp_path):
    """A copy that is measured elsewhere has no history to ask."""
    from benchmarks import machine

    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "benchmarks" / "machine.py"))
    (tmp_path / "benchmarks" / "archived.txt").write_text("0123abcd\n")
    assert machine.describe_run()["commit"] == "0123abcd"
    (tmp_path / "benchmarks" / "archived.txt").write_text("$Format:%H$\n")
    assert machine.describe_run()["commit"] is None  # no repository there


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


def test_a_table_says_when_its_cases_were_measured(tmp_path):
    one = {
        "name": "a-1", "about": "one", "date": "2026-01-02T03:04:05", "versions": {"torch": "2.1"},
        "times": {}, "metrics": {"x": 1.5}, "targets": [],
    }  # fmt: skip
    two = one | {"date": "2026-01-04T00:00:00", "versions": {"torch": "2.2"}}
    record = {"machine": {"cpu": "CPU", "cores": 2}, "cases": [one, two]}
    (tmp_path / "r.json").write_text(json.dumps(record))
    page = fill("<!-- table: r a- | x -->\n<!-- end -->", tmp_path)
    assert "2 cores of an CPU, torch 2.1 and 2.2, 2026-01-02 to 2026-01-04:" in page


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
    contestants = {
        "a": Contestant(lambda: log.append("a"), before=lambda: log.append("before a")),
        "b": Contestant(lambda: log.append("b")),
    }
    times = take_turns(contestants, repeats=3, warmup=1)
    assert {name: len(t.seconds) for name, t in times.items()} == {"a": 3, "b": 3}
    turns = [word for word in log if word in "ab"]
    assert all(set(turns[i : i + 2]) == {"a", "b"} for i in range(0, 8, 2))
    assert all(log[i - 1] == "before a" for i, word in enumerate(log) if word == "a")


def test_a_ratio_is_taken_round_by_round():
    # The second round was slow for both: it says nothing about either.
    assert ratio(Times((2.0, 20.0, 2.0)), Times((1.0, 10.0, 1.0))) == 2.0


def test_quantiles_are_interpolated():
    times = Times((4.0, 1.0, 2.0, 3.0, 5.0))
    assert (times.quantile(0.0), times.median, times.quantile(0.9)) == (1.0, 3.0, 4.6)


@pytest.mark.parametrize("path", command_line.PAGES, ids=lambda path: path.stem)
def test_the_tables_of_the_documentation_are_those_of_the_records(path):
    page = path.read_text(encoding="utf-8")
    assert page.count("<!-- table:") == page.count("<!-- end -->")
    assert fill(page, command_line.RESULTS) == page


def test_every_performance_page_but_the_first_has_tables_of_at_most_seven_columns():
    for path in command_line.PAGES:
        page = path.read_text(encoding="utf-8")
        assert "<!-- table:" in page or path.stem == "index", path
        widths = [line.count("|") - 1 for line in page.splitlines() if line.startswith("| ")]
        assert max(widths, default=0) <= 7, path


def test_a_table_of_cases_that_were_not_run_is_refused():
    page = "<!-- table: h200-decode nothing- | GB/s -->\n<!-- end -->"
    with pytest.raises(ValueError, match="h200-decode has no case whose name begins with nothing-"):
        fill(page, command_line.RESULTS)
