from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from pagetile.analysis import measure
from pagetile.analysis.roofline import Machine
from pagetile.cli import main
from pagetile.cli.app import app

QUICK = ["--iterations", "2", "--warmup", "0", "--device", "cpu"]
RUNS = {
    "attention": ["--query-len", "40", "--num-heads", "2", "--head-size", "8", "--causal"],
    "scores": ["--num-tokens", "20", "--batch", "1", "--num-heads", "2", "--head-size", "8"],
    "windows": ["--grid", "8,8", "--window", "4,4", "--head-size", "8"],
}


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command line, the machine measured beforehand: (exit code, stdout, stderr)."""
    flops = dict.fromkeys(("float32", "float16", "bfloat16"), 1e11)
    known = Machine("here", "a made-up machine", 1e10, flops, 1e9, "")
    monkeypatch.setattr(measure, "measure_machine", lambda device: known)

    def call(*args: str) -> tuple[int, str, str]:
        code = main(args)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("command", RUNS)
def test_help_is_narrow_and_has_examples(command):
    result = CliRunner().invoke(app, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert f"pagetile bench {command} " in result.stdout.split("Examples")[1]
    assert "--iterations" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_missing_command_prints_the_help(run):
    code, out, err = run("bench")
    assert (code, err) == (0, "")
    for command in RUNS:
        assert re.search(rf"^│ {command} ", out, re.MULTILINE)


@pytest.mark.parametrize("command", RUNS)
def test_pagetile_comes_first_beside_its_peers(command, run):
    code, out, err = run("bench", command, *RUNS[command], *QUICK)
    assert (code, err) == (0, "")
    row = r"^(\S.*?)  +[\d.,]+ +\S+ to \S+ +([\d.,]+) x +[\d.,]+ x +(\d\.\de[+-]\d\d)$"
    rows = re.findall(row, out, re.MULTILINE)
    assert [name.startswith("pagetile.") for name, *_ in rows] == [True, False, False]
    assert rows[0][1] == "1.00"
    assert all(float(error) < 1e-5 for *_, error in rows)
    assert re.search(r"^least time +[\d.]+ [µm]s: bytes .*, products .*, exponentials ", out, re.M)
    for column in ("x own", "of least", "error"):  # what its numbers are stands below
        assert re.search(f"^{column} +[a-z]", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_half_precision_has_a_bound_on_a_cpu(run):
    code, out, _ = run("bench", "scores", *RUNS["scores"], *QUICK, "--dtype", "float16")
    assert code == 0
    assert re.search("^least time ", out, re.MULTILINE)


def test_a_training_step_is_timed(run):
    code, out, _ = run("bench", "windows", "--backward", *RUNS["windows"], *QUICK)
    assert code == 0
    assert "forward and backward" in out
    # Five products of 4 windows x 3 heads x 16 x 16 x 8, head size as 16, on 100 GFLOP/s.
    # In the unit of the longest part, which is longer on a machine with much to do.
    [(unit, products)] = re.findall(r"^least time +\S+ (\S+): .*products (\S+),", out, re.MULTILINE)
    seconds = float(products) * {"ms": 1e-3, "µs": 1e-6}[unit]
    assert seconds == pytest.approx(14 * 4 * 3 * 16 * 16 * 16 / 1e11, rel=0.01)


def test_the_least_time_is_the_analysis(run):
    """2 x 2 x 20 x 20 products of 8: 25.6 kFLOP on 100 GFLOP/s; 5760 bytes on 10 GB/s."""
    _, out, _ = run("bench", "scores", *RUNS["scores"], *QUICK)
    [(total, moved, products)] = re.findall(
        r"^least time +(\S+) µs: bytes (\S+), products (\S+),", out, re.MULTILINE
    )
    assert float(moved) == pytest.approx(2 * (2 * 20 * 8 + 20 * 20) * 4 / 1e10 * 1e6, rel=0.01)
    assert float(products) == pytest.approx(2 * 2 * 20 * 20 * 8 / 1e11 * 1e6, rel=0.01)
    assert float(total) == max(float(moved), float(products))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("attention --iterations 0", "'--iterations': expected at least 1: see"),
        ("attention --head-size 0", "head_size is 0"),
        ("attention --num-heads 3 --num-kv-heads 2", "num_heads=3 is not a multiple"),
        ("attention --head-size 7", "head_size"),
        ("scores --batch 0", "batch is 0"),
        ("scores --num-tokens 0", "'--num-tokens': expected at least 1: see"),
        ("scores --device tpu", "'--device': 'tpu' is not one of 'cpu', 'cuda'"),
        ("scores --dtype int8", "int8"),
        ("windows --grid 8,8 --window 4", "differ in their number of axes"),
        ("windows --grid 8,x", "--grid 8,x: expected some whole numbers"),
        ("windows --head-size 0", "head_size is 0"),
        ("windows --num-images 0", "num_images is 0"),
        ("nothing", "No such command 'nothing'"),
        ("attention --query-len 10000000", "take 12,800,000,000,000,000 bytes and more"),
        ("windows --grid 1000,1000,1000", "1,032,090,088,029 scores"),
    ],
)
def test_a_mistake_is_one_line(args, message, run):
    code, out, err = run("bench", *args.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(r"pagetile: .*\n", err)
    assert message in err


def test_a_gpu_that_is_not_there_is_named(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = run("bench", "scores", "--device", "cuda")
    assert (code, err) == (2, "pagetile: --device cuda: this PyTorch finds no GPU\n")
