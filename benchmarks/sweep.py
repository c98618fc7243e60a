"""Sweep random shapes of every class, each beside its peers: see ``python -m benchmarks sweep``.

A ratio is the best peer's time by pagetile's: 1 is as fast, and more is faster. A wrong result, and
a call that fails, have the ratio 0. A class is judged by its worst and its median ratio; it is one
case of a record, with all its shapes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagetile import attention_scores

from .case import at_least
from .gate import allowed_error
from .gpu_timing import GraphClock, time_in_turns
from .machine import read_all
from .sweep_inputs import SweepInputs, find_peers
from .sweep_shapes import CLASSES, SweepClass, SweepShape, draw_shapes

__all__ = ["Finding", "find_classes", "measure", "print_summary", "summarise", "sweep"]

CPU_SCALE = 1 / 64
_ROUNDS = 5
_CPU_ROUNDS = 28
_DECODE_REST = 0.02
"""Seconds before each turn of a decode, which streams memory: the power limit is far."""
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
        """As it goes into the JSON, which has no infinity."""
        return {
            "shape": str(self.shape), "ratio": self.ratio, "best peer": self.best_peer,
            "error": self.error if math.isfinite(self.error) else None,
            "seconds": self.seconds, "absent": self.absent,
        }  # fmt: skip


def find_classes(names: Sequence[str], device: str) -> list[SweepClass]:
    """The classes of some names, or without any, all that can be measured on a device.

    Raises:
        KeyError: No class is called so.
    """
    if names:
        return [CLASSES[name] for name in names]
    on_cpu = ("matmul",)
    return [kind for kind in CLASSES.values() if (kind.against in on_cpu) == (device == "cpu")]


def sweep(
    kinds: Sequence[SweepClass],
    seed: int,
    count: int,
    device: str,
    console: Console,
    seconds: float = math.inf,
) -> Iterator[tuple[SweepClass, list[Finding]]]:
    """Measure up to ``count`` shapes of each class, and yield a class's findings after each shape.

    What is left of ``seconds`` is shared equally among the classes that are left. A class stops
    drawing shapes when its share is over, but has one shape at least.
    """
    scale = 1.0 if device == "cuda" else CPU_SCALE
    end = time.monotonic() + seconds
    for number, kind in enumerate(kinds):
        begin = time.monotonic()
        class_end = begin + (end - begin) / (len(kinds) - number)
        findings: list[Finding] = []
        for shape in draw_shapes(kind, seed, count, scale):
            if findings and time.monotonic() >= class_end:
                break
            finding = _measure_or_fail(kind, shape, device)
            findings.append(finding)
            _print_finding(console, kind, finding)
            yield kind, findings


def _measure_or_fail(kind: SweepClass, shape: SweepShape, device: str) -> Finding:
    """Measure a shape; a call that fails has the ratio 0, unless the GPU has failed with it."""
    try:
        return measure(kind, shape, device)
    except Exception as error:
        if device == "cuda":
            torch.cuda.synchronize()  # raises where no later call can run either
        lines = str(error).strip().splitlines()
        return Finding(shape, math.inf, {}, 0.0, f"failed: {lines[0] if lines else repr(error)}")
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def summarise(kind: SweepClass, findings: Sequence[Finding], seed: int) -> dict[str, Any]:
    """Return a class's worst and median ratio, its peers and all its shapes.

    It is what ``report.record_line`` takes as a case. ``fastest: PEER`` counts the shapes in which
    a peer is the fastest one.
    """
    ratios = [found.ratio for found in findings]
    checks = [
        {
            "what": str(found.shape),
            "passed": found.ratio > 0,
            "detail": f"relative error {found.error:.2g}" if found.ratio else found.best_peer,
        }
        for found in findings
    ]
    leaders = Counter(found.best_peer for found in findings if found.ratio)
    targets = at_least("worst", kind.worst), at_least("median", kind.median)
    return {
        "what": kind.name,
        "about": f"sweep: {kind.about}, shapes of seed {seed}",
        "worst": min(ratios),
        "median": statistics.median(ratios),
        "shapes": len(findings),
        **{f"fastest: {peer}": number for peer, number in leaders.most_common()},
        "targets": [tuple(target) for target in targets],
        "checks": checks,
        "absent": _absences(findings),
        "details": [found.as_record() for found in findings],
    }


def _absences(findings: Sequence[Finding]) -> dict[str, str]:
    """Why each peer takes no part, and in how many shapes if not in all."""
    counts: dict[str, Counter[str]] = {}
    for found in findings:
        for name, reason in found.absent.items():
            counts.setdefault(name, Counter())[reason] += 1
    return {
        name: "; ".join(
            reason if number == len(findings) else f"{reason}, {number} of {len(findings)} shapes"
            for reason, number in reasons.most_common()
        )
        for name, reasons in counts.items()
    }


def _print_finding(console: Console, kind: SweepClass, finding: Finding) -> None:
    """Print a shape's ratio, its best peer, its error, and the other peers' times by pagetile's."""
    own = finding.seconds.get("pagetile")
    others = sorted(
        (seconds / own, name)
        for name, seconds in finding.seconds.items()
        if own and name not in ("pagetile", finding.best_peer)
    )
    behind = "".join(f", {name} {ratio:.2f}" for ratio, name in others)
    console.print(
        f"{kind.name}: {finding.ratio:.3f} x {finding.best_peer} (error {finding.error:.2g}"
        f"{behind}), {finding.shape}",
        markup=False,
    )


