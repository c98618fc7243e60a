"""Sweep random shapes of every class against peers: see ``python -m benchmarks sweep``.

A ratio is the best peer's time divided by pagetile's: 1 is as fast, and more is faster. A wrong
result, and a call that fails, have the ratio 0. A class is judged by its worst and its median
ratio; it is one case of a record, with all its shapes.

All shapes are drawn first, and on a GPU their kernels are compiled before in several processes
(``sweep_warming``). Then one shape after the other is checked and timed, in turns of the classes.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pagetile import attention_scores

from .case import at_least
from .gate import allowed_error
from .gpu_timing import GraphClock, time_in_turns
from .libraries import COMPILED_WHEN_PLANNED
from .machine import read_all
from .sweep_inputs import SweepInputs, find_own_calls, find_peers, import_libraries
from .sweep_shapes import CLASSES, DrawnShape, SweepClass, SweepShape
from .sweep_warming import COLD, Warmed, plan_tasks, warm_up

CPU_SCALE = 1 / 64
_ROUNDS = 7
_CPU_ROUNDS = 28
_CLEARLY_SLOWER = 1.25
"""A peer this many times as slow as the fastest in the first round is not timed again."""
_SHORTEST_REST = 0.01
_DECODE_REST = 0.02
"""The most seconds before each turn of a decode, which stays far below the power limit."""
_READ_BYTES = 1 << 30
_SUM = f"sum of {_READ_BYTES >> 30} GiB"
"""Reads at the machine's full rate, which calls that read little cannot reach; not a peer."""
_WARMING_SHARE, _WARMING_SECONDS = 0.45, 300.0
_MOST_PROCESSES = 14
_SHAPE_SECONDS = 120
"""A shape that takes longer hangs: no later call of the process can run."""
_STDERR = 2
_LEFT_BYTES = 4 << 30
"""More memory than this left after a shape belongs to reference cycles of that shape."""
_LISTED = 3
"""Worst shapes of a class in the summary."""


@dataclass(frozen=True)
class Finding:
    """The result of one shape."""

    shape: SweepShape
    error: float
    """Error of pagetile's result against float64, relative to the largest number of the result."""
    seconds: dict[str, float]
    """Medians, on a CPU minima; ``"pagetile"`` is among them."""
    ratio: float
    best_peer: str
    absent: dict[str, str] = field(default_factory=dict)
    """Peers that were left out, and why."""
    seed: int = 0
    number: int = 0
    """The shape's index in its class for its seed."""

    @property
    def share_of_sum(self) -> float | None:
        """Share of the machine's read bandwidth, in classes that are compared with reading."""
        if _SUM not in self.seconds:
            return None
        return self.seconds[_SUM] / self.seconds["pagetile"]

    def as_record(self) -> dict[str, Any]:
        """The form in a record; JSON has no infinity."""
        return {
            "shape": str(self.shape), "seed": self.seed, "number": self.number,
            "ratio": self.ratio, "best peer": self.best_peer,
            "error": self.error if math.isfinite(self.error) else None,
            "seconds": self.seconds, "absent": self.absent,
        }  # fmt: skip


def find_classes(names: Sequence[str], device: str) -> list[SweepClass]:
    """The classes of some names, or without names, all that can be measured on a device.

    Raises:
        KeyError: No class has this name.
    """
    if names:
        return [CLASSES[name] for name in names]
    on_cpu = ("matmul",)
    return [kind for kind in CLASSES.values() if (kind.against in on_cpu) == (device == "cpu")]


def sweep(
    drawn: Sequence[DrawnShape],
    device: str,
    console: Console,
    seconds: float = math.inf,
    warmed: Warmed = COLD,
) -> Iterator[tuple[SweepClass, list[Finding]]]:
    """Measure drawn shapes in their order, and yield a class's findings after each shape.

    After ``seconds`` only classes without a shape are continued. Shapes whose kernels were not
    compiled before come last.
    """
    end = time.monotonic() + seconds
    findings: dict[str, list[Finding]] = {}
    in_order = sorted(drawn, key=lambda one: one.shape not in warmed.shapes)
    for kind, seed, number, shape in in_order:
        of_kind = findings.setdefault(kind.name, [])
        if of_kind and time.monotonic() >= end:
            continue
        finding = _measure_or_fail(kind, shape, device, warmed.missing_libraries(shape))
        of_kind.append(replace(finding, seed=seed, number=number))
        _print_finding(console, kind, of_kind[-1])
        yield kind, of_kind


