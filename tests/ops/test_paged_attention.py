import itertools
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagetile import PagedBatch, paged_attention
from pagetile.device import DeviceInfo
from pagetile.ops.merge_states import merge_states
from pagetile.ops.paged_attention import make_plan
from pagetile.testing import (
    TABLE_POISON,
    PagedCase,
    assert_matches,
    make_inputs,
    oracle,
    poisoned_memory,
    random_case,
    tolerance,
    vary,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


def plan_for(inputs, num_threads=2, **device):
    """The plan for another machine than this one."""
    here = DeviceInfo.of(torch.device("cpu"))
    there = replace(here, **{"num_workers": num_threads, **device})
    return make_plan(inputs.problem, there)


def on_cpu(inputs, **changes):
    return inputs.attend(impl="cpu", **changes)


def on_two_threads(inputs):
    return on_cpu(inputs, plan=plan_for(inputs))


def without_bf16_dot(inputs):
    """A processor without the instruction; tests/tiles/test_other_processors.py has more."""
    if not DeviceInfo.of(torch.device("cpu")).bf16_dot:
        pytest.skip("this CPU has no AVX512-BF16 to leave unused")
    if inputs.case.cache_dtype.itemsize == 1 and inputs.case.dtype == BF16:
        pytest.skip("its kernel is compiled with -m slow, for an older processor")
    return on_cpu(inputs, plan=plan_for(inputs, bf16_dot=False))


def without_bf16_tiles(inputs):
    """A processor with AVX512-BF16 and without AMX."""
    return on_cpu(inputs, plan=plan_for(inputs, bf16_tiles=False))


def by_reference(inputs):
    return inputs.attend(impl="reference")


IMPLEMENTATIONS = {
    "cpu": on_two_threads,
    "cpu-without-bf16-dot": without_bf16_dot,
    "reference": by_reference,
}


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request):
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Small eager products are slower on two threads; the kernel's own threads are in its plan."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _poisoned_memory():
    with poisoned_memory():
        yield


def bits(result):
    return [
        tensor.contiguous().view(torch.int32 if tensor.dtype == F32 else torch.int16)
        for tensor in result
    ]


def assert_same_bits(result, expected):
    for got, wanted in zip(bits(result), bits(expected), strict=True):
        assert torch.equal(got, wanted)


def poison_of(tensor):
    return -128 if tensor.dtype == INT8 else math.nan


def is_poison(tensor):
    return tensor == -128 if tensor.dtype == INT8 else tensor.isnan()


# Types of queries and caches that every run of the tests compiles kernels for, 20 to 30 seconds
# each. The others, twice as many, are for ``pytest -m slow`` and ``make fuzz``.
EVERYDAY = {
    *((dtype, dtype) for dtype in (F32, F16, BF16)),
    (F32, BF16),  # as the engine's tests
    (F32, INT8),
    (BF16, E4M3),
    (F16, E5M2),
}


def draw(name):
    """A random case of everyday types."""
    case = random_case(random.Random(name))
    if (case.dtype, case.cache_dtype) in EVERYDAY:
        return case
    if case.scales is None:
        return replace(case, kv_dtype=None)
    return replace(case, dtype={INT8: F32, E4M3: BF16, E5M2: F16}[case.cache_dtype])


def random_inputs(name, count, **changes):
    for i in range(count):
        yield make_inputs(replace(draw(f"{name}-{i}"), **changes))


# --- the harness -----------------------------------------------------------------------------


