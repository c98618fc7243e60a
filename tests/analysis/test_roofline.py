from __future__ import annotations

import itertools
import time

import pytest
import torch

from pagetile.analysis import measure
from pagetile.analysis.attention_io import AttentionShape
from pagetile.analysis.roofline import (
    Machine,
    Work,
    attention_work,
    machine,
    machine_names,
    window_work,
)
from pagetile.analysis.window_io import WindowShape
from pagetile.errors import RequestError

# The survey's H200: its own measured bandwidth and product rate, exponentials by arithmetic.
SURVEY = Machine("h", "", 4.3e12, {"bfloat16": 790e12}, 132 * 16 * 1.83e9, "")

# windows, heads, tokens, head size, region windows: microseconds of bytes, products, exponentials
WORKLOADS = {
    (343, 3, 343, 8, 343): (5.4, 9.8, 31.3, "exps"),
    (1372, 3, 343, 16, 343): (42.2, 39.2, 125.3, "exps"),
    (8192, 3, 49, 32, 64): (71.7, 9.6, 15.3, "bytes"),
    (256, 4, 576, 32, 16): (35.7, 55.0, 87.9, "exps"),
    (4096, 6, 64, 30, 4096): (87.9, 16.3, 26.0, "bytes"),
}


@pytest.mark.parametrize("sizes", WORKLOADS)
def test_the_survey_of_workloads(sizes):
    *expected, bound_by = WORKLOADS[sizes]
    roofs = window_work(WindowShape(*sizes)).on(SURVEY)
    microseconds = [roofs.bytes * 1e6, roofs.products * 1e6, roofs.exps * 1e6]
    assert microseconds == pytest.approx(expected, abs=0.06)
    assert roofs.bound_by == bound_by
    assert roofs.seconds * 1e6 == pytest.approx(max(expected), abs=0.06)


def test_causal_attention_counts_what_rows_see():
    shape = AttentionShape(5, 16, key_len=7, num_heads=2, batch=3, causal=True)
    seen = sum(1 for t, key in itertools.product(range(5), range(7)) if key <= 7 - 5 + t)
    work = attention_work(shape)
    assert work.exps == 6 * seen
    assert work.flops == 6 * seen * 2 * (16 + 16)


def test_narrow_heads_are_multiplied_in_whole_steps():
    narrow, wide = (attention_work(AttentionShape(64, d)) for d in (8, 16))
    assert narrow.flops == wide.flops
    assert narrow.bytes < wide.bytes


def test_the_table_is_complete_and_says_where_it_is_from():
    for name in machine_names():
        known = machine(name)
        assert known.source
        assert {"float16", "bfloat16", "float32"} <= known.flops.keys()
        # Matrix units multiply 32 to 256 times as fast as the special function unit exponentiates.
        assert 31 < known.flops["float16"] / known.exps_per_second < 257
        assert known.program_bytes > 0
    assert machine("h200-measured").bytes_per_second < machine("h200").bytes_per_second


def test_an_unknown_machine_is_refused_with_the_known_ones():
    with pytest.raises(RequestError, match="no machine 'h300': expected one of h200, "):
        machine("h300")
    with pytest.raises(RequestError, match="h200 has no rate for float64"):
        Work(1, 1, 1, "float64").on(machine("h200"))


def test_a_type_that_a_cpu_multiplies_slowly_is_measured_by_small_products(monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, b: time.sleep(0.01))
    assert measure._find_side(2048, torch.bfloat16, torch.device("cpu")) == 128
    monkeypatch.setattr(torch, "mm", lambda a, b: None)
    assert measure._find_side(2048, torch.bfloat16, torch.device("cpu")) == 2048


def test_the_present_machine_is_measured():
    here = measure.measure_machine(scale=0.01)
    # A machine of a thousandth or a thousand times the usual speed is a mistake in the formula.
    assert 1e9 < here.bytes_per_second < 1e12
    assert 1e9 < here.flops["float32"] < 1e14
    assert 1e7 < here.exps_per_second < 1e12


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
        ("NVIDIA B7000", None),
    ],
)
def test_the_exponentials_of_a_gpu_are_the_tables(name, known):
    expected = machine(known).exps_per_second if known else float("inf")
    assert measure._known_exps(name) == expected
