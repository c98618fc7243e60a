from __future__ import annotations

import math

import pytest
import torch

from pagetile.analysis.attention_io import AttentionShape, compulsory
from pagetile.analysis.contests import attention_contest, scores_contest
from pagetile.analysis.roofline import Work
from pagetile.analysis.side_by_side import Contest, compare
from pagetile.analysis.window_contest import windows_contest
from pagetile.analysis.window_grid import WindowGrid

CPU = torch.device("cpu")


def errors(contest: Contest) -> dict[str, float]:
    results = compare(contest, iterations=1, warmup=0)
    assert [result.reason for result in results] == [""] * len(results)
    return {result.name: result.error for result in results}


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(50, 16, num_heads=4, num_kv_heads=2, batch=2),
        AttentionShape(50, 16, num_heads=2, causal=True),
        AttentionShape(9, 8, key_len=40, num_heads=2, causal=True, sliding_window=7),
        AttentionShape(40, 8, num_heads=2, sliding_window=7),
    ],
)
def test_all_peers_compute_the_same_attention(shape):
    contest = attention_contest(shape, dtype=torch.float32, device=CPU)
    assert next(iter(contest.contestants)) == "pagetile.attention"
    assert max(errors(contest).values()) < 2e-6
    assert contest.work.bytes == compulsory(shape).bytes


def test_the_expected_attention_is_sdpas_in_float64():
    shape = AttentionShape(30, 8, num_heads=3, causal=True)
    contest = attention_contest(shape, dtype=torch.float64, device=CPU)
    assert (contest.contestants["PyTorch SDPA"]() - contest.expected[0]).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("grid", "num_images"),
    [
        (WindowGrid.of((8, 8), (4, 4), (2, 2)), 3),
        (WindowGrid.of((8, 6, 4), (4, 3, 4), (0, 0, 0)), 1),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_all_peers_compute_the_same_windows(grid, num_images, backward):
    options = {"num_images": num_images, "num_heads": 2, "head_size": 8, "backward": backward}
    contest = windows_contest(grid, **options, dtype=torch.float32, device=CPU)
    assert max(errors(contest).values()) < 3e-6
    shape = (grid.num_windows * num_images, 2, grid.num_tokens, 8)
    shapes = [shape] * 3 + [(grid.table_size, 2)] if backward else [shape]
    assert [tuple(tensor.shape) for tensor in contest.expected] == shapes


def test_expected_gradients_are_autograds_over_all_windows_at_once():
    grid = WindowGrid.of((8, 8), (4, 4), (2, 2))
    options = {"num_images": 2, "num_heads": 2, "head_size": 8, "backward": True}
    contest = windows_contest(grid, **options, dtype=torch.float64, device=CPU)
    gradients = contest.contestants["eager, as Swin models"]()
    for mine, exact in zip(gradients, contest.expected, strict=True):
        torch.testing.assert_close(mine, exact)


def test_all_peers_compute_the_same_scores():
    contest = scores_contest(2, 3, 50, 16, dtype=torch.float32, device=CPU)
    assert max(errors(contest).values()) < 1e-5
    assert contest.expected[0].dtype == torch.float64


# --- timing ---------------------------------------------------------------------------------


def contest_of(**contestants) -> Contest:
    expected = torch.tensor([0.0, 4.0], dtype=torch.float64)
    return Contest("", contestants, [expected], Work(1, 1, 1))


def test_rounds_are_counted_and_every_contestant_has_one_call_in_each():
    calls = []
    ticks = []

    def record(name):
        calls.append(name)
        return torch.zeros(2)

    contest = contest_of(a=lambda: record("a"), b=lambda: record("b"))
    results = compare(contest, iterations=7, warmup=2, tick=lambda: ticks.append(len(calls)))
    assert [len(result.times.seconds) for result in results] == [7, 7]
    assert len(ticks) == 9
    assert calls.count("a") == calls.count("b") == 9 + 1  # and one to check
    rounds = [tuple(calls[2 + 2 * turn : 4 + 2 * turn]) for turn in range(9)]
    assert set(rounds) == {("a", "b"), ("b", "a")}


def test_errors_are_largest_differences_by_the_largest_value():
    own, right, nan = compare(
        contest_of(
            own=lambda: torch.tensor([0.5, 2.0]),
            right=lambda: (torch.tensor([0.0, 4.0]),),
            nan=lambda: torch.tensor([0.0, math.nan]),
        ),
        iterations=1,
        warmup=0,
    )
    assert (own.error, right.error) == (0.5, 0.0)
    assert math.isnan(nan.error)


def test_a_nan_in_any_result_is_the_error():
    zeros, nan = torch.zeros(2), torch.tensor([math.nan, 0.0])
    for results in ((nan, zeros), (zeros, nan)):
        contest = Contest("", {"own": lambda r=results: r}, [torch.ones(2)] * 2, Work(1, 1, 1))
        [own] = compare(contest, iterations=1, warmup=0)
        assert math.isnan(own.error)


def test_an_implementation_that_cannot_run_gives_its_reason_and_others_run():
    def fail():
        raise RuntimeError("no kernel\nmany lines")

    own, peer = compare(contest_of(own=lambda: torch.zeros(2), peer=fail), iterations=3, warmup=0)
    assert (peer.reason, peer.times) == ("unsupported: no kernel", None)
    assert len(own.times.seconds) == 3
