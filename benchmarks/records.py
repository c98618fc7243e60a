"""All records of one machine in one go, and which documented figures they change."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report
from .case import Case
from .document import find_figures, is_wanted, tables, value_of
from .machine import BackgroundLoad, describe

__all__ = [
    "RECORDS",
    "Change",
    "RecordSpec",
    "find_changes",
    "find_changes_in_prose",
    "find_loaded",
    "find_machine",
    "is_of_another_device",
    "plan",
    "run_script",
    "write_lines",
]

ROOT = Path(__file__).parent.parent
MOST_LOAD = 0.1
MOST_NOISE = 0.03
"""A figure that changed by less says nothing, whatever the repeats' own spread is."""


@dataclass(frozen=True)
class RecordSpec:
    """One file of results: the cases in it, or the script that prints it, and how long it takes."""

    ending: str
    """Of the file's name, after the machine's."""
    device: str
    seconds: float
    """Estimate for all of it, on an H200 or on two CPU cores."""
    cases: tuple[str, ...] = ()
    """How the names of its cases begin."""
    but: tuple[str, ...] = ()
    """How names begin that another record has."""
    script: tuple[str, ...] = ()
    """A module and its arguments; each line that it prints is a JSON object."""

    def find(self, cases: Iterable[Case]) -> list[Case]:
        """The cases of the record."""
        return [
            case
            for case in cases
            if case.device == self.device
            and case.name.startswith(self.cases or ("-",))
            and not case.name.startswith(self.but or ("-",))
        ]


# In the order of what readers ask first: what does not fit into the time is left out at the end.
RECORDS = (
    RecordSpec("-decode", "cuda", 200, ("gpu-decode-",)),
    RecordSpec("-prefill", "cuda", 180, ("gpu-prefill-",), ("gpu-prefill-blocks-",)),
    RecordSpec("-windows", "cuda", 240, ("windows-",), ("windows-all",)),
    RecordSpec("-tiles", "cuda", 110, ("gpu-tiled-",)),
    RecordSpec(
        "-workload-n", "cuda", 180,
        script=(
            "benchmarks.workload_n", "n", "small", "host", "n4", "stop", "logprobs", "shared",
            "chats", "fp8",
        ),
    ),
    RecordSpec("-cache-ops", "cuda", 60, ("write-kv-", "copy-blocks-")),
    RecordSpec("-swin", "cuda", 90, ("swin-unetr-",)),
    RecordSpec("-prefill-blocks", "cuda", 50, ("gpu-prefill-blocks-",)),
    RecordSpec("-scores", "cuda", 10, ("gpu-scores-",)),
    RecordSpec(
        "-block-sparse", "cuda", 45, ("gpu-block-sparse", "gpu-visible-", "gpu-shared-prefix-")
    ),
    RecordSpec("-vllm-ops", "cuda", 60, ("vllm-ops-",)),
    RecordSpec("-windows-all", "cuda", 120, ("windows-all",)),
    RecordSpec("-engine", "cuda", 180, ("gpu-engine-",)),
    RecordSpec("", "cpu", 240, ("decode-", "prefill-")),
    RecordSpec("-tiles", "cpu", 60, ("tiled-", "scores-")),
    RecordSpec("-windows", "cpu", 180, ("windows-cpu-",)),
    RecordSpec("-engine", "cpu", 300, ("engine-",)),
    RecordSpec("-speculation", "cpu", 60, script=("benchmarks.speculation",)),
    RecordSpec("-http", "cpu", 120, script=("benchmarks", "http", "--json")),
    RecordSpec("-latency", "cpu", 480, script=("benchmarks", "http-latency", "--json")),
)  # fmt: skip


def plan(
    device: str, seconds: float, records: Sequence[RecordSpec] = RECORDS
) -> tuple[list[RecordSpec], list[RecordSpec]]:
    """The records of a device that fit into some seconds, in order, and those that do not.

    A record that does not fit is passed over; a shorter one after it may fit.
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
    """The name under which this machine has records; for a new one, a name from what it is."""
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
    """Whether a record is of another GPU, or another CPU where there is none.

    Two hosts of one GPU differ in their processors, and renew each other's whole records.
    """
    if not path.exists():
        return False
    old, here = json.loads(path.read_text(encoding="utf-8"))["machine"], describe()
    names = ("gpu",) if "gpu" in here else ("gpu", "cpu", "cores")
    return any(old.get(name) != here.get(name) for name in names)


def run_script(spec: RecordSpec, path: Path, timeout: float, run: dict[str, Any]) -> None:
    """Run a record's script and write the JSON objects that it prints as cases.

    Args:
        spec: The record.
        path: Of its file.
        timeout: In seconds.
        run: ``describe_run``'s.

    Raises:
        RuntimeError: It failed, or took longer than ``timeout`` seconds.
    """
    command, background = ["-m", *spec.script], BackgroundLoad()
    try:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=timeout, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it printed nothing"])[-1])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    shown = " ".join(["python", *command])
    write_lines(path, lines, spec.ending.strip("-"), background, run, shown)


def write_lines(
    path: Path,
    lines: Iterable[Mapping[str, Any]],
    beginning: str,
    background: BackgroundLoad,
    run: dict[str, Any],
    command: str,
) -> None:
    """Write the JSON objects of a script as the cases of a record, whose names so begin."""
    others = background.share
    cases = [report.record_line(line, beginning, others, run) for line in lines]
    report.save(path, {"machine": describe(), "command": command, "cases": cases})


@dataclass(frozen=True)
class Change:
    """A documented figure that a new record changes beyond noise."""

    page: str
    case: str
    column: str
    before: float
    after: float
    noise: float
    """As a part of the figure before."""

    def __str__(self) -> str:
        """In a line."""
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
            for case in (c for c in olds if is_wanted(c, beginning) and c in news):
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
    """Figures of a record in the pages' sentences that it no longer gives."""
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
    """Cases during which other processes took much of the machine: measure them again."""
    return [
        f"{case['name']}: other processes took {case['share_of_other_processes']:.0%}"
        for case in record["cases"]
        if case["share_of_other_processes"] > MOST_LOAD
    ]


def _spread(case: dict[str, Any], column: str) -> float:
    """Of pagetile's times, or of a script's repeats of the column, as a part of the median."""
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
        """Seconds; negative once it is spent."""
        return self._end - self._clock()
