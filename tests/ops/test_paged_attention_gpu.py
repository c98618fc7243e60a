"""The GPU's implementations: the case table on a GPU, tiny cases under the interpreter."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_paged_attention import CASES

from pagetile import PagedBatch, paged_attention
from pagetile.device import DeviceInfo, refusing_to_wait
from pagetile.errors import ShapeError, UnsupportedError
from pagetile.fused.rotary_write import Heads, rotate_and_write
from pagetile.shapes import power_of_2
from pagetile.testing import (
    PagedCase,
    assert_matches,
    make_inputs,
    oracle,
    random_case,
)
from pagetile.tiles.state import AttentionOutput

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")

import triton.language as tl
from triton import jit

from pagetile.ops.paged_attention import hopper, hopper_prefill, triton
from pagetile.ops.paged_attention.hopper import SPECIALISED
from pagetile.ops.paged_attention.plan.prefill import short_len
from pagetile.ops.paged_attention.problem import Arguments, form_of
from pagetile.ops.paged_attention.triton import DECODE, prepare_short
from pagetile.ops.paged_attention.triton_work import choose_whole
from pagetile.tiles.hopper.dividing import pack_of
from pagetile.tiles.hopper.tiling import tiling_of
from pagetile.tiles.triton import workspace

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
E5M2, INT8 = torch.float8_e5m2, torch.int8
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TINY = 12_000  # scores that the interpreter computes in some tenths of a second
IMPLEMENTATIONS = [
    pytest.param("triton", marks=pytest.mark.interpret),
    pytest.param("hopper", marks=pytest.mark.gpu),
]
MIXING = [IMPLEMENTATIONS[0], pytest.param("hopper_prefill", marks=pytest.mark.gpu)]


def attend(inputs, impl, **changes):
    """A call where ``impl`` can run; skipped where it says that it cannot."""
    there = inputs.to(DEVICE)
    try:
        out, lse = there.attend(impl=impl, out=there.out, **changes)
    except UnsupportedError as error:
        if impl == "triton":
            raise
        pytest.skip(str(error))
    return AttentionOutput(out.cpu(), lse.cpu())


def plan(inputs, impl, **changes):
    device = DeviceInfo.of(torch.device("cuda", 0)) if ON_GPU else DeviceInfo("cpu", 3)
    module = {"triton": triton, "hopper": hopper, "hopper_prefill": hopper_prefill}[impl]
    return module.make_plan(inputs.problem, device, **changes)


def is_tiny(case):
    work = sum(a * b for a, b in zip(case.query_lens, case.seq_lens, strict=True)) * case.num_heads
    return work <= TINY and max((*case.seq_lens, 0)) <= 150 and case.head_size <= 128


def is_interpreted(case):
    """Triton 3.6's interpreter computes products of bfloat16 wrongly."""
    return is_tiny(case) and BF16 not in (case.dtype, case.cache_dtype)


def assert_same_bits(result, expected):
    for got, wanted in zip(result, expected, strict=True):
        assert torch.equal(got, wanted)


