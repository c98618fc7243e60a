"""Every kind of forward kernel for Hopper compiles without a GPU, and its loops stay in registers.

Every run compiles a kernel with each option and each property of a tiling, and ``pytest -m slow``
those of each tiling.

A computing thread has few registers to spare. Values spilled once a tile cost little; the loop over
keys, which takes most of the time, must not spill. Three warpgroups have too few registers for the
mask, which is in that loop under a branch.
"""

import re
from dataclasses import fields, replace
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from test_compiled import HOPPER, SLACK, check_registers, rarely  # noqa: E402
from tools.sass import disassemble, loops_that_multiply, loops_with, resources  # noqa: E402

from pagetile.device import DeviceInfo  # noqa: E402
from pagetile.ops.window_attention import hopper  # noqa: E402
from pagetile.ops.window_attention.hopper import launch, one_tile  # noqa: E402
from pagetile.ops.window_attention.hopper.constants import ONLINE_TILE  # noqa: E402
from pagetile.ops.window_attention.hopper.plan import (  # noqa: E402
    make_columns_plan,
    make_one_tile_plan,
    make_plan,
    make_rows_plan,
)
from pagetile.ops.window_attention.problem import Problem  # noqa: E402
from pagetile.tiles.hopper import launch as forward_launch  # noqa: E402
from pagetile.tiles.hopper import softmax  # noqa: E402
from pagetile.tiles.hopper.gather_packed import IN_FLIGHT, chunk_layout, chunk_rows  # noqa: E402
from pagetile.tiles.hopper.launch import _is_far, make_launcher, refuse  # noqa: E402
from pagetile.tiles.hopper.layouts import num_parts, part_size, part_start  # noqa: E402
from pagetile.tiles.hopper.tiling import (  # noqa: E402
    CAPPED_TILINGS,
    HALF_TILING,
    NARROW_TILING,
    PACKED_TILINGS,
    SMALL_PACKED_TILING,
    SMALL_TILING,
    TILINGS,
    WIDE_TILING,
    ForwardConfig,
    Tiling,
    refuse_cap,
    tiling_of,
)
from pagetile.tiles.triton.online_softmax import LOG2_E  # noqa: E402

F16, BF16 = torch.float16, torch.bfloat16
H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
SHARED_MEMORY = 227 << 10  # that a program may have

