"""The README's code runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_it_is_one_screen_and_a_table() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert sum(not line.startswith("|") for line in lines) <= 30


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_python_block_runs_and_asserts_something(block: str) -> None:
    assert "assert " in block
    exec(compile(block, "README.md", "exec"), {})


def test_the_paths_it_names_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    paths = re.findall(r"\]\(((?!http)[^)]+)\)", readme)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
