"""The command line: see ``python -m benchmarks --help``."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from . import report
from .case import Case, Check
from .cases import can_run, find_cases
from .document import fill
from .machine import BackgroundLoad, describe_run, free_read_memory, is_clean
from .prepare import default_jobs, list_commands, prepare, prepare_here
from .records import (
    RECORDS,
    Budget,
    Change,
    RecordSpec,
    find_changes,
    find_changes_in_prose,
    find_loaded,
    find_machine,
    find_made,
    is_of_another_device,
    plan,
    run_script,
    write_lines,
)
from .several_gpus import run_at_once, share_out
from .sweep import CPU_SCALE, find_classes, print_summary, summarise, sweep, warm
from .sweep_shapes import CLASSES as SWEPT
from .sweep_shapes import draw_in_turns, redraw_worst
from .sweep_warming import COLD

_MOST_PREPARING = 240.0
"""Seconds within which ``_prepare`` starts compiling cases; those that run then may go on.

Later fewer and fewer processes share the GPU and the cores, until the longest has both to itself.
Ended there, it would start anew in the process that measures: that costs more time than it saves.
"""
_GRACE = 20.0  # seconds that a running case has to end after the time is over
RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]
QUOTING_PAGES = [
    *PAGES,
    *sorted((ROOT / "docs").glob("*.md")),
    *(page for name in ("guides", "learn") for page in sorted((ROOT / "docs" / name).glob("*.md"))),
]
"""All pages whose sentences may quote a record."""

app = typer.Typer(
    help="Benchmarks: correctness first, every figure beside its peers.",
    no_args_is_help=True,
    add_completion=False,
)
console = Console(highlight=False, soft_wrap=True)

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CASE]...", help="Names, or how they begin."),
]


@app.command("list")
def list_cases(names: Names = None) -> None:
    """Show the cases and their targets."""
    report.print_cases(console, _find(names))


@app.command()
def verify(names: Names = None) -> None:
    """Check the results of cases, without timing them."""
    results = [_verify(case) for case in _find_here(names)]
    if not all(check.passed for checks in results for check in checks):
        raise typer.Exit(1)


@app.command()
def run(
    names: Names = None,
    out: Annotated[str | None, typer.Option(help="Write into results/NAME.json.")] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Timed calls of each, where a case counts them; others run for a time."
        ),
    ] = None,
) -> None:
    """Verify, then time. A case with a wrong result is not timed."""
    path = None if out is None else RESULTS / f"{out}.json"
    if path is not None and report.is_of_another_machine(path):
        raise typer.BadParameter(f"{path.name} is of another machine: choose another --out")
    circumstances = _describe_clean_run() if path is not None else describe_run()
    if not _record(_find_here(names), path, repeats, circumstances):
        raise typer.Exit(1)


def _record(
    found: Sequence[Case],
    path: Path | None,
    repeats: int | None,
    circumstances: dict[str, Any],
    checked: Mapping[str, list[Check]] | None = None,
    absent: Mapping[str, str] | None = None,
) -> bool:
    """Verify cases, unless they are verified already, time them, and record each.

    ``absent`` names peers that were left out of all of them, with reasons.

    Returns:
        Whether all are right.
    """
    order = [case.name for case in find_cases([])]
    records: dict[str, report.Record | None] = {}
    for case in found:
        checks = (checked or {}).get(case.name) or _verify(case)
        records[case.name] = None
        if all(check.passed for check in checks):
            background = BackgroundLoad()
            measurement = case.measure(repeats)
            measurement.absent.update(absent or {})
            others = background.share
            report.print_measurement(console, case, measurement, others)
            records[case.name] = report.record(case, checks, measurement, others, circumstances)
        if path is not None:  # after every case: a long run may be cut off
            report.write(path, records, order)
        _free_memory()
    return None not in records.values()


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        free_read_memory()
        torch.cuda.empty_cache()


def _describe_clean_run() -> dict[str, Any]:
    """What each case of a record says of its run; refused if no commit has the code."""
    circumstances = describe_run()
    if not is_clean(circumstances["commit"]):
        raise typer.BadParameter(
            "a record is made of a commit: commit what is changed under src/ and benchmarks/, or "
            "run without --out"
        )
    return circumstances


@app.command("all")
def all_records(
    machine: Annotated[
        str | None, typer.Option(help="Beginning of the records' names; else this machine's.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Leave out what takes longer.")] = 30,
    repeats: Annotated[int | None, typer.Option(min=1, help="As for `run`.")] = None,
    into: Annotated[
        Path | None, typer.Option(help="Another folder than results/, for a trial.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="RECORD", help="End of a record's name, repeatable: decode, tiles."),
    ] = None,
    but: Annotated[
        list[str] | None, typer.Option(metavar="CASE", help="Leave a case out, repeatable.")
    ] = None,
    without_compiled: Annotated[
        list[str] | None,
        typer.Option(metavar="CASE", help="Leave a case's compiled peers out, repeatable."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compile and verify beforehand; 0: none."),
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of this machine that share the records.")
    ] = 1,
) -> None:
    """Renew all records of this machine; print what is missing and which figures changed.

    It continues where it stopped: a case recorded at this commit is not measured again.
    """
    folder, budget = into or RESULTS, Budget(minutes)
    circumstances = describe_run() if into else _describe_clean_run()
    machine = machine or find_machine(RESULTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    to_do = _find_work(folder, machine, device, only, but or [], circumstances["commit"])
    uncompiled = without_compiled or []
    _refuse_uncompiled(uncompiled)
    options = _options_again(machine, repeats, into, but, uncompiled)
    if gpus > 1:
        raise typer.Exit(_share_records(to_do, gpus, [*options, f"--minutes={minutes}"], jobs))
    jobs = default_jobs() if jobs is None else jobs
    to_do = [
        (spec, _without_compiled_peers(cases, uncompiled), made) for spec, cases, made in to_do
    ]
    _say(f"{len(to_do)} records of {machine}, {minutes:.0f} minutes, into {folder}")
    checked: dict[str, list[Check]] = {}
    missing: list[str] = []
    changes: list[Change | str] = []
    loaded: list[str] = []
    watchdog = _end_after(budget.left)
    try:
        if jobs:
            checked = _prepare(to_do, jobs, budget, uncompiled)
        fitting, left = plan(device, budget.left, [spec for spec, *_ in to_do])
        missing += [
            f"{machine}{spec.ending}: no time for its {spec.seconds:.0f} s" for spec in left
        ]
        for spec, cases, made in to_do:
            if spec not in fitting:
                continue
            name = f"{machine}{spec.ending}"
            _say(f"{name} begins, about {spec.seconds:.0f} s")
            old, new = RESULTS / f"{name}.json", folder / f"{name}.json"
            before = report.load(old) if old.exists() else None
            start = time.monotonic()
            try:
                failed = _renew(
                    spec, new, cases, made, budget, repeats, circumstances, checked, uncompiled
                )
            except _DeviceLostError as reason:
                watchdog.cancel()
                _say(f"{reason}; going on in another process")
                options += [f"--minutes={budget.left / 60}", "--jobs=0"]
                options += [f"--only={word}" for word in only or []]
                has_compiled = getattr(reason.case, "has_compiled_peers", False)
                how = "without-compiled" if has_compiled else "but"
                options.append(f"--{how}={reason.case.name}")
                _report(missing, changes, loaded)
                command = [sys.executable, "-m", "benchmarks", "all", *options]
                raise typer.Exit(subprocess.call(command) or 1) from None
            for line in failed:  # now: a machine may be taken back before the report
                _say(f"missing: {line}")
            missing += failed
            _say(f"{name} ends after {time.monotonic() - start:.0f} s")
            if new.exists():
                loaded += find_loaded(report.load(new))
            if new.exists() and before is not None:
                after = report.load(new)
                changes += find_changes(PAGES, name, before, after)
                changes += find_changes_in_prose(QUOTING_PAGES, name, before, after)
    finally:
        watchdog.cancel()
    _report(missing, changes, loaded)
    if missing:
        raise typer.Exit(1)


def _options_again(
    machine: str,
    repeats: int | None,
    into: Path | None,
    but: Sequence[str] | None,
    uncompiled: Sequence[str],
) -> list[str]:
    """The options of ``all`` that another process is started with."""
    options = [f"--machine={machine}"]
    options += [f"--repeats={repeats}"] if repeats else []
    options += [f"--into={into}"] if into else []
    options += [f"--but={word}" for word in but or []]
    return options + [f"--without-compiled={word}" for word in uncompiled]


def _share_records(to_do: _Work, gpus: int, options: Sequence[str], jobs: int | None) -> int:
    """Make records on several GPUs at the same time; the largest exit code."""
    if gpus > (there := torch.cuda.device_count()):
        raise typer.BadParameter(f"{gpus} GPUs are asked for, and torch sees {there}")
    seconds = {spec.ending.strip("-"): spec.seconds for spec, *_ in to_do}
    more = list(options) + ([] if jobs is None else [f"--jobs={jobs}"])
    shares = share_out(seconds, gpus)
    return (
        run_at_once(
            [
                ["benchmarks", "all", *more, *(f"--only={name}" for name in names)]
                for names in shares
            ]
        )
        if shares
        else 0
    )


def _report(missing: Sequence[str], changes: Sequence[Change | str], loaded: Sequence[str]) -> None:
    """Print what ``all`` found."""
    lines = [f"missing: {line}" for line in missing] + [f"changed: {c}" for c in changes]
    for line in lines + [f"loaded: {line}" for line in loaded]:
        console.print(line, markup=False)
    console.print(f"{len(missing)} missing, {len(changes)} documented figures changed")


def _say(line: str) -> None:
    """Print a line with the time of day, unbuffered: the output is often a file being watched."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _end_after(seconds: float) -> threading.Timer:
    """End this process if a case still runs some seconds after the time is over."""

    def end() -> None:
        _say("the time is over, and what runs does not end: this process does")
        os._exit(4)

    timer = threading.Timer(seconds + _GRACE, end)
    timer.daemon = True
    timer.start()
    return timer


