"""``shared_prefixes``: the prefix of a group is read once, and results stay the same."""

from dataclasses import replace

import pytest
import torch

from pagetile import (
    PagedBatch,
    ShapeError,
    SharedPrefixes,
    UnsupportedError,
    paged_attention,
    plan_paged_attention,
)
from pagetile.errors import DTypeError
from pagetile.ops.paged_attention import shared_prefixes
from pagetile.testing import PagedCase, PagedInputs, assert_matches, make_inputs
from pagetile.tiles.state import AttentionOutput

ON_GPU = torch.cuda.is_available()
BLOCK = 8


def make_shared(case, groups, prefixes):
    """Inputs of a case whose sequences share blocks: sizes of the groups, lengths of prefixes."""
    assert sum(groups) == len(case.seq_lens)
    inputs = make_inputs(case)
    keep = [seq for seq, n in enumerate(inputs.batch.seq_lens.tolist()) if n > 0]
    batch = inputs.batch
    starts, tables = batch.cu_seqlens_q.tolist(), batch.block_tables[keep].clone()
    rows = [row for seq in keep for row in range(starts[seq], starts[seq + 1])]
    first = 0
    for size, prefix in zip(groups, prefixes, strict=True):
        blocks = slice(prefix // BLOCK)
        tables[first : first + size, blocks] = tables[first : first + 1, blocks].clone()
        first += size
    shared = SharedPrefixes(
        torch.tensor([0, *groups]).cumsum(0).int(), torch.tensor(prefixes, dtype=torch.int32)
    )
    new = PagedBatch(
        tables, batch.seq_lens[keep], torch.tensor([0, *case.query_lens]).cumsum(0).int(),
        batch.max_query_len, batch.max_seq_len, shared,
    )  # fmt: skip
    return replace(inputs, q=inputs.q[rows], out=inputs.out[rows], batch=new)


def to(inputs: PagedInputs, device):
    there, shared = inputs.to(device), inputs.batch.shared_prefixes
    shared = SharedPrefixes(shared.cu_group_seqs.to(device), shared.prefix_lens.to(device))
    return replace(there, batch=replace(there.batch, shared_prefixes=shared))


SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "block_size": BLOCK}
CASES = [
    (PagedCase((1, 1, 1), (90, 70, 64), **SIZES), [3], [56]),
    (PagedCase((1, 2, 1, 1), (30, 34, 70, 90), **SIZES), [2, 2], [24, 64]),
    (PagedCase((1, 5, 1), (30, 54, 70), has_alibi=True, has_sinks=True, **SIZES), [2, 1], [24, 0]),
    (PagedCase((30, 20), (70, 61), logits_soft_cap=5.0, has_alibi=True, **SIZES), [2], [40]),
    (PagedCase((1, 1), (70, 61), kv_dtype=torch.int8, scales="token", **SIZES), [2], [56]),
    (PagedCase((1, 1), (70, 61), sliding_window=20, **SIZES), [2], [56]),
    (PagedCase((1, 3), (70, 61), causal=False, **SIZES), [2], [56]),
    (PagedCase((1, 1, 1), (70, 61, 20), **SIZES), [0, 2, 0, 1, 0], [0, 56, 0, 0, 0]),
    (PagedCase((1,) * 40, (70,) * 30 + (20,) * 10, **SIZES), [30, 10], [56, 8]),
    (PagedCase((9, 40, 9), (90, 99, 70), has_alibi=True, **SIZES), [3], [48]),
    (PagedCase((1, 1), (70, 61), kv_dtype=torch.int8, scales="head", **SIZES), [2], [56]),
]
IMPLEMENTATIONS = [
    "reference",
    "cpu",
    pytest.param("triton", marks=pytest.mark.interpret),
    pytest.param("auto", marks=pytest.mark.gpu),
]


@pytest.fixture
def shares(monkeypatch):
    """Share prefixes even where it saves no time."""
    monkeypatch.setattr(shared_prefixes, "saves_time", lambda *_: True)


