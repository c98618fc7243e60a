"""Figures of time, speed or a factor in prose come from a record or name their command.

A figure is backed by one of these, in its own sentence or row of a table:

- the comment of a record around it (``benchmarks/document.py``), which another test keeps true;
- a command in backticks that prints it;
- quotation marks, for a figure of the documents that a page discusses;
- on a page of ``docs/learn``, a ``text`` block that has the number: tests run what prints it.

What remains is listed in ``ALLOWED`` with the reason.
"""

import re

import pytest
from benchmarks.__main__ import QUOTING_PAGES, RESULTS, ROOT, app
from benchmarks.report import load

PAGES = [
    *(page for page in QUOTING_PAGES if page.stem != "lab-log"),  # its entries have commands
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]

NUMBER = r"\d+(?:[., ]\d+)*"
WORD = "twice|thrice|(?:two|three|four|five|six|seven|eight|nine|ten|twenty|a hundred) times"
UNITS = (
    r"%|×(?= as\b| fast| slow| less| more| bytes|[\"”)|.,;]| *$)|ns|µs|us|ms|s|seconds?|minutes?"
    r"|microseconds?|milliseconds?|[KMGT]i?B/s|[GT]FLOP/s|times"
    r"|(?:tokens|requests)(?:/s| a second)"
)
FIGURE = re.compile(
    rf"(?<![\w.#])({NUMBER})(?:(?: to | and |–| / ){NUMBER})* ?(?:{UNITS})(?!\w)"
    rf"|\b(?:{WORD})(?= (?:as|faster|slower)\b)"
)
BACKED = re.compile(
    r"<!-- (table|figure): .*?<!-- (?:end|/figure) -->|```.*?```|<!--.*?-->", re.DOTALL
)
COMMAND = re.compile(r"`[^`]*\b(?:python|pagetile bench|make) [^`]*`")
QUOTED = re.compile('"[^"\n]*"|“[^”\n]*”')
OUTPUT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)

ALLOWED = {
    "docs/benchmarking.md": {
        "3 %": "the rule by which `all` names a change",
        "four times": "how rests are chosen, in benchmarks/gpu_timing.py",
        "50 ms": "the longest rest, in benchmarks/gpu_timing.py",
    },
    "docs/decisions/0024-speculation-by-equality.md": {"twice": "a rule of draft lengths"},
    "docs/decisions/0031-decode-reads-before-it-waits.md": {"four times": "a rule of plans"},
    "docs/engine.md": {"2.2 times": "a bound that the engine keeps, in engine/chunks.py"},
    "docs/learn/swin-windows.md": {
        "8 times": "32 sectors instead of 4, counted in the same row and by the page's code",
        "1.7 times": "64² products for 49²",
    },
    "docs/learn/tiled-attention.md": {
        "19 TB/s": "an A100's, by the product in the same row",
        "2 TB/s": "an A100's data sheet",
        "2.04 TB/s": "an A100's data sheet",
        "4.8 TB/s": "an H200's data sheet",
    },
}