class _DeviceLostError(Exception):
    """After this case the GPU runs nothing more in this process."""

    def __init__(self, case: Case, reason: Exception) -> None:
        super().__init__(f"{case.name} lost the device: {reason}")
        self.case = case


_Work = list[tuple[RecordSpec, list[Case], set[str]]]
"""Records to make: each with its cases, and the names of those that are recorded already."""


def _find_work(
    folder: Path,
    machine: str,
    device: str,
    only: Sequence[str] | None,
    but: Sequence[str],
    commit: str | None,
) -> _Work:
    """The records of a device that lack some case."""
    found: _Work = []
    endings = [f"-{word}".replace("--", "-").rstrip("-") for word in only or []]
    known = [spec.ending for spec in RECORDS if spec.device == device]
    if unknown := [word for word in endings if word not in known]:
        shown = ", ".join(ending.strip("-") or "-" for ending in known)
        raise typer.BadParameter(f"no record ends with {', '.join(unknown)}; there are {shown}")
    for spec in RECORDS:
        if spec.device != device or (endings and spec.ending not in endings):
            continue
        path = folder / f"{machine}{spec.ending}.json"
        made = find_made(path, commit) | set(but)
        everything = spec.find(find_cases([]))
        cases = [case for case in everything if case.name not in made]
        is_empty = not spec.script and not everything
        if cases or is_empty or any(spec.commands(made)):
            names = [case.name for case in everything] or [
                spec.name_of(what) for _, what in spec.parts
            ]
            part = statistics.mean(name not in made for name in names) if names else 1.0
            found.append((replace(spec, seconds=part * spec.seconds), cases, made))
    return found


