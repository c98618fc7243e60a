"""Results as tables on the console and as JSON for the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagetile.analysis.timing import Times

from .case import Case, Check, Measurement, Target
from .machine import describe

REPEATS = ", each turn"
"""Ends the name of a list with all repeats of a metric, in a script's output."""

Record = dict[str, Any]
_FOLDERS = re.compile(r"(?<![\w/:.])/(?:[^/\s:'\"]+/)+")
_NUMBERS = re.compile(r"\[\s+([-\d.e+,\s]+?)\s+\]")


def print_cases(console: Console, cases: Sequence[Case]) -> None:
    """Names, problems and targets."""
    for case in cases:
        console.print(f"[bold]{case.name}[/]  {case.about}")
        for target in case.targets:
            console.print(f"    {target.metric} {target.sign} {target.bound:.3g}")


def print_checks(console: Console, case: Case, checks: Sequence[Check]) -> None:
    """Print the checks of a case: a summary line, and those that failed."""
    failed = [check for check in checks if not check.passed]
    verdict = "[red]wrong[/]" if failed else "[green]right[/]"
    console.print(f"[bold]{case.name}[/] {verdict}: {len(checks)} checks, {len(failed)} failed")
    for check in failed:
        console.print(f"  [red]{check.what}[/]: {check.detail}")


def print_measurement(
    console: Console, case: Case, measurement: Measurement, others: float
) -> None:
    """Print the times of all contestants, the metrics with targets, and the machine's load."""
    console.print(f"{case.about}; other processes took {others:.0%} of the machine")
    times = Table("contestant", "median", "p10 to p90", "best", "repeats", box=None)
    for column in times.columns[1:]:
        column.justify = "right"
    for name, t in measurement.times.items():
        spread = f"{_seconds(t.quantile(0.1))} to {_seconds(t.quantile(0.9))}"
        times.add_row(name, _seconds(t.median), spread, _seconds(t.best), str(len(t.seconds)))
    console.print(times)
    metrics = Table("metric", "value", "target", box=None)
    metrics.columns[1].justify = "right"
    verdicts = {target.metric: _verdict(target, measurement) for target in case.targets}
    for name, value in measurement.metrics.items():
        metrics.add_row(name, f"{value:.4g}", verdicts.get(name, ""))
    console.print(metrics)
    for name, reason in measurement.absent.items():
        console.print(f"{name}: {reason}", markup=False)
    console.print()


def record(
    case: Case, checks: Sequence[Check], measurement: Measurement, others: float, run: Record
) -> Record:
    """One case in the form of a record; ``run`` is the result of ``describe_run``."""
    return {
        "name": case.name,
        "about": case.about,
        **run,
        "share_of_other_processes": others,
        "checks": [check._asdict() for check in checks],
        "times": {name: _summary(times) for name, times in measurement.times.items()},
        "absent": _without_folders(measurement.absent),
        "metrics": measurement.metrics,
        "targets": [
            {**target._asdict(), "reached": target.is_reached(measurement.metrics)}
            for target in case.targets
        ],
    }


def _without_folders(reasons: Mapping[str, str]) -> dict[str, str]:
    """Reasons without the folders of files that they name."""
    return {name: _FOLDERS.sub("", reason) for name, reason in reasons.items()}


def name_line(what: str, beginning: str) -> str:
    """The name of a case that a script describes as ``what``."""
    return f"{beginning}-{re.sub('[^a-z0-9]+', '-', what.lower()).strip('-')}"


