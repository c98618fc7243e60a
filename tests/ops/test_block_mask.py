"""``attention(block_mask=...)``: hidden blocks do not affect results or gradients, or take time."""

import math
import re
from dataclasses import replace

import pytest
import torch
from test_attention import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    ON_GPU,
    Case,
    Inputs,
    assert_matches,
    check,
    device_of,
    expect,
)

from pagetile import BlockMask, DTypeError, ShapeError, attention, explain_attention
from pagetile.device import DeviceInfo
from pagetile.ops.attention.checks import check as check_arguments
from pagetile.ops.attention.problem import Lengths, Options
from pagetile.ops.attention.tile_lists import FIELDS, list_tiles
from pagetile.testing import poisoned_memory

TINY = [
    Case((20,), (40,), batch=2, blocks=(8, 16)),
    Case((20,), (40,), batch=2, causal=True, blocks=(16, 8), has_sinks=True),
    Case((37,), (37,), 4, 2, batch=2, causal=True, sliding_window=9, blocks=(5, 7)),
    Case((9,), (70,), 4, 1, batch=2, blocks=(1, 64), mask_per="batch", has_alibi=True),
    Case((33,), (50,), 2, 2, 24, 40, batch=1, blocks=(32, 32), mask_per="head", dtype=F16),
    Case((33,), (50,), 2, 2, batch=2, blocks=(16, 16), mask_per="neither", logits_soft_cap=2.0),
    Case((5,), (7,), batch=2, causal=True, blocks=(4, 4), density=0.0),  # nothing is visible
    Case((3,), (0,), batch=2, blocks=(4, 4)),
    Case((0,), (3,), batch=1, blocks=(4, 4), mask_per="neither"),
]
LARGE = [
    Case((300,), (300,), 2, 2, 64, batch=2, blocks=(128, 128)),
    Case((300,), (700,), 4, 2, 64, batch=1, causal=True, blocks=(64, 64)),
    Case((260,), (390,), 4, 1, 128, batch=2, causal=True, blocks=(128, 128), mask_per="head"),
    Case((400,), (400,), 2, 1, 128, batch=2, sliding_window=150, blocks=(128, 128)),
    Case((400,), (400,), 2, 1, 128, batch=1, causal=True, sliding_window=150, blocks=(128, 128)),
    Case((200,), (333,), 4, 2, 80, batch=2, blocks=(100, 60), mask_per="batch", has_sinks=True),
    Case((150,), (190,), 2, 2, 256, batch=1, blocks=(64, 64), mask_per="neither"),
    Case((600,), (600,), 3, 1, 32, batch=1, blocks=(128, 256), has_alibi=True, causal=True),
    Case((1,), (600,), 4, 2, 64, batch=2, blocks=(1, 16), causal=True),
    Case((520,), (1030,), 2, 2, 128, batch=1, blocks=(128, 128), density=0.15),
]

IMPLEMENTATIONS = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.interpret)]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    return request.param


@pytest.mark.parametrize("case", TINY, ids=str)
def test_tiny_cases_match_float64(case, impl):
    check(case, impl)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_larger_cases_match_float64_on_a_cpu(case, dtype):
    check(replace(case, dtype=dtype), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*TINY, *LARGE], ids=str)
def test_all_cases_match_float64_on_a_gpu(case, dtype, impl):
    inputs = Inputs(replace(case, dtype=dtype), "cuda")
    with poisoned_memory():
        result, grads = inputs.run(impl)
    assert_matches(inputs, result, grads)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [72, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 200])
def test_hopper_matches_float64(size, causal, window):
    case = Case(
        (600,), (900,), 4, 2, size, batch=2, causal=causal, sliding_window=window,
        blocks=(128, 128), dtype=BF16,
    )  # fmt: skip
    check(case, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True, "sliding_window": 200}], ids=str)
