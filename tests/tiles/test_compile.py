import os
import shutil
import subprocess
import sys
import warnings

import numba.core.caching
import pytest
from numba import njit

from pagetile.tiles.cpu import compile
from pagetile.tiles.cpu.linking import LinkedLibrary


def test_kernels_run_where_they_cannot_be_kept(monkeypatch):
    compile._warn.cache_clear()
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        double = compile.entry()(lambda x: 2 * x)
    assert double(21) == 42
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert compile.entry()(lambda x: x + 1)(1) == 2


def test_a_helper_is_compiled_only_as_part_of_its_callers():
    """Otherwise Numba would optimise and compile it at every level of calls."""
    triple = compile.inner()(lambda x: 3 * x)
    twice = compile.inner()(lambda x: triple(x) + triple(x))
    assert njit(lambda x: twice(x) + 1)(2) == 13
    for helper in (triple, twice):
        (found,) = helper.overloads.values()
        assert isinstance(found.library, LinkedLibrary)
        assert found.library.get_pointer_to_function(found.fndesc.llvm_func_name) == 0


KERNEL = """
from pagetile.tiles.cpu.compile import entry
from cpu_helper import factor

@entry()
def scale(x):
    return factor() * x
"""
HELPER = """
from pagetile.tiles.cpu.compile import inner

@inner()
def factor():
    return {}
"""


def test_a_kept_kernel_is_compiled_anew_when_what_it_calls_changes(tmp_path):
    (tmp_path / "cpu.py").write_text(KERNEL)
    environment = os.environ | {"NUMBA_CACHE_DIR": os.fspath(tmp_path / "kept")}
    command = [sys.executable, "-c", "import cpu; print(cpu.scale(7), cpu.scale.stats.cache_hits)"]

    def run(factor):
        (tmp_path / "cpu_helper.py").write_text(HELPER.format(factor))
        found = subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        return found.stdout.strip().replace("Counter()", "0")

    assert run(2).startswith("14 ")
    assert "1}" in run(2)  # kept
    assert run(3).startswith("21 ")


def test_a_kept_index_that_names_a_class_that_is_gone_is_left_out(tmp_path):
    """As after an update that renames a class in a kernel's signature."""
    environment = os.environ | {"NUMBA_CACHE_DIR": os.fspath(tmp_path / "kept")}
    command = [sys.executable, "-c", "import cpu; print(cpu.double(cpu.{0}(21)))"]
    for name in ("Call", "ScaleCall"):
        (tmp_path / "cpu.py").write_text(CALLED.format(name))
        found = subprocess.run(
            [part.format(name) for part in command],
            cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert found.stdout == "42\n"


CALLED = """
from collections import namedtuple
from pagetile.tiles.cpu.compile import entry

{0} = namedtuple("{0}", "x")

@entry()
def double(call):
    return 2 * call.x
"""


KINDS = """
from numba.extending import overload
from pagetile.tiles.cpu.compile import entry

def name(x):
    pass

@overload(name)
def _(x):
    found = str(x.dtype)
    return lambda x: found

@entry()
def kind(x):
    return name(x)
"""
SAVING_TOGETHER = """
import os, sys, time
from pathlib import Path
import numpy as np
import cpu

mine, other = sys.argv[1:]
replace = os.replace
count = 0

def wait_for(event):
    while not Path(event).exists():
        time.sleep(0.01)

def replace_in_turns(*paths):
    # The first one's index, then the second one's index and kernel, then the first one's kernel.
    global count
    count += 1
    Path(f"{mine} is at {count}").touch()
    if mine == "int16":
        wait_for("uint16 is at 1" if count == 1 else "uint16 is done")
    elif count == 1:
        wait_for("int16 has replaced")
    replace(*paths)
    Path(f"{mine} has replaced").touch()

os.replace = replace_in_turns
assert cpu.kind(np.zeros(1, mine)) == mine
Path(f"{mine} is done").touch()
"""


LATER = """
import cpu, numpy as np
print(*(cpu.kind(np.zeros(1, name)) for name in ("int16", "uint16")))
print(*cpu.kind.stats.cache_hits.values())
"""


def test_processes_that_keep_a_kernel_for_two_types_at_once_keep_both(tmp_path):
    """With Numba's index both take one file, and later processes run one kernel for the other."""
    (tmp_path / "cpu.py").write_text(KINDS)
    environment = os.environ | {"NUMBA_CACHE_DIR": os.fspath(tmp_path / "kept")}
    types = ("int16", "uint16")
    together = [
        subprocess.Popen(
            [sys.executable, "-c", SAVING_TOGETHER, mine, other], cwd=tmp_path, env=environment
        )
        for mine, other in (types, types[::-1])
    ]
    assert [process.wait(120) for process in together] == [0, 0]
    found = subprocess.run(
        [sys.executable, "-c", LATER],
        cwd=tmp_path, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.split() == ["int16", "uint16", "1", "1"]


def double(x):
    return 2 * x


def make_kernel(folder, monkeypatch):
    """A kernel that is kept in ``folder``, as another process would make it."""
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", os.fspath(folder))
    return compile.entry()(double)


@pytest.mark.parametrize("damage", ["truncated", "empty", "changed", "unreadable"])
def test_a_kept_kernel_that_is_damaged_is_compiled_anew(tmp_path, monkeypatch, damage):
    make_kernel(tmp_path, monkeypatch)(1)
    for file in tmp_path.rglob("*.nb?"):
        content = file.read_bytes()
        file.unlink()
        if damage == "unreadable":
            file.mkdir()
        elif damage == "changed":
            file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        else:
            file.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    again = make_kernel(tmp_path, monkeypatch)
    compile._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert again(21) == 42
    assert again.stats.cache_hits == {}
    assert ["NUMBA_CACHE_DIR" in str(w.message) for w in caught] == [True] * (
        damage == "unreadable"
    )
    if damage != "unreadable":  # the damaged file was replaced
        third = make_kernel(tmp_path, monkeypatch)
        assert third(21) == 42
        assert sum(third.stats.cache_hits.values()) == 1


def test_a_kernel_runs_where_its_folder_is_gone_or_full(tmp_path, monkeypatch):
    kernel = make_kernel(tmp_path / "kept", monkeypatch)
    shutil.rmtree(tmp_path / "kept")
    (tmp_path / "kept").write_text("not a folder")
    compile._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert kernel(21) == 42
