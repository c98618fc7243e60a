"""tools/record_pages.py: the animation of the page map in docs/learn/paged-attention.md."""

from __future__ import annotations

import base64
import re
import runpy
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from .conftest import opened, serving
from .test_pages import traffic

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/record_pages.py"))
FRAME = re.compile(r'<g class="frame f\d+">(.*?)</g>')


def test_every_block_of_every_snapshot_is_drawn_in_its_state(llm):
    llm.reset_prefix_cache()
    with opened(llm) as async_llm, serving(async_llm) as url, traffic(async_llm):
        frames = TOOL["record"](url, 1.0)
    picture = TOOL["draw"](frames)
    ET.fromstring(picture)
    groups = FRAME.findall(picture)
    assert len(groups) == len(frames) > 2
    for group, frame in zip(groups, frames, strict=True):
        cells = base64.b64decode(frame["cells"])
        states = Counter(
            {0: "free", 1: "held", 255: "cached"}.get(cell, "shared") for cell in cells
        )
        states["written"] = len(frame["written"])
        del states["free"]  # the outlines beneath all frames
        drawn = {name: d.count("M") for name, d in re.findall(r'class="(\w+)" d="([^"]+)"', group)}
        assert drawn == {name: count for name, count in states.items() if count}
    assert any("held" in group for group in groups)


def test_the_recording_of_the_documents_is_small_and_shows_a_shared_block():
    picture = (ROOT / "docs/learn/pictures/page-map.svg").read_text(encoding="utf-8")
    assert len(picture.encode()) < 300_000
    assert len(FRAME.findall(picture)) >= 30
    assert re.search(r'<path class="shared"', "".join(FRAME.findall(picture)))
    assert "script" not in picture
