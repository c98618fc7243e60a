"""Names and comments use the field's terms: words that readers stumbled over do not come back.

STYLE: say what a thing does, with its subject, its verb and the standard term. A word on this list
is not wrong by itself; in this project it stood in the place of a term that readers know.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "tools", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__)
)

# In comments and strings: say who does it, or what is meant.
PROSE = {
    "nobody": "no caller, no kernel, nothing",
    "anybody": "any caller, any observer",
    "somebody": "another caller, another thread",
    "whoever": "a caller that, code that",
    "theirs": "the peer's, the model's own",
    "ours": "pagetile's",
    "those who": "users who, callers that",
    "bystanders": "background load",
    "line of work": "work queue",
    "was asked for": "was requested",
    "copy engine": "TMA",
    "second-level cache": "L2",
    "kernel in front": "preceding kernel",
    "takes no part": "is left out",
}

# As whole identifiers.
NAMES = {
    "settled": "CachedCall",
    "_settle": "_dispatch",
    "bystanders": "background_load",
    "stands_aside": "must_fall_back",
    "writes_down": "is_exporting",
    "distrust": "evict_from_prefix_cache",
    "Intake": "InputProcessor",
    "Found": "Gradients",
    "Given": "SavedForward",
    "Turns": "pipeline barriers",
    "Orders": "tile metadata",
    "ours": "own",
    "theirs": "expected, or the peer's name",
    "lean": "add_alibi",
    "_bend": "apply_score_mods",
    "weigh": "update_softmax",
    "turned": "transposed, rotated",
    "tilted": "has_alibi",
    "is_beside": "overlaps_prefill",
}

# Classes of one name and one meaning; any other name of a class stands once.
ROLES = {
    "Problem": "what an operation is to compute",
    "Plan": "how a kernel divides a problem",
    "Memory": "the shared memory of a window kernel",
    "WindowAttention": "an adapter of a framework's class of that name",
    "SwinTransformerBlock": "an adapter of a framework's class of that name",
    "_Sample": "one of a response's samples",
}

SENTENCE = re.compile(rf"\b({'|'.join(map(re.escape, PROSE))})\b", re.IGNORECASE)
NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")


def findings(path):
    """Yield ``line: word`` for each discouraged word of a file."""
    text = path.read_text("utf-8")
    if not SENTENCE.search(text) and not NAME.search(text):
        return  # before its tokens, which take longer
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in NAMES:
            yield f"{token.start[0]}: {token.string}: say {NAMES[token.string]}"
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            for match in SENTENCE.finditer(token.string):
                line = token.start[0] + token.string[: match.start()].count("\n")
                yield f"{line}: {match[1]}: say {PROSE[match[1].lower()]}"


def test_names_and_comments_use_the_terms_of_the_field():
    found = [f"{path.relative_to(ROOT)}:{word}" for path in FILES for word in findings(path)]
    assert not found, "\n".join(found)


def test_a_discouraged_word_is_found(tmp_path):
    file = tmp_path / "x.py"
    file.write_text('"""Fetch what nobody\nasked, and ours."""\nsettled = 1  # whoever reads\n')
    found = [line.split(":")[:2] for line in findings(file)]
    assert found == [["1", " nobody"], ["2", " ours"], ["3", " settled"], ["3", " whoever"]]


def test_a_class_s_name_has_one_meaning():
    places = defaultdict(list)
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert repeated.keys() == ROLES.keys(), repeated


def test_pages_that_people_write_stay_within_20_000_words():
    """``docs/learn`` and generated tables aside."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    table = re.compile("<!-- table:.*?<!-- end -->[^\n]*\n", re.DOTALL)
    texts = [page.read_text("utf-8") for page in pages if "learn" not in page.parts]
    assert sum(len(table.sub("", text).split()) for text in texts) <= 20_000
