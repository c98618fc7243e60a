import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pagetile.device import DeviceInfo
from pagetile.errors import ShapeError
from pagetile.ops.paged_attention import Problem, make_plan
from pagetile.ops.paged_attention.checks import check_plan
from pagetile.ops.paged_attention.plan import (
    make_gpu_plan,
    make_hopper_prefill_plan,
    refuse_hopper_decode,
    refuse_hopper_prefill,
)
from pagetile.ops.paged_attention.plan.decode import fit_to_prefill
from pagetile.tiles.cpu.plan import SPLIT_SIZE
from pagetile.tiles.hopper.tiling import PACKED_FORMATS, ForwardConfig

# Llama 8B: one new token of each of 64 sequences of 4096.
DECODE = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
PREFILL = replace(DECODE, num_seqs=1, num_tokens=4096, max_query_len=4096)
TINY = replace(DECODE, num_seqs=1, num_tokens=1, max_seq_len=9)

FORM = SimpleNamespace(q=SimpleNamespace(device=torch.device("cpu")))
SMALL_CPU = DeviceInfo("cpu", 2)
LARGE_CPU = DeviceInfo("cpu", 64, "a server", bf16_dot=True, bf16_tiles=True)

PROBLEMS = [
    Problem(
        num_seqs, num_seqs * query_len, query_len, max(query_len, seq_len),
        num_kv_heads * group, num_kv_heads, head_size, head_size, block_size, dtype, dtype,
    )
    for num_seqs, query_len, seq_len, num_kv_heads, group, head_size, block_size, dtype
    in itertools.product(
        (0, 1, 7, 300), (1, 5, 3000), (0, 1, 511, 512, 513, 131072), (1, 3, 8, 32), (1, 5, 8),
        (8, 128, 512), (1, 256), (torch.float32, torch.bfloat16),
    )
]  # fmt: skip


@pytest.mark.parametrize("device", [DeviceInfo("cpu", 1), SMALL_CPU, LARGE_CPU], ids=str)
def test_every_plan_can_be_carried_out(device):
    for problem in PROBLEMS:
        plan = make_plan(problem, device)
        assert plan.tile_m >= 1
        assert plan.item_splits >= 1
        assert 1 <= plan.decode_heads <= problem.num_kv_heads
        assert 1 <= plan.num_threads <= device.num_workers


def test_tiles_that_change_the_bits_do_not_depend_on_the_problem():
    for device in (SMALL_CPU, LARGE_CPU):
        plans = [make_plan(problem, device) for problem in PROBLEMS]
        assert {(plan.split_size, plan.bf16_dot) for plan in plans} == {
            (SPLIT_SIZE, device.bf16_dot)
        }


def test_matrix_units_multiply_in_every_step_of_a_model_or_in_none():
    prefill = replace(DECODE, num_tokens=2048, max_seq_len=2048)
    for num_heads, num_kv_heads, expected in ((32, 8, True), (12, 12, True), (32, 32, False)):
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        for problem in (DECODE, prefill):
            assert make_plan(replace(problem, **heads), LARGE_CPU).bf16_tiles is expected
            assert not make_plan(replace(problem, **heads), SMALL_CPU).bf16_tiles


def test_splits_end_at_the_end_of_a_tile_of_keys():
    from pagetile.tiles.cpu.online_softmax import TILE_N

    assert SPLIT_SIZE % TILE_N == 0


def test_little_work_wakes_no_other_thread():
    assert make_plan(TINY, LARGE_CPU).num_threads == 1
    assert make_plan(DECODE, LARGE_CPU).num_threads == 64
    assert make_plan(PREFILL, SMALL_CPU).num_threads == 2