@pytest.fixture(params=[(1, 64), (40, 16)], ids=["one-split", "many-splits"])
def tiles(request, monkeypatch):
    """Numbers of programs and of keys a tile, on which the number of splits depends."""
    make = shared_prefixes.make_prefix_plan
    programs, tile_n = request.param

    def change(*args):
        return replace(make(*args), num_programs=programs, tile_n=tile_n)

    monkeypatch.setattr(shared_prefixes, "make_prefix_plan", change)


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize(("case", "groups", "prefixes"), CASES, ids=str)
def test_cases_match_float64(case, groups, prefixes, impl):
    inputs = make_shared(case, groups, prefixes)
    out, lse = inputs.attend(impl=impl, out=inputs.out)
    plain = replace(inputs, batch=replace(inputs.batch, shared_prefixes=None))
    assert_matches(AttentionOutput(out, lse), plain)


@pytest.mark.usefixtures("shares", "tiles")
@pytest.mark.parametrize(
    ("impl", "has_kernel"),
    [
        pytest.param("triton", True, marks=pytest.mark.interpret),
        pytest.param("auto", True, marks=pytest.mark.gpu),
        pytest.param("auto", False, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(("case", "groups", "prefixes"), CASES, ids=str)
def test_cases_on_a_gpu_match_float64(case, groups, prefixes, impl, has_kernel, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "_has_kernel", lambda *_: has_kernel)
    dtype = torch.bfloat16 if impl == "auto" else case.dtype
    inputs = make_shared(replace(case, dtype=dtype), groups, prefixes)
    there = to(inputs, "cuda") if ON_GPU else inputs
    out, lse = there.attend(impl=impl, out=there.out)
    plain = replace(inputs, batch=replace(inputs.batch, shared_prefixes=None))
    assert_matches(AttentionOutput(out.cpu(), lse.cpu()), plain)


@pytest.mark.usefixtures("shares")
def test_the_prefix_is_read_once(monkeypatch):
    passes = []
    run = shared_prefixes.run

    def watch(problem, attend, call, impl):
        return run(problem, lambda inner: passes.append(inner) or attend(inner), call, impl)

    monkeypatch.setattr(shared_prefixes, "run", watch)
    inputs = make_shared(*CASES[0])
    inputs.attend(impl="cpu")
    first, second = passes
    assert first.batch.seq_lens.sum() == 56
    assert second.batch.seq_lens.tolist() == [90 - 56, 70 - 56, 64 - 56]


def test_sharing_is_used_where_it_saves_enough():
    from pagetile.device import DeviceInfo
    from pagetile.ops.paged_attention import Problem

    h200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
    bf16 = torch.bfloat16
    problem = Problem(256, 256, 1, 33024, 32, 8, 128, 128, 16, bf16, bf16)
    shared = SharedPrefixes(torch.tensor([0, 256]), torch.tensor([32768]), 256, 32768)
    assert shared_prefixes.saves_time(problem, shared, h200)
    has_kernel = shared_prefixes._has_kernel
    assert not has_kernel(problem, shared, h200, "auto"), "1024 rows: prefill is faster"
    few_heads = replace(problem, num_heads=8)
    assert has_kernel(few_heads, shared, h200, "auto")
    in_float32 = replace(problem, q_dtype=torch.float32, kv_dtype=torch.float32)
    assert has_kernel(in_float32, shared, h200, "auto"), "prefill takes 16 bits"
    capped = replace(problem, logits_soft_cap=100.0)
    assert has_kernel(capped, shared, h200, "auto"), "prefill takes caps of up to 64"
    alone = SharedPrefixes(torch.arange(257), torch.zeros(256))
    assert not shared_prefixes.saves_time(problem, alone, h200)
    few = replace(problem, num_seqs=8, num_tokens=8)
    short = SharedPrefixes(torch.tensor([0, 8]), torch.tensor([128]), 8, 128)
    assert not shared_prefixes.saves_time(few, short, h200)


@pytest.mark.parametrize("impl", ["hopper", "hopper_prefill", "triton"])
@pytest.mark.parametrize("group_seqs", [1, 6, 30, 500])
@pytest.mark.parametrize("query_len", [1, 7, 20, 700])
def test_an_implementation_that_runs_a_batch_runs_its_prefixes(impl, group_seqs, query_len):
    from pagetile.device import DeviceInfo
    from pagetile.ops.paged_attention import Problem
    from pagetile.ops.paged_attention.api import choose_implementation

    h200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
    num_tokens = group_seqs * query_len
    problem = Problem(
        group_seqs, num_tokens, query_len, 33024, 8, 2, 128, 128, 16, torch.bfloat16, torch.bfloat16
    )
    shared = SharedPrefixes(torch.tensor([0, group_seqs]), torch.tensor([16384]))
    try:
        choose_implementation(problem, h200, impl)
    except UnsupportedError:
        return
    if not shared_prefixes._has_kernel(problem, shared, h200, impl):
        first = replace(problem, num_seqs=1, max_query_len=num_tokens)
        choose_implementation(first, h200, impl)  # raises where it cannot


@pytest.mark.parametrize(
    ("groups", "prefixes", "message"),
    [
        ([0, 2], [56], r"cu_group_seqs is \[0, 2\], expected to ascend from 0 to num_seqs=3"),
        ([0, 2, 1, 3], [8, 8, 8], "cu_group_seqs is"),
        ([0, 2, 2, 3], [8, 8, 8], r"prefix_lens\[1\] is 8, but the group has no sequence"),
        ([0, 3], [50], r"prefix_lens\[0\] is 50, expected whole blocks of 8"),
        ([0, 3], [64], r"prefix_lens\[0\] is 64, but sequence 2 has 63 keys before its new tokens"),
        ([0, 3, 3][:2], [56, 8], "cu_group_seqs has 2 entries, expected num_groups"),
        ([0], [], "prefix_lens has no group, but the batch has 3 sequences"),
    ],
    ids=str,
)
def test_wrong_groups_are_refused(groups, prefixes, message):
    inputs = make_shared(*CASES[0])
    ints = [torch.tensor(numbers, dtype=torch.int32) for numbers in (groups, prefixes)]
    batch = replace(inputs.batch, shared_prefixes=SharedPrefixes(*ints))
    with pytest.raises(ShapeError, match=message):
        replace(inputs, batch=batch).attend(impl="cpu")


def test_a_sequence_of_more_new_tokens_than_keys_may_be_in_a_group_without_a_prefix():
    inputs = make_inputs(PagedCase((1, 9, 1), (70, 5, 70), shares_prefix=True)).share()
    batch = inputs.batch
    assert (batch.seq_lens - batch.cu_seqlens_q.diff()).min() < 0
    out, lse = inputs.attend()
    assert_matches(AttentionOutput(out, lse), inputs)


def test_prefixes_that_differ_are_refused():
    inputs = make_shared(*CASES[0])
    inputs.batch.block_tables[1, 0] = inputs.batch.block_tables[0, 1]
    with pytest.raises(ShapeError, match="do not begin with the same 7 blocks"):
        inputs.attend(impl="cpu")


def test_what_does_not_go_with_shared_prefixes_is_refused():
    inputs = make_shared(*CASES[0])
    lists = torch.zeros(3, 2, 1, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="visible_blocks with shared_prefixes"):
        inputs.attend(visible_blocks=lists)
    from pagetile.device import DeviceInfo
    from pagetile.ops.paged_attention import make_plan

    plan = make_plan(inputs.problem, DeviceInfo.of(inputs.q.device))
    with pytest.raises(UnsupportedError, match="plan with shared_prefixes"):
        inputs.attend(plan=plan)
    with pytest.raises(UnsupportedError, match="a call with shared_prefixes takes no plan"):
        plan_paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    batch = replace(inputs.batch, shared_prefixes=(1, 2))
    with pytest.raises(DTypeError, match="shared_prefixes is of type tuple"):
        paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, batch)


@pytest.mark.usefixtures("shares")
def test_a_compiled_call_takes_shared_prefixes():
    inputs = make_shared(*CASES[0])
    torch._dynamo.reset()

    def step(q):
        return paged_attention(q * 2, inputs.k_cache, inputs.v_cache, inputs.batch).out + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs.q), step(inputs.q))
    torch._dynamo.reset()


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_the_merging_kernel_gives_what_torch_gives(splits, dtype):
    from pagetile.ops.paged_attention import triton_merge

    device = "cuda" if ON_GPU else "cpu"
    torch.manual_seed(splits)
    outs, own = torch.randn(splits, 5, 6, 24), torch.randn(5, 6, 24)
    lses, own_lse = 3 * torch.randn(splits, 5, 6), torch.randn(5, 6)
    lses[0, 0] = own_lse[1] = -torch.inf  # no key in one pass
    lses[:, 2, 3] = own_lse[2, 3] = -torch.inf  # none in any
    outs[0, 0] = own[1] = outs[:, 2, 3] = own[2, 3] = 0
    outs, own, lses, own_lse = outs.to(dtype), own.to(dtype), lses, own_lse
    expected = torch.full((5, 6, 24), torch.nan, dtype=dtype)
    expected_lse = shared_prefixes._merge(expected, outs, lses, AttentionOutput(own, own_lse))
    out = torch.full((5, 7, 40), torch.nan, dtype=dtype, device=device)[:, 1:, 8:32]
    moved = (x.to(device) for x in (outs, lses, own, own_lse))
    lse = triton_merge.merge(out, *moved)
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(lse.cpu(), expected_lse)
    assert lse[2, 3] == -torch.inf
    assert not out[2, 3].any()


