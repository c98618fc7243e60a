"""Tables in the documentation, made from the records under ``results/``.

A table stands between two comments of a page. The first names a record, the beginning of its
cases' names (or whole names with commas between them), and the columns: metrics, or times of
contestants::

    <!-- table: h200-decode gpu-decode- | GB/s | share of read bandwidth | time: sdpa cudnn -->
    <!-- end -->

The caption says what all rows share, and what most do: "Unless a row says otherwise: bfloat16."

``x fastest peer`` is the time of the fastest peer divided by pagetile's: below 1 where a peer wins.
The cell names the peer. With an ending, as in ``x fastest peer, clean cache``, only contestants
whose names have this ending are compared.

The last column may be ``until recorded: COMMAND``: while the record is missing or has none of the
cases, the page shows this command in place of the table.

A figure in a sentence stands between two comments as well. The first names the record, the cases, a
column (or one ``over`` or ``less`` another) and a style::

    <!-- figure: h200-windows windows- | x best peer | 2 digits -->2.1 to 6.7<!-- /figure -->

It is the range over the cases, or with ``least`` or ``most`` one end; ``%`` and ``µs`` are units.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import PEERS, is_clean
from .report import days, load

_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) \|(.*?)-->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
_FIGURE = re.compile(
    r"(<!-- figure: (\S+) (\S+) \| ([^|>]+?) \| (.+?) -->)(.*?)(<!-- /figure -->)", re.DOTALL
)
_COMMA = re.compile(r", (?![^\[(]*[\])])")
_STYLE = re.compile(r"(?:(\d+) digits ?)?(%|µs)?")
_FACTORS = {None: 1.0, "%": 1e2, "µs": 1e6}
_TIME = "time: "
_FASTEST = "x fastest peer"
_NO_PEERS = ("pagetile", "host", "read")
"""Beginnings of the names of contestants that are not peers."""
_STATES = (", clean cache", ", both", ", backward")
"""Endings of the names of contestants timed in another state, such as with another cache."""
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_UNTIL = "until recorded: "
_REASON_LENGTH = 80
_SIMD = {"AVX512": "AVX-512"}


@dataclass(frozen=True)
class Figure:
    """A figure in a sentence: its record, cases, column and style."""

    record: str
    beginning: str
    column: str
    """A column, or one ``over`` or ``less`` another."""
    style: str
    """``[least|most] [N digits] [%|µs]``; without digits, an integer."""

    def of(self, result: dict[str, Any]) -> str:
        """Its text, from a record.

        Raises:
            ValueError: The record has none of the cases, or was made of code in no commit.
        """
        cases = _find_cases(result, self.record, self.beginning)
        values = [value for case in cases if (value := self._value(case)) is not None]
        if not values:
            raise ValueError(f"{self.record} has no {self.column!r} of {self.beginning}")
        end, space, style = self.style.partition(" ")
        if space and end == "least":
            return _in_style([min(values)], style, math.floor)
        if space and end == "most":
            return _in_style([max(values)], style, math.ceil)
        return _in_style([min(values), max(values)], self.style, round)

    def _value(self, case: dict[str, Any]) -> float | None:
        for word in (" over ", " less "):
            one, found, other = self.column.partition(word)
            if found:
                a, b = value_of(case, one), value_of(case, other)
                if a is None or b is None:
                    return None
                return a / b if word == " over " else a - b
        return value_of(case, self.column)


def find_figures(page: str) -> list[Figure]:
    """The figures in a page's sentences."""
    return [Figure(*match.groups()[1:5]) for match in _FIGURE.finditer(page)]


def _in_style(values: list[float], style: str, to_integer: Any) -> str:
    """A range of numbers as ``2.1 to 6.7``, with a unit after the last."""
    parts = _STYLE.fullmatch(style)
    if parts is None:
        raise ValueError(f"a figure is written as {style!r}, expected 'N digits', '%' or 'µs'")
    digits, unit = parts.groups()

    def write(value: float) -> str:
        value *= _FACTORS[unit]
        size = math.floor(math.log10(abs(value) or 1.0))
        places = 0 if digits is None else int(digits) - 1 - size
        number = to_integer(round(value * 10.0**places, 9)) / 10.0**places
        text = f"{number:,.{max(0, places)}f}"
        return text.replace(",", " " if number >= 1e4 else "")

    return " to ".join(dict.fromkeys(map(write, values))) + f" {unit or ''}".rstrip()