def test_everything_unused_is_poisoned():
    for seed in range(60):
        inputs = make_inputs(random_case(random.Random(f"poison-{seed}")))
        num_blocks, block_size = inputs.k_cache.shape[:2]
        used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
        lengths, tables = inputs.batch.seq_lens.tolist(), inputs.batch.block_tables
        for row, seq_len in zip(tables, lengths, strict=True):
            num_used = -(-seq_len // block_size)
            assert (row[num_used:] == TABLE_POISON).all()
            for i in range(num_used):
                used[row[i], : seq_len - i * block_size] = True
        assert 0 in lengths
        assert not used.all(dim=1).all()  # a block that no sequence holds
        scales = (
            [inputs.options["k_scale"], inputs.options["v_scale"]] if inputs.case.scales else []
        )
        for tensor in (inputs.k_cache, inputs.v_cache, *scales):
            if tensor.dim() < 3:
                assert tensor.isfinite().all()
            else:
                assert is_poison(tensor[~used]).all()
                assert not is_poison(tensor[used]).any()
        assert inputs.out.isnan().all()
        again = make_inputs(inputs.case)
        assert torch.equal(again.k_cache.float().nan_to_num(), inputs.k_cache.float().nan_to_num())
        assert torch.equal(again.batch.block_tables, tables)


def test_what_lies_between_strided_tensors_is_poisoned():
    gaps = 0
    for inputs in random_inputs("gaps", 10, strided=True):
        for tensor in (inputs.q, inputs.k_cache, inputs.v_cache):
            buffer = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            gaps += int(is_poison(buffer).sum() - is_poison(tensor).sum())
            assert int((~is_poison(buffer)).sum()) == int((~is_poison(tensor)).sum())
    assert gaps > 1000


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_a_wrong_result_is_refused(dtype):
    inputs = make_inputs(PagedCase((1, 3), (70, 9), dtype=dtype))
    allowed = tolerance(inputs)
    assert 0 < allowed.lse < 1e-4
    assert 0 < allowed.out < (1e-4 if dtype == F32 else 0.1)
    for at, wrong in itertools.product(((0, 0), (3, 2)), (math.nan, math.inf, 3.0)):
        for tensor in range(2):
            result = by_reference(inputs)
            result[tensor][at] = result[tensor][at] + wrong * allowed[tensor]
            with pytest.raises(AssertionError, match=r"is wrong(.|\n)*RMS(.|\n)*PagedCase\("):
                assert_matches(result, inputs)
    blind = make_inputs(PagedCase((3,), (1,), dtype=dtype))
    for lse in (math.nan, math.inf, 0.0, -1e30):
        result = by_reference(blind)
        result.lse[result.lse == -math.inf] = lse
        with pytest.raises(AssertionError, match="is wrong"):
            assert_matches(result, blind)


# --- right, against the oracle -------------------------------------------------------------

# One row in each of many KV heads: these are walked key by key, sixteen heads at once.
MANY_HEADS = [
    PagedCase((1, 1, 1), (600, 37, 3), 32, 32, 64, strided=True),
    PagedCase((1, 1, 1), (600, 37, 3), 32, 32, 64, v_head_size=32, dtype=BF16, strided=True),
    PagedCase((1, 1), (130, 70), 16, 16, 96, dtype=BF16, sliding_window=67, has_sinks=True),
    PagedCase((1, 1), (99, 70), 16, 16, 32, dtype=BF16, kv_dtype=E4M3, scales="token"),
    PagedCase((1, 1), (99, 70), 16, 16, 32, dtype=F32, kv_dtype=INT8, scales="head"),
]

CASES = [
    # sequences of no, one and few keys; nothing at all
    PagedCase((), ()),
    PagedCase((1,), (0,)),
    PagedCase((1,), (1,)),
    PagedCase((3,), (3,)),
    PagedCase((0, 0), (5, 20)),
    # a row more or less than a tile of keys, a split, two splits
    *(PagedCase((1,), (n,), head_size=16) for n in (63, 64, 65, 511, 512, 513, 1024, 1025)),
    *(PagedCase((n,), (n,), head_size=16, num_heads=2) for n in (63, 64, 65)),
    # new tokens that straddle a split, and that start or end at one
    PagedCase((20, 8, 8), (520, 512, 520)),
    PagedCase((20, 8, 8), (520, 512, 520), sliding_window=9),
    # more new tokens than keys: the first rows see none
    PagedCase((5, 9, 1), (3, 0, 1)),
    PagedCase((5, 9), (3, 0), causal=False),
    PagedCase((5, 9), (3, 0), has_sinks=True),
    PagedCase((5, 9), (3, 0), causal=False, sliding_window=2),
    # every group, from few rows to many
    *(PagedCase((1, 2, 5, 40), (9,) * 3 + (40,), group * 2, 2) for group in range(1, 9)),
    PagedCase((2, 30), (70, 70), 71, 1, head_size=8),  # more rows a token than a tile holds
    # head sizes: less than a vector, not a whole number of vectors or pairs, different for values
    *(PagedCase((1, 20), (30, 40), head_size=d) for d in (8, 24, 40, 72, 80, 96, 112, 256, 512)),
    *(
        PagedCase((1, 20), (30, 40), head_size=d, v_head_size=d_v, dtype=BF16)
        for d, d_v in ((64, 8), (8, 64), (40, 72), (192, 128), (128, 512))
    ),
    # blocks of one slot, odd ones, and longer than a tile
    *(PagedCase((1, 20), (100, 40), block_size=n) for n in (1, 3, 63, 64, 65, 100, 256)),
    # windows of one key, and around a tile's and a split's edge
    *(PagedCase((1, 70), (600, 130), sliding_window=w) for w in (1, 2, 63, 64, 65, 88, 511, 600)),
    PagedCase((1, 70), (600, 130), sliding_window=10, causal=False),
    # scales, caps and biases
    *(PagedCase((1, 9), (70, 9), softmax_scale=scale) for scale in (0.0, 1.0, -0.5, 8.0)),
    *(PagedCase((1, 9), (70, 9), logits_soft_cap=cap) for cap in (0.01, 1.0, 30.0)),
    PagedCase((1, 9), (1070, 99), has_alibi=True),
    PagedCase((1, 9), (1070, 99), has_alibi=True, causal=False),
    PagedCase((1, 9), (1070, 9), has_sinks=True),
    PagedCase((1, 9), (700, 70), 6, 2, logits_soft_cap=5.0, has_alibi=True, sliding_window=65),
    PagedCase((1, 9), (700, 70), causal=False, has_alibi=True, has_sinks=True, dtype=BF16),
    # element types of queries and caches
    *(
        PagedCase((1, 20), (600, 90), dtype=dtype, kv_dtype=kv_dtype, head_size=40, strided=True)
        for dtype, kv_dtype in itertools.product((F32, F16, BF16), repeat=2)
    ),
    # 8-bit caches: every type with every type of queries; few and many rows; one row a head
    *(
        PagedCase(
            (1, 3, 20),
            (600, 70, 90),
            dtype=dtype,
            kv_dtype=kv_dtype,
            scales=scales,
            head_size=head_size,
            v_head_size=72,
            strided=True,
        )
        for dtype, (kv_dtype, scales, head_size) in itertools.product(
            (F32, F16, BF16), ((E4M3, "token", 64), (E5M2, "head", 40), (INT8, "tensor", 128))
        )
    ),
    *(
        PagedCase((1, 20), (1070, 40), 4, group, dtype=BF16, kv_dtype=kv_dtype, scales="token")
        for kv_dtype, group in itertools.product((E4M3, E5M2, INT8), (4, 1))
    ),
    *(
        PagedCase(
            (1, 9),
            (700, 70),
            6,
            2,
            kv_dtype=E4M3,
            scales=scales,
            sliding_window=65,
            logits_soft_cap=5.0,
            has_alibi=True,
            has_sinks=True,
            dtype=BF16,
        )
        for scales in ("tensor", "head", "token")
    ),
    *MANY_HEADS,
    # shared blocks
    PagedCase((1,) * 8, tuple(range(40, 80, 5)), shares_prefix=True),
]


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[pytest.mark.slow] * ((case.dtype, case.cache_dtype) not in EVERYDAY),
            id=str(case),
        )
        for case in CASES
    ],
)
def test_boundary_cases_match_the_oracle(attend, case):
    inputs = make_inputs(case)
    assert_matches(attend(inputs), inputs)