def test_capped_scores_of_visible_tiles_on_hopper(size, options):
    """There is no running maximum; the first block of rows attends to nothing."""
    case = Case(
        (600,), (900,), 4, 2, size, batch=2, blocks=(128, 128), dtype=BF16, logits_soft_cap=30.0,
        **options,
    )  # fmt: skip
    check(case, "hopper")


def hide_a_tile(inputs):
    """The second block of keys, visible to no query: 128 keys of NaN."""
    block_mask = inputs.options["block_mask"]
    block_mask.mask[..., 1] = False
    for tensor in (inputs.k, inputs.v):
        tensor[:, 128:256] = math.nan


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_hidden_tiles_are_not_read(impl):
    check_hidden_tiles(impl)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_hidden_tiles_are_not_read_on_a_gpu(impl):
    check_hidden_tiles(impl)


def check_hidden_tiles(impl):
    case = Case((256,), (384,), 2, 2, 128, batch=2, blocks=(128, 128), density=0.8, dtype=BF16)
    clean, spoiled = Inputs(case, device_of(impl)), Inputs(case, device_of(impl))
    clean.options["block_mask"].mask[..., 1] = False
    hide_a_tile(spoiled)
    if impl == "reference":  # it multiplies by weights of zero
        spoiled.k[:, 128:256] = spoiled.v[:, 128:256] = 1e3
    expected, result = (inputs.run(impl) for inputs in (clean, spoiled))
    for name, wanted, got in zip(
        "olqkv", (*expected[0], *expected[1]), (*result[0], *result[1]), strict=True
    ):
        assert got.isfinite().eq(wanted.isfinite()).all(), name
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def test_gradients_match_finite_differences():
    inputs = Inputs(Case((9,), (12,), 2, 1, 8, batch=2, causal=True, blocks=(4, 3), dtype=F64))
    leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]

    def call(*leaves):
        return attention(*leaves, causal=True, block_mask=inputs.options["block_mask"]).out

    assert torch.autograd.gradcheck(call, leaves)


def test_a_wrong_block_is_noticed():
    inputs = Inputs(Case((40,), (40,), batch=1, blocks=(8, 8), density=0.7))
    expected = expect(inputs)
    inputs.options["block_mask"].mask[0, 1, 2, 3] ^= True
    result, grads = inputs.run("cpu")
    with pytest.raises(AssertionError, match="out is off by"):
        assert_matches(inputs, result, grads, expected)


# --- lists of tiles ---------------------------------------------------------------------------


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 11, 40])
@pytest.mark.parametrize("blocks", [(16, 16), (12, 20), (64, 8)], ids=str)
def test_lists_hold_each_visible_tile_once(blocks, window, causal, by_keys):
    query_len, seq_len, tile_q, tile_k = 70, 100, 16, 32
    case = Case((query_len,), (seq_len,), 3, 3, batch=2, blocks=blocks)
    block_mask = Inputs(case).options["block_mask"]
    lists = list_tiles(
        block_mask, query_len, seq_len, tile_q, tile_k, causal=causal, sliding_window=window,
        by_keys=by_keys,
    )  # fmt: skip
    visible = block_mask.expand(query_len, seq_len)
    distance = torch.arange(seq_len) - torch.arange(seq_len - query_len, seq_len)[:, None]
    if causal:
        visible = visible & (distance <= 0)
    if window is not None:
        visible = visible & (distance > -window)
    tiles = lists.shape[2]
    for b in range(2):
        for h in range(3):
            records = lists[b, h].tolist()
            lengths = [record[1] + record[2] for record in records]
            assert by_keys or lengths == sorted(lengths, reverse=True)
            numbers = [record[0] for record in records]
            assert (numbers if by_keys else sorted(numbers)) == list(range(tiles))
            for outer, num_partial, num_full, _, *inner in records:
                partial = inner[:num_partial]
                full = inner[num_partial : num_partial + num_full]
                assert partial == sorted(partial, reverse=True)
                assert full == sorted(full, reverse=True)
                for i in range(len(inner)):
                    m, n = (i, outer) if by_keys else (outer, i)
                    rows = slice(m * tile_q, (m + 1) * tile_q)
                    keys = slice(n * tile_k, (n + 1) * tile_k)
                    tile = visible[b, h, rows, keys]
                    assert i in partial or i in full or not tile.any()
                    if i in full:
                        assert tile.all()
                        assert len(tile) == tile_q or not by_keys
                        assert tile.shape[1] == tile_k or by_keys


