"""How windows are divided on a GPU, and that every shipped kernel compiles for Hopper."""

import itertools
from dataclasses import replace

import pytest
import torch

from pagetile.device import DeviceInfo
from pagetile.ops.window_attention import Problem
from pagetile.ops.window_attention.triton.plan import cover, make_plan

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
H200 = DeviceInfo("cuda", 132, "H200", capability=(9, 0))
VOLUME = Problem(2744, 3, 343, 16, F16, table_size=2197, num_masks=2744, has_regions=True)
IMAGE = Problem(4096, 3, 49, 32, F16, table_size=169, num_masks=64, has_regions=True)


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("num_tokens", range(1, 1025, 31))
def test_tiles_cover_the_tokens_and_little_more(num_tokens, width):
    tiles = cover(num_tokens, width)
    assert num_tokens <= sum(tiles) < num_tokens + 16 + num_tokens // 4
    assert all(tile & (tile - 1) == 0 and 16 <= tile <= width for tile in tiles)


def test_the_groups_of_keys_are_all_keys():
    for num_tokens in (49, 100, 216, 343, 392, 576, 1024):
        plan = make_plan(replace(VOLUME, num_tokens=num_tokens), H200)
        assert sum(itertools.chain(*plan.groups)) >= num_tokens
        assert sum(plan.tiles) >= num_tokens


def test_programs_share_windows_unlike_any_side_of_a_map():
    """Windows at a border come at multiples of the sides, and take longer."""
    for num_heads, num_windows in itertools.product((1, 3, 6, 12), (1, 8, 343, 2744)):
        plan = make_plan(replace(VOLUME, num_heads=num_heads, num_windows=num_windows), H200)
        for chunks in (plan.chunks, plan.chunks_backward):
            assert 1 <= chunks <= num_windows
            assert not any(chunks % side == 0 for side in range(2, min(chunks, 100)))


def test_a_program_meets_one_bias_only():
    problem = replace(VOLUME, table_size=None, num_biases=4)
    plan = make_plan(problem, H200)
    assert plan.chunks % 4 == plan.chunks_backward % 4 == 0


@pytest.mark.parametrize("room", [101_376, 166_912, 232_448])
def test_windows_of_one_tile_fit_into_memory_or_take_two_kernels(room):
    """The bounds were read off compiled kernels (three stages of Swin v2's, sm_90)."""
    device = replace(H200, shared_memory=room)
    for (dtype, size, mask), compiled in {
        (F16, 32, None): 57_856,
        (F16, 64, None): 107_008,
        (F16, 128, None): 213_504,
        (F16, 128, F32): 246_272,
        (F32, 32, F32): 115_456,
        (F32, 64, None): 180_992,
    }.items():
        problem = replace(IMAGE, dtype=dtype, head_size=size, num_tokens=64, mask_dtype=mask)
        stages = make_plan(problem, device).one_tile_stages
        assert stages >= 1
        assert stages < 3 or compiled <= room
    wide = replace(IMAGE, dtype=F32, head_size=128)
    assert (make_plan(wide, device).one_tile_stages > 0) == (room > 200_000)
    assert make_plan(VOLUME, device).one_tile_stages == 0


def test_float32_keeps_no_rounded_bias():
    assert make_plan(replace(VOLUME, dtype=F32), H200).bias_cache == 0
    assert make_plan(VOLUME, H200).bias_cache > 0


def test_stages_leave_room_for_rows_of_a_dense_mask():
    """343 float16 tokens with a mask took 256 000 bytes of shared memory, more than Hopper has."""
    masked = replace(VOLUME, has_regions=False, mask_dtype=F32)
    assert (make_plan(VOLUME, H200).stages, make_plan(masked, H200).stages) == (3, 1)
    assert make_plan(replace(masked, num_tokens=100), H200).stages == 2


# --- compiled ---------------------------------------------------------------------------------

# With the bytes that a thread may keep in memory because its registers are full.
COMPILED = [
    (IMAGE, 96),
    (VOLUME, 512),
    (replace(IMAGE, dtype=BF16, cosine=True), 64),
    (replace(IMAGE, dtype=F32), 576),
    (replace(IMAGE, head_size=30, num_tokens=64), 128),
    (replace(IMAGE, head_size=8, num_tokens=27), 0),
    (replace(IMAGE, table_size=None, num_biases=2, has_regions=False, mask_dtype=F32), 192),
    pytest.param(replace(IMAGE, num_tokens=100, cosine=True), 512, marks=pytest.mark.slow),
    pytest.param(replace(VOLUME, has_regions=False, mask_dtype=F32), 3072, marks=pytest.mark.slow),
    (replace(VOLUME, has_regions=False, mask_dtype=F32, num_tokens=100), 768),
    (replace(VOLUME, num_heads=12, num_windows=8, head_size=10, num_tokens=100), 848),
    pytest.param(
        replace(VOLUME, num_heads=12, num_windows=8, head_size=10), 848, marks=pytest.mark.slow
    ),
    pytest.param(
        replace(VOLUME, num_tokens=576, head_size=64, dtype=BF16), 2048, marks=pytest.mark.slow
    ),
]


def launchers(problem):
    from pagetile.ops.window_attention.triton import launchers as made

    plan = make_plan(problem, H200)
    factor = next(n for n in (8, 4, 2, 1) if problem.head_size % n == 0)
    if problem.dtype == F32:
        factor = min(factor, 4)
    types = (("*fp32", "*i32", "*i32", "*u8" if problem.has_regions else "*fp32", "*fp32"),)
    types += (factor, factor, True)
    first, last = plan.groups[0], plan.groups[-1]
    yield made.make_forward_launcher(problem, plan, types)
    if plan.one_tile_stages:
        yield made.make_one_tile_launcher(problem, plan, types, has_dlse=True)
        return
    pivots = made.make_pivot_launcher(problem, plan, types)
    assert (pivots is not None) == (problem.mask_dtype is not None)
    if pivots is not None:
        yield pivots
    yield made.make_row_launcher(
        problem, plan, types, first, 0, is_last=len(plan.groups) == 1, has_dlse=False
    )
    if len(plan.groups) > 1:
        done = sum(itertools.chain(*plan.groups[:-1]))
        yield made.make_row_launcher(problem, plan, types, last, done, is_last=True, has_dlse=True)
    yield made.make_column_launcher(problem, plan, types)


@pytest.mark.parametrize(("problem", "most_spilled"), COMPILED)
def test_kernels_compile_for_hopper_within_its_memory(problem, most_spilled, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")
    from test_compiled import HOPPER
    from tools.sass import resources

    for launcher in launchers(problem):
        compiled = launcher.compile(HOPPER)
        assert compiled.metadata.shared <= 232_448
        used = resources(compiled, tmp_path)
        assert used["STACK"] <= most_spilled, used


def test_another_number_of_windows_is_the_same_kernel():
    pytest.importorskip("triton")
    from pagetile.ops.window_attention import triton as kernels

    few, many, of_six_heads = (
        kernels._plan_and_keys(replace(VOLUME, num_windows=n, num_masks=n, num_heads=heads), H200)
        for n, heads in ((343, 3), (1000, 3), (1000, 6))
    )
    assert few[1:] == many[1:]
    assert few[1] == of_six_heads[1]  # the forward kernel serves any number of heads