BLOCKS = 12  # of cases, so that a report has lines and not thousands of them
EVERYDAY_BLOCKS = 6
"""Those of every run; the others, and ``make fuzz``, draw more of the same."""


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize(
    "block",
    [
        *range(EVERYDAY_BLOCKS),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(EVERYDAY_BLOCKS, BLOCKS)),
    ],
)
def test_random_cases_match_the_oracle(block):
    for i in range(48):
        inputs = make_inputs(draw(f"any-{block}-{i}"))
        assert_matches(on_two_threads(inputs), inputs)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_cases_match_the_oracle_without_bf16_dot(block):
    for i in range(16):
        case = draw(f"bf16-{block}-{i}")
        inputs = make_inputs(replace(case, dtype=BF16, kv_dtype=None, scales=None))
        assert_matches(without_bf16_dot(inputs), inputs)


@pytest.mark.skipif(
    not DeviceInfo.of(torch.device("cpu")).bf16_tiles, reason="this CPU has no AMX to leave unused"
)
@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_random_cases_match_the_oracle_without_bf16_tiles(block):
    for i in range(16):
        case = draw(f"bf16-{block}-{i}")
        inputs = make_inputs(replace(case, dtype=BF16, kv_dtype=None, scales=None))
        assert_matches(without_bf16_tiles(inputs), inputs)


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_reference_in_low_precision_matches_itself_in_float64(block):
    for i in range(16):
        inputs = make_inputs(random_case(random.Random(f"reference-{block}-{i}")))
        assert_matches(by_reference(inputs), inputs)


def test_a_group_of_cases_without_queries_has_cases_too():
    """A group of cases shares compiled kernels, and its first case may have no queries."""
    case = replace(CASES[0], query_lens=(0,), seq_lens=(1159,))
    for seed in range(20):
        assert set(vary(case, random.Random(seed)).query_lens) == {0}


