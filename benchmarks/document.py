"""Tables in the documentation, made from the records under ``results/``.

A table stands between two comments of a page, and the first says what is in it: a record, the
beginning of its cases' names or whole names with commas between them, and the columns, metrics or
the times of contestants::

    <!-- table: h200-decode gpu-decode- | GB/s | share of read bandwidth | time: sdpa cudnn -->
    <!-- end -->
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .machine import PEERS
from .report import days

__all__ = ["fill"]

_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) \|(.*?)-->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
_TIME = "time: "


def fill(page: str, results: Path) -> str:
    """The page with its tables made anew.

    Raises:
        FileNotFoundError: A table is of a record that is not there.
        ValueError: A record has none of a table's cases.
    """
    return _TABLE.sub(lambda match: _table(match, results), page)


def _table(match: re.Match[str], results: Path) -> str:
    head, record, beginning, columns, end = match.groups()
    result = json.loads((results / f"{record}.json").read_text(encoding="utf-8"))
    cases = [case for case in result["cases"] if _is_wanted(case["name"], beginning)]
    if not cases:
        raise ValueError(f"{record} has no case whose name begins with {beginning}")
    names = [name.strip() for name in columns.split("|")]
    lines = [["case", *(name.removeprefix(_TIME) for name in names)]]
    lines.append(["---", *["---:"] * len(names)])
    lines += [[case["about"], *(_cell(case, name) for name in names)] for case in cases]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{head}\n{_caption(result['machine'], cases)}\n\n{rows}\n{end}"


def _is_wanted(name: str, beginning: str) -> bool:
    return name in beginning.split(",") if "," in beginning else name.startswith(beginning)


def _caption(machine: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    where = machine.get("gpu") or f"{machine['cores']} cores of an {machine['cpu']}"
    there = {name for case in cases for name in case["times"]}
    peers = [package for peer, package in PEERS.items() if peer in there]
    names = ["torch", "triton", *peers] if "gpu" in machine else ["torch"]
    used = []
    for name in names:
        found = {case["versions"][name]: None for case in cases if case["versions"].get(name)}
        used += [f"{name} {' and '.join(found)}"] if found else []
    commits = sorted({case["commit"].split()[0][:7] for case in cases if case.get("commit")})
    at = f", commit {' and '.join(commits)}" if commits else ""
    return f"{where}, {', '.join(used)}, {days(cases)}{at}:"


def _cell(case: dict[str, Any], name: str) -> str:
    if name.startswith(_TIME):
        time = case["times"].get(name.removeprefix(_TIME))
        return "" if time is None else _time(time["median"])
    value = case["metrics"].get(name)
    if value is None:
        return ""
    text = f"{value:.0%}" if name.startswith("share") else f"{value:.4g}"
    targets = {target["metric"]: target for target in case["targets"]}
    return text if name not in targets or not targets[name]["reached"] else f"**{text}**"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