@pytest.mark.interpret
@pytest.mark.parametrize(("case", "groups", "prefixes"), CASES, ids=str)
def test_the_kernel_lays_both_passes_out_as_torch_does(case, groups, prefixes):
    from pagetile.ops.paged_attention import triton_prefixes

    inputs = make_shared(case, groups, prefixes)
    batch, block_size = inputs.batch, inputs.problem.block_size
    expected = shared_prefixes._lay_out(batch, batch.shared_prefixes, block_size)
    there = to(inputs, "cuda").batch if ON_GPU else batch
    found = triton_prefixes.lay_out(
        there.block_tables, there.seq_lens, there.cu_seqlens_q,
        there.shared_prefixes.cu_group_seqs, there.shared_prefixes.prefix_lens,
        block_size=block_size,
    )  # fmt: skip
    for name, own, reference in zip(found._fields[1:], found[1:], expected[1:], strict=True):
        assert own.cpu().tolist() == reference.tolist(), name
    for own, reference, length in zip(found.tables.cpu(), expected[0], expected[1], strict=True):
        used = -(-int(length) // block_size)
        assert own[:used].tolist() == reference[:used].tolist()


@pytest.mark.usefixtures("shares")
def test_passes_that_are_laid_out_once_serve_every_call(monkeypatch):
    inputs = make_shared(*CASES[2])
    expected = inputs.attend(impl="cpu")
    shared = inputs.batch.shared_prefixes
    passes = shared_prefixes.lay_out(inputs.batch, BLOCK)
    monkeypatch.setattr(shared_prefixes, "lay_out", None)  # fails if it is called
    batch = replace(inputs.batch, shared_prefixes=replace(shared, passes=passes))
    found = replace(inputs, batch=batch).attend(impl="cpu")
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.gpu
@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_a_named_kernel_takes_a_prefix_of_more_rows_than_it_has_tiles_for(impl, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "_MOST_ROWS", 64)
    case = PagedCase((1,) * 48, (70,) * 48, dtype=torch.bfloat16, **SIZES)
    inputs = make_shared(case, [48], [56])
    there = to(inputs, "cuda")
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    out, lse = there.attend(impl=impl, out=there.out)
    plain = replace(inputs, batch=replace(inputs.batch, shared_prefixes=None))
    assert_matches(AttentionOutput(out.cpu(), lse.cpu()), plain)


@pytest.mark.gpu
@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize(
    "options",
    [{"has_alibi": True, "has_sinks": True}, {"logits_soft_cap": 100.0}, {"causal": False}],
    ids=str,
)
@pytest.mark.parametrize("impl", ["hopper", "auto"])
def test_groups_of_many_and_of_few_rows(impl, options, monkeypatch):
    monkeypatch.setattr(shared_prefixes, "_MOST_ROWS", 64)
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    case = PagedCase((2,) * 50, (70,) * 50, dtype=torch.bfloat16, **SIZES, **options)
    inputs = make_shared(case, [30, 0, 1, 19], [56, 0, 0, 48])
    there = to(inputs, "cuda")
    out, lse = there.attend(impl=impl, out=there.out)
    plain = replace(inputs, batch=replace(inputs.batch, shared_prefixes=None))
    assert_matches(AttentionOutput(out.cpu(), lse.cpu()), plain)


@pytest.mark.gpu
@pytest.mark.usefixtures("shares")
def test_a_recorded_step_of_layers_serves_other_lengths_and_groups():
    """Lengths and keys are read before the preceding kernel, which writes q, has ended."""
    lens = (70, 640, 90, 600, 80, 620)
    steps = [((4, 2), (64, 0), lens), ((2, 4), (56, 64), lens[::-1]), ((6, 0), (64, 0), lens)]
    steps = [
        make_shared(PagedCase((1,) * 6, lens, dtype=torch.bfloat16, seed=seed, **SIZES), *groups)
        for seed, (*groups, lens) in enumerate(steps)
    ]
    there = to(max(steps, key=lambda step: len(step.k_cache)), "cuda")
    tables = torch.nn.functional.pad(there.batch.block_tables, (0, 8))  # some are wider
    there = replace(there, batch=replace(there.batch, block_tables=tables))
    static = [*tensors_of(there), there.q.clone()]

    def run():
        torch.mul(static[-1], 1.0, out=there.q)
        shared = there.batch.shared_prefixes
        passes = shared_prefixes.lay_out(there.batch, BLOCK)
        batch = replace(there.batch, shared_prefixes=replace(shared, passes=passes))
        found = []
        for _ in range(3):
            found.append(replace(there, batch=batch).attend())
            torch.mul(static[-1], 1.0, out=there.q)
        return found

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for step in (*steps, *steps):
        for tensor, value in zip(static, [*tensors_of(step), step.q], strict=True):
            tensor[tuple(map(slice, value.shape))].copy_(value)
        graph.replay()
        plain = replace(step, batch=replace(step.batch, shared_prefixes=None))
        for out, lse in found:
            assert_matches(AttentionOutput(out.cpu(), lse.cpu()), plain)


def tensors_of(inputs):
    batch, shared = inputs.batch, inputs.batch.shared_prefixes
    return [
        inputs.k_cache, inputs.v_cache, batch.block_tables, batch.seq_lens, shared.cu_group_seqs,
        shared.prefix_lens,
    ]  # fmt: skip


def test_sequences_without_blocks_are_laid_out():
    inputs = make_inputs(PagedCase((3,), (0,), causal=False, **SIZES))
    num_seqs = inputs.batch.num_seqs
    shared = SharedPrefixes(torch.tensor([0, num_seqs]).int(), torch.tensor([0]).int())
    batch = replace(inputs.batch, block_tables=torch.zeros(num_seqs, 0).int())
    tables, seq_lens, _ = shared_prefixes._lay_out(batch, shared, 8)
    assert tables.shape == (1 + num_seqs, 0)
    assert not seq_lens.any()


@pytest.mark.usefixtures("shares")
def test_what_only_the_reference_computes_is_not_shared(monkeypatch):
    """On a GPU no kernel takes its prefix."""
    monkeypatch.setattr(shared_prefixes, "run", None)
    inputs = make_shared(*CASES[0])
    wide = {name: getattr(inputs, name).double() for name in ("q", "k_cache", "v_cache")}
    wide = replace(inputs, **wide)
    assert torch.equal(wide.attend().out, wide.attend(impl="reference").out)
