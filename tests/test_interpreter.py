"""The interpreter tier: GPU kernels on tiny cases without a GPU, in a process of their own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels to interpret")


def test_gpu_kernels_are_right_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "interpret", "-x", "tests"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
