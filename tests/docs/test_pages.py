"""Every block of code of a page runs, prints what the page says, and draws its pictures.

A page is one program: its ``python`` blocks run in order in one namespace, and lines of ``bash``
blocks that start with ``pagetile`` run between them, in an empty folder. A ``text`` block right
after a block of code is what that block prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagetile.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS).with_suffix(""))
    for folder in ("learn", "guides")
    for path in (DOCS / folder).glob("*.md")
)
WITH_CODE = [page for page in PAGES if "```python" in (DOCS / f"{page}.md").read_text()]
LEARN = DOCS / "learn"
RECORDED = ("pictures/page-map.svg",)  # by tools/record_pages.py: no two recordings are the same
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of the page on which its content starts."""

    language: str
    content: str
    line: int
    output: str | None = None
    """The output that the page shows."""


def read_blocks(page: str) -> Iterator[Block]:
    """The blocks to run, each with the ``text`` block that follows it directly."""
    matches = list(FENCE.finditer(page))
    for match, following in zip(matches, [*matches[1:], None], strict=True):
        language, content = match.groups()
        output = None
        if following is not None and following[1] == "text":
            between = page[match.end() : following.start()]
            output = following[2] if not between.strip() else None
        if language in ("python", "bash"):
            yield Block(language, content, page[: match.start()].count("\n") + 2, output)


def run_block(block: Block, page: str, names: dict[str, object]) -> str:
    """Run a block and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            # Line numbers of a traceback are the page's.
            source = "\n" * (block.line - 1) + block.content
            exec(compile(source, f"docs/{page}.md", "exec"), names)
        for line in commands(block):
            assert main(shlex.split(line)[1:]) == 0, line
    return printed.getvalue()


def commands(block: Block) -> list[str]:
    """Its ``pagetile`` commands."""
    lines = block.content.replace("\\\n", " ").splitlines() if block.language == "bash" else []
    return [line for line in lines if line.startswith("pagetile ")]


def words(picture: str) -> list[str]:
    """The text of an SVG."""
    nodes = (node for node in ET.fromstring(picture).iter() if node.tag.endswith("}text"))
    return ["".join(node.itertext()) for node in nodes]


@pytest.mark.parametrize("page", WITH_CODE)
def test_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "pictures").mkdir()
    names: dict[str, object] = {"__name__": page}
    blocks = list(read_blocks(text))
    assert blocks
    for block in blocks:
        printed = run_block(block, page, names)
        if block.output is not None:
            lines = [line.rstrip() for line in printed.splitlines()]
            assert lines == block.output.splitlines(), f"docs/{page}.md:{block.line}"
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    shown = [path for path in shown if path not in RECORDED]
    assert {Path(p) for p in shown} == {p.relative_to(tmp_path) for p in tmp_path.glob("*/*.svg")}
    for path in shown:
        kept = ((DOCS / page).parent / path).read_text(encoding="utf-8")
        assert words(kept) == words((tmp_path / path).read_text()), f"{path} is not up to date"


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (DOCS / page).parent / path if path else DOCS / f"{page}.md"
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def anchors(text: str) -> set[str]:
    """The fragments that link to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_source_files_that_pages_name_exist():
    root = DOCS.parent
    files = [
        "/" + str(path.relative_to(root))
        for folder in ("src", "tests", "benchmarks", "tools", "examples")
        for path in (root / folder).rglob("*.py")
    ]
    missing = [
        f"{page.relative_to(root)}: {name}"
        for page in (root / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
        if not any(file.endswith("/" + name) for file in files)
    ]
    assert missing == []


def test_a_wrong_output_and_a_failing_block_are_noticed():
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n\n```python\nassert False\n```\n"
    first, second = read_blocks(page)
    assert (first.output, second.output, second.line) == ("2\n", None, 10)
    assert run_block(first, "x", {}) == "1\n"
    with pytest.raises(AssertionError):
        run_block(second, "x", {})
    bash = Block("bash", "pagetile explain tiles --tile 5 \\\n  --causal\n", 1)
    assert commands(bash) == ["pagetile explain tiles --tile 5    --causal"]
    with pytest.raises(AssertionError):
        run_block(bash, "x", {})


def test_every_picture_belongs_to_a_page():
    shown = {
        name
        for page in PAGES
        for name in re.findall(r"\(pictures/([^)]+)\)", (DOCS / f"{page}.md").read_text())
    }
    assert {path.name for path in (LEARN / "pictures").iterdir()} == shown
    assert sum(path.stat().st_size for path in (LEARN / "pictures").iterdir()) < 700_000
