"""Few tiles of queries over many keys: Hopper's kernels divide the keys, on a GPU.

``tests/tiles/test_hopper_splits.py`` tests the arithmetic of prefill's schedule without a GPU.
"""

from dataclasses import replace

import pytest
import torch
from test_paged_attention_gpu import assert_same_alone, assert_same_bits, plan

from pagetile.device import DeviceInfo
from pagetile.testing import PagedCase, assert_matches, make_inputs
from pagetile.tiles.state import AttentionOutput

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")

from pagetile.ops.paged_attention import hopper, hopper_prefill
from pagetile.tiles.triton import workspace

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))

LONG = [
    PagedCase((300,), (9000,), 4, 2, head_size=128),
    PagedCase((17,), (12_000,), 8, 1, head_size=128),  # four heads to a tile
    PagedCase((100, 90, 130), (2200, 9000, 130), 4, 2, head_size=128),  # the last is not cut
    PagedCase((1, 300, 4, 1, 0, 17), (20_000, 9000, 5000, 3, 100, 5000), 8, 2, head_size=128),
    PagedCase((300,), (9000,), 4, 2, head_size=64, has_sinks=True),
    PagedCase((200,), (9000,), 4, 4, head_size=64, block_size=64),
    PagedCase((200, 40), (9000, 3000), 4, 2, head_size=256, logits_soft_cap=5.0),
    PagedCase((200,), (9000,), 4, 2, head_size=256, sliding_window=6000, has_sinks=True),
    PagedCase((200,), (9000,), 2, 2, head_size=96, block_size=1),
    PagedCase((200,), (9000,), 2, 1, head_size=112, block_size=8, sliding_window=5000),
    PagedCase((300,), (9000,), 2, 1, head_size=128, causal=False),
    PagedCase((300,), (9000,), 2, 2, head_size=128, has_alibi=True, logits_soft_cap=30.0),
    PagedCase((300, 100), (9000, 3), 2, 1, head_size=128),  # rows that see no key
    PagedCase((200, 1), (9000, 400), 4, 2, head_size=192, v_head_size=128),
    PagedCase((200,), (9000,), 4, 2, head_size=40, has_sinks=True),
]


def test_these_cases_may_be_divided():
    for case in LONG:
        problem = make_inputs(replace(case, dtype=BF16)).problem
        assert hopper_prefill.make_plan(problem, H200).divides_keys, case
        fixed = hopper_prefill.make_plan(problem, H200, batch_invariant=True)
        assert not fixed.divides_keys


@torch.inference_mode()  # in which an engine's launches made it
def spoil_scratch():
    """Fill what earlier launches left as partial results with NaN."""
    for _, (accs, sums, _) in workspace._made.values():
        accs.fill_(torch.nan)
        sums.fill_(torch.nan)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_merged_splits_match_float64(case, dtype):
    inputs = make_inputs(replace(case, dtype=dtype))
    there = inputs.to("cuda")
    spoil_scratch()
    first = there.attend(impl="hopper_prefill", out=there.out)
    assert_matches(AttentionOutput(*(tensor.cpu() for tensor in first)), inputs)
    for _ in range(3):  # whichever split arrives last
        spoil_scratch()
        assert_same_bits(there.attend(impl="hopper_prefill"), first)
    torch.cuda.synchronize()
    assert not any(arrivals.any() for _, (_, _, arrivals) in workspace._made.values())
    assert not any(counter.any() for counter in workspace._counters.values())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [PagedCase((300,), (9000,), 4, 2), PagedCase((1, 40, 3), (9000, 20_000, 500), 8, 2)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [64, 128, 256])
def test_a_captured_launch_divides_other_lengths(case, size):
    there = make_inputs(replace(case, head_size=size, dtype=BF16)).to("cuda")
    there.attend(impl="hopper_prefill")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = there.attend(impl="hopper_prefill", out=there.out)
    lengths = there.batch.seq_lens.clone()
    for shorter in (0, 1, 3000, 7000, 8900, 20_000):
        there.batch.seq_lens.copy_((lengths - shorter).clamp(min=0))
        there.out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(there.attend(impl="hopper_prefill"), result)