def find_unbacked(page, text):
    """The figures of a page that nothing backs, each with its sentence."""
    printed = " ".join(OUTPUT.findall(text)) if page.parent.name == "learn" else ""
    allowed = ALLOWED.get(str(page.relative_to(ROOT)), {})
    found = []
    for line in BACKED.sub("", text).splitlines():
        for sentence in re.split(r"(?<=[.:!?])\s", line):
            if COMMAND.search(sentence):
                continue
            for match in FIGURE.finditer(QUOTED.sub("", sentence)):
                number = match[1] and re.search(rf"(?<![\d.]){re.escape(match[1])}\b", printed)
                if not number and match[0] not in allowed:
                    found.append(f"{match[0]}: {sentence.strip()}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_figure_in_prose_has_a_record_or_a_command(page):
    assert find_unbacked(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_row_of_a_table_has_a_figure_s_comment(page):
    """Its bars would be the ends of cells, and what follows them would not be shown."""
    assert re.findall(r"^\|.*<!-- figure:", page.read_text("utf-8"), re.MULTILINE) == []


def test_the_commands_that_pages_name_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    modules = set(re.findall(r"`[^`]*python -m benchmarks\.(\w+)", text))
    assert "workload_n" in modules
    for name in modules:
        source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        assert '__name__ == "__main__"' in source, name
    scripts = set(re.findall(r"`[^`]*python ([\w/]+\.py)", text))
    assert "tools/decode_forward.py" in scripts
    assert [name for name in scripts if "__main__" not in (ROOT / name).read_text()] == []
    named = set(re.findall(r"`[^`]*python -m benchmarks (\w[\w-]*)", text))
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert named <= known | {"all"}


def best_peers(record, ending=""):
    """The fastest contestant but pagetile in each case; ``ending`` is of all their names."""
    found = {}
    for case in load(RESULTS / f"{record}.json")["cases"]:
        times = {
            name: time["median"]
            for name, time in case["times"].items()
            if name.endswith(", both") == bool(ending) and not name.startswith("pagetile")
        }
        found[case["name"]] = min(times, key=times.get).removesuffix(ending)
    return found


def rows_behind(record, peer):
    """The cases of prefill in which a peer does more operations a second than pagetile."""
    cases = load(RESULTS / f"{record}.json")["cases"]
    values = {case["name"]: case["metrics"] for case in cases}
    return {
        name.removeprefix("gpu-prefill-")
        for name, metrics in values.items()
        if metrics.get(f"TFLOP/s, {peer}", 0.0) > metrics["TFLOP/s"]
    }


CLAIMS = {
    (
        "performance/index.md",
        "faster than FlashInfer on every row that has it but heads of 128 with a soft cap",
    ): lambda: (
        rows_behind("h200-prefill", "flashinfer"),
        {"1x8192-cap-size-128"},
    ),
    ("performance/index.md", "than FlashAttention-3 on all but heads of 96, 192 and 256"): lambda: (
        rows_behind("h200-prefill", "vllm flash_attn 3"),
        {"1x16384-size-96", "1x16384-size-192", "1x16384-size-256"},
    ),
    ("performance/index.md", "than cuDNN on all but 32 prompts of 512"): lambda: (
        rows_behind("h200-prefill", "sdpa cudnn"),
        {"32x512"},
    ),
    (
        "performance/windows.md",
        "SDPA's cuDNN kernel except on windows of 49 and 64 tokens, where SDPA's efficient kernel "
        "is",
    ): lambda: (
        {
            (name.removeprefix("windows-"), peer)
            for ending in ("", ", both")
            for name, peer in best_peers("h200-windows", ending).items()
            if peer != "sdpa, cudnn"
        },
        {
            ("4096x3x49x32", "sdpa, efficient"),
            ("cosine-8", "sdpa, efficient"),
            ("swinir", "sdpa, efficient"),
        },
    ),
}
"""Sentences that compare without a figure: what the records say, and what the sentence says."""


@pytest.mark.parametrize(("page", "sentence"), CLAIMS)
def test_a_sentence_that_compares_says_what_the_record_says(page, sentence):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert sentence in text, "the page no longer says so: change or remove the claim here"
    found, said = CLAIMS[page, sentence]()
    assert found == said, f"{page} says {sentence!r}: write what the record says, here as well"


def test_what_is_allowed_is_still_there():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert [
            figure for figure in ALLOWED.get(str(page.relative_to(ROOT)), {}) if figure not in text
        ] == []


@pytest.mark.parametrize(
    "sentence",
    ["It is 2.1 to 6.7 times as fast.", "It takes 3 µs.", "It reads 4 GB/s.", "It gains 4 %.",
     "It is twice as fast.", "| a | 26 800 tokens/s |", "It does 12 requests a second."],
)  # fmt: skip
def test_a_figure_that_nothing_backs_is_found(sentence):
    page = ROOT / "README.md"
    assert len(find_unbacked(page, sentence)) == 1
    assert find_unbacked(page, f"`python -m benchmarks run` says so: {sentence}") != []
    assert find_unbacked(page, sentence[:-1] + " (`python -m benchmarks run`).") == []


def test_what_backs_a_figure():
    page = ROOT / "docs" / "learn" / "x.md"
    for text in (
        "It takes <!-- figure: r a- | x | µs -->3 µs<!-- /figure -->.",
        "It takes 3 µs (`python -m benchmarks run decode`).",
        'The guide says "3 µs".',
        "```text\n3 µs\n```\nIt takes 3 µs.",
        "```\n3 µs\n```",
        "Two heads of 128, 64 × 4096 tokens, sm_90, 16 bits.",
    ):
        assert find_unbacked(page, text) == [], text
    assert find_unbacked(page, "Use `python x.py`. It takes 3 µs.") != []