def test_lists_are_kept_until_the_mask_changes():
    block_mask = BlockMask(torch.ones(1, 1, 4, 4, dtype=torch.bool), 16, 16)
    options = {"causal": False, "sliding_window": None}
    first = list_tiles(block_mask, 64, 64, 16, 16, **options)
    assert list_tiles(block_mask, 64, 64, 16, 16, **options) is first
    block_mask.mask[0, 0, 1] = False
    second = list_tiles(block_mask, 64, 64, 16, 16, **options)
    assert (second[0, 0, :, 1:3].sum(-1) == torch.tensor([4, 4, 4, 0])).all()
    assert second.shape == (1, 1, 4, FIELDS + 4)


# --- the pattern of vLLM's kernel ----------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("query_len", [150, 96, 1])
def test_local_and_strided_blocks_are_vllms(query_len, rank, step):
    """Compared with the loops of vLLM's paged_attention_kernel, key by key."""
    seq_len, size, local, stride, heads, kv_heads = 150, 16, 2, 3, 4, 2
    block_mask = BlockMask.local_strided(
        query_len, seq_len, local_blocks=local, vert_stride=stride, block_size=size,
        head_sliding_step=step, num_heads=heads, num_kv_heads=kv_heads, tp_rank=rank,
    )  # fmt: skip
    visible = block_mask.expand(query_len, seq_len)[0].expand(heads, query_len, seq_len)
    for head in range(heads):
        if step >= 0:
            offset = (rank * heads + head) * step + 1
        else:
            offset = (rank * kv_heads + head // (heads // kv_heads)) * -step + 1
        for i in range(0, query_len, 7):
            own = (seq_len - query_len + i) // size
            wanted = [
                (j // size + offset) % stride == 0 or j // size > own - local
                for j in range(seq_len)
            ]
            assert visible[head, i].tolist() == wanted


# --- refusals --------------------------------------------------------------------------------

Q = torch.zeros(2, 20, 4, 16)


def mask(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 1, 3, 2), "block_mask has batch=3, expected 1 or 2"),
        ((1, 2, 3, 2), "block_mask has num_heads=2, expected 1 or 4"),
        ((1, 1, 2, 2), "block_mask has q_blocks=2, expected 3: query_len is 20 with block_q=8"),
        ((1, 1, 3, 3), "block_mask has k_blocks=3, expected 2: .* seq_len is 20 with block_k=16"),
    ],
    ids=str,
)
def test_a_mask_of_another_size_is_refused(shape, message):
    with pytest.raises(ShapeError, match=message):
        attention(Q, Q, Q, block_mask=BlockMask(mask(*shape), 8, 16))


def test_a_mask_is_made_right_or_not_at_all():
    with pytest.raises(DTypeError, match=r"mask is torch.float32, expected a tensor of torch.bool"):
        BlockMask(torch.ones(1, 1, 2, 2))
    with pytest.raises(DTypeError, match=r"mask is list"):
        BlockMask([[True]])
    with pytest.raises(ShapeError, match=r"mask has 2 dimensions \[2, 2\], expected \[batch"):
        BlockMask(mask(2, 2))
    with pytest.raises(ShapeError, match="block_k is 0, expected an integer of at least 1"):
        BlockMask(mask(1, 1, 2, 2), 8, 0)
    with pytest.raises(ShapeError, match="vert_stride is 0, expected an integer, 1 or more"):
        BlockMask.local_strided(8, 8, local_blocks=1, vert_stride=0)
    with pytest.raises(ShapeError, match="query_len is 9, expected at most seq_len=8"):
        BlockMask.local_strided(9, 8, local_blocks=1, vert_stride=2)
    with pytest.raises(DTypeError, match=r"block_mask is a Tensor, expected pagetile.BlockMask"):
        attention(Q, Q, Q, block_mask=mask(1, 1, 1, 1))