def test_the_counter_of_tiles_lies_apart_from_those_of_splits():
    """A mixed batch's decode has splits while its prefill draws tiles from a counter."""
    lent = workspace.borrow(-1, (1, 1, 5000))[2]
    counter = workspace.borrow_counter(-1)
    assert counter is workspace.borrow_counter(-1)
    assert counter.untyped_storage().data_ptr() != lent.untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_decode_beside_prompts_of_several_waves(invariant):
    """Splits of the decoding sequence and drawn tiles each use a counter."""
    case = PagedCase((1, 4096), (6000, 4096), 32, 8, head_size=128, dtype=BF16)
    there = make_inputs(case).to("cuda")
    chosen = plan(there, "hopper_prefill", batch_invariant=invariant)
    expected = there.attend(impl="hopper_prefill", plan=chosen)
    for _ in range(100):
        assert_same_bits(there.attend(impl="hopper_prefill", plan=chosen), expected)
    torch.cuda.synchronize()
    assert not any(counter.any() for counter in workspace._counters.values())
    assert not any(arrivals.any() for _, (_, _, arrivals) in workspace._made.values())


@pytest.mark.gpu
def test_a_long_prompt_alone_and_among_others():
    """Under a batch-invariant plan keys are not split."""
    case = PagedCase((200, 300, 133, 1), (9000, 1500, 7000, 64), 4, 2, 128, dtype=BF16)
    assert_same_alone(make_inputs(case), "hopper_prefill", range(4))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_splits_do_not_see_the_next_sequence_s_nan(size):
    case = PagedCase((70, 70), (9000, 7000), 4, 2, head_size=size, dtype=BF16)
    there = make_inputs(case).to("cuda")
    before = there.attend(impl="hopper_prefill")
    start, end = there.batch.cu_seqlens_q[-2:].tolist()
    there.q[start:end] = torch.nan
    after = there.attend(impl="hopper_prefill")
    assert_same_bits([x[:start] for x in after], [x[:start] for x in before])
    assert after.out[start:end].isnan().all()


DECODES = [
    PagedCase((1,), (40_000,), 16, 1, head_size=64, block_size=32),
    PagedCase((1,), (40_000,), 1, 1, head_size=64),  # all splits at once, eight rows of threads
    PagedCase((1, 1), (30_000, 9000), 2, 1, head_size=64, has_sinks=True),
    PagedCase((1, 1, 1), (35_000, 62, 5866), 14, 2, head_size=128),
    PagedCase((1,), (35_001,), 1, 1, head_size=128, sliding_window=30_000),
    PagedCase((4,), (30_000,), 4, 1, head_size=128, logits_soft_cap=5.0),
    PagedCase((1,), (20_000,), 8, 1, head_size=256),
    PagedCase((1, 2), (20_000, 300), 2, 1, head_size=192, v_head_size=128),
    PagedCase((1,), (40_000,), 7, 1, head_size=128, kv_dtype=E4M3, scales="token"),
]
"""One or two heads with more splits than one CTA merges by itself."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_many_splits_of_decode_match_float64(case, batch_invariant):
    inputs = make_inputs(replace(case, dtype=BF16))
    there = inputs.to("cuda")
    own = hopper.make_plan(inputs.problem, H200, batch_invariant=batch_invariant)
    # As many splits of fixed size as there are CTAs.
    own = replace(own, split_size=128) if batch_invariant else own
    spoil_scratch()
    first = there.attend(impl="hopper", out=there.out, plan=own)
    assert_matches(AttentionOutput(*(tensor.cpu() for tensor in first)), inputs)
    for _ in range(3):  # whichever split arrives last
        spoil_scratch()
        assert_same_bits(there.attend(impl="hopper", plan=own), first)
    torch.cuda.synchronize()
    assert not any(arrivals.any() for _, (_, _, arrivals) in workspace._made.values())