def _refuse_uncompiled(names: Sequence[str]) -> None:
    """Refuse names of cases without compiled peers: a record would say that they took no part."""
    known = {case.name for case in find_cases([]) if getattr(case, "has_compiled_peers", False)}
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no case with compiled peers is called {', '.join(unknown)}")


def _without_compiled_peers(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The same cases; those named have no peers that torch.compile makes."""
    return [
        replace(case, has_compiled_peers=False)  # type: ignore[type-var]
        if case.name in names and hasattr(case, "has_compiled_peers")
        else case
        for case in cases
    ]


def _prepare(
    to_do: _Work, jobs: int, budget: Budget, uncompiled: Sequence[str]
) -> dict[str, list[Check]]:
    """Compile and verify the cases to measure; engines first, since each takes long."""
    cases = [case for _, some, _ in to_do for case in some]
    commands = [
        (*command, "--brief")
        for spec, _, made in to_do
        if spec.parts
        for command in spec.commands(made)
    ]
    commands += list_commands(cases, jobs, uncompiled)
    start = time.monotonic()
    limit, grace = _limit_preparing(budget.left, sum(spec.seconds for spec, *_ in to_do))
    _say(
        f"{jobs} processes compile and verify {len(cases)} cases, begun within {limit:.0f} s and "
        f"ended after {limit + grace:.0f} s"
    )
    found = prepare(commands, jobs, limit, _say, grace)
    _say(f"prepared {len(found)} of {len(cases)} cases in {time.monotonic() - start:.0f} s")
    # A case that failed while other processes ran is verified again alone.
    return {n: checks for n, checks in found.items() if all(check.passed for check in checks)}


def _limit_preparing(left: float, needed: float) -> tuple[float, float]:
    """Seconds in which compiling may start, and seconds more in which it has to end.

    Args:
        left: Seconds for everything.
        needed: Seconds that measuring takes once all is compiled. Half of what remains is kept for
            cases that take longer than estimated.
    """
    limit = min(_MOST_PREPARING, left / 4)
    return limit, max(limit / 2, (left - needed - limit) / 2)


@app.command("prepare")
def prepare_cases(
    names: Annotated[list[str], typer.Argument(metavar="CASE...")],
    without_compiled: Annotated[
        list[str] | None, typer.Option(metavar="CASE", help="As for `all`.")
    ] = None,
) -> None:
    """Verify and run cases without keeping their times, only to compile them (see ``all``)."""
    found = [case for case in find_cases([]) if case.name in names]
    for line in prepare_here(_without_compiled_peers(found, without_compiled or [])):
        print(line, flush=True)


def _renew(
    spec: RecordSpec,
    path: Path,
    cases: Sequence[Case],
    made: set[str],
    budget: Budget,
    repeats: int | None,
    circumstances: dict[str, Any],
    checked: Mapping[str, list[Check]],
    uncompiled: Sequence[str],
) -> list[str]:
    """Measure the remaining cases of one record; return which are missing, and why."""
    if is_of_another_device(path):
        return [f"{path.stem}: the record is of another machine"]
    if spec.script:
        failures = run_script(spec, path, budget.left, circumstances, made, _say)
        return [f"{path.stem}: {reason}" for reason in failures]
    if report.is_of_another_machine(path):
        path.unlink()  # of another host: all of it is measured anew
    if not cases:
        return [f"{path.stem}: no case; is a package not installed?"]
    missing = []
    for case in cases:
        if budget.left <= 0:
            missing.append(f"{path.stem}: no time for {case.name}")
            continue
        _say(f"{path.stem}: {case.name}")
        try:
            absent = {"compiled": "lost the device"} if case.name in uncompiled else {}
            if not _record([case], path, repeats, circumstances, checked, absent):
                missing.append(f"{path.stem}: {case.name} is wrong")
        except Exception as reason:  # one case that fails must not end the others
            missing.append(f"{path.stem}: {case.name} failed: {reason}")
            _check_device(case)
    return missing


def _check_device(case: Case) -> None:
    if case.device != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as reason:
        raise _DeviceLostError(case, reason) from None


@app.command()
def once(name: Annotated[str, typer.Argument(metavar="CASE")]) -> None:
    """Call what a GPU's case times once, for a profiler that is started by the program.

    For example: ncu --profile-from-start off python -m benchmarks once gpu-decode-8x4096
    """
    case = _find_here([name])[0]
    make_call = getattr(case, "call", None)
    if case.device != "cuda" or make_call is None:
        raise typer.BadParameter(f"{case.name} is not a case of one call on a GPU")
    call = make_call()
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
) -> None:
    """Show two results side by side."""
    report.compare(console, before, after)


@app.command()
def document(
    pages: Annotated[list[Path] | None, typer.Argument(exists=True, dir_okay=False)] = None,
) -> None:
    """Generate tables, and figures in sentences, from the records."""
    for page in pages or QUOTING_PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


@app.command("sweep")
def sweep_shapes(
    names: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="NAME", help="A class of shapes, repeatable; else all."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Other shapes for another seed.")] = 0,
    shapes: Annotated[int, typer.Option(min=1, help="Shapes of a class, at most.")] = 20,
    seconds: Annotated[
        float, typer.Option(min=0, help="Begin no shape after this time, compiling included.")
    ] = math.inf,
    replay: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A record of a sweep: its worst shapes once more, --shapes of each class.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; else what there is.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Write into results/NAME.json, after every shape.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="Another folder than results/, for a trial.")
    ] = None,
) -> None:
    """Time random shapes of each class beside the peers, each checked against float64."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kinds = find_classes(names or [], device)
    except KeyError as error:
        known = ", ".join(SWEPT)
        raise typer.BadParameter(f"no class is called {error}; there are {known}") from None
    path = None if out is None else (into or RESULTS) / f"{out}.json"
    if path is not None and report.is_of_another_machine(path):
        raise typer.BadParameter(f"{path.name} is of another machine: choose another --out")
    if replay is not None and path is not None and not into:
        raise typer.BadParameter("--replay times a record's worst shapes, which are not a record")
    circumstances = describe_run() if path is None or into else _describe_clean_run()
    cases: dict[str, report.Record] = {}
    records: dict[str, report.Record | None] = {}
    scale = 1.0 if device == "cuda" else CPU_SCALE
    if replay is None:
        drawn = draw_in_turns(kinds, seed, shapes, scale)
    else:
        try:
            drawn = redraw_worst(report.load(replay), kinds, shapes, scale)
        except ValueError as error:
            raise typer.BadParameter(f"{replay.name}: {error}") from None
    end = time.monotonic() + seconds
    warmed = warm(drawn, seconds, console) if device == "cuda" else COLD
    background = BackgroundLoad()
    left = max(0.0, end - time.monotonic())
    for kind, findings in sweep(drawn, device, console, left, warmed):
        case = cases[kind.name] = summarise(kind, findings)
        record = report.record_line(case, "sweep", background.share, circumstances)
        records[record["name"]] = record
        if path is not None:  # after every shape: a long run may be cut off
            report.write(path, records, [f"sweep-{name}" for name in SWEPT])
    print_summary(console, list(cases.values()))
    targets = [target for record in records.values() if record for target in record["targets"]]
    if not all(target["reached"] for target in targets):
        raise typer.Exit(1)


@app.command("tune")
def tune_tiles(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help="How their names begin.")
    ] = None,
) -> None:
    """Measure the tiles of decode on this GPU, and write the fastest to the table of plans."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here: there is nothing to measure")
    from .tune import find_kinds, tune

    found = find_kinds(kinds or [])
    if not found:
        raise typer.BadParameter(f"no kind begins so; there are {', '.join(find_kinds([]))}")
    for kind, case in found.items():
        tune(kind, case, console)


@app.command("http")
def compare_http(
    streams: Annotated[int, typer.Option(min=1, help="Connections at once.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    new: Annotated[int, typer.Option(min=2, help="New tokens of a stream.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each, after one to warm up.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long requests come at half of the saturating rate.")
    ] = 10.0,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint; without it, the shipped one.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, as records keep it.")
    ] = False,
) -> None:
    """Compare streams over HTTP with LLM.generate on the same prompts, in turns."""
    from .http import Workload, compare

    workload = Workload(streams, prompt, new, model, device)
    found = compare(workload, turns, seconds)
    _print_comparison({"what": "streams", "about": workload.about, **found}, as_json)


@app.command("http-n")
def compare_http_n(
    turns: Annotated[int, typer.Option(min=1, help="Turns of each, after one to warm up.")] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, as records keep it.")
    ] = False,
) -> None:
    """Compare workload N over HTTP with LLM.generate on one GPU: 256 streams, in turns."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here: `http` measures a CPU")
    from .http_n import Setup, compare_n

    setup = Setup()
    targets = [("share of LLM.generate", 0.9, ">="), ("server's CPU us a token", 100, "<=")]
    head = {"what": "n", "about": setup.about, "targets": targets}
    _print_comparison({**head, **compare_n(setup, turns)}, as_json)


