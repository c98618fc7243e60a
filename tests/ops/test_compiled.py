"""The small GPU kernels compile for Hopper, without a GPU.

Every run compiles each kernel with each size, type and option, and ``pytest -m slow`` every shipped
combination of them.
"""

import itertools
import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from tools.sass import (  # noqa: E402
    list_instructions,
    read_listing,
    resources,
    uninitialised_loads,
    uninitialised_reads,
)
from triton.backends.compiler import GPUTarget  # noqa: E402

from pagetile.fused.add_norm import triton as add_norm  # noqa: E402
from pagetile.fused.gated_activation import triton as gated_activation  # noqa: E402
from pagetile.fused.instance_norm import triton as instance_norm  # noqa: E402
from pagetile.fused.moe import triton as moe  # noqa: E402
from pagetile.fused.rms_norm import triton as rms_norm  # noqa: E402
from pagetile.fused.rotary import triton as rotary  # noqa: E402
from pagetile.fused.rotary_write import triton as rotary_write  # noqa: E402
from pagetile.fused.small_linear import hopper as small_linear_hopper  # noqa: E402
from pagetile.fused.small_linear import hopper_ring as small_linear_ring  # noqa: E402
from pagetile.fused.small_linear import plan as small_linear_plan  # noqa: E402
from pagetile.fused.small_linear import triton as small_linear  # noqa: E402
from pagetile.fused.small_linear.problem import Problem as SmallLinear  # noqa: E402
from pagetile.ops.copy_blocks import triton as copy_blocks  # noqa: E402
from pagetile.ops.merge_states import triton as merge_states  # noqa: E402
from pagetile.ops.window_attention.triton import gather_rows  # noqa: E402
from pagetile.ops.write_kv import triton as write_kv  # noqa: E402