def num_decode_items(plan, problem):
    keys = plan.split_size * plan.item_splits
    splits = -(-problem.max_seq_len // keys) if plan.parallel_splits else 1
    return problem.num_seqs * splits * -(-problem.num_kv_heads // plan.decode_heads)


def test_a_lone_long_sequence_is_split_for_all_threads():
    lone = replace(DECODE, num_seqs=1, num_tokens=1, max_seq_len=131072)
    for device in (SMALL_CPU, LARGE_CPU):
        plan = make_plan(lone, device)
        assert plan.parallel_splits
        assert num_decode_items(plan, lone) >= 4 * device.num_workers


def test_a_work_item_walks_neighbouring_splits_when_there_are_more_than_enough():
    lone = replace(DECODE, num_seqs=1, num_tokens=1, max_seq_len=131072)
    plan = make_plan(lone, SMALL_CPU)
    assert plan.item_splits > 1
    assert num_decode_items(plan, lone) < 256
    assert make_plan(replace(lone, max_seq_len=1024), SMALL_CPU).item_splits == 1


def test_long_prefills_take_large_tiles_and_short_ones_leave_some_for_all():
    def num_items(problem, device):
        rows = problem.num_tokens * problem.group
        return rows * problem.num_kv_heads / make_plan(problem, device).tile_m

    short = replace(PREFILL, num_tokens=64, max_query_len=64, max_seq_len=64)
    assert make_plan(PREFILL, SMALL_CPU).tile_m > make_plan(short, LARGE_CPU).tile_m
    for problem, device in ((PREFILL, SMALL_CPU), (PREFILL, LARGE_CPU), (short, SMALL_CPU)):
        assert num_items(problem, device) >= 4 * device.num_workers


def test_enough_sequences_are_not_split():
    assert not make_plan(DECODE, SMALL_CPU).parallel_splits


def test_short_sequences_have_nothing_to_split():
    short = replace(DECODE, num_seqs=1, num_tokens=1, max_seq_len=SPLIT_SIZE)
    assert not make_plan(short, LARGE_CPU).parallel_splits
    assert make_plan(replace(short, max_seq_len=SPLIT_SIZE + 1), LARGE_CPU).parallel_splits


def test_few_short_sequences_share_out_their_heads():
    few = replace(DECODE, num_seqs=2, num_tokens=2, max_seq_len=500)
    plan = make_plan(few, SMALL_CPU)
    assert plan.num_threads == 2
    assert num_decode_items(plan, few) >= 4 * 2


def test_many_sequences_walk_the_heads_of_a_page_together():
    plan = make_plan(replace(DECODE, num_seqs=512, num_tokens=512), SMALL_CPU)
    assert plan.decode_heads == 8


def test_wide_keys_take_fewer_heads_at_once():
    wide = replace(
        DECODE, num_seqs=512, num_tokens=512, head_size=512, v_head_size=512,
        q_dtype=torch.float32, kv_dtype=torch.float32,
    )  # fmt: skip
    heads = [make_plan(problem, SMALL_CPU).decode_heads for problem in (DECODE, wide)]
    assert heads[1] < heads[0]


@pytest.mark.parametrize("bf16_dot", [False, True])
def test_bfloat16_is_multiplied_where_the_machine_can(bf16_dot):
    assert make_plan(DECODE, replace(SMALL_CPU, bf16_dot=bf16_dot)).bf16_dot is bf16_dot


# --- GPUs --------------------------------------------------------------------------------------

H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
A100 = DeviceInfo("cuda", 108, "NVIDIA A100", capability=(8, 0))


@pytest.mark.parametrize("device", [H200, A100], ids=["h200", "a100"])
def test_a_gpu_s_tiles_are_powers_of_two_that_hold_the_rows(device):
    for problem in PROBLEMS:
        plan = make_plan(problem, device)
        if device is H200 and refuse_hopper_prefill(problem) is None:
            assert plan == make_hopper_prefill_plan(problem, device)
            continue
        rows = problem.max_query_len * problem.group
        most = 64 if problem.width <= 256 else 16  # whose results fit into registers
        assert plan.path == ("decode" if rows <= most else "prefill")
        for size in (plan.tile_m, plan.tile_n, plan.num_warps):
            assert size & (size - 1) == 0
        if plan.path == "decode":
            assert plan.tile_m >= rows
            assert 0 < plan.num_programs <= 3 * device.num_workers


def test_a_captured_launch_has_the_programs_of_its_bounds_whatever_the_lengths():
    for max_seq_len in (1, 100, 131072):
        plan = make_plan(replace(DECODE, max_seq_len=max_seq_len), H200)
        assert plan == make_plan(DECODE, H200)


def test_cta_ranges_end_where_heads_do_if_that_leaves_few_multiprocessors_idle():
    def programs(num_seqs):
        return make_plan(replace(DECODE, num_seqs=num_seqs), H200).num_programs

    assert programs(8) == 256  # 64 heads of 4 ranges each
    assert programs(64) == 256  # two of the 512 heads a CTA
    assert programs(1) == 256  # 32 splits a head, not 33: merged eight at a time
    assert programs(2) == 256  # 16, which are two eights
    one = replace(DECODE, num_heads=4, num_kv_heads=1)
    assert make_plan(replace(one, num_seqs=1), H200).num_programs == 264
    assert make_plan(replace(one, num_seqs=5), H200).num_programs == 260
    assert programs(300) == 264  # so many heads that few of them are cut
    assert programs(5) == 264  # 240 would leave a tenth of the room unused, for equal lengths only


def test_half_of_the_ctas_take_part_where_splits_of_a_head_are_many_and_short():
    def halving_size(batch_invariant=False, **changes):
        return make_gpu_plan(
            replace(DECODE, **changes), H200, hopper=True, batch_invariant=batch_invariant
        ).halving_size

    assert halving_size(num_seqs=1) == halving_size(num_seqs=8, num_heads=4, num_kv_heads=1) == 768
    # Tiles in flight of one CTA are too few bytes: half of the CTAs only where others have none.
    assert halving_size(num_seqs=1, head_size=64, v_head_size=64) == 64
    assert halving_size(num_seqs=1, head_size=96, v_head_size=96) == 64
    assert halving_size(num_seqs=8) == 0
    # one on a multiprocessor anyway
    assert halving_size(num_seqs=1, head_size=256, v_head_size=256) == 0
    assert halving_size(num_seqs=1, batch_invariant=True) == 0


def test_short_sequences_are_not_split_unless_results_must_not_depend_on_the_batch():
    for problem in PROBLEMS:
        plan = make_gpu_plan(problem, H200, hopper=True)
        fixed = make_gpu_plan(problem, H200, hopper=True, batch_invariant=True)
        if plan.path == "decode":
            for size in (plan.whole_size, plan.short_split_size, plan.halving_size):
                assert size % plan.tile_n == 0
            assert plan.whole_size > max(plan.tile_n, plan.short_split_size)
            assert fixed.whole_size == fixed.short_split_size == fixed.halving_size == 0


def test_many_heads_have_fewer_splits():
    """With few heads, CTAs that would be idle take a tile each."""
    few, many = (
        make_gpu_plan(replace(DECODE, num_seqs=num_seqs), H200, hopper=True)
        for num_seqs in (4, 8)  # times 8 KV heads
    )
    assert few.whole_size < many.whole_size
    assert few.short_split_size < many.short_split_size


def test_all_ctas_of_a_merge_run_at_once_unless_results_must_not_depend_on_the_batch():
    for problem in PROBLEMS:
        for hopper in (False, True):
            plan = make_gpu_plan(problem, H200, hopper=hopper)
            if plan.path != "decode" or problem.rows <= 16:
                assert plan.merge_rows == 0
                continue
            pairs = problem.num_seqs * problem.num_kv_heads
            is_wide = hopper and 64 < problem.width <= 128 and pairs <= H200.num_workers
            most = max(pairs, (14 if is_wide else 4) * H200.num_workers)
            assert pairs * -(-problem.rows // plan.merge_rows) <= most
            fixed = make_gpu_plan(problem, H200, hopper=hopper, batch_invariant=True)
            assert fixed.merge_rows == 8


def test_many_wide_rows_of_few_heads_are_divided_among_half_as_many_ctas():
    verified = replace(DECODE, num_tokens=64 * 8, max_query_len=8, num_heads=7, num_kv_heads=1)

    def plan(**changes):
        return make_gpu_plan(replace(verified, **changes), H200, hopper=True)

    assert (plan().num_programs, plan().merge_rows, plan().halving_size) == (128, 2, 0)
    narrow = plan(head_size=64, v_head_size=64)
    assert (narrow.num_programs, narrow.merge_rows, narrow.halving_size) == (256, 8, 256)
    assert plan(num_seqs=20).whole_size < plan(num_seqs=64).whole_size  # as before
    many = plan(num_heads=56, num_kv_heads=8)  # most heads are in one CTA's range
    assert (many.num_programs, many.merge_rows) == (256, 64)


def test_decode_beside_a_prefill_has_as_many_ctas_as_suit_its_tiles():
    decode = make_gpu_plan(DECODE, H200, hopper=True)

    def programs(num_prompt_tokens):
        mixed = replace(DECODE, num_tokens=63 + num_prompt_tokens, max_query_len=num_prompt_tokens)
        return fit_to_prefill(decode, make_plan(mixed, H200), mixed, H200).num_programs

    per_tile = 128 // DECODE.group
    assert programs(1) == decode.num_programs
    assert programs(1 + 2 * per_tile) == decode.num_programs - decode.num_programs * 16 // 132
    assert programs(1 + 16 * per_tile) == decode.num_programs  # 128 tiles of 8 heads
    assert programs(1 + 66 * per_tile) == 2 * decode.num_programs


def joined(size, group=4, num_kv_heads=8, v_size=None, batch_invariant=False, **changes):
    """Return the plan of a call with such heads."""
    problem = replace(
        DECODE, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_size=size,
        v_head_size=v_size or size, **changes,
    )  # fmt: skip
    return make_gpu_plan(problem, H200, hopper=True, batch_invariant=batch_invariant)


def test_neighbouring_heads_are_read_together_until_they_end_with_a_line():
    def heads(*args, **changes):
        return joined(*args, **changes).tile_heads

    found = {size: heads(size) for size in range(16, 272, 16)}
    assert [size for size in found if found[size] == 4] == [16, 48, 80]
    assert [size for size in found if found[size] == 1] == [64, 128, 192, 256]
    assert heads(128, v_size=80) == heads(32, v_size=64) == 2
    assert heads(80, v_size=64) == heads(80, group=1) == 4
    # Rows that do not fit a tile, and numbers of heads.
    assert heads(80, group=5) == heads(80, num_kv_heads=6) == heads(80, max_query_len=2) == 2
    assert heads(80, group=9) == heads(80, num_kv_heads=1) == heads(80, num_kv_heads=3) == 1
    assert heads(80, max_query_len=3) == 1
    assert heads(80, max_visible=4) == 1
    wide = replace(DECODE, head_size=80, v_head_size=80)
    assert make_gpu_plan(wide, H200).tile_heads == make_plan(wide, A100).tile_heads == 1


@pytest.mark.parametrize("scales", ["head", "token"])
def test_two_heads_of_an_8_bit_cache_share_a_tile(scales):
    def heads(*args, **changes):
        return joined(*args, kv_dtype=torch.int8, scale_kind=scales, **changes).tile_heads

    found = {size: heads(size) for size in range(16, 272, 16)}
    assert found == {size: 2 if size <= 128 else 1 for size in found}
    assert heads(64, v_size=144) == heads(128, group=9) == heads(128, num_kv_heads=3) == 1
    assert heads(128, max_visible=4) == 1
    assert [heads(128, num_seqs=n) for n in (1, 7, 8, 64)] == [1, 1, 2, 2]
    assert heads(128, num_seqs=64, batch_invariant=True) == 1


def test_few_heads_are_not_joined():
    assert [joined(80, num_seqs=n).tile_heads for n in (1, 7, 8, 15, 16)] == [1, 1, 2, 2, 4]
    # Nor any where the same bits are asked for whatever the batch.
    assert {joined(80, num_seqs=n, batch_invariant=True).tile_heads for n in (1, 64, 300)} == {1}
    tiles = {
        (plan.tile_n, plan.num_stages)
        for plan in (joined(80, num_seqs=n, batch_invariant=True) for n in (1, 64))
    }
    assert len(tiles) == 1


def test_joined_heads_have_no_more_stages_than_keep_the_memory_busy():
    stages = {size: joined(size, group=8).num_stages for size in range(80, 272, 16)}
    assert [size for size in stages if stages[size] == 3] == [144, 192, 256]  # two are not joined
    for size in (80, 96, 112, 144, 160, 240):
        plan = joined(size, group=8)
        ctas = -(-plan.num_programs // H200.num_workers)
        keys = ctas * plan.num_stages * plan.tile_n * plan.tile_heads
        assert keys * 4 * size >= 80 << 10


def test_joined_heads_are_one_head_of_all_their_rows():
    for num_seqs in (8, 16, 64, 200):  # 8: as single heads they would not be few
        wide = replace(DECODE, num_seqs=num_seqs, head_size=96, v_head_size=96)
        half = replace(wide, num_kv_heads=DECODE.num_kv_heads // 2)
        plan = make_gpu_plan(wide, H200, hopper=True)
        assert plan.tile_heads == 2
        assert wide.join_kv_heads(2) == half
        assert wide.join_kv_heads(1) is wide
        alone = make_gpu_plan(replace(half, num_heads=half.num_kv_heads * 9), H200, hopper=True)
        assert (plan.num_programs, plan.whole_size) == (alone.num_programs, alone.whole_size)


def test_hopper_s_decode_takes_up_to_64_rows_of_16_bits():
    short = replace(DECODE, num_tokens=64 * 8, max_query_len=8)
    assert short.rows == 32
    plan = make_plan(short, H200)
    assert plan == make_gpu_plan(short, H200, hopper=True)
    assert plan.tile_m == 64
    for size in (32, 256):
        other = replace(short, head_size=size, v_head_size=size)
        assert "32 rows" in refuse_hopper_decode(other)
    assert "32 rows" in refuse_hopper_decode(replace(short, kv_dtype=torch.int8))
    assert refuse_hopper_decode(replace(short, max_query_len=17)) is not None


def test_invariant_splits_are_the_same_for_every_batch():
    plans = [make_plan(problem, H200, batch_invariant=True) for problem in PROBLEMS]
    sizes = {plan.split_size for plan in plans if plan.path == "decode"}
    assert len(sizes) == 1
    (size,) = sizes
    assert all(size % plan.tile_n == 0 for plan in plans if plan.path == "decode")
    assert {make_plan(problem, H200).split_size for problem in PROBLEMS} == {0}


WIDE = {"head_size": 512, "v_head_size": 512}


@pytest.mark.parametrize(
    "change", [WIDE, {"q_dtype": torch.float32}, {"is_aligned": False}], ids=["wide", "f32", "odd"]
)
def test_what_hopper_s_kernel_does_not_take_is_planned_for_the_portable_one(change):
    problem = replace(DECODE, **change)
    assert make_plan(DECODE, H200) == make_gpu_plan(DECODE, H200, hopper=True)
    assert make_plan(problem, H200) == make_gpu_plan(problem, H200)


@pytest.mark.parametrize("cap", [None, 1e-7, 0.1, 64.0, 64.5, 500.0])
@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_plan_is_of_the_implementation_that_runs(problem, cap):
    pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")
    from pagetile.ops.paged_attention.api import choose_implementation

    capped = replace(problem, logits_soft_cap=cap)
    name, module = choose_implementation(capped, H200, "auto")
    takes_cap = cap in (None, 0.1, 64.0)
    prefill = "hopper_prefill" if takes_cap else "triton"
    assert name == ("hopper" if problem is DECODE else prefill)
    for batch_invariant in (False, True):
        expected = module.make_plan(capped, H200, batch_invariant=batch_invariant)
        assert make_plan(capped, H200, batch_invariant=batch_invariant) == expected


@pytest.mark.parametrize(
    ("head_size", "v_head_size", "tile_m", "tile_n"),
    [(64, 64, 192, 128), (128, 128, 128, 128), (256, 256, 128, 64), (192, 128, 128, 128)],
)
def test_a_plan_of_prefill_on_hopper_shows_the_tiles_that_run(
    head_size, v_head_size, tile_m, tile_n
):
    problem = replace(PREFILL, head_size=head_size, v_head_size=v_head_size)
    plan = make_plan(problem, H200)
    assert (plan.path, plan.tile_m, plan.tile_n) == ("prefill", tile_m, tile_n)
    assert plan.num_warps * 16 == tile_m  # a warpgroup of four warps computes 64 rows
    assert plan == make_hopper_prefill_plan(problem, H200)
    assert make_plan(problem, A100) == make_gpu_plan(problem, A100)


@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({}, (192, 64)),
        ({"head_size": 64, "v_head_size": 64}, (192, 64)),
        ({"head_size": 80, "v_head_size": 80}, (192, 64)),
        ({"head_size": 256, "v_head_size": 256}, (128, 64)),
        ({"q_dtype": torch.float16, "kv_dtype": torch.float16}, (128, 128)),
        ({"logits_soft_cap": None}, (128, 128)),
        # keys that are divided, and 8 bits, take larger tiles
        ({"num_tokens": 256, "max_query_len": 256, "max_seq_len": 27_256}, (128, 128)),
        ({"kv_dtype": torch.float8_e4m3fn, "scale_kind": "head"}, (128, 128)),
    ],
    ids=str,
)
def test_a_plan_of_capped_scores_shows_the_tiles_that_run(change, tile):
    problem = replace(PREFILL, **({"logits_soft_cap": 50.0} | change))
    plan = make_plan(problem, H200)
    assert (plan.path, plan.tile_m, plan.tile_n) == ("prefill", *tile)
    config = ForwardConfig(
        problem.q_dtype, problem.head_size, 16, has_cap=problem.logits_soft_cap is not None,
        splits=plan.divides_keys, is_unpacked=plan.unpacks,
        packed="none" if plan.unpacks else PACKED_FORMATS.get(problem.kv_dtype, "none"),
    )  # fmt: skip
    assert tile == (64 * config.tiling.warpgroups, config.tiling.tile_n)


def test_a_plan_says_whether_the_keys_of_a_prefill_may_be_divided():
    chunk = replace(PREFILL, num_tokens=256, max_query_len=256, max_seq_len=27_256)
    narrow = replace(chunk, head_size=64, v_head_size=64)
    assert not make_plan(PREFILL, H200).divides_keys
    assert make_plan(chunk, H200).divides_keys
    assert not make_plan(chunk, H200, batch_invariant=True).divides_keys
    assert not make_plan(chunk, A100).divides_keys
    assert make_plan(narrow, H200).tile_m == 128
    assert make_plan(narrow, H200, batch_invariant=True).tile_m == 192


def test_hopper_s_prefill_refuses_a_plan_that_it_would_not_carry_out():
    pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")
    from pagetile.ops.paged_attention import hopper_prefill

    problem = replace(PREFILL, num_tokens=4096)
    with pytest.raises(ShapeError, match="hopper_prefill runs tiles of 128 x 128"):
        hopper_prefill.prepare(problem, FORM, make_gpu_plan(problem, H200))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(({"block_size": n}, None) for n in (1, 2, 3, 4, 12, 16, 256)),
        *(
            ({"block_size": n, "is_aligned": False}, "rows of the caches do not begin at")
            for n in (1, 8, 16)
        ),
        ({"head_size": 192}, None),
        ({"v_head_size": 64}, None),
        ({"v_head_size": 264}, "v_head_size is 264; multiples of 8 up to 256 run"),
        ({"head_size": 264}, "head_size is 264; multiples of 8 up to 256 run"),
    ],
    ids=str,
)
def test_prefill_on_hopper_takes_blocks_and_heads_of_many_sizes(change, reason):
    pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")
    from pagetile.ops.paged_attention import hopper_prefill

    device = replace(H200, capability=(9, 0))
    answer = hopper_prefill.supports(replace(PREFILL, **change), device)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale_kind": "head"}, None),
        ({"scale_kind": "token"}, None),
        ({"scale_kind": "head", "head_size": 72, "v_head_size": 72}, "multiples of 16 bytes"),
    ],
    ids=str,
)
def test_prefill_on_hopper_takes_8_bit_caches(kv_dtype, change, reason):
    problem = replace(PREFILL, kv_dtype=kv_dtype, **change)
    answer = refuse_hopper_prefill(problem)
    assert answer is None if reason is None else reason in answer
    own, portable = make_hopper_prefill_plan(problem, H200), make_gpu_plan(problem, H200)
    assert make_plan(problem, H200) == (own if reason is None else portable)
    # Registers that the warps which convert need are left to them.
    assert own.max_registers <= make_plan(PREFILL, H200).max_registers