def fill(page: str, results: Path) -> str:
    """The page with its tables and figures generated again.

    Raises:
        FileNotFoundError: A table's record does not exist.
        ValueError: A record has none of a table's cases, or was made of code in no commit.
    """
    page = _TABLE.sub(lambda match: _table(match, results), page)
    return _FIGURE.sub(lambda match: _figure(match, results), page)


def _figure(match: re.Match[str], results: Path) -> str:
    figure = Figure(*match.groups()[1:5])
    return f"{match[1]}{figure.of(load(results / f'{figure.record}.json'))}{match[7]}"


def _find_cases(result: dict[str, Any], record: str, beginning: str) -> list[dict[str, Any]]:
    cases = [case for case in result["cases"] if is_in_table(case["name"], beginning)]
    if not cases:
        raise ValueError(f"{record} has no case whose name begins with {beginning}")
    changed = [case["name"] for case in cases if not is_clean(case["commit"])]
    if changed:
        raise ValueError(f"{record}: {', '.join(changed)} ran on code that is in no commit")
    return cases


def _table(match: re.Match[str], results: Path) -> str:
    head, record, beginning, columns, end = match.groups()
    path, names = results / f"{record}.json", _names(columns)
    command = columns.rpartition(_UNTIL)[2].strip() if _UNTIL in columns else None
    result = load(path) if path.exists() or not command else {"cases": []}
    if command and not any(is_in_table(case["name"], beginning) for case in result["cases"]):
        return f"{head}\nNot recorded yet: `{command}` prints it.\n\n{end}"
    cases = _find_cases(result, record, beginning)
    lines = [["case", *(name.removeprefix(_TIME) for name in names)]]
    shared = _shared_parts([case["about"] for case in cases])
    own = [[part for part in _split(case["about"]) if part not in shared] for case in cases]
    usual = _usual_parts(own)
    unit = _unit(cases, names)
    for case, parts in zip(cases, own, strict=True):
        about = _join(part for i, part in enumerate(parts) if usual.get(i) != part)
        lines.append([about, *(_cell(case, name, unit) for name in names)])
    first, *rest = [f"| {' | '.join(line)} |\n" for line in lines]
    rows = f"{first}|---{'|---:' * len(names)}|\n{''.join(rest)}"
    caption = _caption(result["machine"], cases, shared, list(usual.values()))
    caption += f" Times in {unit}." if unit else ""
    return f"{head}\n{caption}\n\n{rows}\n{end}"


def is_in_table(name: str, beginning: str) -> bool:
    """Whether a table includes a case, by the beginning of its name or in a list with commas."""
    return name in beginning.split(",") if "," in beginning else name.startswith(beginning)


def _split(about: str) -> list[str]:
    """A case's description, split at commas outside brackets."""
    kind, colon, rest = about.partition(": ")
    return [kind + colon.strip(), *_COMMA.split(rest)] if colon else _COMMA.split(about)


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts).replace(":,", ":")


def _shared_parts(abouts: list[str]) -> list[str]:
    """The parts that all rows have; the caption says them once."""
    first, *others = map(_split, abouts)
    return [part for part in first if others and all(part in other for other in others)]


def _usual_parts(rows: list[list[str]]) -> dict[int, str]:
    """The parts that most rows have, by index; the caption says them, other rows what differs.

    The first part always stays in its row. An index that some row lacks is left out: such a row
    would be read as having the usual part.
    """
    usual = {}
    for place in range(1, min(map(len, rows))):
        [(part, count)] = Counter(parts[place] for parts in rows).most_common(1)
        if count >= 3 and 2 * count > len(rows):
            usual[place] = part
    return usual


