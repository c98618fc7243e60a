"""Which implementation runs, and the warnings about it."""

import sys

import pytest
import torch

from pagetile.device import DeviceInfo
from pagetile.ops import dispatch
from pagetile.ops.merge_states.api import IMPLEMENTATIONS
from pagetile.ops.merge_states.problem import Problem

PACKAGE = "pagetile.ops.merge_states"


def choose(device, dtype=torch.float16):
    dispatch.choose.cache_clear()
    dispatch._warn_once.cache_clear()
    return dispatch.choose(
        PACKAGE, IMPLEMENTATIONS, Problem(dtype, needs_gradient=False), device, "auto"
    )


def test_a_gpu_that_is_too_old_is_warned_of_once():
    old = DeviceInfo("cuda", 80, "Tesla V100", capability=(7, 0))
    with pytest.warns(RuntimeWarning, match=r"V100.*7\.0; 8\.0 and later run; the reference"):
        assert choose(old).__name__.endswith("reference")
    # Not again: warnings are errors here.
    dispatch.choose(
        PACKAGE, IMPLEMENTATIONS, Problem(torch.bfloat16, needs_gradient=False), old, "auto"
    )


def test_a_gpu_without_triton_is_warned_of(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.triton", raising=False)
    monkeypatch.setattr(dispatch, "_load", dispatch._load.__wrapped__)
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        choose(DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0)))


def test_a_gpu_that_cannot_convert_an_element_type_is_warned_of():
    pytest.importorskip("triton")
    from pagetile.ops.paged_attention import api, problem

    half, code = torch.float16, torch.float8_e4m3fn
    question = problem.Problem(8, 8, 1, 100, 8, 2, 128, 128, 16, half, code, "head")
    ampere = DeviceInfo("cuda", 108, "NVIDIA A100", capability=(8, 0))
    dispatch.choose.cache_clear()
    dispatch._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"A100.*float8_e4m3fn.*e5m2 and int8 run; the ref"):
        name, _ = api.choose_implementation(question, ampere, "auto")
    assert name == "reference"


def test_a_call_that_only_the_reference_can_run_does_not_warn():
    pytest.importorskip("triton")
    hopper = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
    assert choose(hopper, torch.float64).__name__.endswith("reference")
