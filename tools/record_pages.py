"""Record the page map of a server under demonstration traffic as an animated SVG.

``python tools/record_pages.py [--seconds 30] [--out docs/learn/pictures/page-map.svg]``

Starts ``pagetile serve --demo-traffic`` with a small cache, reads the snapshots that ``/pages``
draws, and writes each as a group that CSS shows at its time. Colours are those of the page.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pagetile
from pagetile.testing.serve import server_process

ROOT = Path(__file__).parent.parent
STYLES = Path(pagetile.__file__).parent / "server" / "static" / "pages.css"
COLUMNS, PITCH, SIDE = 24, 24, 20  # cells in a row; pixels from cell to cell, and of a cell
LEFT, TOP, CHART = 16, 76, 64  # pixels beside and above the cells, and of the chart
CACHED = 255

Frame = dict[str, Any]


def record(url: str, seconds: float) -> list[Frame]:
    """Snapshots of a server's pool, five a second."""
    frames: list[Frame] = []
    with urllib.request.urlopen(f"{url}/pages/frames", timeout=60) as lines:
        for line in lines:
            if line.startswith(b"data: "):
                frames.append(json.loads(line[6:]))
                if frames[-1]["time"] - frames[0]["time"] >= seconds:
                    break
    return frames


@contextlib.contextmanager
def demo_server() -> Iterator[str]:
    """The URL of a server whose cache is too small for its demonstration traffic now and then."""
    small = ("--num-blocks", "144", "--max-num-seqs", "32")
    with server_process("--demo-traffic", "--quiet", *small) as server:
        yield server.url


def draw(frames: Sequence[Frame]) -> str:
    """An SVG that shows the snapshots at the pace at which they were taken, in a loop."""
    rows = -(-frames[0]["num_blocks"] // COLUMNS)
    width, bottom = 2 * LEFT + COLUMNS * PITCH, TOP + rows * PITCH
    height = bottom + CHART + 44
    times = [frame["time"] - frames[0]["time"] for frame in frames]
    total = times[-1] + (times[-1] - times[0]) / max(1, len(frames) - 1)
    ends = [*times[1:], total]
    shown = "".join(
        f"@keyframes f{number}{{0%,{100 * (end - start) / total:.2f}%{{opacity:1}}"
        f"{100 * (end - start) / total + 0.01:.2f}%,100%{{opacity:0}}}}"
        f".f{number}{{animation:f{number} {total:.1f}s step-end {start:.2f}s infinite}}"
        for number, (start, end) in enumerate(zip(times, ends, strict=True))
    )
    cells = f'<path class="free" d="{_squares(range(frames[0]["num_blocks"]), 0.5, SIDE - 1)}"/>'
    groups = "".join(
        f'<g class="frame f{number}">{_frame(frame, frames[0])}</g>'
        for number, frame in enumerate(frames)
    )
    chart = _chart(frames, times, total, width, bottom + 18)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12">'
        f"<title>Blocks of a KV cache while requests run</title><style>{_style(total)}{shown}"
        "@media (prefers-reduced-motion:reduce){.frame,.now{animation:none!important}"
        ".frame:last-of-type{opacity:1}}"
        f'</style><rect class="back" width="{width}" height="{height}"/>'
        f"{_legend()}{cells}{groups}{chart}</svg>\n"
    )


def _style(total: float) -> str:
    """The page's colours, light and dark, and the elements that have them."""
    light, dark = re.findall(r":root(?:[^{]*)\{([^}]*)\}", STYLES.read_text())[:2]
    colours = (re.findall(r"--[\w-]+: #[0-9a-f]+;", part) for part in (light, dark))
    by_day, by_night = ("".join(found).replace(" ", "") for found in colours)
    return (
        f":root{{{by_day}}}@media (prefers-color-scheme:dark){{:root{{{by_night}}}}}"
        ".back{fill:var(--card)}text{fill:var(--text)}.quiet{fill:var(--quiet)}"
        ".free{fill:none;stroke:var(--free)}.cached{fill:var(--cached)}.held{fill:var(--held)}"
        ".shared{fill:var(--shared)}.written{fill:var(--written);stroke:var(--mark);"
        "stroke-width:.6}.line{fill:none;stroke:var(--held);stroke-width:1.5}"
        ".tokens{stroke:var(--chart-tokens)}.now{stroke:var(--mark)}.frame{opacity:0}"
        f".now{{animation:now {total:.1f}s linear infinite}}"
        f"@keyframes now{{to{{transform:translateX({COLUMNS * PITCH}px)}}}}"
    )


