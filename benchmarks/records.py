"""Measures all records of one machine, and finds the documented figures that they change."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report
from .case import Case
from .document import find_figures, is_in_table, tables, value_of
from .machine import BackgroundLoad, describe, is_clean
from .processes import tethered
from .workload_n import CASES as PARTS_OF_N

ROOT = Path(__file__).parent.parent
MOST_LOAD = 0.1
MOST_NOISE = 0.03
"""A smaller change of a figure is noise, even if its repeats agree better."""


@dataclass(frozen=True)
class RecordSpec:
    """One file of results: its cases, or the script that prints them, and how long it takes.

    A script that takes names of parts as arguments prints a case for each, named as ``parts`` says;
    those in ``apart`` run in a process each.
    """

    ending: str
    """The file's name after the machine's."""
    device: str
    seconds: float
    """Estimate for all of it, on an H100 or on two CPU cores, with kernels compiled before."""
    cases: tuple[str, ...] = ()
    """Beginnings of its cases' names."""
    but: tuple[str, ...] = ()
    """Beginnings of names that belong to another record."""
    script: tuple[str, ...] = ()
    """A module and its arguments; each line that it prints is a JSON object."""
    parts: tuple[tuple[str, str], ...] = ()
    """Arguments, and names of the cases that they print."""
    apart: tuple[str, ...] = ()

    @property
    def beginning(self) -> str:
        """The beginning of the names of a script's cases."""
        return self.ending.strip("-")

    def name_of(self, what: str) -> str:
        """The name of the case that a line of the script describes."""
        return report.name_line(what, self.beginning)

    def commands(self, made: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
        """The script's arguments for the cases that are not yet made."""
        made = set(made)
        if not self.parts:
            is_made = any(name.startswith(self.beginning) for name in made)
            yield from () if is_made else (self.script,)
            return
        left = [part for part, what in self.parts if self.name_of(what) not in made]
        together = [part for part in left if part not in self.apart]
        for some in ([together] if together else []) + [
            [part] for part in left if part in self.apart
        ]:
            yield (*self.script, *some)

    def find(self, cases: Iterable[Case]) -> list[Case]:
        """The cases of the record."""
        return [
            case
            for case in cases
            if case.device == self.device
            and case.name.startswith(self.cases or ("-",))
            and not case.name.startswith(self.but or ("-",))
        ]


# The figures that readers ask for first come first: the end is left out when time is short.
RECORDS = (
    RecordSpec("-decode", "cuda", 140, ("gpu-decode-",)),
    RecordSpec("-prefill", "cuda", 70, ("gpu-prefill-",), ("gpu-prefill-blocks-",)),
    RecordSpec(
        "-workload-n", "cuda", 340, script=("benchmarks.workload_n",),
        parts=tuple(PARTS_OF_N.items()), apart=("long", "llama"),
    ),
    RecordSpec("-windows", "cuda", 90, ("windows-",), ("windows-all-",)),
    RecordSpec("-tiles", "cuda", 55, ("gpu-tiled-",)),
    RecordSpec(
        "-block-sparse", "cuda", 15, ("gpu-block-sparse", "gpu-visible-", "gpu-shared-prefix-")
    ),
    RecordSpec("-vllm-ops", "cuda", 55, ("vllm-ops-",)),
    RecordSpec("-cache-ops", "cuda", 25, ("write-kv-", "copy-blocks-")),
    RecordSpec("-http", "cuda", 150, script=("benchmarks", "http-n", "--json")),
    RecordSpec(
        "-latency", "cuda", 70,
        script=("benchmarks", "http-latency", "--device", "cuda", "--limit", "60", "--json"),
    ),
    RecordSpec("-swin", "cuda", 65, ("swin-unetr-",)),
    RecordSpec("-prefill-blocks", "cuda", 20, ("gpu-prefill-blocks-",)),
    RecordSpec("-scores", "cuda", 5, ("gpu-scores-",)),
    RecordSpec("-engine", "cuda", 135, ("gpu-engine-",)),
    RecordSpec("-windows-all", "cuda", 50, ("windows-all-",)),
    RecordSpec("", "cpu", 170, ("decode-", "prefill-")),
    RecordSpec("-tiles", "cpu", 60, ("tiled-", "scores-")),
    RecordSpec("-windows", "cpu", 180, ("windows-cpu-",)),
    RecordSpec("-linears", "cpu", 65, ("linear-",)),
    RecordSpec("-engine", "cpu", 660, ("engine-",)),
    RecordSpec("-speculation", "cpu", 40, script=("benchmarks.speculation",)),
    RecordSpec("-http", "cpu", 60, script=("benchmarks", "http", "--json")),
    RecordSpec("-latency", "cpu", 400, script=("benchmarks", "http-latency", "--json")),
)  # fmt: skip


def find_made(path: Path, commit: str | None) -> set[str]:
    """Names of the cases that a record has of a commit, which are not measured again."""
    if not is_clean(commit) or not path.exists() or report.is_of_another_machine(path):
        return set()
    return {case["name"] for case in report.load(path)["cases"] if case["commit"] == commit}


def plan(
    device: str, seconds: float, records: Sequence[RecordSpec] = RECORDS
) -> tuple[list[RecordSpec], list[RecordSpec]]:
    """The records of a device that fit into some seconds, in order, and those that do not.

    A record that does not fit is skipped; a shorter one after it may fit.
    """
    fitting, left = [], []
    for spec in (spec for spec in records if spec.device == device):
        if spec.seconds <= seconds:
            seconds -= spec.seconds
            fitting.append(spec)
        else:
            left.append(spec)
    return fitting, left


def find_machine(results: Path) -> str:
    """The name in this machine's records; without records, a name from its GPU or CPU."""
    here = describe()
    names = []
    for path in sorted(results.glob("*.json")):
        if json.loads(path.read_text(encoding="utf-8")).get("machine") == here:
            names.append(path.stem)
    for name in names:
        for spec in RECORDS:
            stem = name.removesuffix(spec.ending) if spec.ending else name
            if stem != name or (not spec.ending and name == min(names, key=len)):
                return stem
    words = here.get("gpu") or f"{here['cpu']} {here['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower().removeprefix("nvidia ")).strip("-")


def is_of_another_device(path: Path) -> bool:
    """Whether a record is of another GPU or, without a GPU, of another CPU or instruction set.

    Two hosts of one kind of GPU have different CPUs; each replaces the other's records as a whole.
    """
    if not path.exists():
        return False
    old, here = json.loads(path.read_text(encoding="utf-8"))["machine"], describe()
    names = ("gpu",) if "gpu" in here else ("gpu", "cpu", "cores", "simd")
    return any(old.get(name) != here.get(name) for name in names)


def run_script(
    spec: RecordSpec,
    path: Path,
    timeout: float,
    run: dict[str, Any],
    made: Iterable[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run a record's script and write the JSON objects that it prints as cases.

    A script with parts is recorded line by line, others when they have ended.

    Args:
        spec: The record.
        path: Path of its file.
        timeout: Seconds for all of its commands.
        run: The result of ``describe_run``.
        made: Names of cases that are recorded already.
        say: Called with a line for each command and each case.

    Returns:
        The failures, and what took longer than ``timeout`` seconds; the other commands have run.
    """
    failures, end = [], time.monotonic() + timeout
    for arguments in spec.commands(made):
        command, left = ["-m", *arguments], end - time.monotonic()
        if left <= 0:
            failures.append(f"no time for {' '.join(arguments)}")
            continue
        background, shown = BackgroundLoad(), " ".join(["python", *command])
        say(f"{path.stem}: {shown}")
        is_ours = path.exists() and not report.is_of_another_machine(path)
        kept = report.load(path)["cases"] if spec.parts and is_ours else []
        lines: list[dict[str, Any]] = []
        is_whole = False
        try:
            for line in _read_lines([sys.executable, *command], left):
                lines.append(line)
                if spec.parts:  # otherwise it is not known which cases remain
                    write_lines(path, lines, spec.beginning, background, run, shown, kept)
                say(f"{path.stem}: {spec.name_of(line['what'])} is made")
            is_whole = True
        except RuntimeError as reason:
            failures.append(f"{' '.join(arguments)}: {reason}")
        if lines and (spec.parts or is_whole):  # its time is known now, without others' load
            write_lines(path, lines, spec.beginning, background, run, shown, kept)
    return failures


def _read_lines(command: Sequence[str], timeout: float) -> Iterator[dict[str, Any]]:
    """The JSON objects that a command prints, as soon as each is printed.

    Raises:
        RuntimeError: It failed, or took longer than ``timeout`` seconds.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            tethered(command), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
        )  # fmt: skip
        is_late = threading.Event()

        def end_all() -> None:  # also its servers, which hold the pipe open
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def stop() -> None:
            is_late.set()
            end_all()

        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as printed:
                for line in printed:
                    if line.startswith("{"):
                        yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            end_all()
            process.wait()
        if is_late.is_set():
            raise RuntimeError(f"it took longer than {timeout:.0f} s")
        if code:
            errors.seek(0)
            raise RuntimeError((errors.read().strip().splitlines() or ["it printed nothing"])[-1])


def write_lines(
    path: Path,
    lines: Iterable[Mapping[str, Any]],
    beginning: str,
    background: BackgroundLoad,
    run: dict[str, Any],
    command: str,
    kept: Iterable[dict[str, Any]] = (),
) -> None:
    """Write JSON objects of a script as the record's cases, after or in place of those there."""
    others, cases = background.share, {case["name"]: case for case in kept}
    for line in lines:
        case = report.record_line(line, beginning, others, {**run, "command": command})
        cases[case["name"]] = case
    report.save(path, {"machine": describe(), "cases": list(cases.values())})


@dataclass(frozen=True)
class Change:
    """A documented figure that a new record changes beyond noise."""

    page: str
    case: str
    column: str
    before: float
    after: float
    noise: float
    """The noise as a share of the figure before."""

    def __str__(self) -> str:
        """One line of text."""
        change = self.after / self.before - 1 if self.before else float("inf")
        return (
            f"{self.page}: {self.case}, {self.column}: {self.before:.4g} to {self.after:.4g} "
            f"({change:+.1%}, noise {self.noise:.1%})"
        )


def find_changes(
    pages: Iterable[Path], record: str, before: dict[str, Any], after: dict[str, Any]
) -> list[Change]:
    """Figures of the pages' tables of a record that differ by more than noise.

    Noise is the larger of 3 % and the spread of pagetile's times (p10 to p90, before and after).
    """
    olds, news = ({case["name"]: case for case in result["cases"]} for result in (before, after))
    found = []
    for page in pages:
        for name, beginning, columns in tables(page.read_text(encoding="utf-8")):
            if name != record:
                continue
            for case in (c for c in olds if is_in_table(c, beginning) and c in news):
                for column in columns:
                    spreads = (_spread(each[case], column) for each in (olds, news))
                    noise = max(MOST_NOISE, *spreads)
                    old, new = value_of(olds[case], column), value_of(news[case], column)
                    if old is None or new is None or abs(new - old) <= noise * abs(old):
                        continue
                    found.append(Change(page.name, case, column, old, new, noise))
    return found


def find_changes_in_prose(
    pages: Iterable[Path], record: str, before: dict[str, Any], after: dict[str, Any]
) -> list[str]:
    """Figures in the pages' sentences that differ from a record's."""
    found = []
    for page in pages:
        for figure in find_figures(page.read_text(encoding="utf-8")):
            if figure.record != record:
                continue
            try:
                texts = [figure.of(result) for result in (before, after)]
            except ValueError as reason:
                found.append(f"{page.name}: {reason}")
                continue
            if texts[0] != texts[1]:
                found.append(f"{page.name}, in a sentence: {texts[0]} to {texts[1]}")
    return found


def find_loaded(record: dict[str, Any]) -> list[str]:
    """Cases during which other processes loaded the machine: measure them again."""
    return [
        f"{case['name']}: other processes took {case['share_of_other_processes']:.0%}"
        for case in record["cases"]
        if case["share_of_other_processes"] > MOST_LOAD
    ]


def _spread(case: dict[str, Any], column: str) -> float:
    """Spread of pagetile's times, or of the column's repeats, as a share of the median."""
    repeats = case.get("repeats", {}).get(column)
    if repeats:
        return float((max(repeats) - min(repeats)) / abs(statistics.median(repeats)))
    times = case["times"].get("pagetile")
    return 0.0 if times is None else float((times["p90"] - times["p10"]) / times["median"])


class Budget:
    """Seconds that are left."""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds left; negative once they are over."""
        return self._end - self._clock()
