"""The CPU kernels compile and are right for older processors: AVX2, and SSE4.2 without FMA.

A process compiles for the processor that Numba's variables name, in a cache of its own, and runs it
here. ``pytest -m slow tests/tiles/test_other_processors.py``: minutes, nearly all of it compiling.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from pagetile import (
    BlockMask, attention, attention_scores, merge_states, window_attention, write_kv
)
from pagetile.device import DeviceInfo
from pagetile.fused.rms_norm import Norm
from pagetile.fused.rotary_write import Heads, rotate_and_write
from pagetile.fused.small_linear import small_linear
from pagetile.testing import PagedCase, assert_matches, make_inputs

assert not DeviceInfo.of(torch.device("cpu")).bf16_dot
torch.manual_seed(0)


def close(got, wanted, dtype):
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype] * wanted.abs().max(), error


def dense(dtype):
    q, k, v = (torch.randn(1, 90, 2, 40).to(dtype).requires_grad_() for _ in range(3))
    mask = BlockMask(torch.tensor([[True, False], [True, True]])[None, None], 64, 64)
    results = []
    for impl in ("cpu", "reference"):
        out = attention(q, k, v, causal=True, logits_soft_cap=3.0, block_mask=mask, impl=impl).out
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for got, wanted in zip(*results, strict=True):
        close(got, wanted, dtype)


def paged(dtype, **options):
    inputs = make_inputs(PagedCase((1, 7, 30), (90, 40, 30), dtype=dtype, **options))
    assert_matches(inputs.attend(impl="cpu"), inputs)


def windows(x, dtype):
    results = []
    for impl in ("cpu", "reference"):
        out = window_attention(x, x, x, impl=impl).out
        results.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    for got, wanted in zip(*results, strict=True):
        close(got, wanted, dtype)


def others(dtype):
    x = torch.randn(2, 3, 49, 32).to(dtype)
    close(attention_scores(x, x, impl="cpu"), attention_scores(x, x, impl="reference"), dtype)
    windows(x.clone().requires_grad_(), dtype)
    outs, lses = torch.randn(3, 5, 2, 16).to(dtype), torch.randn(3, 5, 2)
    wanted, got = (merge_states(outs, lses, impl=impl).out for impl in ("reference", "cpu"))
    close(got, wanted, dtype)
    k, v = torch.randn(2, 4, 2, 32).to(dtype).unbind()
    caches = [torch.zeros(2, 3, 16, 2, 32, dtype=dtype) for _ in range(2)]
    for impl, (k_cache, v_cache) in zip(("reference", "cpu"), caches, strict=True):
        write_kv(k, v, k_cache, v_cache, torch.tensor([3, -1, 40, 17]), impl=impl)
    assert torch.equal(*caches)
    x, weight = torch.randn(4, 96).to(dtype), torch.randn(82, 96).to(dtype)
    options = dict(norm=Norm(x[0], 1e-6, "shifted"), activation="silu")
    wanted, got = (small_linear(x, weight, **options, impl=impl) for impl in ("reference", "cpu"))
    close(got, wanted, dtype)
    heads = Heads(1, 1, 32, 32, Norm(x[0, :32], 1e-6, "rounded"))
    cos, sin, slots = x[None, :, :24], x[None, :, 24:48], torch.arange(4)
    wanted, got = (
        rotate_and_write(x, cos, sin, heads, *pair[..., :1, :], slots, impl=impl)
        for impl, pair in zip(("reference", "cpu"), caches, strict=True)
    )
    close(got, wanted, dtype)
    close(caches[1], caches[0], dtype)


for dtype in (torch.float32, torch.bfloat16):
    dense(dtype)
    paged(dtype)
    others(dtype)
for kv_dtype in (torch.float8_e4m3fn, torch.int8):
    paged(torch.bfloat16, kv_dtype=kv_dtype, scales="token")
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["haswell", "x86-64-v2"])
def test_kernels_are_right(name, tmp_path):
    target = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    found = subprocess.run(
        command, env=os.environ | target, capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout == "right\n"


@pytest.mark.slow
def test_conversions_are_right(tmp_path):
    """Every float16 is converted without instructions for it."""
    target = {
        "NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("test_simd.py"))]
    found = subprocess.run(command, env=os.environ | target, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:]
