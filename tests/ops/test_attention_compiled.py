"""The kernels of attention, its gradients and its scores compile for Hopper, without a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from test_compiled import FITTED, HOPPER, assert_fits, resources
from triton.backends.compiler import GPUTarget

from pagewise.device import DeviceInfo
from pagewise.ops.attention import triton as forward
from pagewise.ops.attention import triton_backward as backward
from pagewise.ops.attention.problem import Problem
from pagewise.ops.attention_scores import triton as scores

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL = DeviceInfo("cuda", 128, "RTX", capability=(8, 9), shared_memory=99 << 10)
H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))


def launchers(dtype, size, *, group=1, causal=True, length=16384, device=H200, **features):
    problem = Problem(1, length, length, length, 8 * group, 8, size, size, dtype, False, True)
    kind = {"is_ragged": False, "is_capped": False, "is_tilted": False, "has_d_lse": False}
    kind = backward._Kind(
        dtype, group, size, size, is_causal=causal, is_aligned=True, **{**kind, **features}
    )
    tiles = backward.key_tiles(problem, device), backward.query_tiles(problem, device)
    return backward.make_launchers(kind, *tiles)


@pytest.mark.parametrize("length", [1000, 16384])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_of_queries_stay_in_registers(size, causal, length, tmp_path):
    found = launchers(BF16, size, causal=causal, length=length)
    ptx = assert_fits(found.queries, tmp_path)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx  # tiles come by the copy engine
    assert_fits(found.prepare, tmp_path)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_of_keys_spill_little(size, group, tmp_path):
    """A head of 128 leaves no register free; what spills does so outside the longest loop."""
    compiled = launchers(BF16, size, group=group).keys.compile(HOPPER)
    if FITTED:
        assert resources(compiled, tmp_path)["STACK"] <= (0 if size == 64 else 320)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_gradients_with_every_feature(dtype):
    features = dict.fromkeys(("is_ragged", "is_capped", "is_tilted", "has_d_lse"), True)
    found = launchers(dtype, 72, group=3, **features)
    for launcher in (found.prepare, found.keys, found.queries):
        assert launcher.compile(HOPPER).asm["cubin"]


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_forward(size, features, tmp_path):
    launcher = forward.make_launcher(
        BF16, 4, size, size, True, features, features, features, True, True
    )
    assert "wgmma.mma_async" in assert_fits(launcher, tmp_path)


@pytest.mark.parametrize(("size", "dtype"), [(128, BF16), (256, BF16), (256, F32)], ids=str)
def test_tiles_fit_into_the_memory_of_small_gpus(size, dtype):
    found = launchers(dtype, size, device=SMALL)
    plain = (False,) * 3
    attend = forward.make_launcher(dtype, 4, size, size, True, *plain, True, True, True)
    for launcher in (found.keys, found.queries, attend):
        compiled = launcher.compile(GPUTarget("cuda", 89, 32))
        assert compiled.metadata.shared <= SMALL.shared_memory


@pytest.mark.parametrize(("dtype", "places"), [(F16, 8), (F16, 1), (BF16, 8), (F32, 4)], ids=str)
def test_scores_are_stored_in_whole_vectors(dtype, places, tmp_path):
    unit = 16 // dtype.itemsize
    ptx = assert_fits(scores.make_launcher(dtype, 16, unit, places, unit), tmp_path)
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize(
    ("dtype", "size", "vector"), [(F32, 256, 4), (F32, 256, 1), (BF16, 256, 8), (F16, 32, 1)],
    ids=str,
)  # fmt: skip
def test_scores_fit_any_gpu(dtype, size, vector, tmp_path):
    launcher = scores.make_launcher(dtype, size, vector, vector, 16 // dtype.itemsize)
    assert launcher.compile(HOPPER).metadata.shared <= SMALL.shared_memory