def warm(drawn: Sequence[DrawnShape], seconds: float, console: Console) -> Warmed:
    """Compile the kernels of shapes on this GPU for a share of ``seconds``; print the progress."""
    begin = time.monotonic()
    tasks = plan_tasks(drawn, COMPILED_WHEN_PLANNED)
    limit = min(_WARMING_SECONDS, _WARMING_SHARE * seconds)
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - 2))
    warmed = warm_up(tasks, processes, limit, import_libraries)
    shapes = {one.shape for one in drawn}
    console.print(
        f"compiled ahead for {len(warmed.shapes & shapes)} of {len(shapes)} shapes "
        f"in {time.monotonic() - begin:.0f} s",
        markup=False,
    )
    for reason, number in Counter(warmed.reasons.values()).most_common():
        first = next(what for what, why in warmed.reasons.items() if why == reason)
        console.print(f"not compiled ahead: {number} x {reason}; first {first}", markup=False)
    return warmed


def _measure_or_fail(
    kind: SweepClass, shape: SweepShape, device: str, without: Mapping[str, str]
) -> Finding:
    """Measure a shape; a call that fails has the ratio 0, unless the GPU has failed with it."""
    if device == "cuda":  # a shape that hangs ends the process; shapes before it are recorded
        faulthandler.dump_traceback_later(_SHAPE_SECONDS, exit=True, file=_STDERR)
    try:
        return measure(kind, shape, device, without)
    except Exception as error:
        if device == "cuda":
            torch.cuda.synchronize()  # raises if the GPU runs nothing more
        lines = str(error).strip().splitlines()
        return Finding(shape, math.inf, {}, 0.0, f"failed: {lines[0] if lines else repr(error)}")
    finally:
        if device == "cuda":
            faulthandler.cancel_dump_traceback_later()
            if torch.cuda.memory_allocated() > _LEFT_BYTES:  # held by reference cycles
                gc.collect()
            torch.cuda.empty_cache()


