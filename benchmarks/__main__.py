"""The command line: see ``python -m benchmarks --help``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from . import report
from .case import Case, Check
from .cases import can_run, find_cases
from .document import fill
from .machine import BackgroundLoad, describe_run
from .sweep import find_classes, sweep, write
from .sweep_shapes import CLASSES as SWEPT

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]

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
    order, circumstances = [case.name for case in find_cases([])], describe_run()
    records: dict[str, report.Record | None] = {}
    for case in _find_here(names):
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
    if None in records.values():
        raise typer.Exit(1)


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
    """Generate the tables of the README and of docs/performance from the records."""
    for page in pages or PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


@app.command("sweep")
def sweep_shapes(
    name: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="One class of shapes; else all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other shapes for another seed.")] = 0,
    shapes: Annotated[int, typer.Option(min=1, help="Shapes of a class.")] = 20,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; else what there is.")] = None,
    out: Annotated[str | None, typer.Option(help="Write into results/NAME.json.")] = None,
) -> None:
    """Time random shapes of each class beside the peers, each checked against float64."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kinds = find_classes(name, device)
    except KeyError:
        names = ", ".join(SWEPT)
        raise typer.BadParameter(f"no class is called {name!r}; there are {names}") from None
    record = sweep(kinds, seed, shapes, device, console)
    if out is not None:
        write(record, RESULTS / f"{out}.json")
    if not all(kind["reached"] for kind in record["classes"].values()):
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