SLACK = 0 if triton.__version__.startswith("3.6.") else 96
"""Bytes a thread that other releases may spill more than the one that GPUs are tested with, which
tiles were fitted to registers with."""
HOPPER = GPUTarget("cuda", 90, 32)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def rarely(*cases):
    """Parameters for ``pytest -m slow``: other cases compile each of their features."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def draw_by_turns(cases, numbers):
    """Every case with one of the numbers in turn; rarely, with the others."""
    for at, (case, number) in enumerate(itertools.product(cases, numbers)):
        is_drawn = at // len(numbers) % len(numbers) == at % len(numbers)
        yield (*case, number) if is_drawn else rarely((*case, number))[0]


def draw_each(*axes):
    """All combinations; only as many of them as have every value once are not rare."""
    most = max(map(len, axes))
    drawn = [tuple(axis[at % len(axis)] for axis in axes) for at in range(most)]
    for case in itertools.product(*axes):
        yield case if case in drawn else rarely(case)[0]


def check_registers(compiled, tmp_path):
    """ptxas has generated code that reads uninitialised registers."""
    listing = list_instructions(compiled, tmp_path)
    assert not uninitialised_loads(*listing)
    assert not uninitialised_reads(*listing)


LISTING = """
        /*0000*/                   STL [R1+0x8], R2 ;
        /*0010*/              @!P1 BRA `(.L_x_1) ;
        /*0020*/                   STL.64 [R1+0x10], R4 ;
.L_x_1:
        /*0030*/                   LDL R3, [R1+0x8] ;
        /*0040*/                   LDL R4, [R1+0x14] ;
        /*0050*/                   LDL R5, [R1+0x18] ;
        /*0060*/                   LOP3.LUT R5, R5, 0xfffffffe, RZ, 0xc0, !PT ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""


def test_a_load_that_nothing_was_stored_for_is_found():
    (load,) = uninitialised_loads(*read_listing(LISTING))
    assert load.startswith("LDL R4, [R1+0x14]")
    assert not uninitialised_loads(*read_listing(LISTING.replace("@!P1 BRA", "@!P1 NOP")))
    half = LISTING.replace("LDL R3, [R1+0x8]", "LDL.S16 R3, [R1+0xa]").replace("+0x14", "+0x10")
    assert not uninitialised_loads(*read_listing(half.replace("@!P1 BRA", "@!P1 NOP")))
    assert uninitialised_loads(*read_listing(half.replace("[R1+0x8]", "[R1+0x20]")))
    overwritten = "LDL R4, [R1+0x14] ;\n  /*0044*/ IMAD.MOV.U32 R4, RZ, RZ, "
    for source, count in (("RZ", 0), ("R9", 0), ("R4", 1)):
        listing = LISTING.replace("LDL R4, [R1+0x14]", overwritten + source)
        assert len(uninitialised_loads(*read_listing(listing))) == count


def assert_fits(launcher, tmp_path, spilled=0):
    """At most so many bytes a thread are spilled."""
    compiled = launcher.compile(HOPPER)
    used = resources(compiled, tmp_path)
    assert used["REG"] > 0
    assert used["STACK"] <= spilled + SLACK, used
    assert used["LOCAL"] == 0, used
    return compiled.asm["ptx"]


UNIFORM_LISTING = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   UIADD3 UR8, UP0, UR4, 0x2, URZ ;
        /*0030*/                   R2UR UR10, R3 ;
        /*0040*/                   R2UR UR11, R4 ;
.L_x_1:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R180, gdesc[UR8].tnspB, R24 ;
        /*0060*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0070*/                   EXIT ;
"""


def test_a_register_that_nothing_was_written_to_is_found():
    (read,) = uninitialised_reads(*read_listing(UNIFORM_LISTING))
    assert read.startswith("HGMMA")
    assert not uninitialised_reads(*read_listing(UNIFORM_LISTING.replace("@P0 BRA", "@P0 NOP")))
    compared = "UISETP.NE.AND UP0, UPT, UR9, URZ, UPT"  # writes a predicate
    listing = UNIFORM_LISTING.replace("R2UR UR11, R4", compared)
    assert len(uninitialised_reads(*read_listing(listing))) == 2  # the comparison, and the product
    sent = UNIFORM_LISTING.replace("STG.E desc[UR4][R2.64], R5", "UTMASTG.3D [UR8], [UR4]")
    assert len(uninitialised_reads(*read_listing(sent))) == 2  # UR9 is a coordinate
    all_four = UNIFORM_LISTING.replace("@P0 BRA", "@P0 NOP").replace("R180, gdesc", "gdesc")
    assert len(uninitialised_reads(*read_listing(all_four))) == 1  # UR9


def test_a_move_of_nothing_that_is_overwritten_is_left_out():
    def read_from(register, between="NOP"):
        made = f"UIADD3 UR20, {register}, 0x1, URZ"
        added = f"UMOV UR20, UR30 ;\n /*54*/ {between} ;\n /*58*/ {made} ;\n /*5a*/ STG.E"
        listing = UNIFORM_LISTING.replace("@P0 BRA", "@P0 NOP").replace("STG.E", added)
        return uninitialised_reads(*read_listing(listing))

    assert not read_from("UR4")
    assert not read_from("UR4", "UMOV UR21, UR20 ;\n /*56*/ UMOV UR21, URZ")
    assert len(read_from("UR4", "UMOV UR21, UR20 ;\n /*56*/ UIADD3 UR22, UR21, 0x1, URZ")) == 1
    assert [text.split()[0] for text in read_from("UR20")] == ["UMOV"]


@pytest.mark.parametrize("word", [1, 2, 4, 8, 16])
def test_copy_blocks_moves_words_of_the_width_that_it_is_given(word, tmp_path):
    ptx = assert_fits(copy_blocks.make_launcher(word), tmp_path)
    width = ".v2.b64" if word == 16 else f".b{8 * word}"
    assert re.search(rf"@%p\d+ ld.global{width} ", ptx)
    assert re.search(rf"@%p\d+ st.global{width} ", ptx)


@pytest.mark.parametrize(
    ("dtype", "width"), [*draw_each([F32, F16, BF16], [8, 72, 128, 512])], ids=str
)
def test_merge_states(dtype, width, tmp_path):
    factor = 16 // dtype.itemsize
    ptx = assert_fits(
        merge_states.make_launcher(dtype, 8, width, factor, is_aligned=True), tmp_path
    )
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


PLAIN = draw_each([F32, F16, BF16], [BF16, F32, F16], ["none"])
EIGHT_BITS = draw_each([F16, BF16], [E4M3, E5M2, INT8], ["head", "token"])


@pytest.mark.parametrize(("dtype", "cache_dtype", "scales"), [*PLAIN, *EIGHT_BITS], ids=str)
def test_write_kv(dtype, cache_dtype, scales, tmp_path):
    factors = 16 // dtype.itemsize, 16 // cache_dtype.itemsize
    launcher = write_kv.make_launcher(
        dtype, cache_dtype, 16, 8, 128, 128, scales, *factors, is_aligned=True
    )
    ptx = assert_fits(launcher, tmp_path)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize(("size", "v_size", "block_size"), [(8, 512, 1), (72, 24, 3), (256, 8, 7)])
def test_write_kv_of_other_sizes(size, v_size, block_size, tmp_path):
    launcher = write_kv.make_launcher(
        BF16, BF16, block_size, 5, size, v_size, "none", 8, 8, is_aligned=True
    )
    assert_fits(launcher, tmp_path)


@pytest.mark.parametrize(("fills", "size"), [*draw_each([False, True], [6, 36, 288])])
def test_rows_of_a_map_move_sixteen_bytes_at_a_time(size, fills, tmp_path):
    ptx = assert_fits(gather_rows.make_launcher(torch.int64, size, fills, is_wide=True), tmp_path)
    assert "ld.global.v2.b64" in ptx
    assert "st.global.v2.b64" in ptx


WORDS = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize(("word", "size"), [*draw_each(WORDS, [1, 3, 1100])], ids=str)
def test_rows_of_a_map_of_any_width(word, size, tmp_path):
    assert_fits(gather_rows.make_launcher(word, size, fills=True, is_wide=False), tmp_path)


INSTANCE_NORMS = [(BF16, "none"), (BF16, "plain"), (BF16, "norm"), (F32, "norm")]


@pytest.mark.parametrize(("chunks", "form"), [*draw_each([1, 128], INSTANCE_NORMS)], ids=str)
def test_instance_norm(chunks, form, tmp_path):
    dtype, residual = form
    tile = instance_norm.ONE_TILE[residual] if chunks == 1 else instance_norm.TILE
    names = list(instance_norm.KERNELS) if chunks > 1 else ["finish", "finish_gradients"]
    for name in names:
        ptx = assert_fits(
            instance_norm.make_launcher(name, (dtype, dtype), residual, chunks, tile, 8), tmp_path
        )
        assert "ld.global.v4.b32" in ptx


RMS_NORMS = [(BF16, "rounded"), (F16, "scaled"), (F32, "shifted")]


@pytest.mark.parametrize(
    ("form", "size"), [*draw_each(RMS_NORMS, [72, 128, 1024, 5120, 16384])], ids=str
)
def test_rms_norm(form, size, tmp_path):
    dtype, kind = form
    factor = 16 // dtype.itemsize
    ptx = assert_fits(rms_norm.make_launcher(dtype, size, kind, factor, is_aligned=True), tmp_path)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


MOE_TILES = [(F32, 64), (F16, 16), (BF16, 32), (BF16, 64)]
OTHER_MOE_TILES = [(F32, 16), (F32, 32), (F16, 32), (F16, 64), (BF16, 16)]
WEIGHTS = {
    "rows": ((2 * 768 * 2048, 2048, 1), (0, 0)),
    "columns": ((2 * 768 * 2048, 2, 2 * 768), (2 * 768, 2)),
}


@pytest.mark.parametrize(
    ("dtype", "tile_m", "weights"),
    [
        *draw_by_turns(MOE_TILES, [*WEIGHTS]),
        *rarely(*((*tile, weights) for tile in OTHER_MOE_TILES for weights in WEIGHTS)),
    ],
    ids=str,
)
def test_moe(dtype, tile_m, weights, tmp_path):
    (strides, bias), sizes = WEIGHTS[weights], (2048, 768)
    activation = "silu" if bias == (0, 0) else "clamped"
    aligned = True, True, bias == (0, 0)
    in_turn = bias != (0, 0)
    launcher = moe.make_gate_up(dtype, *sizes, aligned, strides, bias, in_turn, activation, tile_m)
    ptx = assert_fits(launcher, tmp_path)
    assert ("mma" in ptx) == (dtype != F32)
    assert "cp.async" in ptx
    down = (768 * 2048, 768, 1) if strides[2] == 1 else (768 * 2048, 1, 2048)
    bias = bias and (2048 * bool(bias[0]), bool(bias[1]))
    ptx = assert_fits(moe.make_down(dtype, F32, *sizes, (True,), down, bias, tile_m), tmp_path)
    assert "cp.async" in ptx
    assert_fits(moe.make_sort(128), tmp_path)
    assert_fits(moe.make_sum(dtype, 2048, 8), tmp_path)


def test_rms_norm_at_any_address(tmp_path):
    assert_fits(rms_norm.make_launcher(BF16, 77, "rounded", 1, is_aligned=False), tmp_path)


ROTATIONS = [(128, 64, False), (80, 16, False), (64, 32, True)]


@pytest.mark.parametrize(("dtype", "form"), [*draw_each([F32, F16, BF16], ROTATIONS)], ids=str)
def test_rotary(dtype, form, tmp_path):
    size, half, is_shared = form
    factor = 16 // dtype.itemsize
    launcher = rotary.make_launcher(dtype, (16, 8), size, half, is_shared, factor, is_aligned=True)
    ptx = assert_fits(launcher, tmp_path)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


def test_rotary_at_any_address(tmp_path):
    assert_fits(
        rotary.make_launcher(BF16, (7, 1), 1024, 511, is_shared=False, factor=1, is_aligned=False),
        tmp_path,
    )


NORMS = [("", "rounded"), ("shifted", "shifted")]


@pytest.mark.parametrize(
    ("dtype", "size", "norms"), [*draw_each([F32, BF16], [72, 1024, 5120, 16384], NORMS)], ids=str
)
def test_add_norm(dtype, size, norms, tmp_path):
    before, after = norms
    launcher = add_norm.make_launcher(dtype, size, before, after, is_aligned=True, is_early=True)
    ptx = assert_fits(launcher, tmp_path, spilled=128 if size == 16384 else 0)
    assert "ld.global.v4.b32" in ptx
    assert "griddepcontrol.wait" in ptx
    assert_fits(
        add_norm.make_launcher(dtype, 77, before, after, is_aligned=False, is_early=False), tmp_path
    )


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [*draw_each([F32, F16, BF16], ["silu", "gelu", "gelu_tanh", "relu"])],
    ids=str,
)
def test_gated_activation(dtype, activation, tmp_path):
    ptx = assert_fits(
        gated_activation.make_launcher(dtype, 3072, activation, is_aligned=True, is_early=True),
        tmp_path,
    )
    assert "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx
    assert_fits(
        gated_activation.make_launcher(dtype, 77, activation, is_aligned=False, is_early=False),
        tmp_path,
    )


ROTARY_WRITES = [
    # sizes, half, angles
    ((16, 8, 128, 128), 64, "own"),
    ((32, 8, 80, 80), 16, "own"),
    ((8, 4, 256, 256), 128, "own"),
    ((64, 8, 64, 64), 32, "shared"),
    ((4, 4, 128, 64), 64, ""),
]


def draw_rotary_writes():
    """Every size with two of the norms and types, each of those with some sizes; rarely, all."""
    norms = [("", ""), ("rounded", "rounded"), ("shifted", "shifted")]
    others = [*itertools.product((F32, BF16), norms)]
    for at, case in enumerate(ROTARY_WRITES):
        for number, (dtype, norm) in enumerate(others):
            is_drawn = (number - at) % 3 == 0
            values = (dtype, *case, norm)
            yield values if is_drawn else rarely(values)[0]


@pytest.mark.parametrize(("dtype", "sizes", "half", "angles", "norms"), [*draw_rotary_writes()])
def test_rotary_write(dtype, sizes, half, angles, norms, tmp_path):
    factors = (16 // dtype.itemsize,) * 2
    launcher = rotary_write.make_launcher(
        (dtype, dtype), sizes, half, 16, norms, angles, factors, "none", is_aligned=True,
        is_early=True,
    )  # fmt: skip
    ptx = assert_fits(launcher, tmp_path)
    assert re.search(r"ld.global.v[24].b", ptx)
    assert re.search(r"st.global.v[24].b", ptx)


@pytest.mark.parametrize("scales", ["head", "token"])
def test_rotary_write_to_8_bits(scales, tmp_path):
    launcher = rotary_write.make_launcher(
        (BF16, torch.float8_e4m3fn), (16, 8, 128, 128), 64, 16, ("rounded", "rounded"), "own",
        (8, 16), scales, is_aligned=True, is_early=True,
    )  # fmt: skip
    ptx = assert_fits(launcher, tmp_path)
    assert "griddepcontrol.wait" in ptx
    assert "cvt.rn.satfinite.e4m3x2" in ptx


PRODUCTS = [(1024, 4096, ""), (2048, 1024, ""), (1024, 3072, "silu"), (3072, 1024, ""),
            (4096, 6144, ""), (14336, 4096, ""), (4096, 14336, "silu"), (3584, 18944, "gelu_tanh"),
            (18944, 3584, ""), (1024, 151936, ""), (64, 24, "")]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "num_columns", "activation", "num_rows"),
    [*draw_by_turns(PRODUCTS, [1, 2, 4, 8, 32, 64])],
)
def test_products_of_few_rows(size, num_columns, activation, num_rows, tmp_path):
    problem = SmallLinear(num_rows, size, num_columns, BF16, bool(activation))
    plan = small_linear_plan.make_plan(problem)
    launcher = small_linear.make_launcher(
        plan, BF16, num_rows, size, "", activation, has_residual=not activation
    )
    compiled = launcher.compile(HOPPER)
    used = resources(compiled, tmp_path)
    is_used = small_linear_plan.is_faster(problem)
    assert used["STACK"] <= SLACK or not is_used, (plan, used)
    assert compiled.metadata.shared <= 227 << 10
    assert "griddepcontrol.wait" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("size", "num_columns", "activation", "kind"),
    [*draw_by_turns(PRODUCTS, ["rounded", "scaled", "shifted"])],
)
def test_products_of_few_rows_with_a_norm(size, num_columns, activation, kind, tmp_path):
    for num_rows in (1, 2):
        problem = SmallLinear(num_rows, size, num_columns, BF16, bool(activation), has_norm=True)
        if not small_linear_plan.is_faster(problem):
            continue
        plan = small_linear_plan.make_plan(problem)
        launcher = small_linear.make_launcher(plan, BF16, num_rows, size, kind, activation)
        ptx = assert_fits(launcher, tmp_path)
        assert "ld.global.v4.b32" in ptx


RESIDENT = [(1024, 4096, "", "rounded"), (2048, 1024, "", ""), (1024, 3072, "silu", "rounded"),
            (3072, 1024, "", ""), (1032, 40, "gelu", "shifted")]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "num_columns", "activation", "kind", "num_rows"), [*draw_by_turns(RESIDENT, [8, 16])]
)
def test_products_whose_weights_are_held_in_registers(
    size, num_columns, activation, kind, num_rows, tmp_path
):
    problem = SmallLinear(num_rows, size, num_columns, BF16, bool(activation), bool(kind))
    plan = small_linear_plan.plan_resident(problem)
    launcher = small_linear_hopper.make_launcher(
        plan, BF16, size, kind, activation, has_residual=not activation
    )
    assert_fits(launcher, tmp_path)
    code, _ = list_instructions(launcher.compile(HOPPER), tmp_path)
    names = [re.sub(r"^@!?U?P\d+ ", "", line).split()[0].partition(".")[0] for line in code]
    wait = names.index("ACQBULK")
    wide = (1 + bool(activation)) * plan.tile_n * -(-size // plan.tile_k) * plan.tile_k
    assert names[:wait].count("LDG") >= wide * 2 // 16 // (32 * plan.num_warps)
    # All of x is asked for before the first product waits for some of it.
    products = [at for at, name in enumerate(names) if name == "HMMA"]
    loads = [at for at, name in enumerate(names) if name == "LDG"]
    assert wait < max(loads) < min(products)


@pytest.mark.parametrize(
    ("num_rows", "size", "num_columns"),
    [(64, 2048, 1024), (64, 3072, 1024), (256, 2048, 1024), (256, 3072, 1024), (100, 520, 70)],
)
def test_partial_products_by_tma(num_rows, size, num_columns, tmp_path):
    plan = small_linear_plan.plan_hopper_parts(SmallLinear(num_rows, size, num_columns, BF16))
    launcher = small_linear_ring.make_launcher(
        plan, BF16, size, is_partial=True, is_even=num_columns % 8 == 0
    )
    assert_fits(launcher, tmp_path)
    compiled = launcher.compile(HOPPER)
    if num_rows == 64:  # two programs find room
        assert compiled.metadata.shared <= 113 << 10
        assert resources(compiled, tmp_path)["REG"] <= 128
    code, _ = list_instructions(compiled, tmp_path)
    names = [re.sub(r"^@!?U?P\d+ ", "", line).split()[0].partition(".")[0] for line in code]
    wait = names.index("ACQBULK")
    # Weights of all slots are asked for before the wait, x behind it.
    assert names[:wait].count("UTMALDG") == plan.stages * plan.tile_k // 64
    assert names[wait:].count("UTMALDG") >= plan.stages * plan.tile_k // 64
    # Products of a slot wait for those of the slot before, and not for their own.
    waits = [line for line in code if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 2, waits


STREAMED = [(4096, 6144, "", False), (4096, 14336, "silu", False), (14336, 4096, "", True),
            (1024, 151936, "", False)]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "num_columns", "activation", "is_cut", "num_rows"),
    [*draw_by_turns(STREAMED, [8, 16, 32, 64])],
)
def test_products_whose_weights_stream(size, num_columns, activation, is_cut, num_rows, tmp_path):
    problem = SmallLinear(num_rows, size, num_columns, BF16, bool(activation))
    make_plan = small_linear_plan.plan_hopper_parts if is_cut else small_linear_plan.plan_ring
    plan = make_plan(problem)
    launcher = small_linear_ring.make_launcher(
        plan, BF16, size, activation, is_partial=is_cut, is_even=True
    )
    assert_fits(launcher, tmp_path)
    compiled = launcher.compile(HOPPER)
    # Programs of an output head share a multiprocessor.
    assert compiled.metadata.shared <= (113 if num_columns > 65536 else 221) << 10
    assert resources(compiled, tmp_path)["REG"] <= 128
    code, _ = list_instructions(compiled, tmp_path)
    names = [re.sub(r"^@!?U?P\d+ ", "", line).split()[0].partition(".")[0] for line in code]
    wait = names.index("ACQBULK")
    copies = (1 + bool(activation)) * plan.stages * plan.tile_k // 64
    assert names[:wait].count("UTMALDG") == copies
    assert "PREEXIT" in names[:wait]
    waits = [line for line in code if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 2, waits


@pytest.mark.parametrize("num_rows", [1, 4])
def test_products_of_few_rows_in_float32(num_rows, tmp_path):
    plan = small_linear_plan.make_plan(SmallLinear(num_rows, 1024, 3072, F32, is_gated=True))
    assert plan.kind == "few"
    assert_fits(small_linear.make_launcher(plan, F32, num_rows, 1024, "", "silu"), tmp_path)
