"""All window workloads of each of some models, forward, against SDPA's fastest backend.

Heads of 30, as in SwinIR and HAT, have cases of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from pagetile.analysis.timing import Times, admit, ratio

from .case import Check, Measurement, Target
from .gpu_timing import time_in_turns
from .windows import WindowCase, WindowInputs, compare, judge_by

_WORTH_IT = 10e-6
_PICKED = 2  # windows from each end, and as many random ones between
_ROUNDS = 5


@dataclass(frozen=True)
class WindowWorkloadsCase:
    """Each workload with the regions of a shifted map, if it has several windows, and without.

    Metrics: ``x SDPA, WORKLOAD``, the time of SDPA's fastest backend with a dense mask over
    pagetile's, where either takes more than 10 µs; ``x SDPA at least``, the smallest of them;
    ``workloads``, their number.
    """

    name: str
    model: str
    workloads: tuple[WindowCase, ...]
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        return f"windows of {self.model}: shifted and not, forward"

    def verify(self) -> list[Check]:
        """Run the timed implementation at full size, and compare some windows with float64."""
        return [self._check(case) for case in self._forms()]

    def measure(self, repeats: int | None) -> Measurement:
        """Time pagetile and SDPA's backends by replayed graphs with a cold cache."""
        times: dict[str, Times] = {}
        metrics: dict[str, float] = {}
        absent: dict[str, str] = {}
        for case in self._forms():
            inputs = WindowInputs(case)
            ways, left_out = inputs.peers()
            ways.pop("eager", None)
            exact = {"out": inputs.pick(picked := _pick(inputs)).results("float64")["out"]}
            judge = judge_by(exact)
            calls, wrong = admit(
                {name: way.forward() for name, way in ways.items()},
                lambda name, out: judge(name, out[picked]),  # noqa: B023 (called at once)
            )
            absent |= {f"{name}, {case.name}": why for name, why in (left_out | wrong).items()}
            calls = {"pagetile": inputs.pagetile().forward(), **calls}
            found = time_in_turns(calls, self.device, repeats=repeats or _ROUNDS)
            times |= {f"{name}, {case.name}": time for name, time in found.items()}
            mine = found.pop("pagetile")
            if not found:
                continue
            best = min(found.values(), key=lambda time: time.median)
            if max(best.median, mine.median) > _WORTH_IT:
                metrics[f"x SDPA, {case.name}"] = ratio(best, mine)
        least = min(metrics.values(), default=0.0)
        metrics = {"x SDPA at least": least, "workloads": len(metrics), **metrics}
        return Measurement(times, metrics, absent)

    def _forms(self) -> Iterator[WindowCase]:
        for case in self.workloads:
            if case.grid != case.window:
                yield replace(case, name=f"{case.name}, shifted")
            yield replace(case, is_shifted=False)

    def _check(self, case: WindowCase) -> Check:
        inputs = WindowInputs(case)
        picked = _pick(inputs)
        few = inputs.pick(picked)
        chosen = inputs.implementation()
        with torch.no_grad():
            found = inputs.attend(*inputs.rows, *inputs.learned, impl=chosen)
        exact, eager = (few.results(how)["out"] for how in ("float64", "eager"))
        check = compare(f"{case.name}: {chosen}", found[picked], exact, eager, case.dtype)
        is_timed = torch.equal(found, inputs.pagetile().forward()())
        return check if is_timed else Check(check.what, False, f"{chosen} is not what is timed")


def _pick(inputs: WindowInputs) -> list[int]:
    """The first windows, the last ones of an image, which have regions, and random ones."""
    one, all_windows = range(inputs.num_masks), range(len(inputs.dout))
    some = random.Random(0).sample(all_windows, min(_PICKED, len(all_windows)))
    return sorted({*one[:_PICKED], *one[-_PICKED:], *some})


def find_workloads() -> dict[str, tuple[WindowCase, ...]]:
    """The stages of models in use, by model."""
    return {model: tuple(stages) for model, stages in _find_models()}


def _find_models() -> Iterator[tuple[str, Iterable[WindowCase]]]:
    yield "SwinUNETR 24, 96³", _unetr((49, 28, 14, 6), 8, 1)
    yield "SwinUNETR 48, 96³", _unetr((49, 28, 14, 6), 16, 1)
    yield "SwinUNETR 48, 4 × 96³", _unetr((49, 28, 14, 6), 16, 4)
    yield "SwinUNETR 24, 128³", _unetr((70, 35, 21, 14), 8, 1)
    yield "SwinUNETR 48, 128³", _unetr((70, 35, 21, 14), 16, 1)
    yield "SwinUNETR 48, 2 × 128³", _unetr((70, 35, 21, 14), 16, 2)
    yield "Swin-T, 224", _swin((56, 28, 14, 7), 7, 3, 1)
    yield "Swin-T, 128 × 224", _swin((56, 28, 14, 7), 7, 3, 128)
    yield "Swin-B, 64 × 224", _swin((56, 28, 14, 7), 7, 4, 64)
    yield "Swin-B, 32 × 384", _swin((96, 48, 24, 12), 12, 4, 32)
    yield "Swin v2-B, 32 × 256", _swin((64, 32, 16, 8), 16, 4, 32, torch.bfloat16)
    yield "Swin v2-B, 16 × 384", _swin((96, 48, 24, 12), 24, 4, 16, torch.bfloat16)
    yield (
        "Video Swin-T",
        (
            WindowCase("stage 1", (16, 56, 56), (8, 7, 7), 3, 32),
            WindowCase("stage 3", (16, 14, 14), (8, 7, 7), 12, 32),
        ),
    )
    yield "ViT-B", (WindowCase("windows of 14", (70, 70), (14, 14), 12, 64),)
    yield "volumes of 64³", (WindowCase("8 × 8 × 8", (64, 64, 64), (8, 8, 8), 3, 32),)


def _unetr(sides: tuple[int, ...], head_size: int, images: int) -> Iterator[WindowCase]:
    """Yield the stages of a volume padded to multiples of 7; a smaller one is one window."""
    for stage, (side, num_heads) in enumerate(zip(sides, (3, 6, 12, 24), strict=True), 1):
        window = (min(side, 7),) * 3
        yield WindowCase(f"stage {stage}", (side,) * 3, window, num_heads, head_size, images)


def _swin(
    sides: tuple[int, ...],
    window: int,
    num_heads: int,
    images: int,
    dtype: torch.dtype = torch.float16,
) -> Iterator[WindowCase]:
    """Yield the stages of an image, each with twice the heads of the one before."""
    for stage, side in enumerate(sides, 1):
        size = (min(side, window),) * 2
        yield WindowCase(f"stage {stage}", (side, side), size, num_heads, 32, images, dtype)
        num_heads *= 2
