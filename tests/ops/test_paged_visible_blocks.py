"""``visible_blocks``: rows attend only to the keys of listed blocks."""

from dataclasses import replace

import pytest
import torch

from pagetile import PagedBatch, ShapeError, explain_paged_attention, paged_attention
from pagetile.errors import DTypeError
from pagetile.ops.paged_attention.api import check_on_host
from pagetile.testing import PagedCase, assert_matches, make_inputs
from pagetile.tiles.state import AttentionOutput

ON_GPU = torch.cuda.is_available()
INT8 = torch.int8
CASES = [
    PagedCase((1, 1), (70, 33), 4, 2, head_size=16, block_size=8, visible_share=0.4),
    PagedCase((1,), (97,), 8, 2, head_size=32, visible_share=0.5, sliding_window=30),
    PagedCase((5, 3), (60, 40), 4, 2, 16, block_size=4, visible_share=0.5, has_alibi=True),
    PagedCase((1, 1, 1), (90, 80, 7), 4, 4, 16, block_size=7, visible_share=0.5, has_sinks=True),
    PagedCase((40, 30), (60, 90), 4, 1, 16, block_size=8, visible_share=0.4, logits_soft_cap=5.0),
    PagedCase((40,), (60,), 6, 2, 16, block_size=5, visible_share=0.6, sliding_window=11),
    PagedCase((40, 1, 2), (60, 80, 9), 4, 2, 16, block_size=5, visible_share=0.3, causal=False),
    PagedCase((1, 1), (70, 33), 4, 2, 16, visible_share=0.4, kv_dtype=INT8, scales="token"),
    PagedCase((1, 1), (70, 33), 4, 2, 16, block_size=8, visible_share=0.0),
    PagedCase((20, 1), (70, 33), 4, 2, 16, block_size=1, visible_share=0.5, strided=True),
    PagedCase((1,), (1200,), 4, 2, 16, block_size=16, visible_share=0.2),
]
IMPLEMENTATIONS = [
    "reference",
    "cpu",
    pytest.param("triton", marks=pytest.mark.interpret),
    pytest.param("hopper", marks=pytest.mark.gpu),
]


def attend(inputs, impl, **changes):
    there = inputs.to("cuda" if ON_GPU and impl in ("triton", "hopper") else "cpu")
    out, lse = there.attend(impl=impl, **changes)
    return AttentionOutput(out.cpu(), lse.cpu())


def taken_by(case, impl):
    """The case in a type that an implementation supports, if it supports its number of rows."""
    if impl != "hopper":
        return case
    if max(case.query_lens) * case.num_heads // case.num_kv_heads > 16 or case.strided:
        pytest.skip("hopper takes up to 16 aligned rows")
    return replace(case, dtype=torch.bfloat16)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_match_float64(case, impl):
    inputs = make_inputs(taken_by(case, impl))
    assert_matches(attend(inputs, impl), inputs)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_listing_all_blocks_changes_nothing_but_rounding(impl):
    case = PagedCase((1, 1), (70, 33), 4, 2, head_size=16, block_size=8, visible_share=1.0)
    inputs = make_inputs(taken_by(case, impl))
    result = attend(inputs, impl, visible_blocks=None)
    assert_matches(result, inputs)
    assert_matches(attend(inputs, impl), inputs)


@pytest.mark.interpret
def test_a_captured_length_serves_shorter_lists():
    """Sizes of the lists are bounds: entries after the first -1 are not read as blocks."""
    inputs = make_inputs(CASES[0])
    listed = inputs.options["visible_blocks"]
    longer = torch.nn.functional.pad(listed, (0, 9), value=-1)
    expected = attend(inputs, "triton")
    for found, wanted in zip(
        attend(inputs, "triton", visible_blocks=longer), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted)


def listed_call(blocks, dtype=torch.int32):
    cache = torch.randn(6, 4, 1, 8)
    batch = PagedBatch.of([[5, 3, 1]], [10])
    lists = torch.tensor([[blocks]], dtype=dtype)
    return torch.randn(1, 2, 8), cache, cache, batch, lists


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([2, 0], r"visible_blocks\[0, 0, 1\] is 0 after 2, expected block numbers in ascending"),
        ([1, 1], r"visible_blocks\[0, 0, 1\] is 1 after 1"),
        ([0, -1, 2], r"visible_blocks\[0, 0, 2\] is 2 after -1"),
        ([0, 3], r"visible_blocks\[0, 0, 1\] is 3, expected 0 to 2, or -1 after the last"),
        ([-2, 0], r"visible_blocks\[0, 0, 0\] is -2, expected 0 to 2"),
    ],
    ids=str,
)
def test_wrong_lists_are_refused(blocks, message):
    q, k_cache, v_cache, batch, lists = listed_call(blocks)
    with pytest.raises(ShapeError, match=message):
        paged_attention(q, k_cache, v_cache, batch, visible_blocks=lists, impl="cpu")
    good = listed_call([0, 2, -1])
    paged_attention(*good[:4], visible_blocks=good[4], impl="cpu")


