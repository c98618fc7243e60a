"""The sampling kernels compile for Hopper without a GPU, and their passes stay in registers."""

import re

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from tools.sass import resources  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from pagetile.engine import triton_cut, triton_draw, triton_logprobs  # noqa: E402

ROWS = {
    "rows": "*i32",
    "lengths": "*i32",
    "ints": "*i32",
    "floats": "*fp64",
    "addresses": "*i64",
    "stride": "i32",
    "vocab_size": "i32",
}
LOGITS = {"logits": "*bf16", **ROWS}


def compile_kernel(kernel, types, constants, **options):
    """Compile for arguments whose pointers and sizes are multiples of 16."""
    names = kernel.arg_names
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in types
        if name not in ("num_words", "num_tiles")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("masks", [{}, {"step_masks": "*i32"}], ids=["free", "masked"])
@pytest.mark.parametrize("tiles", [1, 8])
def test_score_reads_logits_and_tables_in_wide_words(tiles, masks, tmp_path):
    outputs = dict.fromkeys(("bests", "scores", "raw_bests", "sums"), "*fp32")
    types = {**outputs, "tokens": "*i32", **LOGITS, **masks, "num_words": "i32"}
    constants = {
        "NUM_TILES": 128, "TILE": triton_draw.TILE, "TILES": tiles, "LEAVES_OUT": False,
    }  # fmt: skip
    if not masks:
        constants["step_masks"] = None
    most = triton_draw.MOST_REGISTERS if tiles > 1 else None
    compiled = compile_kernel(triton_draw.score_kernel, types, constants, num_warps=8, maxnreg=most)
    used = resources(compiled, tmp_path)
    if tiles == 1:  # four programs a multiprocessor, or three
        assert used["REG"] <= (72 if masks else 64), used
    assert used["STACK"] <= (16 if tiles > 1 else 0), used
    assert used["LOCAL"] == 0, used
    # Eight logits; eight biases and eight counts of two words each. Without masks, a program of
    # several tiles reads all of its logits at once, and those of a tile again.
    ahead = tiles + 1 if tiles > 1 and not masks else 0
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.asm["ptx"])) == 5 + ahead


@pytest.mark.parametrize("leaves_out", [False, True])
def test_score_looks_at_a_row_before_its_logits_where_many_rows_get_no_token(leaves_out):
    outputs = dict.fromkeys(("bests", "scores", "raw_bests", "sums"), "*fp32")
    types = {**outputs, "tokens": "*i32", **LOGITS, "num_words": "i32"}
    constants = {
        "NUM_TILES": 128, "TILE": triton_draw.TILE, "TILES": 8, "LEAVES_OUT": leaves_out,
        "step_masks": None,
    }  # fmt: skip
    most = triton_draw.MOST_REGISTERS
    compiled = compile_kernel(triton_draw.score_kernel, types, constants, num_warps=8, maxnreg=most)
    ptx = compiled.asm["ptx"]
    first_logits, first_branch = ptx.index("ld.global.v4.b32"), re.search(r"@%p\d+ bra", ptx)
    assert first_branch is not None
    assert (first_branch.start() < first_logits) == leaves_out


def test_the_passes_of_cut_need_no_exchange_between_threads(tmp_path):
    outputs = {"chosen": "*i64", "last_tokens": "*i64", "largest": "*fp32"}
    types = {**outputs, **LOGITS, "num_words": "i32"}
    constants = {"step_masks": None, "THREADS": 512, "EACH": 8}
    compiled = compile_kernel(triton_cut.cut_kernel, types, constants, num_warps=16, maxnreg=64)
    used = resources(compiled, tmp_path)
    assert used["SHARED"] <= 2048, used  # of reductions between passes; a tile would take 16 KiB


def test_report_and_choose_compile(tmp_path):
    types = {
        "report": "*i32", "chosen": "*i64", "bests": "*fp32", "sums": "*fp32", "logits": "*bf16",
        "rows": "*i32", "ints": "*i32", "stride": "i32", "vocab_size": "i32", "num_tiles": "i32",
    }  # fmt: skip
    constants = {"TILE": triton_draw.TILE, "NUM_TILES": 128, "MAX_TOP": 20}
    compiled = compile_kernel(triton_logprobs.report_kernel, types, constants, num_warps=8)
    assert resources(compiled, tmp_path)["STACK"] == 0
    types = {
        "chosen": "*i64", "largest": "*fp32", "last_tokens": "*i64", "lengths": "*i32",
        "bests": "*fp32", "scores": "*fp32", "tokens": "*i32", "rows": "*i32", "ints": "*i32",
        "floats": "*fp64", "addresses": "*i64", "vocab_size": "i32", "num_tiles": "i32",
    }  # fmt: skip
    compiled = compile_kernel(triton_draw.choose_kernel, types, {"NUM_TILES": 128}, num_warps=1)
    assert resources(compiled, tmp_path)["STACK"] == 0