def summarise(kind: SweepClass, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a class's worst and median ratio, its peers and all its shapes.

    It is in the form that ``report.record_line`` takes. ``fastest: PEER`` counts the shapes in
    which a peer is the fastest.
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
    seeds = sorted({found.seed for found in findings})
    shares = [found.share_of_sum for found in findings if found.share_of_sum is not None]
    return {
        "what": kind.name,
        "about": f"sweep: {kind.about}, shapes of seed {', '.join(map(str, seeds))}",
        "worst": min(ratios),
        "median": statistics.median(ratios),
        "shapes": len(findings),
        **(
            {f"worst of a {_SUM}": min(shares), f"median of a {_SUM}": statistics.median(shares)}
            if shares
            else {}
        ),
        **{f"fastest: {peer}": number for peer, number in leaders.most_common()},
        "targets": [tuple(target) for target in targets],
        "checks": checks,
        "absent": _absences(findings),
        "details": [found.as_record() for found in findings],
    }


def _absences(findings: Sequence[Finding]) -> dict[str, str]:
    """Why each peer was left out, and of how many shapes if not of all."""
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
    """Print a shape's ratio, its best peer, its error, and the peers' times by pagetile's."""
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
    """Print a table of classes as ``summarise`` has them, their worst shapes, and absent peers."""
    table = Table("class", "shapes", "worst", "median", "aim", "fastest peers")
    table.box = None
    for case in cases:
        leaders = [
            f"{name.removeprefix('fastest: ')} ({number})"
            for name, number in case.items()
            if name.startswith("fastest: ")
        ]
        aims = " / ".join(f"{bound:g}" for _, bound, _ in case["targets"])
        table.add_row(
            case["what"], str(case["shapes"]), f"{case['worst']:.3f}", f"{case['median']:.3f}",
            aims, ", ".join(leaders),
        )  # fmt: skip
    console.print(table)
    for case in cases:
        for detail in sorted(case["details"], key=lambda detail: detail["ratio"])[:_LISTED]:
            console.print(f"{case['what']} {_in_words(detail)}", markup=False)
    for case in cases:
        for name, reason in case["absent"].items():
            console.print(f"{case['what']}: {name}: {reason}", markup=False)


def _in_words(detail: Mapping[str, Any]) -> str:
    """A shape of a record: seed and number, ratio, both times, the peer, and sizes."""
    peer, seconds = detail["best peer"], detail["seconds"]
    beside = peer
    if peer in seconds:
        beside = f"{seconds['pagetile'] * 1e6:.1f} us, {peer} {seconds[peer] * 1e6:.1f} us"
    place = f"seed {detail['seed']} number {detail['number']}"
    return f"{place}: {detail['ratio']:.3f}, {beside}; {detail['shape']}"


def measure(
    kind: SweepClass, shape: SweepShape, device: str, without: Mapping[str, str] | None = None
) -> Finding:
    """Check a shape against float64, and time it in turns with the peers of its class.

    ``without`` names libraries that are left out, and why.
    """
    if kind.against == "matmul":
        return _measure_scores(shape)
    inputs = SweepInputs(shape, device)
    error = inputs.error(inputs.attend().out)
    if not error <= allowed_error(inputs.q.dtype):
        return Finding(shape, error, {}, 0.0, "float64")
    own = find_own_calls(kind.against, inputs)
    calls: dict[str, Callable[[], Any]] = {name: one.call for name, one in own.items()}
    absent: dict[str, str] = {}
    if kind.against == "peers":
        peers, absent = find_peers(inputs, without)
        calls |= peers
    elif kind.against == "bandwidth":
        calls[_SUM] = lambda: read_all(device, _READ_BYTES)
    if device == "cuda":
        calls, refused = _capture(calls)
        absent = absent | refused
    seconds = _race(calls, device, is_decode=max(shape.query_lens) == 1)
    seconds |= {name: seconds[name] / one.share for name, one in own.items() if name in seconds}
    if _SUM in seconds:
        seconds[_SUM] *= shape.kv_bytes / _READ_BYTES
    return replace(_compare(shape, error, seconds), absent=absent)


def _race(
    calls: Mapping[str, Callable[[], Any]], device: str, *, is_decode: bool
) -> dict[str, float]:
    """Median seconds of each call; for peers that are clearly slower than another, of one turn.

    The longer the calls, the longer the rest before each: dense products of some 30 ms in a row
    lower the clock.
    """
    if device == "cpu":
        times = time_in_turns(calls, device, repeats=_ROUNDS)
        return {name: found.median for name, found in times.items()}
    first = time_in_turns(calls, device, repeats=1, rest=_SHORTEST_REST, captured=False)
    seconds = {name: found.median for name, found in first.items()}
    fastest = min((seconds[name] for name in _peers_of(seconds)), default=math.inf)
    last = {
        name: call
        for name, call in calls.items()
        if name not in _peers_of(seconds) or seconds[name] <= _CLEARLY_SLOWER * fastest
    }
    longest = max(seconds[name] for name in last)
    most = _DECODE_REST if is_decode else GraphClock.rest
    rest = min(most, max(_SHORTEST_REST, 16 * longest))
    times = time_in_turns(last, device, repeats=_ROUNDS, rest=rest, captured=False)
    return seconds | {name: found.median for name, found in times.items()}


def _peers_of(names: Iterable[str]) -> list[str]:
    """The peers; the sum over much memory is one only if there is no other."""
    others = [name for name in names if name != "pagetile"]
    return [name for name in others if name != _SUM] or others


def _capture(
    calls: dict[str, Callable[[], Any]],
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The replays of the calls' CUDA graphs, and why some calls cannot be captured."""
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
    peers = _peers_of(seconds)
    if not peers:
        return Finding(shape, error, seconds, 0.0, "nothing to compare with")
    best = min(peers, key=lambda name: seconds[name])
    return Finding(shape, error, seconds, seconds[best] / seconds["pagetile"], best)


def _measure_scores(shape: SweepShape) -> Finding:
    """``attention_scores`` against torch's batched products with the same scale, on this CPU."""
    sizes = (len(shape.seq_lens), shape.num_heads, shape.seq_lens[0], shape.head_size)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(sizes, generator=generator) for _ in range(2))
    scale = shape.head_size**-0.5
    expected = q.double() @ k.double().transpose(-1, -2) * scale
    result = attention_scores(q, k, softmax_scale=scale)
    error = float((result.double() - expected).abs().max() / expected.abs().max())
    if not error <= 1e-5:
        return Finding(shape, error, {}, 0.0, "float64")
    rows, keys = q.flatten(0, 1), k.flatten(0, 1).mT  # the product applies the scale
    nothing = q.new_zeros(())
    calls: dict[str, Callable[[], Any]] = {
        "pagetile": lambda: attention_scores(q, k, softmax_scale=scale),
        "torch.matmul": lambda: torch.matmul(q * scale, k.transpose(-1, -2)),
        "torch.baddbmm": lambda: torch.baddbmm(nothing, rows, keys, beta=0, alpha=scale),
    }
    times = time_in_turns(calls, "cpu", repeats=_CPU_ROUNDS)
    # Minima: other processes only add time; a thread that is not scheduled costs milliseconds.
    return _compare(shape, error, {name: found.best for name, found in times.items()})