def _squares(blocks: Sequence[int], inset: float, side: float) -> str:
    return "".join(f"M{x + inset:g} {y + inset:g}h{side}v{side}h-{side}z" for x, y in _at(blocks))


def _at(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    for block in blocks:
        yield LEFT + block % COLUMNS * PITCH, TOP + block // COLUMNS * PITCH


def _frame(frame: Frame, first: Frame) -> str:
    """One snapshot: a path for each state of a cell, told by its shape as well, and its numbers."""
    cells = base64.b64decode(frame["cells"])
    cached = [block for block, count in enumerate(cells) if count == CACHED]
    held = [block for block, count in enumerate(cells) if count == 1]
    shared = [block for block, count in enumerate(cells) if 1 < count < CACHED]
    cut = "".join(f"M{x} {y}h{SIDE - 6}l6 6v{SIDE - 6}h-{SIDE}z" for x, y in _at(shared))
    paths = {
        "cached": _squares(cached, SIDE / 4, SIDE // 2),
        "held": _squares(held, 0, SIDE),
        "shared": cut,
        "written": _squares(frame["written"], 7, 6),
    }
    grown = {name: frame["counts"][name] - first["counts"][name] for name in frame["counts"]}
    numbers = (
        f"{len(held) + len(shared)} held, {len(shared)} of them shared · {len(cached)} cached · "
        f"{len(cells) - len(held) - len(shared) - len(cached)} free",
        f"{len(frame['sequences'])} running, {frame['waiting']} waiting · so far "
        f"{grown['preemptions']} preemptions, {grown['copied_blocks']} blocks copied on write",
    )
    drawn = "".join(f'<path class="{name}" d="{d}"/>' for name, d in paths.items() if d)
    texts = "".join(
        f'<text x="{LEFT}" y="{y}">{text}</text>' for y, text in zip((22, 40), numbers, strict=True)
    )
    return drawn + texts


def _legend() -> str:
    """A sample of each state above the cells."""
    samples = {
        "free": ("free", "M{x}.5 50.5h11v11h-11z"),
        "cached": ("free, content kept", "M{x} 53h6v6h-6z"),
        "held": ("held", "M{x} 50h12v12h-12z"),
        "shared": ("shared", "M{x} 50h8l4 4v8h-12z"),
        "written": ("just written", "M{x} 53h6v6h-6z"),
    }
    parts, x = [], LEFT
    for name, (text, path) in samples.items():
        parts.append(f'<path class="{name}" d="{path.format(x=x)}"/>')
        parts.append(f'<text class="quiet" x="{x + 18}" y="60">{text}</text>')
        x += 38 + 7 * len(text)
    return "".join(parts)


def _chart(
    frames: Sequence[Frame], times: Sequence[float], total: float, width: int, top: int
) -> str:
    """Held blocks and tokens per second over the recording, and a line that moves with it."""
    most = max(frame["tokens_per_second"] for frame in frames) or 1.0
    lines = []
    for name, heights in (
        ("", [1 - frame["num_free"] / frame["num_blocks"] for frame in frames]),
        (" tokens", [frame["tokens_per_second"] / most for frame in frames]),
    ):
        points = " ".join(
            f"{LEFT + COLUMNS * PITCH * time / total:.1f},{top + CHART * (1 - share):.1f}"
            for time, share in zip(times, heights, strict=True)
        )
        lines.append(f'<polyline class="line{name}" points="{points}"/>')
    return (
        f'{"".join(lines)}<path class="now" d="M{LEFT} {top}v{CHART}"/>'
        f'<text class="quiet" x="{LEFT}" y="{top + CHART + 16}">'
        f"Held blocks (blue) and tokens per second (violet) over {total:.0f} s</text>"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="a turn of the traffic is 18")
    parser.add_argument("--every", type=int, default=3, help="keep every n-th snapshot")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/learn/pictures/page-map.svg")
    chosen = parser.parse_args(arguments)
    with demo_server() as url:
        frames = record(url, chosen.seconds)
    chosen.out.write_text(draw(frames[:: chosen.every]), encoding="utf-8")
    print(f"{chosen.out}: {len(frames[:: chosen.every])} frames")


if __name__ == "__main__":
    main()