def test_random_cases_meet_every_feature():
    cases = [
        random_case(random.Random(f"any-{block}-{i}"))
        for block in range(EVERYDAY_BLOCKS)
        for i in range(48)
    ]
    groups = {case.num_heads // case.num_kv_heads for case in cases}
    lengths = {seq_len for case in cases for seq_len in case.seq_lens}
    pairs = [pair for case in cases for pair in zip(case.query_lens, case.seq_lens, strict=True)]
    assert groups == set(range(1, 9))
    assert {0, 1, 2} < lengths
    assert max(lengths) > 1024
    assert {case.dtype for case in cases} == {F32, F16, BF16}
    assert len({(case.dtype, case.cache_dtype) for case in cases}) == 18
    assert {case.scales for case in cases} == {None, "tensor", "head", "token"}
    assert {24, 40, 72, 80, 96, 112, 256} < {case.head_size for case in cases}
    assert {None, 0.0} < {case.softmax_scale for case in cases}
    for feature in ("v_head_size", "sliding_window", "logits_soft_cap"):
        assert 50 < sum(getattr(case, feature) is not None for case in cases) < 238, feature
    for feature in ("causal", "has_alibi", "has_sinks", "strided", "shares_prefix"):
        assert 50 < sum(getattr(case, feature) for case in cases) < 238, feature
    assert sum(query_len > seq_len for query_len, seq_len in pairs) > 10
    assert sum(query_len == 1 for query_len, _ in pairs) > 250
    assert sum(1 < query_len < seq_len for query_len, seq_len in pairs) > 240
    assert sum(1 < query_len == seq_len for query_len, seq_len in pairs) > 100
    assert any(case.block_size == 1 for case in cases)
    assert any(case.block_size == 256 for case in cases)


@pytest.mark.parametrize("where", ["q", "k_cache"])
@pytest.mark.parametrize("seq_len", [20, 700, 1500])
def test_a_nan_that_a_row_sees_shows_in_its_result_and_in_no_other(attend, where, seq_len):
    inputs = make_inputs(PagedCase((1, 3), (seq_len, 9), 4, 2, 16))
    expected = attend(inputs)
    seq = inputs.batch.seq_lens.tolist().index(seq_len)
    row = int(inputs.batch.cu_seqlens_q[seq])
    spoilt = getattr(inputs, where).clone()
    if where == "q":
        spoilt[row, :2, 3] = math.nan
    else:
        spoilt[int(inputs.batch.block_tables[seq, 1]), 3, 0, 5] = math.nan
    result = attend(inputs.replace(**{where: spoilt}))
    for got, wanted in zip(result, expected, strict=True):
        assert got[row, :2].isnan().all()  # the heads of KV head 0
        got[row, :2] = wanted[row, :2]
        assert torch.equal(got, wanted)


# --- the reference, against others ---------------------------------------------------------


def dense(num_tokens, seq_len, num_heads, num_kv_heads, dtype=torch.float64, seed=0):
    """One sequence in a cache with one block a token, and as dense tensors for SDPA."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(n, heads, 32, dtype=dtype, generator=generator)
        for n, heads in ((num_tokens, num_heads), (seq_len, num_kv_heads), (seq_len, num_kv_heads))
    )
    batch = PagedBatch(
        torch.arange(seq_len, dtype=torch.int32)[None],
        torch.tensor([seq_len], dtype=torch.int32),
        torch.tensor([0, num_tokens], dtype=torch.int32),
        num_tokens,
        seq_len,
    )
    return q, k, v, batch


def sdpa(q, k, v, **options):
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)[0].transpose(0, 1)


def positions(num_tokens, seq_len):
    """The distance from each query back to each key, ``[num_tokens, seq_len]``."""
    return torch.arange(seq_len - num_tokens, seq_len)[:, None] - torch.arange(seq_len)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("num_tokens", "seq_len"), [(1, 1), (7, 7), (1, 50), (20, 50)])
@pytest.mark.parametrize(
    ("options", "visible", "sdpa_options"),
    [
        pytest.param({}, lambda behind: behind >= 0, {}, id="causal"),
        pytest.param({"causal": False}, lambda behind: behind > -9999, {}, id="full"),
        pytest.param(
            {"sliding_window": 5}, lambda behind: (behind >= 0) & (behind < 5), {}, id="window"
        ),
        pytest.param(
            {"sliding_window": 5, "causal": False}, lambda behind: behind < 5, {}, id="full-window"
        ),
        pytest.param(
            {"softmax_scale": 0.7}, lambda behind: behind >= 0, {"scale": 0.7}, id="scale"
        ),
        pytest.param({"softmax_scale": 0.0}, lambda behind: behind >= 0, {"scale": 0.0}, id="zero"),
    ],
)
def test_the_reference_equals_sdpa_on_dense_cases(
    num_tokens, seq_len, num_heads, num_kv_heads, options, visible, sdpa_options
):
    q, k, v, batch = dense(num_tokens, seq_len, num_heads, num_kv_heads)
    mask = visible(positions(num_tokens, seq_len))
    result = paged_attention(q, k[:, None], v[:, None], batch, impl="reference", **options)
    expected = sdpa(q, k, v, attn_mask=mask, **sdpa_options)
    torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)
    # One more key of score 0 and no value leaves Z / (Z + 1) of a value that is 1 everywhere.
    one_more = torch.cat([k, torch.zeros_like(k[:1])])
    ones = torch.cat([torch.ones_like(v), torch.zeros_like(v[:1])])
    mask = torch.cat([mask, torch.ones(num_tokens, 1, dtype=torch.bool)], dim=1)
    share = sdpa(q, one_more, ones, attn_mask=mask, **sdpa_options)[..., 0]
    torch.testing.assert_close(result.lse, share.logit().float(), rtol=1e-6, atol=1e-6)


def test_the_reference_with_alibi_equals_sdpa_with_its_bias():
    q, k, v, batch = dense(20, 50, 4, 2)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    behind = positions(20, 50)
    bias = (-slopes[:, None, None] * behind).double().masked_fill(behind < 0, -math.inf)
    caches = k[:, None], v[:, None]
    result = paged_attention(q, *caches, batch, alibi_slopes=slopes, impl="reference")
    expected = sdpa(q, k, v, attn_mask=bias[None])
    torch.testing.assert_close(result.out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_is_the_formula_written_out_in_loops(causal, window):
    case = PagedCase(
        (2, 3), (5, 2), 4, 2, 8, block_size=2, has_alibi=True, has_sinks=True,
        logits_soft_cap=1.5, softmax_scale=0.6, causal=causal, sliding_window=window,
    )  # fmt: skip
    inputs = make_inputs(case)
    result, batch = oracle(inputs), inputs.batch
    for seq, token, head in itertools.product(range(batch.num_seqs), range(3), range(4)):
        start, end = batch.cu_seqlens_q[seq : seq + 2].tolist()
        if start + token >= end:
            continue
        seq_len = int(batch.seq_lens[seq])
        position = seq_len - (end - start) + token
        terms, total = [], math.exp(inputs.options["sinks"][head])
        for key in range(seq_len):
            if (causal and key > position) or (window and key <= position - window):
                continue
            block, slot = int(batch.block_tables[seq, key // 2]), key % 2
            q, kv_head = inputs.q[start + token, head], head // 2
            k, v = inputs.k_cache[block, slot, kv_head], inputs.v_cache[block, slot, kv_head]
            score = sum(a * b for a, b in zip(q.tolist(), k.tolist(), strict=True))
            score = 1.5 * math.tanh(0.6 * score / 1.5)
            score += float(inputs.options["alibi_slopes"][head]) * (key - position)
            terms.append((math.exp(score), v.double()))
            total += math.exp(score)
        out = sum((weight / total * v for weight, v in terms), torch.zeros(8, dtype=torch.float64))
        torch.testing.assert_close(result.out[start + token, head], out, rtol=1e-10, atol=1e-10)
        assert float(result.lse[start + token, head]) == pytest.approx(math.log(total), rel=1e-6)


# --- the same bits, however the work is cut --------------------------------------------------


def select(inputs, order, rng=None):
    """The batch of some of the sequences, in another order."""
    starts = inputs.batch.cu_seqlens_q.tolist()
    rows = [torch.arange(starts[seq], starts[seq + 1]) for seq in order]
    lengths = torch.tensor([0, *map(len, rows)])
    batch = replace(
        inputs.batch,
        block_tables=inputs.batch.block_tables[list(order)],
        seq_lens=inputs.batch.seq_lens[list(order)],
        cu_seqlens_q=lengths.cumsum(0, dtype=torch.int32),
    )
    rows = torch.cat(rows) if rows else torch.arange(0)
    options = lists_of(inputs, list(order))
    return inputs.replace(q=inputs.q[rows], batch=batch, options=options), rows


def lists_of(inputs, order, num_blocks=None):
    """The options for some of the sequences; lists of blocks end before ``num_blocks``."""
    lists = inputs.options.get("visible_blocks")
    if lists is None:
        return inputs.options
    lists = lists[order]
    if num_blocks is not None:
        lists = torch.where(lists < num_blocks, lists, -1)
    return {**inputs.options, "visible_blocks": lists}


def row_bits(result, rows):
    return type(result)(result.out[rows], result.lse[rows])


def test_permuting_physical_blocks_changes_no_bit():
    for inputs in random_inputs("blocks", 40):
        num_blocks = len(inputs.k_cache)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))
        tables = inputs.batch.block_tables
        known = (tables >= 0) & (tables < num_blocks)
        moved = tables.clone()
        moved[known] = order.argsort().int()[tables[known]]
        options = dict(inputs.options)
        if inputs.case.scales == "token":
            options |= {name: options[name][order] for name in ("k_scale", "v_scale")}
        other = inputs.replace(
            k_cache=inputs.k_cache[order],
            v_cache=inputs.v_cache[order],
            batch=replace(inputs.batch, block_tables=moved),
            options=options,
        )
        assert_same_bits(on_two_threads(other), on_two_threads(inputs))


def test_permuting_sequences_changes_no_bit():
    for i, inputs in enumerate(random_inputs("sequences", 40)):
        order = random.Random(i).sample(range(inputs.batch.num_seqs), inputs.batch.num_seqs)
        other, rows = select(inputs, order)
        assert_same_bits(on_two_threads(other), row_bits(on_two_threads(inputs), rows))


def test_a_sequence_alone_gets_the_bits_that_it_gets_in_a_batch():
    for inputs in random_inputs("alone", 40):
        together = on_two_threads(inputs)
        for seq in range(inputs.batch.num_seqs):
            alone, rows = select(inputs, [seq])
            assert_same_bits(on_two_threads(alone), row_bits(together, rows))


def chunk(inputs, seq, first, end):
    """New tokens ``first`` to ``end`` of a causal sequence, as a step of their own."""
    start, stop = inputs.batch.cu_seqlens_q[seq : seq + 2].tolist()
    seq_len = int(inputs.batch.seq_lens[seq]) - (stop - start) + end
    batch = PagedBatch(
        inputs.batch.block_tables[seq : seq + 1],
        torch.tensor([max(0, seq_len)], dtype=torch.int32),
        torch.tensor([0, end - first], dtype=torch.int32),
        end - first,
        max(0, seq_len),
    )
    rows = slice(start + first, start + end)
    options = lists_of(inputs, [seq], -(-max(0, seq_len) // inputs.k_cache.shape[1]))
    return inputs.replace(q=inputs.q[rows], batch=batch, options=options), rows


def test_chunked_prefill_gets_the_bits_of_one_shot():
    num_chunks = 0
    for i, inputs in enumerate(random_inputs("chunks", 60, causal=True)):
        rng = random.Random(i)
        together = on_two_threads(inputs)
        for seq, query_len in enumerate(inputs.batch.cu_seqlens_q.diff().tolist()):
            seq_len = int(inputs.batch.seq_lens[seq])
            if query_len > seq_len:
                continue  # a chunk's position is its sequence's length so far: never negative
            first = 0
            while first < query_len:
                end = min(query_len, first + rng.choice([1, 1, 2, 5, 30, 100]))
                part, rows = chunk(inputs, seq, first, end)
                assert_same_bits(on_two_threads(part), row_bits(together, rows))
                first, num_chunks = end, num_chunks + 1
    assert num_chunks > 200


def test_no_choice_of_a_plan_but_split_size_and_products_changes_a_bit():
    for i, inputs in enumerate(random_inputs("plans", 60)):
        rng, plan = random.Random(i), plan_for(inputs)
        expected = on_cpu(inputs, plan=plan)
        for _ in range(6):
            other = replace(
                plan,
                tile_m=rng.choice([1, 16, 64, 256, 1000]),
                decode_heads=rng.randint(1, inputs.problem.num_kv_heads),
                parallel_splits=rng.random() < 0.5,
                item_splits=rng.randint(1, 3),
                num_threads=rng.randint(1, 4),
            )
            assert_same_bits(on_cpu(inputs, plan=other), expected)


@pytest.mark.parametrize("case", MANY_HEADS, ids=str)
def test_heads_walked_together_get_the_bits_of_heads_walked_alone(case):
    inputs = make_inputs(case)
    plan = plan_for(inputs)
    assert plan.decode_heads == case.num_kv_heads
    for decode_heads in (1, 5, 16):
        alone = on_cpu(inputs, plan=replace(plan, decode_heads=decode_heads))
        assert_same_bits(alone, on_cpu(inputs, plan=plan))


LONG = PagedCase((1, 1, 40), (2100, 700, 640), 8, 2, dtype=BF16, block_size=7)


@pytest.mark.parametrize("item_splits", [1, 2, 4, 9])
def test_splits_on_several_threads_change_no_bit(item_splits):
    for case in (LONG, replace(LONG, dtype=F32), replace(LONG, sliding_window=1300)):
        inputs = make_inputs(case)
        plan = replace(plan_for(inputs, 3), parallel_splits=True, item_splits=item_splits)
        alone = replace(plan, num_threads=1, parallel_splits=False)
        assert_same_bits(on_cpu(inputs, plan=plan), on_cpu(inputs, plan=alone))


def test_the_number_of_torch_threads_changes_no_bit():
    inputs = make_inputs(LONG)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(on_cpu(inputs))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_twenty_calls_give_the_same_bits():
    inputs = make_inputs(LONG)
    first = on_two_threads(inputs)
    for _ in range(20):
        assert_same_bits(on_two_threads(inputs), first)


def test_four_threads_that_call_at_once_get_the_bits_of_one():
    everything = [*random_inputs("concurrent", 12), make_inputs(LONG)]
    expected = [on_two_threads(inputs) for inputs in everything]

    def call_all(first):
        order = [*range(first, len(everything)), *range(first)]
        return [(i, on_two_threads(everything[i])) for i in order for _ in range(3)]

    with ThreadPoolExecutor(4) as callers:
        for results in callers.map(call_all, (0, 3, 6, 9)):
            for i, result in results:
                assert_same_bits(result, expected[i])


FORKED = """
import multiprocessing, torch
from pagetile.device import DeviceInfo
from pagetile.ops.paged_attention import make_plan
from pagetile.testing import PagedCase, make_inputs

inputs = make_inputs(PagedCase((1, 1, 40), (2100, 700, 640), 8, 2))
plan = make_plan(inputs.problem, DeviceInfo("cpu", 2))
assert plan.num_threads == 2

def attend():
    result = inputs.attend(impl="cpu", plan=plan)
    return result.out.numpy().tobytes() + result.lse.numpy().tobytes()

def child(pipe):
    pipe.send_bytes(attend())

expected = attend()  # the parent's threads are running now
context = multiprocessing.get_context("fork")
receiver, sender = context.Pipe()
process = context.Process(target=child, args=(sender,))
process.start()
assert receiver.poll(60), "the child hangs"
assert receiver.recv_bytes() == expected
process.join(60)
assert process.exitcode == 0
assert attend() == expected
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_forked_child_computes_on_threads_of_its_own():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=300)