def print_summary(console: Console, cases: Sequence[dict[str, Any]]) -> None:
    """Print a table of classes as ``summarise`` has them, and who takes no part."""
    table = Table("class", "shapes", "worst", "median", "aim", "fastest peers", "worst shape")
    table.box = None
    for case in cases:
        worst = min(case["details"], key=lambda detail: detail["ratio"])
        leaders = [
            f"{name.removeprefix('fastest: ')} ({number})"
            for name, number in case.items()
            if name.startswith("fastest: ")
        ]
        aims = " / ".join(f"{bound:g}" for _, bound, _ in case["targets"])
        table.add_row(
            case["what"], str(case["shapes"]), f"{case['worst']:.3f}", f"{case['median']:.3f}",
            aims, ", ".join(leaders), worst["shape"],
        )  # fmt: skip
    console.print(table)
    for case in cases:
        for name, reason in case["absent"].items():
            console.print(f"{case['what']}: {name} takes no part: {reason}", markup=False)


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
    rest = _DECODE_REST if max(shape.query_lens) == 1 else GraphClock.rest
    if device == "cuda":
        calls, refused = _capture(calls)
        absent = absent | refused
    times = time_in_turns(calls, device, repeats=_ROUNDS, rest=rest, captured=False)
    seconds = {name: found.median for name, found in times.items()}
    if kind.against == "bandwidth":
        seconds["reading alone"] *= shape.kv_bytes / _READ_BYTES
    return replace(_compare(shape, error, seconds), absent=absent)


def _capture(
    calls: dict[str, Callable[[], Any]],
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return the replays of the calls' CUDA graphs, and which peers cannot be recorded, and why."""
    replays: dict[str, Callable[[], Any]] = {}
    refused: dict[str, str] = {}
    for name, call in calls.items():
        try:
            replays[name] = GraphClock().prepare(call)
        except Exception as error:  # whatever a library raises about it
            if name == "pagetile":
                raise
            lines = str(error).strip().splitlines()
            refused[name] = f"cannot be captured: {lines[0] if lines else repr(error)}"
    return replays, refused


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
    times = time_in_turns(calls, "cpu", repeats=_CPU_ROUNDS)
    # What else runs on the machine only adds: a thread that is not scheduled costs milliseconds.
    return _compare(shape, error, {name: found.best for name, found in times.items()})