NARROW_CAPPED = ForwardConfig(
    BF16, 64, 64, causal=True, has_window=True, has_cap=True, has_sinks=True
)
CONFIGS = [
    # (config, most bytes of memory that a thread keeps between tiles)
    (ForwardConfig(BF16, 128, 16, causal=True, uniform=True), 0),
    # smaller tiles of capped scores
    (NARROW_CAPPED, 80),
    # values of another width than keys
    (ForwardConfig(BF16, 192, 16, causal=True, uniform=True, v_head_size=128), 8),
    # lists of tiles
    (ForwardConfig(BF16, 64, 0, causal=True, uniform=True, is_sparse=True), 24),
    # rows gathered one by one
    (
        ForwardConfig(F16, 112, 8, causal=True, has_window=True, pack=64),
        80,
    ),  # takes the most shared memory
    (ForwardConfig(BF16, 256, 12, uniform=True), 16),
    # queries in registers
    (ForwardConfig(BF16, 80, 16, causal=True, pack=8), 24),
    # caches of 8 bits
    (
        ForwardConfig(BF16, 128, 16, causal=True, packed="e4m3", has_token_scales=True),
        64,
    ),
    (ForwardConfig(BF16, 64, 16, causal=True, packed="int8", has_cap=True, has_alibi=True), 128),
    (ForwardConfig(F16, 192, 1, causal=True, has_window=True, packed="e5m2", is_far=True), 64),
    # few sequences of unequal lengths; heads of a group that do not fill a warpgroup's rows
    (ForwardConfig(BF16, 64, 16, causal=True, few_seqs=True, splits=True, pack=5), 24),
    # the same, of caches of 8 bits that were unpacked before
    (ForwardConfig(BF16, 128, 128, causal=True, few_seqs=True, pack=7, is_unpacked=True), 8),
]
OTHER_CONFIGS = [
    (ForwardConfig(BF16, 64, 16, causal=True, few_seqs=True, pack=8), 80),
    (ForwardConfig(BF16, 128, 16, causal=True, uniform=True, has_cap=True), 8),
    (ForwardConfig(BF16, 192, 16, causal=True, uniform=True), 40),
    (ForwardConfig(BF16, 64, 16, causal=True, packed="e4m3", splits=True), 104),
    (ForwardConfig(BF16, 128, 16, causal=True, few_seqs=True, pack=7), 8),
    (ForwardConfig(BF16, 128, 128, causal=True, uniform=True, pack=4, is_unpacked=True), 8),
    (ForwardConfig(BF16, 48, 8, causal=True, has_window=True, has_cap=True, pack=8), 80),
    (ForwardConfig(BF16, 256, 0, causal=True, uniform=True, is_sparse=True, has_alibi=True), 24),
    (
        ForwardConfig(
            BF16, 128, 16, causal=True, uniform=True, has_cap=True, has_alibi=True, has_sinks=True
        ),
        8,
    ),
    (ForwardConfig(BF16, 80, 8, causal=True, has_window=True, has_cap=True, pack=8), 24),
    (ForwardConfig(BF16, 128, 16, causal=True, splits=True), 104),
    (ForwardConfig(BF16, 128, 256, causal=True, has_window=True, pack=4), 8),
    (ForwardConfig(BF16, 256, 16, causal=True, has_window=True, has_cap=True), 24),
    (ForwardConfig(F16, 48, 16, causal=True, uniform=True), 96),
    (ForwardConfig(BF16, 64, 16, causal=True, uniform=True, has_alibi=True), 72),
    (ForwardConfig(F16, 96, 8, causal=True, has_window=True, has_sinks=True, pack=4), 24),
    (ForwardConfig(BF16, 192, 0, causal=True, uniform=True, v_head_size=128), 0),
    (
        ForwardConfig(
            BF16, 128, 0, causal=True, has_window=True, uniform=True, is_sparse=True, has_cap=True
        ),
        96,
    ),
    (ForwardConfig(BF16, 128, 1, causal=True, uniform=True, is_far=True), 40),
    (ForwardConfig(BF16, 192, 0, causal=True, few_seqs=True, v_head_size=128), 0),
    (ForwardConfig(BF16, 128, 16, causal=True, splits=True, few_seqs=True, pack=4), 24),
    (ForwardConfig(BF16, 128, 16, causal=True, uniform=True, packed="e4m3"), 64),
    (
        ForwardConfig(
            BF16, 128, 16, causal=True, packed="e4m3", has_token_scales=True, is_far=True
        ),
        64,
    ),
    (ForwardConfig(BF16, 64, 128, causal=True, few_seqs=True, pack=8, is_unpacked=True), 96),
    (ForwardConfig(BF16, 256, 128, causal=True, few_seqs=True, is_unpacked=True), 24),
    (ForwardConfig(F16, 192, 128, causal=True, v_head_size=128, is_unpacked=True), 24),
    (ForwardConfig(BF16, 128, 128, causal=True, splits=True, is_unpacked=True), 104),
    (ForwardConfig(BF16, 128, 128, has_window=True, has_cap=True, is_unpacked=True), 24),
    (ForwardConfig(BF16, 128, 16, causal=True, few_seqs=True, pack=4), 8),
    (ForwardConfig(BF16, 256, 16, causal=True, few_seqs=True, pack=8), 16),
    (ForwardConfig(BF16, 128, 16, causal=True, uniform=True, pack=7), 0),
    (ForwardConfig(BF16, 64, 16, causal=True, uniform=True, pack=7), 56),
    (ForwardConfig(BF16, 128, 16, causal=True, splits=True, few_seqs=True, pack=7), 24),
    (ForwardConfig(BF16, 128, 16, causal=True, splits=True, pack=7), 104),
    (ForwardConfig(BF16, 256, 16, causal=True, few_seqs=True, pack=6), 16),
    (ForwardConfig(BF16, 192, 16, causal=True, few_seqs=True, pack=5), 56),
    (ForwardConfig(BF16, 192, 16, causal=True, uniform=True, pack=3, v_head_size=128), 8),
    (ForwardConfig(BF16, 80, 16, causal=True, packed="e4m3", pack=7), 64),
    (ForwardConfig(F16, 192, 64, causal=True, splits=True, few_seqs=True, v_head_size=128), 48),
    (ForwardConfig(BF16, 128, 16, causal=True, few_seqs=True, packed="e4m3", splits=True), 104),
    (ForwardConfig(BF16, 64, 64, causal=True, uniform=True), 48),
    (ForwardConfig(F16, 96, 0, has_window=True), 24),
    (ForwardConfig(BF16, 128, 0, uniform=True), 0),
    (ForwardConfig(F16, 128, 8, causal=True), 0),
    (ForwardConfig(BF16, 256, 16, causal=True, uniform=True), 16),
    (ForwardConfig(BF16, 192, 64, causal=True, pack=2), 32),
    (ForwardConfig(BF16, 80, 64, causal=True, pack=8), 24),
    (ForwardConfig(BF16, 96, 128, causal=True, uniform=True), 0),
    (ForwardConfig(F16, 192, 16, uniform=True), 16),
    (ForwardConfig(BF16, 64, 16, causal=True, uniform=True), 72),
    (ForwardConfig(F16, 64, 0, uniform=True), 40),
    (
        ForwardConfig(
            BF16,
            160,
            128,
            causal=True,
            has_window=True,
            pack=4,
            v_head_size=96,
            has_cap=True,
            has_alibi=True,
            has_sinks=True,
        ),
        16,
    ),
    (ForwardConfig(F16, 136, 64, uniform=True, v_head_size=128), 0),
    (ForwardConfig(BF16, 192, 16, causal=True, v_head_size=128, splits=True), 104),
    (ForwardConfig(BF16, 128, 16, causal=True, uniform=True, v_head_size=64), 0),
    (ForwardConfig(BF16, 256, 16, causal=True, uniform=True, v_head_size=128), 16),
    (ForwardConfig(F16, 64, 0, uniform=True, v_head_size=128), 0),
    (ForwardConfig(BF16, 128, 0, uniform=True, is_sparse=True), 0),
    (ForwardConfig(BF16, 128, 1, causal=True, uniform=True), 0),
    (ForwardConfig(BF16, 64, 4, causal=True, uniform=True), 72),
    (ForwardConfig(F16, 40, 16, causal=True, has_window=True, uniform=True), 112),
    (ForwardConfig(BF16, 64, 16, causal=True, splits=True), 104),
    (
        ForwardConfig(
            BF16, 256, 16, causal=True, has_window=True, has_cap=True, pack=2, splits=True
        ),
        48,
    ),
    (ForwardConfig(F16, 112, 8, causal=True, has_window=True, pack=64, splits=True), 120),
    *(
        (ForwardConfig(dtype, size, 16, causal=True, uniform=True, packed=packed), 136)
        for dtype in (F16, BF16)
        for size in (64, 128, 256)
        for packed in ("e4m3", "e5m2", "int8")
    ),
    (ForwardConfig(BF16, 32, 16, causal=True, packed="e4m3", has_sinks=True), 128),
    (ForwardConfig(BF16, 112, 16, packed="int8", pack=4), 64),
    *(
        (ForwardConfig(dtype, size, 16, causal=True, packed=packed, has_token_scales=True), 200)
        for dtype, packed in ((F16, "e4m3"), (BF16, "e5m2"), (BF16, "int8"))
        for size in (64, 128, 256)
    ),
]