# --- the same result, said in other words ---------------------------------------------------


def merged(states):
    return merge_states(*(torch.stack(tensors) for tensors in zip(*states, strict=True)))


def test_parts_of_the_keys_merged_in_any_order_give_the_whole():
    """Parts are whole blocks, attended to without a mask, as in cascades and sharded caches."""
    rng = random.Random(0)
    for seed in range(20):
        cap = rng.choice([None, 3.0])
        case = PagedCase((1, 1), (900, 450), 4, 2, 40, logits_soft_cap=cap, seed=seed)
        inputs = make_inputs(case)
        cuts = sorted(rng.sample(range(1, 28), rng.randint(1, 5)))
        parts = []
        for first, end in itertools.pairwise([0, *cuts, 57]):
            lengths = (inputs.batch.seq_lens - 16 * first).clamp(0, 16 * (end - first)).int()
            tables = inputs.batch.block_tables[:, first:end]
            part = replace(inputs.batch, block_tables=tables, seq_lens=lengths)
            parts.append(on_cpu(inputs.replace(batch=part), causal=False, plan=plan_for(inputs)))
        for _ in range(4):
            rng.shuffle(parts)
            assert_matches(merged(parts), inputs)
            half = len(parts) // 2
            assert_matches(merged([merged(parts[:half]), merged(parts[half:])]), inputs)