def record_line(line: Mapping[str, Any], beginning: str, others: float, run: Record) -> Record:
    """A JSON object that a script printed, as a case of a record.

    ``what`` names it, ``about`` describes it, ``targets`` are ``[metric, bound, sign]``, ``checks``
    are statements that are true, or objects with a verdict; ``absent`` and ``details`` are kept as
    they are. Of the rest, numbers are metrics, and a list of numbers named by a metric and
    ``REPEATS`` has the repeats of that metric.
    """
    metrics = {name: value for name, value in line.items() if isinstance(value, (int, float))}
    repeats = {
        name.removesuffix(REPEATS): value for name, value in line.items() if name.endswith(REPEATS)
    }
    targets = [Target(*target) for target in line.get("targets", ())]
    return {
        "name": name_line(line["what"], beginning),
        "about": line.get("about", line["what"]),
        **run,
        "share_of_other_processes": others,
        "checks": [
            {"what": check, "passed": True, "detail": ""} if isinstance(check, str) else check
            for check in line.get("checks", ())
        ],
        "times": {},
        "absent": _without_folders(line.get("absent", {})),
        "metrics": metrics,
        "repeats": repeats,
        "targets": [
            {**target._asdict(), "reached": target.is_reached(metrics)} for target in targets
        ],
        **({"details": line["details"]} if "details" in line else {}),
    }


def is_of_another_machine(path: Path) -> bool:
    """Whether a record exists that is of another machine."""
    return path.exists() and bool(load(path)["machine"] != describe())


def write(path: Path, records: Mapping[str, Record | None], order: Sequence[str]) -> None:
    """Write cases into a record by name, and keep its others.

    Args:
        path: Path of a file that may not exist yet.
        records: Cases by name; None removes a case, since its result is wrong.
        order: The names of all cases; cases with other names are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    before = load(path)["cases"] if path.exists() else []
    cases = {case["name"]: case for case in before} | dict(records)
    kept = [cases[name] for name in order if cases.get(name) is not None]
    save(path, {"machine": describe(), "cases": kept})


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, each list of numbers on a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False)
    text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Record:
    """A record; in those from before 2026-11-24 all cases share one date, commit and versions."""
    result: Record = json.loads(path.read_text(encoding="utf-8"))
    shared = {name: result[name] for name in ("commit", "date", "versions") if name in result}
    cases = [shared | case for case in result["cases"]]
    return {"machine": result["machine"], "cases": cases}


def compare(console: Console, before: Path, after: Path) -> None:
    """Print two results side by side: our times and the metrics of the cases they share."""
    results = [load(path) for path in (before, after)]
    for path, result in zip((before, after), results, strict=True):
        commits = ", ".join(sorted({str(case["commit"]) for case in result["cases"]}))
        console.print(
            f"{path.stem}: {commits}, {result['machine']['cpu']}, {days(result['cases'])}"
        )
    table = Table("case", "what", before.stem, after.stem, "ratio", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    olds, news = ({case["name"]: _values(case) for case in r["cases"]} for r in results)
    for name in (name for name in olds if name in news):
        shared = [what for what in olds[name] if what in news[name]]
        for what in shared:
            old, new = olds[name][what], news[name][what]
            change = f"{new / old:.3f}" if old else ""
            first = name if what == shared[0] else ""
            table.add_row(first, what, f"{old:.4g}", f"{new:.4g}", change)
    console.print(table)


def days(cases: Sequence[Record]) -> str:
    """The dates of the measurements: one day, or the first and the last."""
    found = sorted({case["date"][:10] for case in cases})
    if not found:
        return "never"
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _values(case: Record) -> dict[str, float]:
    medians = {f"{name}, ms": times["median"] * 1e3 for name, times in case["times"].items()}
    return {**medians, **case["metrics"]}


def _summary(times: Times) -> Record:
    return {
        "median": times.median,
        "p10": times.quantile(0.1),
        "p90": times.quantile(0.9),
        "best": times.best,
        "repeats": len(times.seconds),
        "seconds": [float(f"{seconds:.4g}") for seconds in times.seconds],
    }


def _verdict(target: Any, measurement: Measurement) -> str:
    reached = target.is_reached(measurement.metrics)
    verdict = "[green]reached[/]" if reached else "[red]missed[/]"
    return f"{target.sign} {target.bound:.3g} {verdict}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
