"""The kernels of attention, its gradients and its scores compile for Hopper, without a GPU."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from test_compiled import HOPPER, SLACK, assert_fits, rarely
from test_hopper_compile import SHARED_MEMORY
from tools.sass import (
    disassemble,
    list_instructions,
    loops_that_multiply,
    resources,
    uninitialised_reads,
)
from triton.backends.compiler import GPUTarget

from pagetile.device import DeviceInfo
from pagetile.ops.attention import hopper_backward as hopper
from pagetile.ops.attention import operator
from pagetile.ops.attention import triton as forward
from pagetile.ops.attention import triton_backward as backward
from pagetile.ops.attention import triton_block_sparse as block_sparse
from pagetile.ops.attention.problem import Problem
from pagetile.ops.attention_scores import triton as scores
from pagetile.tiles.forward_tiles import choose_forward_tiles

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SMALL = DeviceInfo("cuda", 128, "RTX", capability=(8, 9), shared_memory=99 << 10)
H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))


def launchers(dtype, size, *, group=1, causal=True, length=16384, device=H200, **features):
    problem = Problem(1, length, length, length, 8 * group, 8, size, size, dtype, is_ragged=False)
    config = {"is_ragged": False, "has_cap": False, "has_alibi": False}
    config = backward.GradientsConfig(
        dtype, group, size, size, is_causal=causal, is_aligned=True, **{**config, **features}
    )
    tiles = backward.key_tiles(problem, device), backward.query_tiles(problem, device)
    return backward.make_launchers(config, *tiles)


@pytest.mark.parametrize(
    ("size", "causal", "length"),
    [
        (128, True, 16384),
        *rarely((64, False, 1000), (64, False, 16384), (64, True, 1000), (64, True, 16384)),
        *rarely((128, False, 1000), (128, False, 16384), (128, True, 1000)),
    ],
)
def test_gradients_of_queries_stay_in_registers(size, causal, length, tmp_path):
    found = launchers(BF16, size, causal=causal, length=length)
    ptx = assert_fits(found.queries, tmp_path)
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx  # tiles are loaded by TMA
    assert_fits(backward.make_prepare(BF16, size, is_aligned=True, has_d_lse=False), tmp_path)


@pytest.mark.parametrize(("size", "group"), [(64, 1), (128, 4), *rarely((64, 4), (128, 1))])
def test_gradients_of_keys_spill_little(size, group, tmp_path):
    """A head of 128 leaves no register free; what spills does so outside the longest loop."""
    compiled = launchers(BF16, size, group=group).keys.compile(HOPPER)
    assert resources(compiled, tmp_path)["STACK"] <= (0 if size == 64 else 320) + SLACK
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "size", "keys", "queries"),
    [
        (F32, 64, 192, 72),
        *rarely((BF16, 256, 808, 96), (F32, 128, 568, 248), (F32, 256, 720, 424)),
    ],
    ids=str,
)
def test_other_gradients_spill_what_is_known(dtype, size, keys, queries, tmp_path):
    """The tiles that were fastest on an H200, in spite of the spilling."""
    found = launchers(dtype, size)
    assert_fits(found.keys, tmp_path, keys)
    assert_fits(found.queries, tmp_path, queries)


@pytest.mark.parametrize(
    ("dtype", "size", "spilled"),
    [
        (F32, 64, 16),
        (BF16, 256, 24),
        *rarely((BF16, 512, 8), (F32, 128, 48), (F32, 256, 400), (BF16, 128, 0)),
    ],
    ids=str,
)
def test_forward_by_triton_spills_what_is_known(dtype, size, spilled, tmp_path):
    flags = ("causal", "has_cap", "has_alibi", "has_sinks", "has_whole_strides", "is_aligned")
    launcher = forward.make_launcher(dtype, 4, size, size, **dict.fromkeys(flags, True))
    assert_fits(launcher, tmp_path, spilled)


@pytest.mark.parametrize(
    ("dtype", "size", "has_blocks"),
    [
        (BF16, 64, False),
        (BF16, 64, True),
        *rarely((F32, 64, True), (F32, 64, False), (BF16, 128, True), (BF16, 128, False)),
    ],
    ids=str,
)
def test_block_sparse_kernels_stay_in_registers(size, dtype, has_blocks, tmp_path):
    tiles = choose_forward_tiles(size, is_float32=dtype == F32)
    attend = block_sparse.make_launcher(
        dtype, 1, size, size, causal=True, has_cap=False, has_alibi=False, has_sinks=False,
        has_blocks=has_blocks, are_aligned=True, tiles=tiles,
    )  # fmt: skip
    # A mask of a tile's own is loaded in the loop over partial tiles, which are few.
    assert_fits(attend, tmp_path, 64 if dtype == F32 else 440 if has_blocks and size > 64 else 0)
    found = launchers(dtype, size, is_sparse=True, has_blocks=has_blocks)
    assert_fits(found.queries, tmp_path, 16 if dtype == BF16 else 96)
    assert_fits(found.keys, tmp_path, (16 if size == 64 else 400) if dtype == BF16 else 256)


@pytest.mark.parametrize("dtype", [F16, *rarely((F32,))], ids=str)
def test_gradients_with_every_feature(dtype):
    features = dict.fromkeys(("is_ragged", "has_cap", "has_alibi"), True)
    found = launchers(dtype, 72, group=3, **features)
    for launcher in (
        backward.make_prepare(dtype, 72, is_aligned=False, has_d_lse=True),
        found.keys,
        found.queries,
    ):
        assert launcher.compile(HOPPER).asm["cubin"]


HOPPER_GRADIENTS = [
    # head size, group, causal, sliding window, keys end within a tile; most spilled words that
    # the loop loads and stores
    (80, 3, False, True, True, 8),
    (64, 8, True, False, False, 40),
    (256, 1, True, False, False, 2),
    *rarely(
        (128, 4, True, False, False, 8),
        (128, 1, False, False, False, 0),
        (128, 1, True, False, False, 8),
        (64, 1, False, False, False, 8),
        (192, 4, False, True, True, 0),
    ),
]


@pytest.mark.parametrize(("size", "group", "causal", "window", "end", "spilled"), HOPPER_GRADIENTS)
def test_gradients_on_hopper(size, group, causal, window, end, spilled, tmp_path):
    """Five products a tile, each of which runs without a wait for the one before."""
    launcher = hopper.make_launcher(BF16, size, group, causal, window, end)
    compiled = launcher.compile(HOPPER)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert not uninitialised_reads(*list_instructions(compiled, tmp_path))
    loops = loops_that_multiply(disassemble(compiled, tmp_path))
    assert len(loops) == 2  # a warpgroup each
    width, rows = launcher.constants["WIDTH"], launcher.constants["TILE_M"]
    for body in loops:
        text = "\n".join(body)
        products = sorted(int(n) for n in re.findall(r"HGMMA\.64x(\d+)x16", text))
        if width == 256:  # a warpgroup makes scores or their gradients, and half of all sums
            assert products == sorted([64] * (256 // 16) + [128] * (3 * 64 // 16))
            waits, adds = (3, 4), 64 * 128 // 128 // 4
        else:
            scores, sums = [rows] * (2 * width // 16), [width] * (2 * rows // 16)
            assert products == sorted([*scores, *sums, *[64] * (128 // 16)])
            waits, adds = (4,), 64 * 64 // 128 // 4
        assert text.count("WARPGROUP.DEPBAR") in waits
        assert len(re.findall(r"\bRED", text)) == adds  # of 16 bytes a thread
        assert len(re.findall(r"\b(LDL|STL)", text)) <= spilled + SLACK // 12


def test_hoppers_gradients_are_left_to_others_where_bits_have_to_be_equal():
    plain = Problem(2, 512, 256, 256, 8, 2, 128, 128, BF16, is_ragged=False)
    assert chosen(plain) == "hopper_backward"
    assert chosen(plain, "hopper") == "hopper_backward"
    assert chosen(plain, "triton") == "triton_backward"
    for other in (
        {"dtype": F32}, {"v_head_size": 64}, {"is_ragged": True}, {"block_q": 128, "block_k": 128}
    ):  # fmt: skip
        assert chosen(replace(plain, **other)) == "triton_backward"
        assert chosen(replace(plain, **other), "hopper") == "triton_backward"
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(plain) == chosen(plain, "hopper") == "triton_backward"
    finally:
        torch.use_deterministic_algorithms(False)


def chosen(problem, impl="auto"):
    return operator._choose_backward(problem, H200, impl).__name__.rpartition(".")[2]


@pytest.mark.parametrize(
    ("size", "features"), [(128, False), *rarely((64, True), (64, False), (128, True))]
)
def test_forward(size, features, tmp_path):
    launcher = forward.make_launcher(
        BF16, 4, size, size, causal=True, has_cap=features, has_alibi=features,
        has_sinks=features, has_whole_strides=True, is_aligned=True,
    )  # fmt: skip
    assert "wgmma.mma_async" in assert_fits(launcher, tmp_path)


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, BF16), *rarely((128, BF16), (256, F32))], ids=str
)
def test_tiles_fit_into_the_memory_of_small_gpus(size, dtype):
    found = launchers(dtype, size, device=SMALL)
    attend = forward.make_launcher(
        dtype, 4, size, size, causal=True, has_cap=False, has_alibi=False, has_sinks=False,
        has_whole_strides=True, is_aligned=True, is_small=True,
    )  # fmt: skip
    for launcher in (found.keys, found.queries, attend):
        compiled = launcher.compile(GPUTarget("cuda", 89, 32))
        assert compiled.metadata.shared <= SMALL.shared_memory


@pytest.mark.parametrize(
    ("dtype", "size", "length"),
    [(F16, 16, 343), (BF16, 16, 49), (F16, 16, 3000), *rarely((BF16, 16, 256), (F16, 64, 49))],
    ids=str,
)
def test_scores_are_stored_in_whole_lines(dtype, size, length, tmp_path):
    launcher = scores.make_launcher(dtype, size, length, 8, (9, 0))
    ptx = assert_fits(launcher, tmp_path)
    assert "cp.async.bulk.global.shared::cta" in ptx
    assert ("st.shared.b16" in ptx) == (length % 8 > 0)  # or vectors alone
    assert ("cp.async.bulk.prefetch.L2" in ptx) == (length < 3000)
    layouts = launcher.compile(HOPPER).asm["ttgir"]
    assert "convert_layout" not in layouts  # eight neighbours a thread, as registers lie
    # But for a single tile of 64 rows, which is unrolled.
    assert ("async_copy_global_to_local" in layouts) == (length > 64 or size > 32)
    before = scores.make_launcher(dtype, size, length, 8, (8, 0)).compile(GPUTarget("cuda", 80, 32))
    assert "st.global.v4.b32" in before.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "size", "length"),
    [
        (BF16, 128, 3000),
        *rarely((F32, 256, 3000), (F32, 16, 343), (F32, 64, 343), (BF16, 256, 343)),
    ],
    ids=str,
)
def test_scores_fit_any_gpu(dtype, size, length):
    launcher = scores.make_launcher(dtype, size, length, 16 // dtype.itemsize, (9, 0))
    assert launcher.compile(HOPPER).metadata.shared <= SMALL.shared_memory
