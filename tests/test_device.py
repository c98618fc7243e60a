import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pagetile import device
from pagetile.device import _left_by_limits

NARROW = (4, 32) if platform.machine() in ("aarch64", "arm64") else (4, 16)


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_a_container_s_limits_count(tmp_path):
    write(tmp_path / "pod", max="1000\n", current="300\n", stat="inactive_file 50\n")
    write(tmp_path / "pod" / "one", max="max\n", current="200\n", stat="inactive_file 0\n")
    assert _left_by_limits(tmp_path, "0::/pod/one\n") == [750]


def test_limits_of_the_first_version_of_control_groups_count_the_same(tmp_path):
    stat = "inactive_file 1\ntotal_inactive_file 100\n"
    write(tmp_path / "memory", limit_in_bytes="900", usage_in_bytes="1200", stat=stat)
    # Seen from within, the path is the host's.
    own = "5:cpu:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    assert _left_by_limits(tmp_path, own) == [0]
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600")
    assert _left_by_limits(tmp_path, own) == [400]


def test_without_limits_there_are_none(tmp_path):
    assert _left_by_limits(tmp_path, "0::/\n") == []
    assert _left_by_limits(tmp_path, "") == []
    assert all(left >= 0 for left in _left_by_limits())


TARGETS = [
    ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}, f"False False False {NARROW}"),
    ({"NUMBA_CPU_NAME": "generic"}, f"False False False {NARROW}"),
    (
        {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"},
        "False False False (8, 16)",
    ),
    (
        {"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": "+avx512f,+avx512bf16,-avx512vbmi"},
        "True False False (16, 32)",
    ),
]
# Numba reads its target when it is imported, here in a child for each. They share an import of
# torch, which takes seconds.
FOR_EACH_TARGET = """
import json, os, sys
import torch

for target in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ.update(target)
        from pagetile.device import DeviceInfo, cpu_features, vector_registers
        here = DeviceInfo.of(torch.device("cpu"))
        vbmi = "avx512vbmi" in cpu_features()
        print(here.bf16_dot, here.bf16_tiles, vbmi, vector_registers(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
if not os.fork():
    sys.modules["numba"] = None
    from pagetile.device import cpu_features
    print(sorted(cpu_features()), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def instruction_sets():
    """A line for each of ``TARGETS``, and one without Numba."""
    names = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [
        sys.executable, "-c", FOR_EACH_TARGET, json.dumps([target for target, _ in TARGETS])
    ]  # fmt: skip
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_instruction_sets_are_those_of_numbas_target(instruction_sets):
    """Whatever this machine has: a kernel for another dies in LLVM of an instruction it lacks."""
    assert instruction_sets[:-1] == [expected for _, expected in TARGETS]


def test_without_numba_there_are_no_instruction_sets(instruction_sets):
    assert instruction_sets[-1] == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="AMX is used on Linux only")
@pytest.mark.parametrize(("answer", "expected"), [(0, True), (-1, False)])
def test_tiles_are_used_where_linux_permits_them(answer, expected, monkeypatch):
    monkeypatch.setattr(device, "cpu_features", lambda: {"avx512bf16", "amx-tile", "amx-bf16"})
    monkeypatch.setattr(
        device.ctypes, "CDLL", lambda name: SimpleNamespace(syscall=lambda *call: answer)
    )
    assert device._may_use_tiles.__wrapped__() is expected