def test_lists_of_a_gpu_are_checked_on_the_host_when_debugging():
    inputs = make_inputs(CASES[0])
    listed = inputs.options["visible_blocks"]
    arguments = inputs.problem, inputs.batch, len(inputs.k_cache)
    check_on_host(*arguments, listed)
    with pytest.raises(ShapeError, match="visible_blocks"):
        check_on_host(*arguments, listed.flip(-1))


def test_lists_have_a_shape_and_a_type():
    q, k_cache, v_cache, batch, lists = listed_call([0, 2])
    with pytest.raises(ShapeError, match="visible_blocks has num_kv_heads=2 but k_cache has 1"):
        paged_attention(q, k_cache, v_cache, batch, visible_blocks=lists.repeat(1, 2, 1))
    with pytest.raises(DTypeError, match="visible_blocks is int64, expected int32"):
        paged_attention(q, k_cache, v_cache, batch, visible_blocks=lists.long())
    with pytest.raises(DTypeError, match="visible_blocks is of type list"):
        paged_attention(q, k_cache, v_cache, batch, visible_blocks=[[0]])


def test_explain_names_the_implementations_that_take_lists():
    q, k_cache, v_cache, batch, lists = listed_call([0, 2])
    lines = explain_paged_attention(q, k_cache, v_cache, batch, visible_blocks=lists).splitlines()
    assert lines[3:] == ["cpu: yes", "reference: yes"]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[:3])
def test_a_nan_in_a_block_that_no_head_lists_does_not_show(impl):
    q, cache, _, batch, lists = listed_call([0, 2])
    expected = paged_attention(q, cache, cache, batch, visible_blocks=lists, impl=impl).out
    poisoned = cache.clone()
    poisoned[3] = torch.nan  # the sequence's second block
    found = paged_attention(q, poisoned, poisoned, batch, visible_blocks=lists, impl=impl).out
    assert torch.equal(found, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("sliding_window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("query_len", [1, 11])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_what_lies_in_unlisted_blocks_does_not_show(
    block_size, query_len, dtype, sliding_window, impl
):
    """Heads list only the last, partial block; one of them an earlier block of the same tile."""
    if dtype == torch.bfloat16 and impl == "triton" and not ON_GPU:
        pytest.skip("the interpreter has no bfloat16")
    seq_lens = (97, 69)
    case = PagedCase(
        (query_len, 2), seq_lens, 8, 2, 32, block_size=block_size, dtype=dtype,
        sliding_window=sliding_window, visible_share=0.0,
    )  # fmt: skip
    inputs = make_inputs(taken_by(case, impl))
    if impl == "hopper" and inputs.problem.rows > 16:
        pytest.skip("hopper takes up to 16 rows; the drawn sequence without keys has more")
    lists = torch.full((inputs.batch.num_seqs, 2, 3), -1, dtype=torch.int32)
    k_cache, v_cache = inputs.k_cache.clone(), inputs.v_cache.clone()
    for seq, seq_len in enumerate(inputs.batch.seq_lens.tolist()):
        num_blocks = -(-seq_len // block_size)
        for head in range(2 if seq_len else 0):
            listed = 64 // block_size if (head, seq_len) == (1, 69) else num_blocks - 1
            lists[seq, head, 0] = listed
            for index, block in enumerate(inputs.batch.block_tables[seq, :num_blocks].tolist()):
                if index != listed:
                    k_cache[block, :, head], v_cache[block, :, head] = torch.nan, torch.inf
                    k_cache[block, ::2, head], v_cache[block, ::2, head] = -torch.inf, torch.nan
    inputs.options["visible_blocks"] = lists
    poisoned = inputs.replace(k_cache=k_cache, v_cache=v_cache)
    assert_matches(attend(poisoned, impl), inputs)


def test_a_table_that_is_too_short_is_named_before_the_lists():
    inputs = make_inputs(PagedCase((1,), (70,), block_size=8, visible_share=1.0))
    batch = inputs.batch
    short = replace(batch, block_tables=batch.block_tables[:, :3])
    with pytest.raises(ShapeError, match=r"max_blocks_per_seq=3: give all blocks"):
        inputs.replace(batch=short).attend(impl="cpu")
