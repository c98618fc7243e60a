"""The example runs as its docstring says, and prints the report."""

import multiprocessing.dummy
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from swin_models import framework, torchvision_loads

EXAMPLE = Path(__file__).parents[2] / "examples" / "swin_training_memory.py"


def test_the_example_compares_a_step_before_and_after():
    framework("transformers")
    if not torchvision_loads():
        pytest.skip("torchvision is built for CUDA and torch is not: Transformers does not import")
    command = [sys.executable, str(EXAMPLE), "--model", "transformers", "--image", "64", "64"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("as it is: ")
    assert lines[1].startswith("patched 4 window attentions, 2 layers")
    assert lines[-1].startswith("patched: ")
    assert all("MiB on " in lines[at] for at in (0, -1))


def test_an_image_that_the_model_cannot_run_is_an_error_of_one_line(monkeypatch, capsys):
    """In a thread of this process: the test above starts the example's own processes."""
    framework("monai")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: multiprocessing.dummy)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--image", "16", "16", "16"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "as it is cannot run --image [16, 16, 16]: spatial dim" in last
