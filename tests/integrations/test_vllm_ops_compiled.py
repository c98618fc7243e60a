"""Every configuration of the x-packed kernels compiles for Hopper without a GPU, and fits."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from triton.backends.compiler import GPUTarget  # noqa: E402
from vllm_cases import (  # noqa: E402
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    decode_case,
    make_call,
)

from pagetile.integrations import vllm_ops  # noqa: E402
from pagetile.integrations.vllm_ops import triton_cache, triton_launch  # noqa: E402
from pagetile.integrations.vllm_ops.checks import Problem  # noqa: E402

SLACK = 0 if triton.__version__.startswith("3.6.") else 96
"""Bytes a thread that other releases may spill more than the one that GPUs are tested with."""


def compile_and_count(launcher, tmp_path, spilled=0):
    """The PTX of a kernel that spills at most so many bytes a thread."""
    compiled = launcher.compile(GPUTarget("cuda", 90, 32))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", text)}
    assert used["REG"] > 0
    assert used["STACK"] <= spilled + SLACK, used
    assert used["LOCAL"] == 0, used
    assert compiled.metadata.shared <= 227 << 10
    return compiled.asm["ptx"]


def launcher_of(
    q_dtype, kv_dtype, size, block_size=16, group=4, alibi=False, sparse=False, partitions=False
):
    problem = Problem(64, 8 * group, 8, size, block_size, 1024, q_dtype, kv_dtype)
    tiles = triton_launch.choose_tiles(problem, sparse)
    return triton_launch.make_launcher(
        problem.kernel_sizes, tiles, alibi, sparse, partitions, is_aligned=True
    )


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "size"),
    [
        (BF16, BF16, 256),
        (BF16, E4M3, 128),
        (F32, F32, 128),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (
                *((BF16, BF16, size) for size in (64, 80, 128)),
                *((BF16, E4M3, size) for size in (64, 96, 256)),
                (F16, E5M2, 128),
                (F16, F16, 120),
                (F32, E4M3, 64),
            )
        ),
    ],
    ids=str,
)
def test_keys_and_values_are_copied_sixteen_bytes_at_a_time(q_dtype, kv_dtype, size, tmp_path):
    spilled = {F32: 64, BF16: 208 if size == 256 else 0}.get(kv_dtype, 0)
    ptx = compile_and_count(launcher_of(q_dtype, kv_dtype, size), tmp_path, spilled)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+|\d+)", ptx)
    sizes = [int(size, 0) for size in copies]
    # Where partitions are merged, sums of a few rows are copied ahead by fours.
    assert set(sizes) <= {4, 16}
    assert sizes.count(16) >= 16
    assert sizes.count(4) <= 64


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 256, "group": 8},
        {"group": 7, "alibi": True},
        {"sparse": True, "partitions": True, "alibi": True},
        *(
            pytest.param(others, marks=pytest.mark.slow)
            for others in ({"block_size": 8}, {"group": 1}, {"group": 48})
        ),
    ],
    ids=str,
)
def test_other_calls(changes, tmp_path):
    compile_and_count(launcher_of(BF16, BF16, 128, **changes), tmp_path)


CACHES = [(BF16, BF16), (F32, F32), (BF16, E4M3), (F16, E5M2)]
CACHE_SIZES = (64, 80, 256)


@pytest.mark.parametrize(
    ("dtypes", "size"),
    [
        *zip(CACHES, (*CACHE_SIZES, 80), strict=True),
        *(
            pytest.param(dtypes, size, marks=pytest.mark.slow)
            for dtypes in CACHES
            for size in CACHE_SIZES
        ),
    ],
    ids=str,
)
def test_reshape_and_cache_stores_sixteen_bytes_of_a_key_at_a_time(dtypes, size, tmp_path):
    ptx = compile_and_count(
        triton_cache.make_launcher(*dtypes, size, 16, is_aligned=True), tmp_path
    )
    assert "st.global.v4.b32" in ptx


def test_a_plan_gives_every_multiprocessor_work():
    def split(num_seqs, longest, num_kv_heads=8):
        problem = Problem(num_seqs, 32, num_kv_heads, 128, 16, 9, torch.bfloat16, torch.bfloat16)
        return triton_launch.choose_split(problem, longest, 64, 132)

    for num_seqs, longest in ((1, 131072), (1, 8192), (8, 4096), (64, 1024), (256, 2048)):
        keys = split(num_seqs, longest)
        assert keys % 64 == 0
        programs = num_seqs * 8 * -(-longest // keys)
        assert programs >= min(264, num_seqs * 8 * longest // 512)


@pytest.fixture
def kinds(monkeypatch):
    """The parameters of launchers that calls ask for; each call ends with InterruptedError."""
    made = []

    def make_launcher(*arguments):
        made.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(triton_launch, "make_launcher", make_launcher)
    monkeypatch.setattr(triton_launch, "refuse_device", lambda *arguments: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return made


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_common_call_is_known_to_be_aligned(version, dtype, kinds, mirror):
    """Otherwise the compiler copies element by element, and cannot use cp.async."""
    call = make_call(decode_case((40, 600), dtype=dtype, num_heads=6, num_kv_heads=2))
    with pytest.raises(InterruptedError):
        call.run(vllm_ops, version, mirror, "cpu")
    assert kinds[0][-2] is True
    call.query = call.query.new_zeros(call.query.numel() + 1)[1:].view(call.query.shape)
    with pytest.raises(InterruptedError):
        call.run(vllm_ops, version, mirror, "cpu")
    assert kinds[1][-2] is False


@pytest.mark.parametrize("version", [1, 2])
def test_offsets_within_32_bits_hold_every_head(version, kinds, monkeypatch, mirror):
    """The heads of queries lie further apart than anything else whose offset is computed."""
    call = make_call(decode_case((40, 600), dtype=F32, num_heads=6, num_kv_heads=2))
    num_seqs, heads, size = call.query.shape
    call.query = call.query.new_zeros(heads, 1000, size)[:, :num_seqs].transpose(0, 1)
    reach = heads * 1000 * size
    for limit, is_narrow in ((reach + 1, True), (reach, False)):
        monkeypatch.setattr(triton_launch, "_NARROW", limit)
        with pytest.raises(InterruptedError):
            call.run(vllm_ops, version, mirror, "cpu")
        assert kinds[-1][-1] is is_narrow
