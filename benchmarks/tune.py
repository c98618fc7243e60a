"""Finds the fastest tiles of decode on this GPU: ``python -m benchmarks tune``.

Every candidate is compiled in a process of its own, checked against float64 on a poisoned problem,
and timed on a case of ``python -m benchmarks run``; one that does not fit or has a wrong result is
dropped. The fastest is written to the table that ``make_plan`` reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import Progress
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from pagetile.device import DeviceInfo
from pagetile.ops.paged_attention.plan import GpuPlan, make_plan, refuse_hopper_decode
from pagetile.ops.paged_attention.plan.decode_tiles import MEASURED, DecodeTiles, kind_of
from pagetile.ops.paged_attention.problem import Problem

from .cases import GPU_CASES
from .gpu_attention import GpuDecodeCase
from .gpu_inputs import Inputs, check_against_float64
from .gpu_timing import time_in_turns

GAIN = 0.99
"""A candidate has to take less than this share of the present tiles' time, against chance."""


def find_kinds(beginnings: list[str]) -> dict[str, GpuDecodeCase]:
    """A case for each kind of problem whose name begins so; all without beginnings."""
    device = DeviceInfo.of(torch.device("cuda", torch.cuda.current_device()))
    kinds: dict[str, GpuDecodeCase] = {}
    for case in GPU_CASES:
        if isinstance(case, GpuDecodeCase):
            problem = case.problem
            hopper = device.capability == (9, 0) and refuse_hopper_decode(problem) is None
            kinds.setdefault(kind_of(problem, hopper), case)
    return {
        kind: case
        for kind, case in kinds.items()
        if not beginnings or kind.startswith(tuple(beginnings))
    }


def tune(kind: str, case: GpuDecodeCase, console: Console) -> None:
    """Find the tiles of one kind, and write them if they are faster than the present ones."""
    device = DeviceInfo.of(torch.device("cuda", torch.cuda.current_device()))
    present = _present_plan(case.problem, device)
    impl = "hopper" if kind.startswith("hopper") else "triton"
    current = _tiles(present, device)
    heads = current.tile_heads
    candidates = [replace(tiles, tile_heads=heads) for tiles in _candidates(impl)]
    found = _compile(kind, case, impl, [tiles for tiles in candidates if tiles != current])
    inputs = Inputs(case.seq_lens, case.shape, decode=True)

    def with_plan(plan: GpuPlan) -> Callable[[], object]:
        return lambda: inputs.attend(plan=plan, impl=impl)

    calls = {"present": with_plan(present)} | {
        str(t): with_plan(_plan(present, t, device)) for t in found
    }
    medians = {name: time.median for name, time in time_in_turns(calls, "cuda").items()}
    ordered = sorted(found, key=lambda tiles: medians[str(tiles)])
    console.print(f"{kind}: present {medians['present'] * 1e6:.1f} µs, {current}")
    for tiles in ordered[:5]:
        console.print(f"  {medians[str(tiles)] * 1e6:.1f} µs, {tiles}")
    best = ordered[0] if ordered and medians[str(ordered[0])] < GAIN * medians["present"] else None
    _write(device.name, kind, best or current)


def _candidates(impl: str) -> Iterator[DecodeTiles]:
    """Tiles that may be fast; many do not fit, which compiling them shows."""
    for tile_n in (32, 64, 128):
        for num_stages in (2, 3, 4, 6):
            if impl == "hopper":
                yield from (DecodeTiles(tile_n, 4, num_stages, 2, 128, n) for n in (72, 80))
                yield from (DecodeTiles(tile_n, 4, num_stages, 1, 168, n) for n in (88,))
            else:
                yield from (
                    DecodeTiles(tile_n, n, num_stages, p) for n in (4, 8) for p in (1, 2, 3)
                )


def _present_plan(problem: Problem, device: DeviceInfo) -> GpuPlan:
    plan = make_plan(problem, device)
    assert isinstance(plan, GpuPlan), "there is a GPU"
    return plan


def _tiles(plan: GpuPlan, device: DeviceInfo) -> DecodeTiles:
    programs = -(-plan.num_programs // device.num_workers)
    return DecodeTiles(
        plan.tile_n, plan.num_warps, plan.num_stages, programs,
        plan.max_registers, plan.fetch_registers, plan.tile_heads,
    )  # fmt: skip


def _plan(present: GpuPlan, tiles: DecodeTiles, device: DeviceInfo) -> GpuPlan:
    """The present plan with other tiles."""
    programs = present.num_programs * tiles.programs // _tiles(present, device).programs
    fields = asdict(tiles)
    del fields["programs"]
    return replace(present, num_programs=programs, **fields)


def _compile(
    kind: str, case: GpuDecodeCase, impl: str, candidates: list[DecodeTiles]
) -> list[DecodeTiles]:
    """Candidates that fit and are right. Compiled kernels stay in Triton's cache on the disk."""
    workers = max(1, (os.cpu_count() or 2) - 2)
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        Progress(transient=True) as progress,
    ):
        task = progress.add_task(kind, total=len(candidates))
        futures = [pool.submit(_is_right, case, impl, tiles) for tiles in candidates]
        for future in futures:
            future.add_done_callback(lambda _: progress.advance(task))
        return [tiles for tiles, future in zip(candidates, futures, strict=True) if future.result()]


def _is_right(case: GpuDecodeCase, impl: str, tiles: DecodeTiles) -> bool:
    device = DeviceInfo.of(torch.device("cuda", 0))
    try:
        checks = check_against_float64(
            case.shape,
            [1100, 64, 1],
            decode=True,
            impl=impl,
            cut=lambda problem: _plan(_present_plan(problem, device), tiles, device),
        )
    except (CompilationError, OutOfResources, PTXASError):
        return False
    return all(check.passed for check in checks)


def _write(gpu: str, kind: str, tiles: DecodeTiles) -> None:
    table = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    table.setdefault(gpu, {})[kind] = asdict(tiles)
    MEASURED.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
