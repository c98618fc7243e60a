"""Unpacking blocks of 8-bit caches before a prefill: the kernel, and when it runs."""

import math
import re
from dataclasses import replace

import pytest
import torch

from pagetile.device import DeviceInfo
from pagetile.ops.paged_attention import Problem
from pagetile.ops.paged_attention.plan import make_hopper_prefill_plan
from pagetile.ops.paged_attention.plan.prefill import short_len
from pagetile.ops.paged_attention.plan.unpacking import MOST_BYTES, MOST_SEQS, PAGE, count_pages
from pagetile.ops.paged_attention.problem import Arguments, form_of
from pagetile.testing import PagedCase, assert_matches, make_inputs, poisoned_memory
from pagetile.tiles.state import AttentionOutput

F16, BF16 = torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
with poisoned_memory() as works:
    IS_POISONED = works and not ON_GPU


# --- when blocks are unpacked -------------------------------------------------------------------

# A prompt of 4096 tokens by Llama 8B.
PROMPT = Problem(1, 4096, 4096, 4096, 32, 8, 128, 128, 16, BF16, E4M3, "head")


def unpacks(problem, **options):
    return make_hopper_prefill_plan(problem, H200, **options).unpacks


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_blocks_of_long_prompts_are_unpacked(dtype, kv_dtype):
    problem = replace(PROMPT, q_dtype=dtype, kv_dtype=kv_dtype)
    plan = make_hopper_prefill_plan(problem, H200)
    assert plan.unpacks
    # What runs over them is the kernel for caches of 16 bits.
    wide = make_hopper_prefill_plan(replace(problem, kv_dtype=dtype, scale_kind="none"), H200)
    assert plan == replace(wide, unpacks=True)
    assert not wide.unpacks


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 100, "max_query_len": 100, "max_seq_len": 100_000},  # reading is the bound
        {"num_tokens": 300, "max_query_len": 300, "max_seq_len": 300},  # as long as a launch
        {"num_heads": 8, "num_seqs": 64, "num_tokens": 64 * 512, "max_query_len": 512,
         "max_seq_len": 512},  # few tiles of queries read a key
        {"sliding_window": 64, "num_heads": 8},
        {"scale_kind": "token"},
        {"num_tokens": 0, "max_query_len": 0},
        {"max_seq_len": 0},
    ],
    ids=str,
)  # fmt: skip
def test_blocks_are_converted_for_every_tile_where_that_is_faster(change):
    assert not unpacks(replace(PROMPT, **change))


def test_a_group_of_heads_that_share_keys_counts_as_more_queries():
    short = replace(PROMPT, num_seqs=32, num_tokens=32 * 512, max_query_len=512, max_seq_len=512)
    assert [unpacks(replace(short, num_heads=8 * group)) for group in (1, 2, 4, 8)] == [
        *(False, False, True, True)
    ]


def test_memory_for_unpacked_blocks_is_bounded():
    fitting = MOST_BYTES // (8 * (128 + 128) * 2)  # tokens
    at_most = replace(PROMPT, num_tokens=fitting, max_query_len=fitting, max_seq_len=fitting)
    assert unpacks(at_most)
    more = replace(at_most, max_seq_len=fitting + 1)
    assert not unpacks(more)
    assert not unpacks(more, unpacks=True)
    assert not unpacks(replace(PROMPT, num_seqs=MOST_SEQS + 1), unpacks=True)


def test_what_depends_on_the_batch_does_not_change_an_invariant_result():
    assert not unpacks(PROMPT, batch_invariant=True)


