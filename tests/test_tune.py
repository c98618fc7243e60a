"""Tiles of decode: the table of measured tiles, and its look-up."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")

from benchmarks import tune
from benchmarks.__main__ import app
from benchmarks.cases import GPU_CASES
from benchmarks.gpu_attention import GpuDecodeCase
from typer.testing import CliRunner

from pagetile.device import DeviceInfo
from pagetile.ops.paged_attention.plan import decode_tiles, make_plan
from pagetile.ops.paged_attention.plan.decode_tiles import (
    MEASURED,
    DecodeTiles,
    choose_decode_tiles,
    kind_of,
)
from pagetile.ops.paged_attention.problem import Problem

H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
OTHER = DeviceInfo("cuda", 114, "NVIDIA H100 PCIe", capability=(9, 0))
PROBLEM = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(decode_tiles, "MEASURED", path)
    monkeypatch.setattr(tune, "MEASURED", path)
    decode_tiles._measured.cache_clear()
    yield path
    decode_tiles._measured.cache_clear()


def test_a_measured_gpu_takes_its_tiles_and_others_the_formula_s(table):
    fast = DecodeTiles(32, 4, 6, 1, 168, 88)
    tune._write(H200.name, kind_of(PROBLEM, hopper=True), fast)
    assert choose_decode_tiles(PROBLEM, H200, hopper=True) == fast
    assert choose_decode_tiles(PROBLEM, OTHER, hopper=True) != fast
    assert choose_decode_tiles(PROBLEM, H200, hopper=False) != fast


def test_writing_a_kind_keeps_the_others(table):
    tune._write("a", "x", DecodeTiles(32, 4, 2, 1))
    tune._write("a", "y", DecodeTiles(64, 4, 2, 1))
    tune._write("b", "x", DecodeTiles(16, 4, 2, 1))
    found = json.loads(table.read_text())
    assert {gpu: sorted(kinds) for gpu, kinds in found.items()} == {"a": ["x", "y"], "b": ["x"]}
    assert found["a"]["x"]["tile_n"] == 32


def test_a_plan_says_its_tiles_again():
    plan = make_plan(PROBLEM, H200)
    tiles = tune._tiles(plan, H200)
    assert tiles == choose_decode_tiles(PROBLEM, H200, hopper=True)
    assert tune._plan(plan, tiles, H200) == plan
    half = tune._plan(plan, DecodeTiles(128, 4, 2, 1, 168, 88), H200)
    assert (half.tile_n, half.num_programs) == (128, plan.num_programs // 2)


def test_what_was_measured_is_of_kinds_that_there_are():
    kinds = {
        kind_of(case.problem, hopper)
        for case in GPU_CASES
        if isinstance(case, GpuDecodeCase)
        for hopper in (True, False)
    }
    for found in json.loads(MEASURED.read_text()).values():
        assert found.keys() <= kinds
        for tiles in found.values():
            assert DecodeTiles(**tiles).programs in (1, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_tune():
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "no CUDA device here" in result.output
