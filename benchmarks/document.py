"""Tables in the documentation, made from the records under ``results/``.

A table stands between two comments of a page, and the first says what is in it: a record, the
beginning of its cases' names or whole names with commas between them, and the columns, metrics or
the times of contestants::

    <!-- table: h200-decode gpu-decode- | GB/s | share of read bandwidth | time: sdpa cudnn -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .machine import PEERS, is_clean
from .report import days, load

__all__ = ["fill", "is_wanted", "tables", "value_of"]

_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) \|(.*?)-->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
_TIME = "time: "


def fill(page: str, results: Path) -> str:
    """The page with its tables made anew.

    Raises:
        FileNotFoundError: A table is of a record that is not there.
        ValueError: A record has none of a table's cases, or one that no commit describes.
    """
    return _TABLE.sub(lambda match: _table(match, results), page)


def _table(match: re.Match[str], results: Path) -> str:
    head, record, beginning, columns, end = match.groups()
    result = load(results / f"{record}.json")
    cases = [case for case in result["cases"] if is_wanted(case["name"], beginning)]
    if not cases:
        raise ValueError(f"{record} has no case whose name begins with {beginning}")
    changed = [case["name"] for case in cases if not is_clean(case["commit"])]
    if changed:
        raise ValueError(f"{record}: {', '.join(changed)} ran on code that is in no commit")
    names = [name.strip() for name in columns.split("|")]
    lines = [["case", *(name.removeprefix(_TIME) for name in names)]]
    lines.append(["---", *["---:"] * len(names)])
    shared = _shared_parts([case["about"] for case in cases])
    for case in cases:
        about = _join(part for part in _parts(case["about"]) if part not in shared)
        lines.append([about, *(_cell(case, name) for name in names)])
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{head}\n{_caption(result['machine'], cases, shared)}\n\n{rows}\n{end}"


def is_wanted(name: str, beginning: str) -> bool:
    """Whether a table has a case: by the beginning of its name, or listed with commas between."""
    return name in beginning.split(",") if "," in beginning else name.startswith(beginning)


def _parts(about: str) -> list[str]:
    kind, colon, rest = about.partition(": ")
    return [kind + colon.strip(), *rest.split(", ")] if colon else about.split(", ")


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts).replace(":,", ":")


def _shared_parts(abouts: list[str]) -> list[str]:
    """What all rows of a table say alike; it is said once, in the caption."""
    first, *others = map(_parts, abouts)
    return [part for part in first if others and all(part in other for other in others)]


def _caption(machine: dict[str, Any], cases: list[dict[str, Any]], shared: list[str]) -> str:
    where = machine.get("gpu") or f"{machine['cores']} cores of an {machine['cpu']}"
    there = {name for case in cases for name in case["times"]}
    peers = [package for peer, package in PEERS.items() if peer in there]
    names = ["torch", "triton", *peers] if "gpu" in machine else ["torch"]
    used = []
    for name in names:
        found = {case["versions"][name]: None for case in cases if case["versions"].get(name)}
        used += [f"{name} {' and '.join(found)}"] if found else []
    commits = sorted({case["commit"].split()[0][:7] for case in cases if case.get("commit")})
    counts = sorted({time["repeats"] for case in cases for time in case["times"].values()})
    repeats = f", {'–'.join(map(str, dict.fromkeys(counts[:: len(counts) - 1 or 1])))} repeats"
    used += [days(cases), f"commit {' and '.join(commits)}"]
    caption = f"{where}, {', '.join(used)}{repeats if counts else ''}."
    if shared:
        caption += f" All rows: {_join(shared).rstrip(':')}."
    return caption + _absence(cases)


def _absence(cases: list[dict[str, Any]]) -> str:
    """Who takes no part, with the reason and the number of cases."""
    counts: dict[tuple[str, str], int] = {}
    for case in cases:
        for who in case.get("absent", {}).items():
            counts[who] = counts.get(who, 0) + 1
    sayings = [
        f"{name} ({reason}{f'; {count} of {len(cases)} rows' * (count < len(cases))})"
        for (name, reason), count in counts.items()
    ]
    return f" No part: {', '.join(sayings)}." if sayings else ""


def value_of(case: dict[str, Any], column: str) -> float | None:
    """A metric, or for ``time: NAME`` the median seconds of the fastest form of a contestant.

    Forms have a contestant's name and one word more, as ``flashinfer BatchAttention``.
    """
    if not column.startswith(_TIME):
        value: float | None = case["metrics"].get(column)
        return value
    name, comma, ending = column.removeprefix(_TIME).partition(", ")
    found = [
        time["median"]
        for other, time in case["times"].items()
        if re.fullmatch(rf"{re.escape(name)}( \w+)?{re.escape(comma + ending)}", other)
    ]
    return min(found, default=None)


def tables(page: str) -> list[tuple[str, str, list[str]]]:
    """The tables of a page: record, beginning of the cases' names, columns."""
    found = _TABLE.finditer(page)
    return [(m[2], m[3], [name.strip() for name in m[4].split("|")]) for m in found]


def _cell(case: dict[str, Any], name: str) -> str:
    value = value_of(case, name)
    if value is None:
        return ""
    if name.startswith(_TIME):
        return _time(value)
    text = f"{value:.0%}" if name.startswith("share") else f"{value:.4g}"
    targets = {target["metric"]: target for target in case["targets"]}
    return text if name not in targets or not targets[name]["reached"] else f"**{text}**"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
