import os
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
    """Numba would optimise it, and make machine code of it, at every level of calls."""
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
    """As after an update that renames the tuple of a call's fields."""
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
