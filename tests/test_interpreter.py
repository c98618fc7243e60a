"""The interpreter tier: GPU kernels on tiny cases without a GPU, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MARK = "mark.interpret"

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels to interpret")


def marked():
    """Files that mark tests for it: to import all others takes seconds."""
    found = [path for path in sorted(TESTS.rglob("*.py")) if MARK in path.read_text("utf-8")]
    return [str(path) for path in found if path != Path(__file__)]


def test_a_file_marks_its_tests_itself():
    """A mark that came from a helper would not be found."""
    assert len(marked()) > 20
    assert all(Path(path).name.startswith("test_") for path in marked())


def test_gpu_kernels_are_right_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "interpret", "-x", *marked()],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