def test_two_types_of_16_bits_are_multiplied_and_planned_as_float32():
    for problem in (replace(DECODE, max_query_len=16, **WIDE), PREFILL):
        mixed = replace(problem, kv_dtype=torch.float16)
        single = replace(problem, q_dtype=torch.float32, kv_dtype=torch.float32)
        assert make_plan(mixed, H200) == make_plan(single, H200)


def test_float16_with_a_scale_for_each_token_is_left_to_triton_s_prefill():
    """Values times their scale are rounded to the type of q before the product."""
    by_token = replace(PREFILL, kv_dtype=torch.float8_e5m2, scale_kind="token")
    assert refuse_hopper_prefill(by_token) is None
    reason = refuse_hopper_prefill(replace(by_token, q_dtype=torch.float16))
    assert reason is not None
    assert "may overflow" in reason
    by_head = replace(by_token, q_dtype=torch.float16, scale_kind="head")
    assert refuse_hopper_prefill(by_head) is None


@pytest.mark.parametrize("split_size", [1536, 1000, 32])
def test_splits_that_kernels_cannot_divide_by_are_refused(split_size):
    plan = make_gpu_plan(DECODE, H200, batch_invariant=True)
    assert plan.split_size % plan.tile_n == 0
    with pytest.raises(ShapeError, match=f"split_size={split_size}, expected a power of two"):
        check_plan(replace(plan, split_size=split_size), "auto")
    for tiles in (1, 2, 16):
        check_plan(replace(plan, split_size=tiles * plan.tile_n), "auto")
