from __future__ import annotations

import numpy as np
import pytest

from pagetile.analysis.window_io import (
    WindowShape,
    backward_compulsory,
    compulsory,
    multiprocessor,
    unfused,
)
from pagetile.errors import ShapeError

# windows, heads, tokens, head size, masked; compulsory, half, AMP and SDPA bytes as the survey of
# workloads has them, to three digits.
WORKLOADS = {
    "SwinUNETR fs24 96^3 s1": ((343, 3, 343, 8, True), "23.4M 1.98G 3.92G 1.96G"),
    "SwinUNETR fs24 96^3 s4": ((1, 24, 216, 8, False), "2.6M 14.1M 27.5M 2.6M"),
    "SwinUNETR fs48 96^3 s1 B4": ((1372, 3, 343, 16, 343), "181.5M 8.11G 15.86G 7.93G"),
    "SwinUNETR fs48 128^3 s1": ((1000, 3, 343, 16, True), "132.8M 5.91G 11.56G 5.78G"),
    "Swin-T s1 B128": ((8192, 3, 49, 32, 64), "308.3M 1.56G 2.50G 1.25G"),
    "SwinV2-B 384 s1 B16": ((256, 4, 576, 32, 16), "153.7M 5.74G 11.17G 5.59G"),
    "VideoSwin-T s1": ((128, 3, 392, 32, True), "39.5M 1.02G 1.97G 982.6M"),
    "SwinIR 512^2": ((4096, 6, 64, 30, True), "377.8M 2.37G 3.98G 1.99G"),
}


def parse(text: str) -> float:
    return float(text[:-1]) * {"M": 1e6, "G": 1e9}[text[-1]]


def make(windows: int, heads: int, tokens: int, head_size: int, masked: int) -> WindowShape:
    regions = windows if masked is True else int(masked)
    return WindowShape(windows, heads, tokens, head_size, num_region_windows=regions)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_survey_of_workloads(name):
    sizes, bytes_ = WORKLOADS[name]
    shape = make(*sizes)
    counted = [compulsory(shape), *(unfused(shape, how=how) for how in ("half", "amp", "sdpa"))]
    for traffic, text in zip(counted, bytes_.split(), strict=True):
        last_digit = 10.0 ** -len(text[:-1].split(".")[1]) * parse(f"1{text[-1]}")
        # The survey leaves out of SDPA what is small beside its mask.
        assert traffic.bytes == pytest.approx(parse(text), abs=last_digit)


def simulate(shape: WindowShape, windows_per_program: int) -> int:
    """Bytes that programs load and store, one (head, group of windows) after the other."""
    half = np.zeros((shape.num_tokens, shape.head_size), np.float16)
    bias = np.zeros((shape.num_tokens, shape.num_tokens), np.float16)
    regions = np.zeros(shape.num_tokens, np.uint8)
    moved = 0
    for _head in range(shape.num_heads):
        for start in range(0, shape.num_windows, windows_per_program):
            moved += bias.nbytes
            for _ in range(start, min(start + windows_per_program, shape.num_windows)):
                moved += 4 * half.nbytes + (regions.nbytes if shape.num_region_windows else 0)
    return moved


@pytest.mark.parametrize("windows_per_program", [1, 3, 8, 100])
@pytest.mark.parametrize("masked", [0, 5])
def test_multiprocessor_traffic_against_a_loop(windows_per_program, masked):
    shape = WindowShape(10, 3, 49, 8, num_region_windows=masked)
    counted = multiprocessor(shape, windows_per_program=windows_per_program)
    assert counted.bytes == simulate(shape, windows_per_program)


def test_what_a_bias_matrix_costs_a_program():
    for head_size, ratio in ((16, 5.4), (8, 10.7)):
        shape = WindowShape(343, 3, 343, head_size)
        bias = multiprocessor(shape).bytes - multiprocessor(shape, bias="none").bytes
        assert bias / (4 * shape.tensor_bytes) == pytest.approx(ratio, abs=0.05)


def test_a_table_is_smaller_than_its_matrix():
    shape = WindowShape(343, 3, 343, 16, table_size=13**3)
    table = compulsory(shape, bias="table").bytes - compulsory(shape, bias="none").bytes
    matrix = compulsory(shape, bias="matrix").bytes - compulsory(shape, bias="none").bytes
    assert (table, matrix) == (13_182, 705_894)


def test_a_dense_mask_costs_more_than_region_ids():
    shape = WindowShape(1000, 3, 343, 8, num_region_windows=1000)
    assert (shape.dense_mask_bytes, shape.region_bytes) == (470_596_000, 343_000)
    dense = multiprocessor(shape, mask="dense").bytes - multiprocessor(shape).bytes
    assert dense == 3 * shape.dense_mask_bytes - 3 * shape.region_bytes


def test_the_tensor_that_monai_users_run_out_of_memory_on():
    shape = WindowShape(1000, 3, 343, 8)
    assert shape.score_matrix_bytes / 2**30 == pytest.approx(1.315, abs=5e-4)


def test_the_backward_pass_moves_each_tensor_once():
    shape = WindowShape(10, 3, 49, 8, num_region_windows=5)
    rows = 10 * 3 * 49
    expected = 8 * rows * 8 * 2 + 2 * rows * 4 + 3 * 49 * 49 * (2 + 4) + 5 * 49
    assert backward_compulsory(shape).bytes == expected


def test_the_log_sum_exp_is_counted_when_it_is_written():
    shape = WindowShape(10, 3, 49, 8)
    assert compulsory(shape, with_lse=True).bytes - compulsory(shape).bytes == 10 * 3 * 49 * 4


def test_bad_shapes_are_refused():
    with pytest.raises(
        ShapeError, match="num_windows=10 is not a multiple of num_region_windows=4"
    ):
        WindowShape(10, 3, 49, 8, num_region_windows=4)
    with pytest.raises(ShapeError, match="num_tokens is 0"):
        WindowShape(10, 3, 0, 8)
    with pytest.raises(ShapeError, match="give WindowShape a table_size"):
        compulsory(WindowShape(10, 3, 49, 8), bias="table")
    with pytest.raises(ShapeError, match="how is 'x'"):
        unfused(WindowShape(10, 3, 49, 8), how="x")