def test_pages_are_counted_from_bounds():
    def count(longest=1000, **changes):
        problem = replace(PROMPT, **changes)
        return count_pages(problem, short_len(problem), longest)

    assert PAGE == 128
    assert [count(longest) for longest in (0, 1, 128, 129, 1000)] == [0, 1, 1, 2, 8]
    assert count(num_seqs=3, num_tokens=3 * 4096) == 3 * 8
    # With a window, keys to the left of the first token's are left out, but not parts of a page.
    assert count(100_000, sliding_window=100, max_query_len=500, num_tokens=500) == 6
    # Of 400 tokens in sequences of more than 2 there are 133 at most.
    assert short_len(replace(PROMPT, num_seqs=300, num_tokens=400)) == 2
    assert count(128, num_seqs=300, num_tokens=400) == 133
    assert count(128, num_seqs=20, num_tokens=400) == 20


# --- the kernel ---------------------------------------------------------------------------------

eight_bits = {"kv_dtype": E4M3, "scales": "head", "dtype": F16}
CASES = [
    PagedCase((3, 150), (300, 150), 2, 2, 16, block_size=16, **eight_bits),
    PagedCase((40, 9, 70), (129, 128, 70), 8, 1, 32, block_size=128, **eight_bits),
    PagedCase((60, 60), (200, 300), 4, 4, 48, v_head_size=16, block_size=5, **eight_bits),
    # Two sequences are left to another kernel.
    PagedCase((1, 60, 2, 30), (90, 260, 150, 30), 8, 2, 16, block_size=16, **eight_bits),
    # Pages to the left of the window are left out.
    PagedCase((20, 30), (400, 700), 2, 2, 16, sliding_window=200, **eight_bits),
    PagedCase((20, 300), (400, 260), 2, 1, 16, sliding_window=1, **eight_bits),
    PagedCase((80, 90), (3, 0), 2, 2, 16, causal=False, **eight_bits),
    PagedCase((70,), (70,), 2, 2, 16, kv_dtype=E4M3, scales="tensor"),
]


def unpack(inputs):
    """Unpack by the kernel, on the GPU or by the interpreter; the inputs of a prefill."""
    from pagetile.ops.paged_attention.triton_unpack import prepare_unpacking

    there = inputs.to(DEVICE)
    options = {name: value for name, value in there.options.items() if value is not None}
    scale = options.pop("softmax_scale", 1.0)
    call = Arguments(there.q, there.k_cache, there.v_cache, there.batch, scale, **options)
    device = DeviceInfo.of(there.q.device)
    with poisoned_memory():
        cache = prepare_unpacking(inputs.problem, form_of(call), device)(call, there.batch)
    return cache._replace(k=cache.k.cpu(), v=cache.v.cpu(), tables=cache.tables.cpu())