def check_products_overlap(code):
    """ptxas waits after every product of a kernel if some products lack registers."""
    text = "\n".join(instruction for _, instruction in code)
    assert 2 * text.count("WARPGROUP.DEPBAR") < text.count("HGMMA")


@pytest.mark.parametrize(("config", "memory"), [*CONFIGS, *rarely(*OTHER_CONFIGS)], ids=str)
def test_the_loop_over_keys_stays_in_registers(config, memory, tmp_path):
    compiled = make_launcher(config).compile(HOPPER)
    assert compiled.metadata.shared <= SHARED_MEMORY
    waits = compiled.asm["ptx"].count("griddepcontrol.wait")
    assert waits == config.is_unpacked  # for the kernel that unpacks
    check_registers(compiled, tmp_path)
    used = resources(compiled, tmp_path)
    assert used["STACK"] <= memory + SLACK, used
    code = disassemble(compiled, tmp_path)
    loops = loops_that_multiply(code)
    # One each; of wide heads one for tiles that need no mask, too, and for those after them.
    has_left = config.has_window and not config.is_sparse
    kinds = config.causal + 1 + has_left if config.tiling.width > 128 else 1
    assert len(loops) == kinds * config.tiling.warpgroups
    tile_n, width = config.tiling.tile_n, config.tiling.width
    parts, v_parts = (
        [part_size(size, part, tiles) for part in range(num_parts(size, tiles))]
        for size, tiles in zip(config.sizes, (config.key_tiles, 1), strict=True)
    )
    most_moved = 0 if width > 64 else 56 if config.has_cap else 30 if config.has_alibi else 24
    most_moved += 16 + SLACK // 2 if width == 64 and config.has_token_scales else 0
    # Triton 3.7.1 keeps one value of wide heads over 8-bit caches in memory, four with scales of
    # tokens, in the loop over masked tiles, which are two of a tile of queries. With 8 registers
    # more for these warps, the loops that convert every tile move 8 times; with 8 less, this 20.
    masked_moved = (8 if config.has_token_scales else 2) if width > 128 and SLACK else 0
    for at, body in enumerate(loops):
        text = "\n".join(body)
        is_masked = kinds > 1 and at % kinds == 0
        also_moved = masked_moved if config.packed != "none" and is_masked else 0
        assert "PRMT" not in text  # weights lie as products take them
        assert len(re.findall(r"\b(LDL|STL)", text)) <= most_moved + also_moved
        products = re.findall(r"HGMMA\.64x(\d+)x16", text)
        assert sorted(map(int, products)) == sorted(
            [tile_n] * (sum(parts) // 16) + v_parts * (tile_n // 16)
        )
    if config.packed != "none":
        # Three warpgroups leave few registers, and scales of tokens take some.
        is_tight = width == 64 and config.has_token_scales
        check_conversion(code, parts, tile_n, most_moved=64 if is_tight else 24)
        check_products_overlap(code)
        return
    gathering = loops_with("LDGSTS", code)
    assert len(gathering) == (2 if config.gathers else 0)  # keys, values
    for body in gathering:
        copies = [text for text in body if "LDGSTS" in text]
        assert all(".BYPASS.128 " in text for text in copies)
        # by 64 threads, eight elements each
        assert len(copies) in {tile_n * sum(columns) // 8 // 64 for columns in (parts, v_parts)}
        assert len(re.findall(r"\b(LDL|STL)", "\n".join(body))) <= (6 if width == 64 else 1)


def check_conversion(code, parts, tile_n, most_moved):
    """Keys and values each have a loop of 16-byte loads, 16-byte stores and few barriers."""
    loops = [body for body in loops_with("LDG.E.128", code) if "STS.128" in "\n".join(body)]
    assert len(loops) == 2
    for body in loops:
        text = "\n".join(body)
        values = tile_n * sum(parts) // 64  # of each of 64 threads
        # Narrow parts have rows for some of the lanes only.
        assert values // 16 <= text.count("LDG.E.128") <= values // 16 * 2
        assert text.count("STS.128") == 2 * text.count("LDG.E.128")
        assert text.count("BAR.SYNC") <= 24  # Triton 3.6 has one before most stores
        assert len(re.findall(r"\b(LDL|STL)", text)) <= most_moved


FEW_SEQS = ForwardConfig(BF16, 128, 16, causal=True, few_seqs=True)


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        (replace(FEW_SEQS, block_size=128, pack=7, is_unpacked=True), 2),
        *rarely(
            (replace(FEW_SEQS, pack=7), 2),
            (replace(FEW_SEQS, pack=5), 2),
            (replace(FEW_SEQS, pack=5, head_size=256), 1),
        ),
    ],
    ids=str,
)
def test_a_box_of_queries_may_have_fewer_rows_than_a_tile(config, stages):
    """Triton's descriptors and barriers count the rows that are copied."""
    pack = config.pack
    assert config.tiling.q_stages == stages
    compiled = make_launcher(config).compile(HOPPER)
    boxes = [meta["block_size"] for meta in compiled.metadata.tensordesc_meta]
    assert boxes.count([64 // pack, pack, 64]) == config.staged + 1
    rows = 64 // pack * pack * (config.tiling.warpgroups if stages > 1 else 1)
    assert re.search(rf"expect_tx.*, {rows * 2 * config.tiling.width};", compiled.asm["ptx"])


CAPPED = ForwardConfig(BF16, 128, 16, causal=True, uniform=True, has_cap=True)


@pytest.mark.parametrize(
    ("config", "is_bounded"),
    [
        (NARROW_CAPPED, True),
        *rarely(
            (CAPPED, True),
            (replace(CAPPED, packed="e4m3", has_token_scales=True), True),
            (replace(CAPPED, packed="e4m3"), False),  # of values in float16
            (replace(CAPPED, dtype=F16), False),
            (replace(CAPPED, has_alibi=True), False),
        ),
    ],
    ids=str,
)
def test_bounded_scores_need_no_maximum(config, is_bounded, tmp_path):
    for body in loops_that_multiply(disassemble(make_launcher(config).compile(HOPPER), tmp_path)):
        maxima = [text for text in body if "FMNMX" in text and ".NAN" not in text]
        assert not maxima if is_bounded else len(maxima) > config.tiling.tile_n // 2


def test_weights_of_bounded_scores_stay_in_range():
    """Weights for the largest cap in bfloat16, and sums of many times large values in float32."""
    bound = max(c for c in range(1, 129) if refuse_cap(c) is None) * LOG2_E.value
    part = softmax.PART_OF_CAP.value
    assert -bound * (1 + part) >= -126 + 20
    assert bound * (1 - part) + 20 + 25 <= 127


def test_a_head_is_multiplied_in_one_part_or_in_two_that_waste_less():
    sizes = {
        size: [part_size(size, i) for i in range(num_parts(size))] for size in range(8, 257, 8)
    }
    for size, parts in sizes.items():
        assert size <= sum(parts) <= tiling_of(size, size).width
        assert parts == sorted(parts, reverse=True)
        assert [part_start(size, i) for i in range(len(parts))] == [0, parts[0]][: len(parts)]
    some = (8, 32, 40, 56, 64, 72, 96, 112, 136, 160, 176, 200)
    assert [sizes[size] for size in some] == [
        *([16], [32], [32, 16], [64], [64], [64, 16], [64, 32], [128]),
        *([128, 16], [128, 32], [128, 64], [256]),
    ]


def test_keys_wider_than_values_lie_in_tiles_of_64_columns():
    parts = {
        (size, v_size): [part_size(size, i, tiles) for i in range(num_parts(size, tiles))]
        for size in range(8, 257, 8)
        for v_size in (64, 128, 136)
        if (tiles := ForwardConfig(BF16, size, 0, v_head_size=v_size).key_tiles) > 1
    }
    assert sorted(parts) == [(size, v) for size in range(136, 193, 8) for v in (64, 128)]
    assert [parts[size, 128] for size in (136, 160, 168, 192)] == [
        *([64, 64, 16], [64, 64, 32], [64, 64, 64], [64, 64, 64])
    ]
    assert ForwardConfig(BF16, 192, 0, v_head_size=128, is_sparse=True).key_tiles == 1


def span(bases):
    """All XOR sums of some of the bases."""
    places = {(0, 0)}
    for row, column in bases:
        places |= {(r ^ row, c ^ column) for r, c in places}
    return places


@pytest.mark.parametrize("size", range(16, 257, 16))
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_lanes_hold_every_word_of_a_chunk_and_store_without_bank_conflicts(size, warpgroups):
    tile_n = tiling_of(size, size).tile_n
    rows = chunk_rows(tile_n, size, warpgroups)
    assert tile_n % (rows * int(IN_FLIGHT)) == 0
    for words in (part_size(size, part) // 4 for part in range(num_parts(size))):
        layout = chunk_layout(rows, words, 2)
        bases = layout.reg_bases + layout.lane_bases + layout.warp_bases
        assert span(bases) == {(row, column) for row in range(rows) for column in range(words)}
        if words >= 16:  # eight lanes store 16 bytes each, to an atom of eight 16-byte columns
            lanes = span(layout.lane_bases[:3])
            assert len({(column // 2 % 8) ^ (row % 8) for row, column in lanes}) == 8


def test_small_boxes_are_gathered_instead():
    by_rows = {
        (size, block): ForwardConfig(BF16, size, block, causal=True, uniform=True).gathers
        for size in (64, 80, 128, 192, 256)
        for block in (0, 1, 8, 16, 24, 48, 64, 80, 96, 192, 256)
    }
    long_rows = {block for (size, block), found in by_rows.items() if found and size in (128, 256)}
    others = {block for (size, block), found in by_rows.items() if found and size not in (128, 256)}
    assert long_rows == {1, 24}
    assert others == {1, 8, 16, 24, 48, 80, 96}


def test_every_run_compiles_each_option_and_property_and_slow_runs_each_tiling():
    for option in fields(ForwardConfig):
        assert len({getattr(config, option.name) for config, _ in CONFIGS}) > 1, option.name
    assert {config.packed for config, _ in CONFIGS} == {"none", "e4m3", "e5m2", "int8"}
    tilings = {
        *(*TILINGS, SMALL_TILING, NARROW_TILING, HALF_TILING, WIDE_TILING, *CAPPED_TILINGS),
        *(*PACKED_TILINGS, SMALL_PACKED_TILING),
    }
    for name in (each.name for each in fields(Tiling)):
        compiled = {getattr(config.tiling, name) for config, _ in CONFIGS}
        assert compiled == {getattr(tiling, name) for tiling in tilings}, name
    assert {config.tiling for config, _ in [*CONFIGS, *OTHER_CONFIGS]} == tilings
    gathering = {config.tiling for config, _ in [*CONFIGS, *OTHER_CONFIGS] if config.gathers}
    assert gathering == tilings
    assert [tiling_of(size, size).width for size in (8, 64, 72, 128, 136, 256)] == [
        *(64, 64, 128, 128, 256, 256)
    ]


def test_caps_that_would_show_rounding_are_refused():
    assert refuse_cap(None) is refuse_cap(0.01) is refuse_cap(64) is None
    assert refuse_cap(1e9) == "logits_soft_cap is 1e+09; 1e-06 to 64 run"
    assert refuse_cap(1e-40) == "logits_soft_cap is 1e-40; 1e-06 to 64 run"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device": DeviceInfo("cuda", 108, "A100", capability=(8, 0))}, "A100 is not a Hopper"),
        ({"dtype": torch.float32}, "q is float32; float16 and bfloat16 run"),
        ({"v_head_size": 64}, None),
        ({"v_head_size": 264}, "v_head_size is 264; multiples of 8 up to 256 run"),
        ({"head_size": 512, "v_head_size": 512}, "multiples of 8 up to 256 run"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_a_reason(change, reason):
    question = {"device": H200, "dtype": BF16, "head_size": 128, "v_head_size": 128} | change
    answer = refuse(**question)
    assert answer is None if reason is None else reason in answer


# --- window attention -------------------------------------------------------------------------

WINDOWS = Problem(1, 3, 343, 16, F16, table_size=2197, learned_dtypes=(torch.float32,))
SHIFTED = {"num_masks": 1, "has_regions": True}


@pytest.mark.parametrize(
    ("change", "most_spilled"),
    [
        (SHIFTED, 200),
        ({"num_tokens": 512, "head_size": 32, "dtype": BF16}, 64),
        *rarely(
            ({"num_tokens": 256, "head_size": 30, "dtype": BF16}, 64),
            (SHIFTED | {"num_tokens": 417, "head_size": 32}, 64),  # 264 bytes of memory are left
            (
                SHIFTED
                | {"num_tokens": 1024, "head_size": 24, "table_size": None, "num_biases": 1},
                64,
            ),
        ),
    ],
    ids=str,
)
def test_window_attention_fits_a_multiprocessor(change, most_spilled, tmp_path):
    problem = replace(WINDOWS, **change)
    plan = make_plan(problem, H200)
    launcher = launch.make_launcher(problem, replace(plan, chunks=1), "*fp32", "*u8")
    compiled = launcher.compile(HOPPER)
    assert compiled.metadata.shared <= SHARED_MEMORY
    check_registers(compiled, tmp_path)
    used = resources(compiled, tmp_path)
    assert used["STACK"] <= most_spilled + SLACK, used
    code = disassemble(compiled, tmp_path)
    check_products_overlap(code)
    pieces = loops_that_multiply(code)
    careful = [body for body in pieces if any("FMNMX" in text for text in body)]
    quick = [body for body in pieces if body not in careful]
    assert len(quick) == plan.streams * (2 if problem.has_regions else 1)
    assert len(careful) == plan.streams
    for body in quick:
        exponentials = sum("MUFU.EX2" in text for text in body)
        of_pairs = problem.dtype == F16  # of which a quarter are polynomials
        assert exponentials == plan.piece // 2 - (plan.piece // 8 if of_pairs else 0)
        assert not any("F2FP" in text for text in body if of_pairs)
        assert not any(re.search(r"\b(LDL|STL)", text) for text in body)
    for body in careful:  # and for every tile of the decays of two rows
        exponentials = sum("MUFU.EX2" in text for text in body)
        assert exponentials == plan.piece // 2 + 2 * (plan.piece // ONLINE_TILE)


WALKS = {
    "columns": (make_columns_plan, partial(launch.make_columns_launcher, uses_pdl=True)),
    "rows": (make_rows_plan, launch.make_rows_launcher),
}


@pytest.mark.parametrize(
    "change",
    [
        SHIFTED | {"num_tokens": 49, "head_size": 32},
        *rarely(
            ({"num_tokens": 36, "head_size": 24, "table_size": None},),
            (SHIFTED | {"num_tokens": 64, "head_size": 64, "dtype": BF16},),
            ({"num_tokens": 48, "head_size": 32, "dtype": BF16},),
        ),
    ],
    ids=str,
)
def test_windows_of_one_tile_share_a_multiprocessor(change, tmp_path):
    problem = replace(WINDOWS, **change)
    for is_backward in (False, True):
        plan = replace(make_one_tile_plan(problem, H200, is_backward), chunks=1)
        if is_backward:
            launcher = one_tile.make_gradients_launcher(problem, plan, "*fp32", has_dlse=True)
        else:
            launcher = one_tile.make_launcher(problem, plan, "*fp32")
        compiled = launcher.compile(HOPPER)
        assert plan.programs * (compiled.metadata.shared + 1024) <= SHARED_MEMORY + 1024
        check_registers(compiled, tmp_path)
        used = resources(compiled, tmp_path)
        assert plan.programs * 128 * used["REG"] <= 1 << 16
        assert used["STACK"] <= 40 + SLACK, used


@pytest.mark.parametrize(
    ("change", "walk", "most_spilled"),
    [
        (SHIFTED, "columns", 136),
        (SHIFTED | {"num_tokens": 81, "head_size": 32}, "rows", 0),
        *rarely(
            (SHIFTED, "rows", 72),
            ({"num_tokens": 256, "head_size": 30, "dtype": BF16}, "columns", 216),
            ({"num_tokens": 256, "head_size": 32, "dtype": BF16}, "columns", 216),
            ({"num_tokens": 256, "head_size": 30, "dtype": BF16}, "rows", 216),
            ({"num_tokens": 576, "head_size": 24}, "rows", 80),
            (SHIFTED | {"num_tokens": 512, "head_size": 32, "dtype": BF16}, "rows", 184),
            (SHIFTED | {"num_tokens": 144, "head_size": 32}, "columns", 0),
        ),
    ],
    ids=str,
)
def test_gradients_of_windows_fit_a_multiprocessor(change, walk, most_spilled, tmp_path):
    problem = replace(WINDOWS, **change)
    make, make_one = WALKS[walk]
    plan = make(problem, H200)
    compiled = make_one(problem, replace(plan, chunks=1), "*fp32", "*u8").compile(HOPPER)
    assert compiled.metadata.shared <= SHARED_MEMORY
    check_registers(compiled, tmp_path)
    used = resources(compiled, tmp_path)
    assert used["STACK"] <= most_spilled + SLACK, used
    if problem.dtype == F16:  # float32 scores leave too few registers to some
        check_products_overlap(disassemble(compiled, tmp_path))


def test_what_goes_before_and_after_gradients_of_windows_compiles():
    launch.make_region_encoder("*u8", 343).compile(HOPPER)
    problem = replace(WINDOWS, head_size=32, dtype=BF16)
    deltas = launch.make_deltas_launcher(problem, has_dlse=True).compile(HOPPER)
    assert "ld.global.b16" not in deltas.asm["ptx"]
    launch.make_sums_launcher(3, 343, 11, uses_pdl=True).compile(HOPPER)
    padder = launch.make_padder(BF16, 6, 256, 30).compile(HOPPER)
    assert "st.global.v4.b32" in padder.asm["ptx"]
    one_tile.make_region_packer("*u8", 49).compile(HOPPER)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (SHIFTED, None),
        ({"dtype": torch.float32}, "q is float32"),
        ({"cosine": True}, "left to triton"),
        ({"table_size": None}, None),
        ({"table_size": None, "num_biases": 1}, None),
        ({"table_size": None, "num_biases": 2}, "several biases"),
        ({"learned_dtypes": (torch.float64,)}, "float64"),
        ({"mask_dtype": torch.bool, "num_masks": 1}, "dense mask"),
        ({"head_size": 20}, None),
        ({"head_size": 17}, "head_size is 17; multiples of 8"),
        ({"head_size": 30, "num_tokens": 64}, "in windows of more than 64 tokens"),
        ({"head_size": 72}, "head_size is 72"),
        ({"num_tokens": 32}, "num_tokens is 32; 33 to 1024"),
        (SHIFTED | {"num_tokens": 49, "head_size": 64}, None),
        (SHIFTED | {"num_tokens": 144, "num_windows": 85}, "windows times heads are 255; from 256"),
        (SHIFTED | {"num_tokens": 144, "num_windows": 86}, None),
        (SHIFTED | {"num_tokens": 216, "num_windows": 42}, "windows times heads are 126; from 128"),
        (SHIFTED | {"num_tokens": 216, "num_windows": 43}, None),
        (SHIFTED | {"num_tokens": 216, "num_windows": 1, "head_size": 24}, None),
        ({"num_tokens": 1025}, "num_tokens is 1025; 33 to 1024"),
        (SHIFTED | {"num_tokens": 1024, "head_size": 64}, "do not fit"),
    ],
    ids=str,
)
def test_window_attention_runs_where_it_is_faster_than_triton(change, reason):
    answer = hopper.supports(replace(WINDOWS, **change), H200)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("scale", [0.25, 1.0, 16.0, 1 / 16, 0.05, 1e-7, -0.25, -7.0, 0.0])
def test_a_scale_that_bias_can_be_divided_by(scale):
    q = torch.randn(64, generator=torch.Generator().manual_seed(0))
    found, normal = launch.normalise_scale(q, scale)
    assert normal >= 1 / 16
    assert torch.equal(found.double() * normal, q.double() * scale)
    if abs(scale) > 0.01:
        found, normal = launch.normalise_scale(q.half(), scale)
        assert torch.equal(found.double() * normal, q.half().double() * scale)


@pytest.mark.parametrize(("num_blocks", "is_far"), [((1 << 31) // 512, True), (1 << 20, False)])
def test_boxes_are_for_rows_that_32_bits_count(num_blocks, is_far):
    """Of a cache whose heads come before its slots, heads and slots of all blocks are rows."""
    cache = torch.empty(num_blocks, 8, 64, 32, dtype=F16, device="meta").transpose(1, 2)
    config = ForwardConfig(F16, 32, 64, causal=True)
    assert not config.gathers
    assert _is_far(config, cache, cache) is is_far
    by_slot = torch.empty(num_blocks, 64, 8, 32, dtype=F16, device="meta")
    assert not _is_far(config, by_slot, by_slot)
    assert replace(config, is_far=True).gathers


@pytest.mark.parametrize(("num_blocks", "is_far"), [(1 << 24, True), (1 << 23, False)])
def test_strides_of_scales_are_counted_in_64_bits_where_32_are_too_few(
    num_blocks, is_far, monkeypatch
):
    """Eight heads' scales of all tokens follow each other."""
    found = []

    def make(config):
        found.append(config)
        raise InterruptedError

    monkeypatch.setattr(forward_launch, "make_launcher", make)
    monkeypatch.setattr(forward_launch, "_on_its_device", lambda x, function: x)
    cache = torch.empty(1, 32, 8, 64, dtype=torch.int8, device="meta").expand(num_blocks, 32, 8, 64)
    scale = torch.empty(8, num_blocks, 32, device="meta").permute(1, 2, 0)
    q = torch.empty(4, 8, 64, dtype=F16, device="meta")
    numbers = torch.zeros(2, dtype=torch.int32, device="meta")
    with pytest.raises(InterruptedError):
        forward_launch.attend(
            q.clone(), q.new_empty(4, 8), q, cache, cache, numbers, numbers[1:], numbers[None],
            max_query_len=4, softmax_scale=1.0, causal=True, sliding_window=None,
            logits_soft_cap=None, alibi_slopes=None, sinks=None, k_scale=scale, v_scale=scale,
        )  # fmt: skip
    [config] = found
    assert config.is_far is is_far
    types = make_launcher(config).types
    assert {types[f"{name}s_{axis}"] for name in "kv" for axis in ("block", "slot", "head")} == {
        "i64" if is_far else "i32"
    }