def assert_a_captured_call_takes_other_lengths(inputs, reductions, **options):
    """Replays give the same bits as calls made for the lengths."""
    inputs.attend(out=inputs.out, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = inputs.attend(out=inputs.out, **options)
    lengths = inputs.batch.seq_lens.clone()
    for shorter in reductions:
        inputs.batch.seq_lens.copy_((lengths - shorter).clamp(min=0))
        inputs.out.fill_(torch.nan)
        graph.replay()
        there = inputs.replace(out=torch.empty_like(inputs.out))
        assert_same_bits(result, there.attend(out=there.out, **options))
        assert not result.out.isnan().any()


@pytest.mark.interpret
@pytest.mark.parametrize(
    "case", [case for case in CASES if ON_GPU or is_interpreted(case)], ids=str
)
def test_the_case_table_matches_float64(case):
    inputs = make_inputs(case)
    assert_matches(attend(inputs, "triton"), inputs)


def on_hopper(case, dtype):
    """The same case in types that Hopper's kernels take."""
    kv_dtype = case.kv_dtype if case.cache_dtype.itemsize == 1 else None
    return make_inputs(replace(case, dtype=dtype, kv_dtype=kv_dtype))


def is_grouped(problem):
    """Whether a warpgroup's products take up to 64 rows."""
    sizes = problem.head_size, problem.v_head_size
    return problem.kv_dtype.itemsize == 2 and min(sizes) > 32 and max(sizes) <= 128


def test_hopper_supports_its_own_problems():
    """An implementation that refuses more would skip below."""
    H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
    drawn = [on_hopper(case, BF16).problem for case in CASES]
    problems = [problem for problem in drawn if problem.is_aligned]
    for problem in drawn:
        if not problem.is_aligned:
            for module in (hopper, hopper_prefill):
                assert module.supports(problem, H200) is not None
    decode = [hopper.supports(problem, H200) is None for problem in problems]
    assert sum(16 < p.rows <= 64 and taken for p, taken in zip(problems, decode, strict=True)) >= 3
    prefill = [hopper_prefill.supports(problem, H200) is None for problem in problems]
    assert decode == [p.rows <= (64 if is_grouped(p) else 16) and p.width <= 256 for p in problems]
    many = [p.rows > 64 and p.width <= 256 for p in problems]
    assert prefill == many
    narrow = [replace(case, query_lens=(70,), seq_lens=(70,)) for case in CASES if case.v_head_size]
    taken = [hopper_prefill.supports(on_hopper(case, BF16).problem, H200) for case in narrow]
    assert sum(reason is None for reason in taken) >= 3
    assert sum(decode) >= 19
    assert sum(prefill) >= 20
    odd = [case for _, case in ODD_GROUPS]
    for case in (*EIGHT_BITS, *BENT, *NARROW_VALUES, *SMALL_BLOCKS, *odd):
        assert hopper_prefill.supports(make_inputs(replace(case, dtype=BF16)).problem, H200) is None
    for case in (*PADDED, *JOINED):
        assert hopper.supports(without_spare_rows(case).problem, H200) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("impl", ["hopper", "hopper_prefill"])
def test_the_case_table_matches_float64_on_hopper(case, dtype, impl):
    inputs = on_hopper(case, dtype)
    assert_matches(attend(inputs, impl), inputs)


SMALL_BLOCKS = [
    *(
        PagedCase((70, 300, 9), (70, 700, 600), 4, 2, head_size=d, block_size=b)
        for b in (1, 2, 4, 8)
        for d in (64, 128, 256)
    ),
    *(PagedCase((150, 70), (150, 333), 4, 2, head_size=128, block_size=b) for b in (3, 5, 12, 100)),
    *(PagedCase((200,), (200,), 8, 1, head_size=d, block_size=1) for d in (8, 72, 136, 248)),
    *(
        PagedCase((150, 70), (700, 333), 4, 2, head_size=128, block_size=b)
        for b in (24, 48, 80, 96)
    ),
    *(PagedCase((150, 70), (700, 333), 4, 2, head_size=80, block_size=b) for b in (48, 96, 192)),
    *(
        PagedCase((200, 70), (900, 400), 4, 2, head_size=d, block_size=b, sliding_window=300)
        for d in (192, 256)
        for b in (1, 16)
    ),
    PagedCase((200, 70), (700, 300), 4, 4, head_size=128, block_size=1, sliding_window=100),
    PagedCase((200, 70), (700, 300), 6, 2, head_size=64, block_size=2, sliding_window=300),
    PagedCase((200, 70), (300, 301), 8, 2, head_size=128, block_size=1, causal=False),
    PagedCase((80, 90), (3, 0), 4, 2, head_size=128, block_size=4),
    PagedCase((80, 90), (3, 0), 4, 2, head_size=64, block_size=1, causal=False),
]


def check_prefill(case, **changes):
    """Compare prefill by Hopper's kernel, which must support it; ``changes`` apply to its plan."""
    inputs = make_inputs(case)
    there = inputs.to("cuda")
    chosen = plan(inputs, "hopper_prefill", **changes) if changes else None
    for name, value in changes.items():
        assert getattr(chosen, name) == value
    result = there.attend(impl="hopper_prefill", out=there.out, plan=chosen)
    assert_matches(AttentionOutput(*(tensor.cpu() for tensor in result)), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_capped_sequence_does_not_see_its_neighbour_s_nan(size):
    case = PagedCase((70, 70), (70, 70), 4, 2, head_size=size, dtype=BF16, logits_soft_cap=30.0)
    there = make_inputs(case).to("cuda")
    before = there.attend(impl="hopper_prefill")
    start, end = there.batch.cu_seqlens_q[-2:].tolist()
    there.q[start:end] = torch.nan
    after = there.attend(impl="hopper_prefill")
    assert_same_bits([x[:start] for x in after], [x[:start] for x in before])
    assert after.out[start:end].isnan().all()


packed_case = partial(PagedCase, kv_dtype=E4M3, scales="head")
EIGHT_BITS = [
    *(
        packed_case((70, 300, 9), (70, 700, 600), 4, 2, head_size=d, block_size=b, scales=scales)
        for d, b, scales in (
            *((64, 16, "head"), (64, 1, "tensor"), (128, 16, "head"), (128, 24, "tensor")),
            *((128, 128, "head"), (256, 16, "head"), (256, 3, "head")),
        )
    ),
    *(
        packed_case((200, 70), (900, 400), 8, 2, head_size=d, block_size=16)
        for d in (16, 32, 48, 80, 96, 112, 144, 192, 208)
    ),
    packed_case((1, 300, 4, 70), (2000, 700, 500, 70), 8, 2, head_size=128),  # mixed
    packed_case((80, 90), (3, 0), 4, 2, head_size=128),
    packed_case((80, 90), (3, 0), 4, 2, head_size=64, block_size=1, causal=False),
    packed_case((64,) * 37 + (40, 33), (64,) * 20 + (200,) * 19, 16, 4, head_size=128),
    packed_case(
        (200, 70), (3000, 333), 6, 2, head_size=128, sliding_window=150, logits_soft_cap=5.0,
        has_alibi=True, has_sinks=True,
    ),
    packed_case((200, 70), (900, 333), 8, 1, head_size=256, sliding_window=300),
    packed_case((200, 70), (300, 301), 4, 4, head_size=64, has_alibi=True),
]  # fmt: skip


def with_rows_of_any_size(inputs):
    """The same with queries too large for float16, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-100, 2, inputs.q.shape[:2], generator=generator)
    q = (inputs.q.double() * torch.exp2(exponents[..., None].double())).to(inputs.q.dtype)
    q[3, 1] = 0
    q[4, :, 1:] *= 2.0**-60
    return replace(inputs, q=q)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 5.0, "has_alibi": True}], ids=str)
def test_queries_of_any_size_over_8_bit_caches(size, options):
    case = packed_case((200, 70), (900, 400), 8, 2, head_size=size, dtype=BF16, **options)
    inputs = with_rows_of_any_size(make_inputs(case))
    assert_matches(attend(inputs, "hopper_prefill"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize(
    ("dtype", "by_token"), [(F16, False), (BF16, False), (BF16, True)], ids=str
)
def test_prefill_over_8_bit_caches(case, kv_dtype, dtype, by_token):
    scales = "token" if by_token else case.scales
    case = replace(case, dtype=dtype, kv_dtype=kv_dtype, scales=scales)
    check_prefill(case, unpacks=False)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EIGHT_BITS, ids=str)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F16, E4M3), (BF16, E5M2), (BF16, INT8)], ids=str)
def test_prefill_over_unpacked_8_bit_caches(case, dtype, kv_dtype):
    check_prefill(replace(case, dtype=dtype, kv_dtype=kv_dtype), unpacks=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_unpacked_keys_may_be_divided_among_programs(size):
    case = packed_case((70, 300, 9), (9000, 5000, 6000), 4, 2, size, dtype=BF16)
    assert plan(make_inputs(case), "hopper_prefill", unpacks=True).divides_keys
    check_prefill(case, unpacks=True)


@pytest.mark.gpu
def test_long_prompts_over_8_bit_caches_are_unpacked():
    """Chosen by "auto", also with no page for some of the sequences."""
    case = packed_case((2048, 1, 1500), (2048, 700, 3000), 8, 2, 128, dtype=BF16)
    inputs = make_inputs(case)
    assert plan(inputs, "hopper_prefill").unpacks
    assert_matches(attend(inputs, "auto"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_prefill_reads_every_code_as_torch_does(kv_dtype, dtype, size):
    """With one key a sequence the result is its value: the 8-bit number times the scale."""
    case = PagedCase(
        (80,), (1,), 256 // size, 256 // size, size, dtype=dtype, kv_dtype=kv_dtype,
        scales="tensor", causal=False,
    )  # fmt: skip
    inputs = make_inputs(case)
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).view(-1, size)
    if kv_dtype == E5M2:  # an infinity times the weight 0 of a repeated key is not a number
        codes = torch.where(codes.float().isinf(), 0.0, codes.float()).to(kv_dtype)
    seq = inputs.batch.seq_lens.tolist().index(1)
    inputs.v_cache[int(inputs.batch.block_tables[seq, 0]), 0] = codes
    inputs.options["v_scale"] = torch.tensor(0.5)
    first, end = inputs.batch.cu_seqlens_q[seq : seq + 2].tolist()
    result = inputs.to("cuda").attend(impl="hopper_prefill").out[first:end].cpu()
    expected = (codes.float() * 0.5).expand(end - first, -1, -1)
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("features", [{}, {"has_alibi": True}, {"logits_soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize("unpacks", [False, True], ids=["converting", "unpacking"])
def test_scales_of_prefill_may_be_negative_or_0(kv_dtype, features, unpacks):
    case = PagedCase(
        (200, 70), (700, 333), 8, 4, head_size=128, dtype=BF16, kv_dtype=kv_dtype, scales="head",
        **features,
    )  # fmt: skip
    inputs = make_inputs(case)
    signs = {"k_scale": torch.tensor([-1.0, 0.0, 1.0, -1.0]), "v_scale": torch.tensor([1.0, -1.0])}
    signs["v_scale"] = signs["v_scale"].repeat_interleave(2)
    changed = {name: inputs.options[name] * sign for name, sign in signs.items()}
    inputs = inputs.replace(options={**inputs.options, **changed})
    chosen = plan(inputs, "hopper_prefill", unpacks=unpacks)
    result = inputs.to("cuda").attend(impl="hopper_prefill", plan=chosen)
    assert_matches(AttentionOutput(*(tensor.cpu() for tensor in result)), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["k_cache", "v_cache"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=str)
def test_a_nan_code_shows_in_prefill_in_the_heads_that_see_it(where, kv_dtype):
    case = PagedCase((300,), (300,), 4, 2, 128, dtype=BF16, kv_dtype=kv_dtype, scales="head")
    inputs = make_inputs(case)
    expected = inputs.to("cuda").attend(impl="hopper_prefill").out.cpu()
    seq = inputs.batch.seq_lens.tolist().index(300)
    block, first = int(inputs.batch.block_tables[seq, 0]), int(inputs.batch.cu_seqlens_q[seq])
    getattr(inputs, where).view(torch.uint8)[block, 0, 0, 5] = 0xFF
    result = inputs.to("cuda").attend(impl="hopper_prefill").out.cpu()
    columns = slice(5, 6) if where == "v_cache" else slice(None)
    assert result[first : first + 300, :2, columns].isnan().all()
    assert torch.equal(result[:, 2:], expected[:, 2:])


@pytest.mark.gpu
@pytest.mark.parametrize("unpacks", [False, True], ids=["converting", "unpacking"])
def test_prefill_over_8_bit_caches_is_captured_and_repeats_its_bits(unpacks):
    case = PagedCase((300, 70), (900, 400), 8, 2, 128, dtype=BF16, kv_dtype=E4M3, scales="head")
    there = make_inputs(case).to("cuda")
    chosen = plan(there, "hopper_prefill", unpacks=unpacks)
    first = there.attend(impl="hopper_prefill", plan=chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = there.attend(impl="hopper_prefill", plan=chosen)
    for _ in range(20):
        for tensor in result:
            tensor.fill_(torch.nan)
        graph.replay()
        assert_same_bits(result, first)


BENT = [
    *(
        PagedCase((200, 70, 9), (700, 333, 9), 8, 2, head_size=d, logits_soft_cap=cap)
        for d in (64, 96, 128, 256)
        for cap in (0.01, 1.0, 64.0)
    ),
    *(PagedCase((200, 70, 9), (700, 333, 9), 8, 2, head_size=d, has_alibi=True) for d in (40, 128)),
    *(
        PagedCase(
            (200, 70, 9), (3000, 333, 9), 6, 2, head_size=d, block_size=b, sliding_window=150,
            logits_soft_cap=5.0, has_alibi=True, has_sinks=True, softmax_scale=scale,
        )
        for d, b, scale in ((64, 1, 0.5), (128, 16, -0.5), (192, 64, 0.2), (256, 8, 0.0))
    ),
    PagedCase((200, 70), (300, 333), 8, 1, head_size=128, has_alibi=True, causal=False),
    PagedCase((80, 90), (3, 0), 4, 2, head_size=64, has_alibi=True, logits_soft_cap=2.0),
    PagedCase((80, 90), (3, 0), 4, 2, head_size=64, has_sinks=True, logits_soft_cap=50.0),
    PagedCase(  # most scores are near the cap or its negative
        (200, 70, 9), (700, 333, 9), 8, 2, head_size=128, has_sinks=True, logits_soft_cap=64.0,
        softmax_scale=4.0,
    ),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", BENT, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_caps_and_biases_of_many_tokens_on_hopper(case, dtype):
    check_prefill(replace(case, dtype=dtype))


bf16_case = partial(PagedCase, dtype=BF16)
BOUNDED = [
    *(  # of a tile's keys rows see none, or one
        bf16_case(
            (300, 70, 80), (900, 71, 3), 4, 2, head_size=d, block_size=b, sliding_window=window,
            logits_soft_cap=30.0, has_sinks=window > 1,
        )
        for d, b in ((64, 8), (96, 16), (128, 1), (128, 128), (256, 16))
        for window in (1, 90)
    ),
    bf16_case((80, 90), (3, 0), 4, 2, head_size=128, logits_soft_cap=50.0, causal=False),
    *(  # 8 bits whose values become bfloat16
        bf16_case(
            (200, 70), (900, 333), 8, 2, head_size=d, kv_dtype=kv_dtype, scales="token",
            logits_soft_cap=cap,
        )
        for d, kv_dtype, cap in ((64, E4M3, 0.1), (128, INT8, 64.0), (256, E5M2, 30.0))
    ),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", BOUNDED, ids=str)
def test_capped_scores_without_a_running_maximum(case):
    check_prefill(case)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_splits_of_capped_scores_are_merged(size, scale):
    """Scores of any size, and scores most of which are near the cap or its negative."""
    case = bf16_case(
        (70, 300, 9), (9000, 5000, 6000), 4, 2, size, logits_soft_cap=64.0, softmax_scale=scale,
        has_sinks=True,
    )  # fmt: skip
    assert plan(make_inputs(case), "hopper_prefill").divides_keys
    check_prefill(case)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [0.1, 64.0])
@pytest.mark.parametrize("sink", [-300.0, -64.0, 64.0, 90.0])
def test_a_sink_may_be_past_the_cap(cap, sink):
    case = bf16_case(
        (200, 70, 80), (700, 333, 3), 8, 2, head_size=128, logits_soft_cap=cap, softmax_scale=4.0,
        has_sinks=True,
    )  # fmt: skip
    inputs = make_inputs(case)
    inputs.options["sinks"][::2] = sink
    assert_matches(attend(inputs, "hopper_prefill"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [0.1, 64.0])
@pytest.mark.parametrize("power", [-12, 20])
def test_values_under_a_cap_may_be_large_or_small(cap, power):
    case = bf16_case(
        (200, 70), (700, 333), 8, 2, head_size=128, logits_soft_cap=cap, softmax_scale=4.0
    )
    inputs = make_inputs(case)
    inputs.v_cache.mul_(2.0**power)
    assert_matches(attend(inputs, "hopper_prefill"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [1e-7, 65.0, 500.0])
def test_caps_that_hopper_s_prefill_refuses_run_elsewhere(cap):
    inputs = make_inputs(bf16_case((200, 70), (700, 333), 8, 2, 64, logits_soft_cap=cap))
    assert hopper_prefill.supports(inputs.problem, DeviceInfo.of(torch.device("cuda", 0)))
    assert_matches(attend(inputs, "auto"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"logits_soft_cap": 50.0},
        {"logits_soft_cap": 50.0, "sliding_window": 100},
        {"kv_dtype": E4M3, "scales": "head"},
        {"kv_dtype": INT8, "scales": "head", "sliding_window": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("query_lens", [(300, 70, 200), (300, 1, 70)], ids=str)
def test_a_captured_prefill_is_valid_for_other_lengths(changes, query_lens):
    """With and without a bound of scores, and with unpacked blocks."""
    case = bf16_case(query_lens, (900, 700, 400), 8, 2, 128, **changes)
    inputs = make_inputs(case).to("cuda")
    chosen = plan(inputs, "hopper_prefill", unpacks="scales" in changes)
    assert chosen.unpacks == ("scales" in changes)
    reductions = (0, 1, 129, 350, 899)
    assert_a_captured_call_takes_other_lengths(
        inputs, reductions, impl="hopper_prefill", plan=chosen
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL_BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_of_odd_blocks_and_of_small_boxes(case, dtype):
    check_prefill(replace(case, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [8, 24, 32, 48, 56, 72, 80, 96, 112, 144, 160, 176, 192, 200])
@pytest.mark.parametrize("block_size", [2, 16, 128])
def test_heads_of_any_size_are_multiplied_in_parts(size, block_size):
    lengths = (70, 300, 9, 129), (70, 700, 600, 257)
    check_prefill(PagedCase(*lengths, 4, 2, head_size=size, block_size=block_size, dtype=BF16))


NARROW_VALUES = [
    *(
        PagedCase((150, 70, 9), (700, 333, 9), 4, 4, head_size=192, v_head_size=128, block_size=b)
        for b in (1, 8, 16, 24, 64, 128, 256)
    ),
    *(
        PagedCase((150, 70, 9), (700, 333, 9), 4, 2, head_size=d, v_head_size=v, block_size=b)
        for d, v in ((64, 8), (96, 64), (128, 64), (136, 128), (160, 80), (192, 24), (248, 200))
        for b in (2, 64)
    ),
    PagedCase((150, 70), (700, 333), 8, 1, head_size=192, v_head_size=128, sliding_window=100),
    PagedCase((200, 70), (300, 333), 6, 2, head_size=192, v_head_size=128, causal=False),
    PagedCase((80, 90), (3, 0), 4, 2, head_size=192, v_head_size=128, has_sinks=True),
    PagedCase(
        (200, 70, 9), (700, 333, 9), 8, 2, head_size=192, v_head_size=128, logits_soft_cap=5.0,
        has_alibi=True, strided=True, seed=104,  # aligned rows in any order of dimensions
    ),
    PagedCase((1, 300, 4), (3000, 700, 900), 8, 2, head_size=192, v_head_size=128),  # mixed
    PagedCase((70, 90), (9000, 3000), 2, 2, head_size=192, v_head_size=128),  # keys are divided
    PagedCase((150, 70), (700, 333), 4, 2, head_size=64, v_head_size=128),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", NARROW_VALUES, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_prefill_with_values_of_another_width_than_keys(case, dtype):
    check_prefill(replace(case, dtype=dtype))


PADDED = [
    *(
        PagedCase((1, 1, 1, 1), (70, 1700, 64, 3), 8, 2, head_size=d, block_size=b, dtype=dtype)
        for d in (72, 80, 88, 96, 104, 112, 144, 160, 192, 200)
        for b, dtype in ((16, BF16), (3, F16))
    ),
    *(
        PagedCase(
            (1, 1, 2), (700, 1300, 65), 8, 2, head_size=d, dtype=dtype, kv_dtype=kv_dtype,
            scales=scales,
        )
        for d in (80, 96, 112, 144, 192)
        for dtype, kv_dtype, scales in (
            (BF16, E4M3, "head"), (BF16, torch.int8, "token"), (F16, torch.float8_e5m2, "token"),
        )
    ),
    *(
        PagedCase((1, 1), (700, 333), 4, 2, head_size=d, v_head_size=v, dtype=BF16)
        for d, v in ((96, 64), (64, 96), (80, 96), (96, 80), (128, 80), (80, 128), (192, 128))
    ),
    PagedCase(
        (4, 1), (700, 333), 4, 1, head_size=80, dtype=BF16, sliding_window=100,
        logits_soft_cap=5.0, has_alibi=True, has_sinks=True, strided=True, seed=104,
    ),
    PagedCase((1, 1), (3000, 70), 4, 2, head_size=96, dtype=BF16, visible_share=0.3),
]  # fmt: skip


def without_spare_rows(case):
    """The inputs of a case whose batch says exactly how many new tokens a sequence has."""
    inputs = make_inputs(case)
    batch = replace(inputs.batch, max_query_len=max(case.query_lens))
    return inputs.replace(batch=batch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_decode_of_heads_that_are_padded(case):
    """Split among CTAs, split at fixed keys, and not split."""
    inputs = without_spare_rows(case)
    expected = oracle(inputs)
    base = plan(inputs, "hopper")
    for changed in (base, replace(base, split_size=1024), replace(base, num_programs=1)):
        there = inputs.to("cuda")
        result = there.attend(impl="hopper", out=there.out, plan=changed)
        assert_matches(AttentionOutput(*(tensor.cpu() for tensor in result)), inputs, expected)


JOINED = [
    *(
        PagedCase(
            (1, 1, 1, 1), (70, 1700, 64, 3), 4 * kv_heads, kv_heads, head_size=d, block_size=b,
            dtype=dtype,
        )
        for d, kv_heads in (
            (8, 4), (16, 4), (32, 2), (48, 2), (48, 4), (80, 2), (80, 8), (112, 2), (144, 4),
            (240, 2),
        )
        for b, dtype in ((16, BF16), (3, F16))
    ),
    PagedCase((1, 1, 1), (700, 1300, 65), 28, 4, head_size=80, dtype=BF16),
    PagedCase((2, 1, 2), (700, 1300, 65), 8, 4, head_size=48, dtype=BF16),
    PagedCase((1, 1, 1), (9000, 3, 65), 4, 4, head_size=112, v_head_size=48, dtype=BF16),
    PagedCase((1, 1, 1), (9000, 3, 65), 4, 4, head_size=80, v_head_size=48, dtype=BF16),
    *(
        PagedCase(
            (1, 1), (700, 333), 16, kv_heads, head_size=d, dtype=BF16, sliding_window=100,
            logits_soft_cap=5.0, has_alibi=True, has_sinks=True,
        )
        for d, kv_heads in ((80, 2), (80, 4), (176, 2))
    ),
    *(
        PagedCase(
            (1, 1, 1), (700, 1300, 65), 4 * kv_heads, kv_heads, head_size=d, block_size=b,
            dtype=dtype, kv_dtype=kv_dtype, scales=scales, seed=seed, **features,
        )
        for d, kv_heads, b, dtype, kv_dtype, scales, seed, features in (
            (128, 2, 16, BF16, E4M3, "token", 0, {}),
            (128, 8, 12, F16, INT8, "token", 2, {"sliding_window": 100}),
            (128, 2, 16, BF16, E4M3, "token", 1, {"logits_soft_cap": 5.0, "has_sinks": True}),
            (64, 4, 16, BF16, E5M2, "token", 0, {"has_alibi": True}),
            (64, 2, 3, BF16, E5M2, "head", 0, {}),
            (80, 2, 16, F16, INT8, "tensor", 0, {}),
            (128, 4, 64, BF16, E4M3, "head", 0, {"has_alibi": True, "has_sinks": True}),
        )
    ),
]  # fmt: skip


def joined_plan(inputs):
    """The plan of a larger batch, in which heads are joined."""
    large = replace(inputs.problem, num_seqs=64)
    return hopper.make_plan(large, DeviceInfo.of(torch.device("cuda", 0)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", JOINED, ids=str)
def test_decode_of_neighbouring_heads_that_are_read_together(case):
    """Split among CTAs, split at fixed keys, and not split."""
    inputs = without_spare_rows(case)
    expected = oracle(inputs)
    base = joined_plan(inputs)
    assert base.tile_heads > 1
    for changed in (base, replace(base, split_size=1024), replace(base, num_programs=1)):
        there = inputs.to("cuda")
        result = there.attend(impl="hopper", out=there.out, plan=changed)
        assert_matches(AttentionOutput(*(tensor.cpu() for tensor in result)), inputs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_nan_of_a_head_does_not_reach_those_that_are_read_with_it(name, kv_heads):
    case = PagedCase((1, 1), (300, 70), 4 * kv_heads, kv_heads, head_size=80, dtype=BF16)
    there = without_spare_rows(case).to("cuda")
    plan = joined_plan(there)
    assert plan.tile_heads == kv_heads
    before = there.attend(impl="hopper", plan=plan).out
    getattr(there, name)[..., 1, :] = torch.nan
    after = there.attend(impl="hopper", plan=plan).out
    others = [*range(4), *range(8, 4 * kv_heads)]
    assert torch.equal(after[:, others], before[:, others])
    has_keys = before[:, 4:8].abs().amax((1, 2)) > 0
    assert after[has_keys, 4:8].isnan().any(-1).all()


def uneven_inputs(size, group, num_kv_heads, **features):
    """A batch so large that "auto" joins heads; one sequence has no keys."""
    draw = random.Random(size)
    lengths = tuple(draw.choice((1, 40, 700, draw.randint(1, 5000))) for _ in range(40))
    case = bf16_case(
        (1,) * 40, lengths, group * num_kv_heads, num_kv_heads, head_size=size, **features
    )
    return without_spare_rows(case)


ALL_FEATURES = {"has_alibi": True, "has_sinks": True, "logits_soft_cap": 5.0}
UNEVEN = [
    (80, 4, 8, 4, {}),
    (80, 1, 12, 4, {"sliding_window": 100}),
    (80, 3, 6, 2, ALL_FEATURES),  # six rows of 16
    (112, 7, 4, 2, {}),
    (240, 8, 4, 2, ALL_FEATURES),
    (48, 5, 10, 2, {}),
    (80, 4, 7, 1, {}),  # not joined: an odd number of heads
]


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "group", "num_kv_heads", "heads", "features"), UNEVEN, ids=str)
def test_large_batches_join_neighbouring_heads(size, group, num_kv_heads, heads, features):
    """Chosen by "auto", then repeated, and with early reads."""
    inputs = uneven_inputs(size, group, num_kv_heads, **features)
    assert plan(inputs, "hopper").tile_heads == heads
    first = attend(inputs, "auto")
    assert_matches(first, inputs)
    early = inputs.replace(batch=replace(inputs.batch, allows_early_reads=True))
    for _ in range(10):
        assert_same_bits(attend(inputs, "hopper"), first)
        assert_same_bits(attend(early, "hopper"), first)


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("size", "heads"), [(80, 4), (144, 2)])
def test_a_captured_call_of_joined_heads_is_valid_for_other_lengths(size, heads, early):
    inputs = uneven_inputs(size, 4, 8).to("cuda")
    inputs = inputs.replace(batch=replace(inputs.batch, allows_early_reads=early))
    assert plan(inputs, "hopper").tile_heads == heads
    assert_a_captured_call_takes_other_lengths(inputs, (0, 1, 39, 650, 4999), impl="hopper")


WITH_SINKS = [
    PagedCase((70, 300, 9, 129), (70, 700, 600, 257), 16, 2, head_size=64, sliding_window=128),
    PagedCase((70, 9, 0), (700, 600, 5), 16, 2, head_size=64),
    PagedCase((300, 70), (900, 400), 4, 2, head_size=128, block_size=1, sliding_window=100),
    PagedCase((200,), (333,), 2, 2, head_size=256),
    PagedCase((80, 90), (3, 0), 4, 2, head_size=96, causal=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", WITH_SINKS, ids=str)
def test_prefill_with_sinks(case):
    check_prefill(replace(case, dtype=BF16, has_sinks=True))


MIXED = [
    PagedCase((1, 300, 4, 1, 0, 17), (20000, 700, 5000, 3, 100, 900), 8, 2, head_size=128),
    PagedCase((1, 1, 200, 16), (3000, 70, 200, 16), 2, 2, head_size=64, has_sinks=True),
    PagedCase((200, 1, 2), (900, 4000, 500), 12, 2, head_size=96, sliding_window=300),
    PagedCase((2, 70), (3000, 80), 20, 1, head_size=128, block_size=1),  # not shared out
    PagedCase((1, 90, 0), (0, 30, 0), 4, 4, head_size=256, causal=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", MIXED, ids=str)
@pytest.mark.parametrize("impl", ["triton", "hopper_prefill"])
def test_mixed_batches(case, impl):
    inputs = make_inputs(replace(case, dtype=BF16))
    there = inputs.to("cuda")
    first = there.attend(impl=impl, out=there.out)
    assert_matches(AttentionOutput(*(tensor.cpu() for tensor in first)), inputs)
    assert_same_bits(there.attend(impl=impl), first)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "case",
    [
        PagedCase((1, 40, 0, 9, 3), (150, 45, 7, 20, 3), 4, 2, head_size=8, has_sinks=True),
        PagedCase((3, 40, 2), (70, 45, 90), 6, 2, head_size=8, sliding_window=20),
        PagedCase((2, 6), (70, 8), 17, 1, head_size=8),  # a group that decode has no room for
    ],
    ids=str,
)
def test_tiny_mixed_batches(case):
    inputs = make_inputs(replace(case, dtype=F16))
    assert_matches(attend(inputs, "triton"), inputs)


def test_every_sequence_of_a_mixed_batch_is_one_kernel_s():
    """Decode takes sequences of up to ``ROWS // GROUP`` new tokens, prefill the others."""
    for group in range(1, 18):
        problem = make_inputs(PagedCase((1, 100), (5, 100), group, 1)).problem
        most = short_len(problem)
        assert most == (8 if group <= 8 else 16) // group
        assert not most or power_of_2(most * group) // group == most
        assert not short_len(
            replace(problem, num_tokens=100 * problem.num_seqs)
        )  # all have as many


@pytest.mark.parametrize("impl", ["hopper_prefill", "triton"])
def test_short_sequences_of_a_mixed_batch_share_programs(impl):
    inputs = make_inputs(PagedCase((1, 100), (5000, 100), 8, 2, head_size=64, dtype=BF16))
    form = form_of(Arguments(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, 0.125))
    decode = SPECIALISED if impl == "hopper_prefill" else DECODE
    call = prepare_short(inputs.problem, form, None, decode)
    assert call.launch.launcher.kernel is decode.function
    assert call.launch.grid[0] > 1
    even = replace(inputs.problem, num_tokens=100 * inputs.problem.num_seqs)
    assert prepare_short(even, form, None, decode) is None


odd_case = partial(bf16_case, (200, 70, 9), (700, 333, 9))
ODD_GROUPS = [  # (heads that share a tile, a case in which they leave rows of it empty)
    (7, odd_case(14, 2, head_size=64)),
    (7, odd_case(14, 2, head_size=128)),
    (7, odd_case(14, 2, head_size=256, dtype=F16)),
    (7, odd_case(7, 1, head_size=192, v_head_size=128, sliding_window=100)),
    (7, odd_case(7, 1, head_size=192, block_size=1, causal=False)),
    (7, odd_case(14, 2, head_size=64, logits_soft_cap=5.0, has_sinks=True)),
    (7, odd_case(14, 2, head_size=128, logits_soft_cap=5.0, has_alibi=True, has_sinks=True)),
    (7, odd_case(14, 2, head_size=128, kv_dtype=E4M3, scales="head")),
    (7, bf16_case((70, 300, 9), (9000, 5000, 6000), 7, 1, head_size=128, has_sinks=True)),
    (7, bf16_case((300,), (9000,), 14, 2, head_size=64, sliding_window=5000)),
    (7, bf16_case((1187,), (9938,), 7, 1, head_size=128)),
    (7, bf16_case((1, 300, 4, 1, 0, 17), (20000, 700, 5000, 3, 100, 900), 14, 2, head_size=128)),
    (7, bf16_case((40, 33, 1, 10) * 10, (64, 200, 300, 9) * 10, 14, 2, head_size=128)),
    (5, odd_case(10, 2, head_size=128, has_alibi=True)),
    (5, odd_case(5, 1, head_size=256, has_sinks=True, sliding_window=100)),
    (5, bf16_case((40, 33, 1, 10) * 10, (64, 200, 300, 9) * 10, 10, 2, head_size=64)),
    (5, bf16_case((70, 300, 9), (9000, 5000, 6000), 5, 1, head_size=64)),
    (3, odd_case(6, 2, head_size=64, causal=False)),
    (3, odd_case(3, 1, head_size=128, block_size=1, has_alibi=True)),
    (6, odd_case(12, 2, head_size=256)),
    (6, bf16_case((70,), (9000,), 12, 1, head_size=128, has_sinks=True, has_alibi=True)),
    (12, bf16_case((6, 9, 10), (700, 333, 10), 12, 1, head_size=64, has_alibi=True)),
    (28, bf16_case((3, 4, 4), (700, 333, 4), 28, 1, head_size=128, has_alibi=True)),
    (60, bf16_case((2, 1, 2), (700, 333, 40), 60, 1, head_size=128, has_sinks=True)),
]


def test_odd_groups_are_packed():
    for pack, case in ODD_GROUPS:
        sizes = case.head_size, case.v_head_size or case.head_size
        group = case.num_heads // case.num_kv_heads
        assert pack_of(group, max(case.query_lens), tiling_of(*sizes)) == pack


@pytest.mark.gpu
@pytest.mark.parametrize(("pack", "case"), ODD_GROUPS, ids=str)
def test_rows_of_a_tile_without_queries(pack, case):
    """They are not stored, whatever an earlier kernel has left in shared memory."""
    fill = make_inputs(bf16_case((512,) * 20, (512,) * 20, 8, 8, case.head_size)).to("cuda")
    fill.q.fill_(torch.nan)
    fill.attend(impl="hopper_prefill", out=fill.out)
    check_prefill(case)


@pytest.mark.gpu
@pytest.mark.parametrize(("query_lens", "heads"), [((300, 70, 200), 14), ((300, 1, 70), 10)])
def test_a_captured_prefill_of_an_odd_group_is_valid_for_other_lengths(query_lens, heads):
    case = PagedCase(query_lens, (900, 9000, 400), heads, 2, head_size=128, dtype=BF16)
    inputs = make_inputs(case).to("cuda")
    reductions = (0, 1, 129, 350, 899)
    assert_a_captured_call_takes_other_lengths(inputs, reductions, impl="hopper_prefill")


MANY_TILES = [
    PagedCase((64,) * 37 + (40, 33, 1), (64,) * 20 + (200,) * 20, 14, 2, head_size=128),
    PagedCase((64,) * 37 + (40, 33, 1), (64,) * 20 + (200,) * 20, 16, 4, head_size=112),
    PagedCase((16,) * 70 + (9, 1), (40,) * 72, 24, 3, head_size=72, block_size=4),
    PagedCase((130,) * 40 + (128, 64, 63), (300,) * 43, 4, 4, head_size=128, block_size=32),
]


@pytest.mark.gpu
@pytest.mark.parametrize("first", [8, 4], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("case", MANY_TILES, ids=lambda case: f"{case.num_heads}-{case.head_size}")
def test_results_follow_one_another_into_a_slice(case, first):
    """A multiprocessor computes several tiles, whose results are stored from one shared buffer.

    An earlier launch writes the rows of short sequences.
    """
    inputs = make_inputs(replace(case, dtype=BF16))
    there = inputs.to("cuda")
    tokens, heads, size = there.q.shape
    memory = there.q.new_full((tokens + 2, heads + 1, 136), torch.nan)
    out = memory[1:-1, :heads, first : first + size]
    result = there.attend(impl="hopper_prefill", out=out)
    assert_matches(AttentionOutput(*(tensor.cpu() for tensor in result)), inputs)
    out.fill_(torch.nan)
    assert memory.isnan().all()


def random_inputs(count, accepts, seed):
    rng = random.Random(f"gpu-{seed}")
    found = 0
    while found < count:
        case = random_case(rng)
        if accepts(case):
            found += 1
            yield make_inputs(case)


@pytest.mark.interpret
@pytest.mark.parametrize("seed", range(10 if ON_GPU else 1))  # each case compiles a kernel
def test_random_cases_match_float64(seed):
    accepts = (lambda case: True) if ON_GPU else is_interpreted
    for inputs in random_inputs(10 if ON_GPU else 8, accepts, seed):
        assert_matches(attend(inputs, "triton"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_random_cases_of_17_to_64_rows_match_float64_on_hopper(seed, dtype):
    def accepts(case):
        rows = max(case.query_lens, default=0) * case.num_heads // case.num_kv_heads
        return 16 < rows <= 64

    for inputs in random_inputs(8, accepts, f"rows-{seed}"):
        inputs = on_hopper(replace(inputs.case, head_size=(64, 80, 128)[seed % 3]), dtype)
        if hopper.supports(inputs.problem, DeviceInfo.of(torch.device("cuda", 0))) is None:
            assert_matches(attend(inputs, "hopper"), inputs)


SHORT_QUERIES = [
    PagedCase((5, 8, 0, 1, 7), (150, 90, 0, 1, 7), 6, 2, head_size=64, block_size=16),
    PagedCase((5,), (150,), 7, 1, head_size=64, sliding_window=70, logits_soft_cap=20.0),
    PagedCase((3, 6), (149, 71), 4, 1, head_size=64, has_alibi=True, has_sinks=True),
    PagedCase((8, 3), (3, 100), 4, 1, head_size=64, causal=False),
]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", SHORT_QUERIES, ids=str)
def test_a_launch_merges_the_splits_of_many_rows(case, batch_invariant, impl):
    inputs = make_inputs(replace(case, dtype=F16))
    expected = oracle(inputs)
    base = plan(inputs, impl, batch_invariant=batch_invariant)
    assert base.merge_rows > 0
    fixed = {"split_size": 64} if batch_invariant else {"least_size": 0, "whole_size": 0}
    for merge_rows in (2, 4, 64) if ON_GPU else (64,):
        changed = replace(base, merge_rows=merge_rows, **fixed)
        assert_matches(attend(inputs, impl, plan=changed), inputs, expected)
    assert has_merged(inputs, impl, merge_rows=1, **fixed)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 20, 3)], ids=str)
def test_the_same_call_gives_the_same_bits(impl, query_lens):
    inputs = make_inputs(PagedCase(query_lens, (150, 40, 3), dtype=F16, head_size=64))
    first = attend(inputs, impl)
    for _ in range(20 if ON_GPU else 1):
        assert_same_bits(attend(inputs, impl), first)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_any_number_of_programs_agrees(impl):
    inputs = make_inputs(PagedCase((1, 1, 1), (150, 70, 1), dtype=F16))
    expected = oracle(inputs)
    base = plan(inputs, impl)
    for programs in (1, 2, 5, 64, 1000 if ON_GPU else 100):
        result = attend(inputs, impl, plan=replace(base, num_programs=programs))
        assert_matches(result, inputs, expected)


def has_merged(inputs, impl, **changes):
    """Whether a call stores a partial result of any sequence."""
    attend(inputs, impl)  # with its workspace
    for _, (accs, sums, _) in workspace._made.values():
        accs.fill_(7.0)
        sums.fill_(7.0)
    call = replace(plan(inputs, impl), **changes)
    assert_matches(attend(inputs, impl, plan=call), inputs)
    return any((sums != 7.0).any() for _, (_, sums, _) in workspace._made.values())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("seq_lens", [(150,), (150, 70, 1), (1, 0, 64, 65), (70, 3) * 6], ids=str)
def test_a_sequence_of_few_keys_is_not_split(impl, seq_lens):
    """Merging its splits would take longer than reading them."""
    inputs = make_inputs(PagedCase((1,) * len(seq_lens), seq_lens, dtype=F16))
    assert not has_merged(inputs, impl)
    assert has_merged(inputs, impl, whole_size=0, num_programs=7) or max(seq_lens) <= 65


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sequences_are_split_evenly_where_there_is_much_work(impl):
    seq_lens = (150, 70, 100) * 5
    inputs = make_inputs(PagedCase((1,) * 15, seq_lens, dtype=F16))
    assert not has_merged(inputs, impl, num_programs=30)
    assert has_merged(inputs, impl, num_programs=5)  # of 14 tiles


@jit
def _choose_whole(out, total_tiles, total_whole, longest, programs, WHOLE: tl.constexpr):
    whole, total = choose_whole(total_tiles, total_whole, longest, programs, WHOLE)
    tl.store(out, whole)
    tl.store(out + 1, total)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("total_tiles", "longest", "is_whole"),
    [
        (600, 16, True),  # up to eight tiles a CTA
        (801, 16, False),
        (600, 17, False),  # one head is divided and merged in any case
        (100, 17, True),  # but a tile for each CTA is all there is
    ],
)
def test_short_heads_beside_a_long_one_are_not_split_only_if_ctas_are_idle(
    total_tiles, longest, is_whole
):
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    _choose_whole[(1,)](out, total_tiles, 50, longest, 100, WHOLE=4)
    assert out.tolist() == ([4, 50] if is_whole else [0, total_tiles])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("whole", "split"), [(0, 0), (128, 64), (128, 128), (64, 128), (1024, 512)], ids=str
)
def test_work_tiles_of_any_size_agree(impl, whole, split):
    lengths = (3000, 1, 700, 64, 65, 2048, 2049) if ON_GPU else (150, 1, 70, 64, 65, 128, 129)
    inputs = make_inputs(PagedCase((1,) * 7, lengths, dtype=F16, sliding_window=120, seed=whole))
    expected, base = oracle(inputs), plan(inputs, impl)
    for programs in (1, 4, 23, 40, 300) if ON_GPU else (1, 4, 40):
        result = attend(
            inputs,
            impl,
            plan=replace(base, num_programs=programs, whole_size=whole, short_split_size=split),
        )
        assert_matches(result, inputs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lengths", [(1,), (100,), (64, 65, 3), (1500, 1, 129), (700,) * 70], ids=str
)
@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_early_reads_see_the_new_keys_of_the_preceding_kernel(lengths, kv_dtype):
    """Old keys are loaded while it runs; the bits equal those of a call that waits first."""
    case = PagedCase(
        (1,) * len(lengths), lengths, 4, 2, head_size=128, dtype=BF16, kv_dtype=kv_dtype,
        scales=kv_dtype and "token",
    )  # fmt: skip
    there = make_inputs(case).to("cuda")
    batch, heads = there.batch, Heads(4, 2, 128, 128)
    early = replace(batch, allows_early_reads=True)
    last = (batch.seq_lens.long() - 1).clamp(min=0)
    block = batch.block_tables.gather(1, last[:, None] // 16)[:, 0] * 16
    slots = torch.where(batch.seq_lens > 0, block + last % 16, -1)[batch.cu_seqlens_q.diff() > 0]
    qkv = torch.zeros(len(slots), heads.width, device="cuda", dtype=BF16)
    scales = {name: there.options.get(name) for name in ("k_scale", "v_scale")}

    def step(batch):
        q = rotate_and_write(qkv, None, None, heads, there.k_cache, there.v_cache, slots, **scales)
        return paged_attention(q, there.k_cache, there.v_cache, batch, impl="hopper", **scales)

    step(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            result = step(early)
    for _ in range(5):
        qkv.normal_()
        graph.replay()
        assert_same_bits(step(batch), result)


def assert_same_alone(inputs, impl, seqs, **split):
    """Sequences have the same bits alone as among the others."""
    together = attend(inputs, impl, plan=replace(plan(inputs, impl, batch_invariant=True), **split))
    batch = inputs.batch
    for seq in seqs:
        rows = slice(*batch.cu_seqlens_q[seq : seq + 2].tolist())
        alone = inputs.replace(
            q=inputs.q[rows],
            out=inputs.out[rows],
            batch=PagedBatch(
                batch.block_tables[seq : seq + 1],
                batch.seq_lens[seq : seq + 1],
                torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                batch.max_query_len,
                batch.max_seq_len,
            ),
        )
        fixed = replace(plan(alone, impl, batch_invariant=True), **split)
        assert_same_bits(attend(alone, impl, plan=fixed), [tensor[rows] for tensor in together])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_with_splits_at_fixed_keys_a_sequence_does_not_depend_on_its_neighbours(impl):
    lengths = (2500, 1, 700, 64) if ON_GPU else (150, 1, 70, 64)
    inputs = make_inputs(PagedCase((1,) * 4, lengths, dtype=F16))
    assert_same_alone(inputs, impl, range(4), **({} if ON_GPU else {"split_size": 64}))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_with_splits_at_fixed_keys_many_rows_do_not_depend_on_neighbours(impl):
    lengths = (2500, 5, 700, 64) if ON_GPU else (150, 5, 70, 64)
    inputs = make_inputs(PagedCase((5, 3, 5, 1), lengths, 8, 2, dtype=F16, head_size=64))
    assert_same_alone(inputs, impl, (0, 2), **({} if ON_GPU else {"split_size": 64}))


@pytest.mark.parametrize("impl", MIXING)
def test_with_splits_at_fixed_keys_mixed_batches_do_not_depend_on_neighbours(impl):
    lengths = (9000, 3, 700, 300) if ON_GPU else (150, 3, 90, 60)
    inputs = make_inputs(PagedCase((1, 3, 70, 2), lengths, dtype=F16, head_size=16))
    assert_same_alone(inputs, impl, range(4))


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_a_sequence_alone_and_among_200_others(new_tokens, impl):
    draw = random.Random(0)
    lengths = (7000, *(draw.randint(new_tokens, 3000) for _ in range(200)))
    inputs = make_inputs(PagedCase((new_tokens,) * 201, lengths, 8, 2, dtype=BF16))
    assert_same_alone(inputs, impl, (0, 7, 100, 200))


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_a_prompt_alone_and_among_others(size, cap):
    """Rows past a sequence's end in a tile belong to the next one and must not affect it."""
    lengths = (70, 1500, 133, 64)
    inputs = make_inputs(
        PagedCase((70, 300, 133, 1), lengths, 4, 2, size, logits_soft_cap=cap, dtype=BF16)
    )
    assert_same_alone(inputs, "hopper_prefill", range(4))


@pytest.mark.parametrize("impl", MIXING)
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [F16, pytest.param(BF16, marks=pytest.mark.gpu)], ids=str)
def test_bits_do_not_depend_on_unused_slots(impl, cap, dtype):
    inputs = make_inputs(PagedCase((1, 40, 7), (70, 50, 37), dtype=dtype, logits_soft_cap=cap))
    expected = attend(inputs, impl)
    for number in (0.0, 3.0, torch.inf):
        changed = {
            name: getattr(inputs, name).nan_to_num(nan=number) for name in ("k_cache", "v_cache")
        }
        assert_same_bits(attend(inputs.replace(**changed), impl), expected)


@pytest.mark.interpret
@pytest.mark.parametrize("seq_len", [20, 150])
def test_a_nan_that_a_row_sees_shows_in_its_result_and_in_no_other(seq_len):
    inputs = make_inputs(PagedCase((1, 3), (seq_len, 9), 4, 2, dtype=F16))
    expected = attend(inputs, "triton")
    seq = inputs.batch.seq_lens.tolist().index(seq_len)
    row = int(inputs.batch.cu_seqlens_q[seq])
    spoilt = inputs.k_cache.clone()
    spoilt[int(inputs.batch.block_tables[seq, 1]), 3, 0, 5] = torch.nan
    result = attend(inputs.replace(k_cache=spoilt), "triton")
    for got, wanted in zip(result, expected, strict=True):
        assert got[row, :2].isnan().all()  # the heads of KV head 0
        got[row, :2] = wanted[row, :2]
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [(1, 2), (1, 40)], ids=str)
def test_strides_of_lengths_do_not_matter(impl, query_lens):
    inputs = make_inputs(PagedCase(query_lens, (70, 50), dtype=F16)).to(DEVICE)

    def every_other(tensor):
        return torch.stack([tensor, torch.full_like(tensor, 77)], dim=1)[:, 0]

    batch = replace(
        inputs.batch,
        seq_lens=every_other(inputs.batch.seq_lens),
        cu_seqlens_q=every_other(inputs.batch.cu_seqlens_q),
    )
    assert_same_bits(attend(inputs.replace(batch=batch), impl), attend(inputs, impl))