def test_a_window_as_long_as_the_sequence_hides_nothing():
    for inputs in random_inputs("window", 30, causal=True, sliding_window=None):
        longest = max(1, int(inputs.batch.seq_lens.max()))
        for window in (longest, longest + 1, 1 << 40):
            windowed = on_cpu(inputs, sliding_window=window, plan=plan_for(inputs))
            assert_same_bits(windowed, on_two_threads(inputs))


def test_a_window_one_shorter_hides_the_first_key_of_the_last_row():
    inputs = make_inputs(PagedCase((1,), (9,)))
    whole = on_cpu(inputs)
    windowed = on_cpu(inputs, sliding_window=8)
    assert (whole.lse >= windowed.lse).all()
    assert (whole.lse > windowed.lse).any()


@pytest.mark.parametrize("cap", [1e6, 1e30])
def test_a_huge_soft_cap_caps_nothing(attend, cap):
    for inputs in random_inputs("cap", 10, logits_soft_cap=None):
        capped = inputs.replace(options={**inputs.options, "logits_soft_cap": cap})
        assert_matches(attend(capped), inputs)


def test_upper_bounds_of_the_lengths_change_no_bit():
    inputs = make_inputs(LONG)
    larger = replace(inputs.batch, max_query_len=4000, max_seq_len=100_000)
    assert_same_bits(on_two_threads(inputs.replace(batch=larger)), on_two_threads(inputs))


