"""Sweep random shapes of every class, each beside its peers: see ``python -m benchmarks sweep``.

A ratio is the best peer's time by pagetile's: 1 is as fast, and more is faster. A wrong result has
the ratio 0. A class is judged by its worst and its median ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagetile import attention_scores

from .gate import allowed_error
from .gpu_timing import time_in_turns
from .machine import describe, describe_run, read_all
from .sweep_inputs import SweepInputs, find_peers
from .sweep_shapes import CLASSES, SweepClass, SweepShape, draw_shapes

__all__ = ["Finding", "find_classes", "measure", "summarise", "sweep"]

CPU_SCALE = 1 / 64
_ROUNDS = 7
_READ_BYTES = 1 << 30


@dataclass(frozen=True)
class Finding:
    """What was found about one shape."""

    shape: SweepShape
    error: float
    """Of pagetile's result against float64, as a part of the largest number of the result."""
    seconds: dict[str, float]
    """Medians, on a CPU the least; ``"pagetile"`` is among them."""
    ratio: float
    best_peer: str
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that take no part, and why."""

    def as_record(self) -> dict[str, Any]:
        """As it goes into the JSON."""
        return {
            "shape": str(self.shape), "ratio": self.ratio, "best peer": self.best_peer,
            "error": self.error, "seconds": self.seconds, "absent": self.absent,
        }  # fmt: skip


def find_classes(name: str | None, device: str) -> list[SweepClass]:
    """The class of a name, or all that can be measured on a device.

    Raises:
        KeyError: No class is called so.
    """
    if name is not None:
        return [CLASSES[name]]
    on_cpu = ("matmul",)
    return [kind for kind in CLASSES.values() if (kind.against in on_cpu) == (device == "cpu")]


def sweep(
    kinds: Sequence[SweepClass], seed: int, count: int, device: str, console: Console
) -> dict[str, Any]:
    """Measure ``count`` shapes of each class, print a table, and return the record."""
    scale = 1.0 if device == "cuda" else CPU_SCALE
    classes = {}
    table = Table("class", "shapes", "worst", "median", "aim", "worst shape", box=None)
    for kind in kinds:
        findings = []
        for shape in draw_shapes(kind, seed, count, scale):
            finding = measure(kind, shape, device)
            console.print(
                f"{kind.name}: {finding.ratio:.3f} x {finding.best_peer}, {finding.shape}"
            )
            findings.append(finding)
        classes[kind.name] = summarise(kind, findings)
        worst = min(findings, key=lambda found: found.ratio)
        table.add_row(
            kind.name, str(count), f"{classes[kind.name]['worst']:.3f}",
            f"{classes[kind.name]['median']:.3f}", f"{kind.worst:g} / {kind.median:g}",
            str(worst.shape),
        )  # fmt: skip
    console.print(table)
    return {"machine": describe(), **describe_run(), "seed": seed, "classes": classes}


def summarise(kind: SweepClass, findings: Sequence[Finding]) -> dict[str, Any]:
    """A class's worst and median ratio, whether they are reached, and all its shapes."""
    ratios = [found.ratio for found in findings]
    worst, median = min(ratios), statistics.median(ratios)
    return {
        "about": kind.about, "against": kind.against, "worst": worst, "median": median,
        "reached": worst >= kind.worst and median >= kind.median,
        "shapes": [found.as_record() for found in findings],
    }  # fmt: skip


def measure(kind: SweepClass, shape: SweepShape, device: str) -> Finding:
    """Check a shape against float64, and time it beside what its class is compared with."""
    if kind.against == "matmul":
        return _measure_scores(shape)
    inputs = SweepInputs(shape, device)
    error = inputs.error(inputs.attend().out)
    if not error <= allowed_error(inputs.q.dtype):
        return Finding(shape, error, {}, 0.0, "float64")
    calls: dict[str, Callable[[], Any]] = {"pagetile": inputs.attend}
    absent: dict[str, str] = {}
    if kind.against == "peers":
        peers, absent = find_peers(inputs)
        calls |= peers
    elif kind.against == "bf16":
        calls["bfloat16 cache"] = SweepInputs(
            replace(shape, kv_dtype=torch.bfloat16), device
        ).attend
    elif kind.against == "bandwidth":
        calls["reading alone"] = lambda: read_all(device, _READ_BYTES)
    times = time_in_turns(calls, device, repeats=_ROUNDS)
    seconds = {name: time.median for name, time in times.items()}
    if kind.against == "bandwidth":
        seconds["reading alone"] *= shape.kv_bytes / _READ_BYTES
    return replace(_compare(shape, error, seconds), absent=absent)


def _compare(shape: SweepShape, error: float, seconds: dict[str, float]) -> Finding:
    peers = {name: time for name, time in seconds.items() if name != "pagetile"}
    if not peers:
        return Finding(shape, error, seconds, 0.0, "nothing to compare with")
    best = min(peers, key=lambda name: peers[name])
    return Finding(shape, error, seconds, peers[best] / seconds["pagetile"], best)


def _measure_scores(shape: SweepShape) -> Finding:
    """``attention_scores`` beside ``torch.matmul`` with the same scale, on this CPU."""
    sizes = (len(shape.seq_lens), shape.num_heads, shape.seq_lens[0], shape.head_size)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(sizes, generator=generator) for _ in range(2))
    scale = shape.head_size**-0.5
    expected = q.double() @ k.double().transpose(-1, -2) * scale
    result = attention_scores(q, k, softmax_scale=scale)
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    if not error <= 1e-5:
        return Finding(shape, error, {}, 0.0, "float64")
    calls: dict[str, Callable[[], Any]] = {
        "pagetile": lambda: attention_scores(q, k, softmax_scale=scale),
        "torch.matmul": lambda: torch.matmul(q * scale, k.transpose(-1, -2)),
    }
    times = time_in_turns(calls, "cpu", repeats=4 * _ROUNDS)
    # What else runs on the machine only adds: a thread that is not scheduled costs milliseconds.
    return _compare(shape, error, {name: time.best for name, time in times.items()})