@pytest.mark.interpret
@pytest.mark.parametrize("query_len", [3, 40])
def test_a_sink_of_minus_infinity_is_none(query_len):
    # The first rows see no key.
    inputs = make_inputs(PagedCase((query_len,), (2,), 4, 2, dtype=F16, has_sinks=True))
    sinks = torch.full_like(inputs.options["sinks"], -torch.inf)
    none = attend(inputs.replace(options={**inputs.options, "sinks": None}), "triton")
    least = attend(inputs.replace(options={**inputs.options, "sinks": sinks}), "triton")
    assert_same_bits(least, none)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [(1, 1), (1, 40)], ids=str)
@pytest.mark.parametrize("powers", [(-4, -4), (-6, -6), (-6, 0)], ids=str)
def test_scales_of_tokens_may_be_small(impl, query_lens, powers):
    case = PagedCase(query_lens, (150, 70), dtype=F16, kv_dtype=torch.int8, scales="token")
    inputs = make_inputs(case)
    v_scale = inputs.options["v_scale"]
    v_scale *= 10.0 ** torch.empty_like(v_scale).uniform_(*powers)
    assert_matches(attend(inputs, impl), inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("query_lens", [(1, 1), (1, 40)], ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6, 1e37])
def test_queries_need_not_fit_in_float16(impl, query_lens, size):
    case = PagedCase(query_lens, (150, 70), dtype=BF16, kv_dtype=torch.int8, scales="head")
    inputs = make_inputs(case)
    inputs.q.mul_(size)
    inputs.options["k_scale"] /= size
    assert_matches(attend(inputs, impl), inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("sliding_window", [2**31 - 1, 2**40])
@pytest.mark.parametrize("query_lens", [(1, 3), (1, 40)], ids=str)
def test_a_window_may_be_any_number_of_keys(impl, sliding_window, query_lens):
    inputs = make_inputs(PagedCase(query_lens, (70, 2), dtype=F16))
    assert_same_bits(attend(inputs, impl, sliding_window=sliding_window), attend(inputs, impl))


@pytest.mark.interpret
def test_a_plan_with_tiles_of_fewer_rows_is_refused():
    one, more = (make_inputs(PagedCase((n, 1), (70, 50), 4, 2, dtype=F16)) for n in (1, 14))
    with pytest.raises(ShapeError, match=r"tile_m=16, but .* 28 rows"):
        attend(more, "triton", plan=plan(one, "triton"))


@pytest.mark.interpret
def test_there_may_be_more_tiles_of_rows_than_a_grid_has_along_y():
    count = 70_000 if ON_GPU else 20
    q, k_cache, v_cache = torch.randn(3, count, 1, 1, 16, device=DEVICE).half()
    ints = torch.arange(count + 1, device=DEVICE).int()
    batch = PagedBatch(ints[:-1, None], torch.ones_like(ints[:-1]), ints, 100, 100)
    result = paged_attention(q[:, 0], k_cache, v_cache, batch, impl="triton")
    torch.testing.assert_close(result.out, v_cache[:, 0])


def test_a_gpu_s_implementation_refuses_a_cpu_s_tensors():
    inputs = make_inputs(PagedCase())
    for impl in ("triton", "hopper"):
        with pytest.raises(
            UnsupportedError, match=f"{impl} cannot run this: the tensors are on cpu"
        ):
            inputs.attend(impl=impl)


# --- on a GPU only ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "hopper"])
@pytest.mark.parametrize("new_tokens", [1, 7])
def test_a_captured_call_is_valid_for_other_lengths(impl, new_tokens):
    case = PagedCase((new_tokens,) * 3, (900, 70, 300), 8, 2, head_size=64, dtype=BF16)
    inputs = make_inputs(case).to("cuda")
    inputs = inputs.replace(batch=replace(inputs.batch, max_seq_len=4096))
    assert_a_captured_call_takes_other_lengths(inputs, (0, 1, 50, 69), impl=impl)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_a_call_takes_memory_for_its_result_only_and_never_waits(impl):
    inputs = make_inputs(PagedCase((1,) * 3, (900, 70, 300), dtype=BF16)).to("cuda")
    inputs.attend(impl=impl)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with refusing_to_wait():
        inputs.attend(impl=impl)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2  # out and lse


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_32_bits_count():
    num_blocks = (1 << 31) // (16 * 8 * 128) + 8
    cache = torch.zeros(num_blocks, 16, 8, 128, dtype=BF16, device="cuda")
    table = torch.arange(num_blocks - 4, num_blocks, device="cuda").int()[None]
    cache[table[0].long()] = torch.randn(4, 16, 8, 128, dtype=BF16, device="cuda")
    q = torch.randn(1, 32, 128, dtype=BF16, device="cuda")
    lengths = torch.tensor([60], device="cuda").int()
    batch = PagedBatch.decode(table, lengths, 60)
    small = PagedBatch.decode(torch.arange(4, device="cuda").int()[None], lengths, 60)
    tail = cache[-4:].clone()
    for impl in ("triton", "hopper"):
        result = paged_attention(q, cache, cache, batch, impl=impl)
        assert_same_bits(result, paged_attention(q, tail, tail, small, impl=impl))


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [1 << 31, 1 << 34, 1 << 35])
def test_gathered_rows_of_a_cache_of_more_elements_than_32_bits_count(elements):
    """For rows of 16 bytes 32 bits reach 2³⁵ elements, half of that with signed offsets."""
    num_blocks = elements // (8 * 128) + 100
    torch.cuda.empty_cache()
    needed, free = num_blocks * 8 * 128 * 2 / 2**30 + 1, torch.cuda.mem_get_info()[0] / 2**30
    if free < needed:
        pytest.skip(f"needs {needed:.0f} GiB on the GPU, where {free:.0f} GiB are free")
    cache = torch.empty(num_blocks, 1, 8, 128, dtype=BF16, device="cuda")
    cache[-100:].normal_()
    table = torch.arange(num_blocks - 100, num_blocks, device="cuda").int()[None]
    q = torch.randn(90, 8, 128, dtype=BF16, device="cuda")
    lengths, starts = torch.tensor([100]).int().cuda(), torch.tensor([0, 90]).int().cuda()
    batch = PagedBatch(table, lengths, starts, 90, 100)
    small = replace(batch, block_tables=torch.arange(100, device="cuda").int()[None])
    tail = cache[-100:].clone()
    result = paged_attention(q, cache, cache, batch, impl="hopper_prefill")
    assert_same_bits(result, paged_attention(q, tail, tail, small, impl="hopper_prefill"))


@pytest.mark.parametrize("heads", [1, 8])
def test_prefill_copies_scales_that_lie_farther_apart_than_32_bits_count(heads):
    problem = make_inputs(packed_case((70,), (70,), 8, heads)).problem
    far = torch.empty_strided((heads,), ((1 << 31) // heads,), device="meta")
    assert hopper_prefill._of_heads(problem, far).stride() == (1,)
    near = torch.empty_strided((heads,), ((1 << 31) // heads - 1,), device="meta")
    assert hopper_prefill._of_heads(problem, near).stride() == near.stride()