@app.command("http-latency")
def compare_http_latency(
    turns: Annotated[int, typer.Option(min=1, help="Turns of each server and rate.")] = 4,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long requests come in a turn at half of a rate.")
    ] = 20.0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cpu",
    limit: Annotated[
        float | None,
        typer.Option(min=20, help="Seconds in which all has to end, by shorter and fewer turns."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write into results/NAME.json.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object a line, as records keep them.")
    ] = False,
) -> None:
    """Compare latency with other servers', at half of the rate that saturates them."""
    from .http_latency import Setup, compare_latency

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here")
    circumstances = _describe_clean_run() if out is not None else {}
    background = BackgroundLoad()
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    begin = time.monotonic()

    def say(what: str) -> None:
        progress.print(f"{time.monotonic() - begin:4.0f} s  {what}", markup=False)

    try:
        lines = compare_latency(Setup(device, turns, seconds, limit=limit), say)
    except RuntimeError as reason:
        progress.print(str(reason), markup=False)
        raise typer.Exit(1) from None
    if out is not None:
        within = "" if limit is None else f" --limit {limit:g}"
        command = f"python -m benchmarks http-latency --device {device}{within} --out {out}"
        write_lines(RESULTS / f"{out}.json", lines, "latency", background, circumstances, command)
    for line in lines:
        _print_comparison(line, as_json)
        if not as_json:
            console.print()


def _print_comparison(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        shown = f"{value:,.4g}" if isinstance(value, (int, float)) else value
        console.print(f"{name:44} {shown}", markup=False)


def _find(names: list[str] | None) -> list[Case]:
    try:
        return find_cases(names or [])
    except KeyError as error:
        raise typer.BadParameter(f"no case is called {error}; see `list`") from None


def _find_here(names: list[str] | None) -> list[Case]:
    """Return the cases that this machine can run; one that was named and cannot run is an error."""
    found = _find(names)
    missing = [case.name for case in found if not can_run(case)]
    if names and missing:
        raise typer.BadParameter(f"no CUDA device for {', '.join(missing)}")
    return [case for case in found if case.name not in missing]


def _verify(case: Case) -> list[Check]:
    checks = case.verify()
    report.print_checks(console, case, checks)
    return checks


if __name__ == "__main__":
    app()