# --- memory ----------------------------------------------------------------------------------


def test_out_is_written_and_returned_and_nothing_around_it(attend):
    for inputs in random_inputs("out", 20, strided=True):
        expected, out = attend(inputs), inputs.out
        buffer = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
        written = torch.zeros_like(buffer, dtype=torch.bool)
        written.as_strided(out.shape, out.stride(), out.storage_offset())[:] = True
        result = attend(inputs.replace(options={**inputs.options, "out": out}))
        assert result.out is out
        assert_same_bits(result, expected)
        assert buffer[~written].isnan().all()


def test_inputs_are_never_written(attend):
    for inputs in random_inputs("inputs", 20):
        named = {**vars(inputs), **vars(inputs.batch), **inputs.options}
        tensors = {name: value for name, value in named.items() if torch.is_tensor(value)}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        attend(inputs)
        for name, tensor in tensors.items():
            same = [t.contiguous().flatten().view(torch.uint8) for t in (tensor, before[name])]
            assert torch.equal(*same), name


def test_the_cpu_path_reads_no_key_that_no_row_sees():
    hidden = 0
    for inputs in random_inputs("unseen", 40, sliding_window=3, shares_prefix=False):
        expected = on_two_threads(inputs)
        paged = {"k_cache": inputs.k_cache.clone(), "v_cache": inputs.v_cache.clone()}
        if inputs.case.scales == "token":
            paged |= {name: inputs.options[name].clone() for name in ("k_scale", "v_scale")}
        tables = inputs.batch.block_tables.clone()
        block_size = inputs.problem.block_size
        for seq, query_len in enumerate(inputs.batch.cu_seqlens_q.diff().tolist()):
            seq_len = int(inputs.batch.seq_lens[seq])
            for key in range(seq_len if query_len == 0 else max(0, seq_len - query_len - 2)):
                block = int(tables[seq, key // block_size])
                for tensor in paged.values():
                    tensor[block, key % block_size].fill_(poison_of(tensor))
                hidden += 1
        caches = {name: paged.pop(name) for name in ("k_cache", "v_cache")}
        spoilt = inputs.replace(**caches, options={**inputs.options, **paged})
        assert_same_bits(on_two_threads(spoilt), expected)
    assert hidden > 1000


def test_strides_of_lengths_and_biases_do_not_matter(attend):
    inputs = make_inputs(PagedCase((1, 5), (30, 5), 4, 2, has_alibi=True, has_sinks=True))

    def every_other(tensor):
        return torch.stack([tensor, torch.full_like(tensor, 77)], dim=1)[:, 0]

    batch = replace(
        inputs.batch,
        seq_lens=every_other(inputs.batch.seq_lens),
        cu_seqlens_q=every_other(inputs.batch.cu_seqlens_q),
    )
    options = {
        name: every_other(value) if torch.is_tensor(value) else value
        for name, value in inputs.options.items()
    }
    assert_same_bits(attend(inputs.replace(batch=batch, options=options)), attend(inputs))


def test_a_cache_of_more_than_two_to_the_31_elements_is_addressed_in_64_bits():
    """Untouched pages take no memory: 13 GB of addresses, a few MB of memory."""
    shape = 2**31 // (256 * 2 * 8) + 4, 256, 2, 8
    small = make_inputs(PagedCase((1, 20), (700, 600), head_size=8, block_size=256, dtype=F16))
    k_cache, v_cache = (torch.empty(shape, dtype=F16) for _ in range(2))
    assert k_cache.numel() > 2**31
    spread = torch.linspace(0, shape[0] - 1, len(small.k_cache)).int()
    k_cache[spread.long()] = small.k_cache
    v_cache[spread.long()] = small.v_cache
    tables = small.batch.block_tables
    tables = torch.where(tables < len(spread), spread[tables.clamp(max=len(spread) - 1)], tables)
    batch = replace(small.batch, block_tables=tables)
    large = small.replace(k_cache=k_cache, v_cache=v_cache, batch=batch)
    assert_same_bits(on_two_threads(large), on_two_threads(small))
    assert_matches(on_two_threads(large), large)