def find_pages(inputs):
    """Each unpacked page: its sequence, its number there, and its rows of keys and values.

    Rows are in float32, keys with the sign of their scale, and zeros past a sequence's end.
    """
    batch, block_size = inputs.batch, inputs.k_cache.shape[1]
    query_lens, window = batch.cu_seqlens_q.diff().tolist(), inputs.case.sliding_window or 10**9
    short = short_len(inputs.problem)
    k_scale = inputs.options["k_scale"]
    signs = torch.where(k_scale < 0, -1.0, 1.0).reshape(-1, 1)
    for seq, (query_len, seq_len) in enumerate(
        zip(query_lens, batch.seq_lens.tolist(), strict=True)
    ):
        if query_len <= short:
            continue
        blocks = batch.block_tables[seq, : -(-seq_len // block_size)].long()
        k, v = (c.float()[blocks].flatten(0, 1)[:seq_len] for c in (inputs.k_cache, inputs.v_cache))
        first = max(0, seq_len - query_len + 1 - window) // PAGE
        for number in range(first, -(-seq_len // PAGE)):
            rows = slice(number * PAGE, (number + 1) * PAGE)
            padded = [x.new_zeros(PAGE, *x.shape[1:]) for x in (k, v)]
            for to, x in zip(padded, (k[rows] * signs, v[rows]), strict=True):
                to[: len(x)] = x
            yield seq, number, *padded


def with_negative_scales(inputs):
    scale = inputs.options["k_scale"]
    flipped = scale.clone()
    flipped.view(-1)[::2] *= -1
    return inputs.replace(options={**inputs.options, "k_scale": flipped})


@pytest.mark.interpret
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F16, E4M3), (BF16, INT8), (BF16, E5M2)], ids=str)
def test_pages_hold_what_blocks_hold_and_nothing_else(case, dtype, kv_dtype):
    inputs = with_negative_scales(make_inputs(replace(case, dtype=dtype, kv_dtype=kv_dtype)))
    cache = unpack(inputs)
    assert (cache.k.dtype, cache.v.dtype) == (dtype, F16)
    seen = []
    for seq, number, k, v in find_pages(inputs):
        page = int(cache.tables[seq, number])
        torch.testing.assert_close(cache.k[page].float(), k, rtol=0, atol=0)
        torch.testing.assert_close(cache.v[page].float(), v, rtol=0, atol=0)
        seen.append(page)
    assert sorted(seen) == list(range(len(seen)))  # each page is one sequence's
    assert len(seen) <= len(cache.k)
    assert not IS_POISONED or cache.k[len(seen) :].isnan().all()  # no other page was written


@pytest.mark.parametrize(
    "kv_dtype",
    [
        pytest.param(INT8, marks=pytest.mark.interpret),
        # The interpreter converts subnormals and NaN of 8 bits wrongly.
        *(pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (E4M3, E5M2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_code_is_unpacked_as_torch_converts_it(dtype, kv_dtype):
    case = PagedCase((70,), (70,), 2, 2, 128, dtype=dtype, kv_dtype=kv_dtype, scales="head")
    inputs = make_inputs(case)
    seq = inputs.batch.seq_lens.tolist().index(70)
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).view(2, 128)
    block = int(inputs.batch.block_tables[seq, 1])
    inputs.k_cache[block, 3] = inputs.v_cache[block, 3] = codes
    cache = unpack(inputs)
    page = int(cache.tables[seq, 0])
    for found in (cache.k, cache.v):
        torch.testing.assert_close(
            found[page, 16 + 3].float(), codes.float(), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.interpret
def test_caches_may_lie_side_by_side_and_heads_apart():
    inputs = make_inputs(CASES[0])
    expected = unpack(inputs)
    both = torch.stack([inputs.k_cache, inputs.v_cache], dim=1)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in both.unbind(1)]
    scale = inputs.options["k_scale"].repeat_interleave(3)[::3]
    options = {**inputs.options, "k_scale": scale, "v_scale": scale}
    for k_cache, v_cache in (both.unbind(1), apart):
        cache = unpack(inputs.replace(k_cache=k_cache, v_cache=v_cache, options=options))
        for seq, number, _, _ in find_pages(inputs):
            page, wanted = (int(c.tables[seq, number]) for c in (cache, expected))
            assert torch.equal(cache.k[page], expected.k[wanted])
            assert torch.equal(cache.v[page], expected.v[wanted])


@pytest.mark.interpret
def test_a_launch_is_valid_for_shorter_sequences():
    """Lengths are bounds of a launch: a captured one is replayed with other lengths."""
    inputs = make_inputs(replace(CASES[0], seq_lens=(300, 400)))
    longest = inputs.batch.seq_lens
    for lens in (longest - 100, longest * 0, longest.clamp(max=1), longest):
        lens = lens.clamp(min=0)
        batch = replace(inputs.batch, seq_lens=lens)
        shorter = inputs.replace(batch=batch)
        cache = unpack(shorter)
        for seq, number, k, v in find_pages(shorter):
            page = int(cache.tables[seq, number])
            assert torch.equal(cache.k[page].float(), k)
            assert torch.equal(cache.v[page].float(), v)


def count_guarded(inputs):
    """How many numbers past each result were written, of those with room in the launch."""
    from pagetile.ops.paged_attention.triton_unpack import prepare_unpacking

    there = inputs.to(DEVICE)
    options = {name: value for name, value in there.options.items() if value is not None}
    call = Arguments(there.q, there.k_cache, there.v_cache, there.batch, 1.0, **options)
    unpack = prepare_unpacking(inputs.problem, form_of(call), DeviceInfo.of(there.q.device))
    memory, results = [], []
    for sizes, dtype in (
        (unpack.k_sizes, inputs.q.dtype), (unpack.v_sizes, F16), (unpack.table_sizes, torch.int32)
    ):  # fmt: skip
        size = math.prod(sizes)
        memory.append((torch.full((size + 100_000,), 77, dtype=dtype, device=DEVICE), size))
        results.append(memory[-1][0][:size].view(sizes))
    unpack.launch(
        *results, call.k_cache, call.v_cache, call.k_scale, call.batch.block_tables,
        call.batch.seq_lens, call.batch.cu_seqlens_q,
    )  # fmt: skip
    return [int((numbers[size:] != 77).sum()) for numbers, size in memory]


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("bounds", "window"),
    [
        ({"max_seq_len": 300}, None),
        ({"max_seq_len": 300}, 100),
        ({"max_seq_len": 1}, None),
        ({"max_query_len": 20}, 1),
    ],
    ids=str,
)
def test_no_length_makes_a_launch_write_past_its_pages(bounds, window):
    """Results are wrong where a bound is too small, but other memory is not overwritten."""
    case = PagedCase((290, 300), (700, 900), 2, 2, 16, sliding_window=window, **eight_bits)
    inputs = make_inputs(case)
    assert count_guarded(inputs) == [0, 0, 0]
    wrong = replace(inputs.batch, **bounds)
    assert count_guarded(inputs.replace(batch=wrong)) == [0, 0, 0]


@pytest.mark.interpret
@pytest.mark.parametrize(
    "options", [{}, {"has_alibi": True, "has_sinks": True, "logits_soft_cap": 5.0}], ids=str
)
def test_attention_over_unpacked_pages_is_that_over_the_blocks(options):
    case = PagedCase((40, 150), (300, 150), 4, 2, 32, block_size=16, **eight_bits, **options)
    inputs = make_inputs(replace(case, scales="tensor"))
    inputs.options["k_scale"] *= -1
    cache = unpack(inputs)
    batch = replace(inputs.batch, block_tables=cache.tables)
    given = dict(inputs.options)
    k_scale, v_scale = given.pop("k_scale"), given.pop("v_scale")
    given["softmax_scale"] = abs(float(k_scale)) / math.sqrt(32)
    pages = inputs.replace(k_cache=cache.k, v_cache=cache.v, batch=batch, options=given)
    out, lse = pages.attend(impl="reference")
    assert_matches(AttentionOutput((out.float() * v_scale).to(F16), lse), inputs)


# --- what is compiled ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_size", "v_head_size", "block_size"),
    [
        (BF16, E4M3, 128, 128, 16),
        (BF16, INT8, 64, 64, 1),
        (F16, E5M2, 256, 128, 24),
        (BF16, E4M3, 80, 80, 256),
    ],
    ids=str,
)
def test_rows_are_copied_16_bytes_at_a_time(
    dtype, kv_dtype, head_size, v_head_size, block_size, tmp_path
):
    pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")
    from test_compiled import assert_fits

    from pagetile.ops.paged_attention.triton_unpack import make_launcher

    launcher = make_launcher(dtype, kv_dtype, head_size, v_head_size, block_size, 32)
    ptx = assert_fits(launcher, tmp_path)
    assert re.search(r"ld\.global[.:\w]*\.v4\.b32", ptx)
    assert re.search(r"st\.global[.:\w]*\.v4\.b32", ptx)
    assert not re.search(r"(ld|st)\.global[.:\w]*\.b(8|16)\b", ptx)