def _caption(
    machine: dict[str, Any], cases: list[dict[str, Any]], shared: list[str], usual: list[str]
) -> str:
    where = machine.get("gpu") or f"{machine['cores']} cores of an {machine['cpu']}"
    where += f" with {_SIMD.get(machine['simd'], machine['simd'])}" if "simd" in machine else ""
    there = {name for case in cases for name in case["times"]}
    shapes = [shape for case in cases for shape in case.get("details", ())]  # of a sweep
    there |= {name for shape in shapes for name in shape["seconds"]}
    peers = list(dict.fromkeys(package for peer, package in PEERS.items() if peer in there))
    names = ["torch", "triton", *peers] if "gpu" in machine else ["torch"]
    used = []
    for name in names:
        found = {case["versions"][name]: None for case in cases if case["versions"].get(name)}
        used += [f"{name} {' and '.join(found)}"] if found else []
    commits = sorted({case["commit"].split()[0][:7] for case in cases if case.get("commit")})
    counts = sorted(
        {time["repeats"] for case in cases for time in case["times"].values()}
        | {len(found) for case in cases for found in case.get("repeats", {}).values()}
    )
    repeats = f", {'–'.join(map(str, dict.fromkeys(counts[:: len(counts) - 1 or 1])))} repeat"
    repeats += "s" * (counts != [1])
    used += [days(cases), f"commit {' and '.join(commits)}"]
    caption = f"{where}, {', '.join(used)}{repeats if counts else ''}."
    if shared:
        caption += f" All rows: {_join(shared).rstrip(':')}."
    if usual:
        caption += f" Unless a row says otherwise: {_join(usual)}."
    return caption + _absence(cases)


def _absence(cases: list[dict[str, Any]]) -> str:
    """The peers that were left out, each with the reason and the number of cases."""
    counts: dict[tuple[str, str], int] = {}
    for case in cases:
        for who in case.get("absent", {}).items():
            counts[who] = counts.get(who, 0) + 1
    names: dict[tuple[str, int], list[str]] = {}
    for (name, reason), count in counts.items():
        names.setdefault((_shorten(reason), count), []).append(name)
    sayings = [
        f"{_join(who)} ({reason}{f'; {count} of {len(cases)} rows' * (count < len(cases))})"
        for (reason, count), who in names.items()
    ]
    return f" Left out: {'; '.join(sayings)}." if sayings else ""


def _shorten(reason: str) -> str:
    """The beginning of a reason; the record has all of it."""
    return textwrap.shorten(reason, _REASON_LENGTH, placeholder=" …")


def value_of(case: dict[str, Any], column: str) -> float | None:
    """A metric, or for ``time: NAME`` the median seconds of a contestant's fastest variant.

    Variants have a contestant's name and one word more, as ``flashinfer BatchAttention``.
    """
    if column.startswith(_FASTEST):
        found_peer = _fastest_peer(case, column.removeprefix(_FASTEST))
        return None if found_peer is None else found_peer[1]
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


def _fastest_peer(case: dict[str, Any], ending: str) -> tuple[str, float] | None:
    """The fastest peer's name, and its median time divided by pagetile's."""
    peers = {
        name.removesuffix(ending): time["median"]
        for name, time in case["times"].items()
        if name.endswith(ending) and not name.startswith(_NO_PEERS)
        if ending or not name.endswith(_STATES)
    }
    own = case["times"].get("pagetile" + ending)
    if own is None or not peers:
        return None
    name = min(peers, key=peers.__getitem__)
    return name, peers[name] / own["median"]


def tables(page: str) -> list[tuple[str, str, list[str]]]:
    """The tables of a page: record, beginning of the cases' names, columns."""
    found = _TABLE.finditer(page)
    return [(m[2], m[3], _names(m[4])) for m in found]


def _names(columns: str) -> list[str]:
    names = [name.strip() for name in columns.split("|")]
    return [name for name in names if not name.startswith(_UNTIL)]


def _unit(cases: list[dict[str, Any]], names: list[str]) -> str | None:
    """The unit of all times of a table, in which the shortest is at least 1."""
    columns = [name for name in names if name.startswith(_TIME)]
    times = [value_of(case, column) for case in cases for column in columns]
    shortest = min((time for time in times if time is not None), default=None)
    if shortest is None:
        return None
    return next((unit for unit, one in _UNITS.items() if shortest >= one), "ns")


def _cell(case: dict[str, Any], name: str, unit: str | None) -> str:
    value = value_of(case, name)
    if value is None:
        return ""
    if name.startswith(_TIME):
        assert unit is not None
        return _with_spaces(float(f"{value / _UNITS[unit]:.3g}"))
    if name.startswith(_FASTEST):
        peer = _fastest_peer(case, name.removeprefix(_FASTEST))
        assert peer is not None
        return f"{value:.3g} ({peer[0]})"
    text = f"{value:.0%}" if name.startswith("share") else _with_spaces(value)
    targets = {target["metric"]: target for target in case["targets"]}
    return text if name not in targets or not targets[name]["reached"] else f"**{text}**"


def _with_spaces(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 1e4 else f"{value:.4g}"
