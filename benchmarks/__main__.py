"""The command line: see ``python -m benchmarks --help``."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from . import report
from .case import Case, Check
from .cases import can_run, find_cases
from .document import fill
from .machine import BackgroundLoad, describe_run, is_clean
from .records import (
    Budget,
    Change,
    RecordSpec,
    find_changes,
    find_changes_in_prose,
    find_loaded,
    find_machine,
    is_of_another_device,
    plan,
    run_script,
    write_lines,
)
from .sweep import CPU_SCALE, find_classes, print_summary, summarise, sweep, warm
from .sweep_shapes import CLASSES as SWEPT
from .sweep_shapes import draw_in_turns, redraw_worst
from .sweep_warming import COLD

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
    """Check that what the cases time is right."""
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
    """Verify, then time. A case that is wrong gets no speed."""
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
) -> bool:
    """Verify and time cases, and write each into the record. Whether all are right."""
    order = [case.name for case in find_cases([])]
    records: dict[str, report.Record | None] = {}
    for case in found:
        checks = _verify(case)
        records[case.name] = None
        if all(check.passed for check in checks):
            background = BackgroundLoad()
            measurement = case.measure(repeats)
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
        torch.cuda.empty_cache()


def _describe_clean_run() -> dict[str, Any]:
    """What every case of a record says of its run; refused if no commit has the code."""
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
    minutes: Annotated[float, typer.Option(min=0, help="Leave out what takes longer.")] = 26,
    repeats: Annotated[int | None, typer.Option(min=1, help="As for `run`.")] = None,
    into: Annotated[
        Path | None, typer.Option(help="Another folder than results/, for a trial.")
    ] = None,
) -> None:
    """Renew all records of this machine, say what is missing and which figures changed."""
    folder, budget = into or RESULTS, Budget(minutes)
    circumstances = describe_run() if into else _describe_clean_run()
    machine = machine or find_machine(RESULTS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fitting, left = plan(device, 60 * minutes)
    missing = [f"{machine}{spec.ending}: no time for its {spec.seconds:.0f} s" for spec in left]
    changes: list[Change | str] = []
    loaded: list[str] = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(spec.seconds for spec in fitting))
        for spec in fitting:
            name = f"{machine}{spec.ending}"
            progress.update(task, description=name)
            old, new = RESULTS / f"{name}.json", folder / f"{name}.json"
            before = report.load(old) if old.exists() else None
            missing += _renew(spec, new, budget, repeats, circumstances)
            progress.advance(task, spec.seconds)
            if new.exists():
                loaded += find_loaded(report.load(new))
            if new.exists() and before is not None:
                after = report.load(new)
                changes += find_changes(PAGES, name, before, after)
                changes += find_changes_in_prose(QUOTING_PAGES, name, before, after)
    lines = [f"missing: {line}" for line in missing] + [f"changed: {c}" for c in changes]
    for line in lines + [f"loaded: {line}" for line in loaded]:
        console.print(line, markup=False)
    console.print(f"{len(missing)} missing, {len(changes)} documented figures changed")
    if missing:
        raise typer.Exit(1)


def _renew(
    spec: RecordSpec,
    path: Path,
    budget: Budget,
    repeats: int | None,
    circumstances: dict[str, Any],
) -> list[str]:
    """Make one record; return what of it is missing, and why."""
    if is_of_another_device(path):
        return [f"{path.stem}: the record is of another machine"]
    if spec.script:
        try:
            run_script(spec, path, budget.left, circumstances)
        except RuntimeError as reason:
            return [f"{path.stem}: {reason}"]
        return []
    if report.is_of_another_machine(path):
        path.unlink()  # of another host: all of it is made anew
    found = spec.find(find_cases([]))
    if not found:
        return [f"{path.stem}: no case; is a package not installed?"]
    missing = []
    for case in found:
        if budget.left <= 0:
            missing.append(f"{path.stem}: no time for {case.name}")
            continue
        try:
            if not _record([case], path, repeats, circumstances):
                missing.append(f"{path.stem}: {case.name} is wrong")
        except Exception as reason:  # one case that fails must not cost the others
            missing.append(f"{path.stem}: {case.name} failed: {reason}")
    return missing


@app.command()
def once(name: Annotated[str, typer.Argument(metavar="CASE")]) -> None:
    """Call what a GPU's case times once, for a profiler that starts when it is told.

    For example: ncu --profile-from-start off python -m benchmarks once gpu-decode-8x4096
    """
    case = _find_here([name])[0]
    make_call = getattr(case, "call", None)
    if case.device != "cuda" or make_call is None:
        raise typer.BadParameter(f"{case.name} is no case of one call on a GPU")
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
    turns: Annotated[int, typer.Option(min=1, help="Turns of each, after one to warm up.")] = 2,
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