def test_ragged_batches_have_none():
    starts = torch.tensor([0, 20], dtype=torch.int32)
    with pytest.raises(ShapeError, match="block_mask is given and cu_seqlens_q too"):
        attention(Q[0], Q[0], Q[0], cu_seqlens_q=starts, block_mask=BlockMask(mask(1, 1, 1, 1)))


def test_explain_says_what_runs():
    assert "cpu: yes" in explain_attention(Q, Q, Q, block_mask=BlockMask(mask(1, 1, 1, 1)))


def test_attention_compiles_as_one_node():
    leaves = [torch.randn(1, 20, 4, 16, requires_grad=True) for _ in range(3)]
    block_mask = BlockMask(torch.rand(1, 4, 3, 3) < 0.6, 8, 8)

    def call(q, k, v):
        return attention(q * 2, k, v, block_mask=block_mask).out.square().sum()

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = (torch.autograd.grad(f(*leaves), leaves) for f in (whole, call))
    for found, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_a_graph_may_make_its_lists():
    assert ON_GPU
    q, k, v = torch.randn(3, 1, 512, 2, 128, dtype=BF16, device="cuda").unbind()
    block_mask = BlockMask(torch.rand(1, 2, 4, 4, device="cuda") < 0.5)
    expected = attention(q, k, v, block_mask=BlockMask(block_mask.mask.clone())).out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, block_mask=block_mask).out
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_layouts_agree():
    q, k, v = torch.randn(3, 2, 4, 20, 16, dtype=F32).unbind()
    block_mask = BlockMask(torch.rand(2, 4, 3, 3) < 0.6, 8, 8)
    here = attention(q, k, v, block_mask=block_mask, layout="BHSD").out
    there = attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=block_mask).out
    torch.testing.assert_close(here, there.transpose(1, 2))


def test_a_mask_of_inference_mode_may_change(impl):
    """Its changes are not counted, so no list of its tiles is kept."""
    device = device_of(impl)
    with torch.inference_mode():
        q, k, v = torch.randn(3, 1, 40, 2, 16, device=device).unbind()
        mask = torch.eye(2, dtype=torch.bool, device=device)[None, None]
        for _ in range(2):
            block_mask = BlockMask(mask, 20, 20)
            out, _ = attention(q, k, v, block_mask=block_mask, impl=impl)
            expected, _ = attention(q, k, v, block_mask=block_mask, impl="reference")
            assert torch.allclose(out, expected, atol=1e-5)
            mask.logical_not_()


def test_lists_that_32_bits_do_not_count_are_left_to_triton():
    """Hopper's kernel finds a record by an offset of 32 bits."""
    hopper = pytest.importorskip("pagetile.ops.attention.hopper")
    tiles = 1 << 13  # of 128 queries and, in so narrow a head, 128 keys
    mask = torch.empty(1, 32, tiles, tiles, dtype=torch.bool, device="meta")
    q, k, v = torch.empty(3, 1, 128 * tiles, 32, 64, dtype=BF16, device="meta").unbind(0)
    device = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
    for shared, reason in ((mask, "2\\^31 words"), (mask[:, :1], "^None$")):
        options = Options(1.0, block_mask=BlockMask(shared, 128, 128))
        problem = check_arguments(q, k, v, Lengths(), options)
        assert re.search(reason, str(hopper.supports(problem, device)))
