"""``write_kv`` and ``paged_attention`` in compiled graphs: one node each."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagetile import PagedBatch, ShapeError, merge_states, paged_attention, write_kv
from pagetile.ops.paged_attention import api

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 8
TABLES = torch.tensor([[1, 2], [5, 7]], dtype=torch.int32)


def step(q, k, v, k_cache, v_cache, batch, slots, k_scale=None, v_scale=None, **options):
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    write_kv(k, v, k_cache, v_cache, slots, **scales)
    return paged_attention(q * 2, k_cache, v_cache, batch, **scales, **options)


def inputs_of(length):
    """Return a step's inputs: the newest token of both sequences."""
    torch.manual_seed(length)
    q, *kv = torch.randn(2, HEADS, SIZE), *torch.randn(2, 2, KV_HEADS, SIZE)
    batch = PagedBatch.decode(TABLES, torch.tensor([length] * 2, dtype=torch.int32), length)
    last = length - 1
    slots = TABLES[:, last // BLOCK].long() * BLOCK + last % BLOCK
    return q, *kv, batch, slots


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_compiled_steps_are_those_of_eager_ones(dtype, with_out):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = [torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(2, 8, BLOCK, KV_HEADS) for _ in range(2)]
    for length in range(1, 2 * BLOCK):
        q, k, v, batch, slots = inputs_of(length)
        results = []
        for run, (k_cache, v_cache), pair in zip((step, compiled), caches, scales, strict=True):
            options = {"sliding_window": 7, "out": torch.empty_like(q) if with_out else None}
            if dtype == torch.int8:
                options |= {"k_scale": pair[0], "v_scale": pair[1]}
            result = run(q, k, v, k_cache, v_cache, batch, slots, **options)
            assert not with_out or result.out.data_ptr() == options["out"].data_ptr()
            results.append(result)
        for found, expected in zip(*results, strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(*caches)
        assert torch.equal(*scales)
    torch._dynamo.reset()


def test_torch_can_trace_the_operators():
    q, k, v, batch, slots = inputs_of(5)
    k_cache, v_cache = torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE)
    checks = ("test_schema", "test_faketensor")
    written = (k, v, k_cache, v_cache, slots, None, None, "auto")
    torch.library.opcheck(torch.ops.pagetile.write_kv.default, written, test_utils=checks)
    lengths = (batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, 1, 5, *[None] * 4)
    call = (q, k_cache, v_cache, *lengths, 0.3, True, *[None] * 7, "auto")
    operators = torch.ops.pagetile
    torch.library.opcheck(operators.paged_attention.default, call, test_utils=checks)
    into = (*call, torch.empty_like(q))
    torch.library.opcheck(operators.paged_attention_into.default, into, test_utils=checks)


@pytest.mark.parametrize("kind", ["one", "heads", "expanded"])
def test_scales_that_are_read_are_not_written(kind):
    torch._dynamo.reset()
    q, k, v, batch, slots = inputs_of(5)
    k_cache, v_cache = torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE, dtype=torch.int8)
    scale = {
        "one": torch.tensor(0.03),
        "heads": torch.tensor([0.03, 0.02]),
        "expanded": torch.tensor(0.03).expand(KV_HEADS),
    }[kind]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(q, k, v, k_cache, v_cache, batch, slots, scale, scale)
    expected = step(q, k, v, k_cache, v_cache, batch, slots, scale, scale)
    assert torch.equal(found.out, expected.out)
    torch._dynamo.reset()


def test_they_have_no_gradients_compiled_or_eager():
    torch._dynamo.reset()
    q, k, v, batch, slots = inputs_of(5)
    k_cache, v_cache = torch.zeros(2, 8, BLOCK, KV_HEADS, SIZE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    api._warn_of_no_gradient.cache_clear()
    with pytest.warns(UserWarning, match=r"q requires a gradient.*Use pagetile\.attention"):
        assert not step(*leaves, k_cache, v_cache, batch, slots).out.requires_grad
    for run in (step, compiled):  # warnings are errors here: it warns once
        assert not run(*leaves, k_cache, v_cache, batch, slots).out.requires_grad
    torch._dynamo.reset()


def test_without_gradients_a_parameter_as_query_does_not_warn():
    q, _, _, batch, _ = inputs_of(5)
    cache = torch.zeros(8, BLOCK, KV_HEADS, SIZE)
    api._warn_of_no_gradient.cache_clear()
    with torch.no_grad():
        paged_attention(torch.nn.Parameter(q), cache, cache, batch)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_data_get_shapes(kind):
    mode = FakeTensorMode() if kind == "fake" else contextlib.nullcontext()
    device = "meta" if kind == "meta" else "cpu"
    with mode, torch.device(device):
        cache = torch.empty(8, BLOCK, KV_HEADS, SIZE)
        tables, lengths = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        q, k = torch.empty(2, HEADS, SIZE), torch.empty(2, KV_HEADS, SIZE)
        write_kv(k, k, cache, cache.clone(), torch.empty(2, dtype=torch.int64))
        found = paged_attention(q, cache, cache, PagedBatch.decode(tables, lengths, 20))
        merged = merge_states(torch.stack([found.out] * 2), torch.stack([found.lse] * 2))
    assert found.out.shape == merged.out.shape == (2, HEADS, SIZE)
    assert found.lse.shape == merged.lse.shape == (2, HEADS)
    assert merged.out.device.type == device


def test_meta_tensors_are_checked():
    cache = torch.empty(8, BLOCK, KV_HEADS, SIZE, device="meta")
    integers = torch.empty(2, 3, dtype=torch.int32, device="meta")
    batch = PagedBatch.decode(integers, integers[:, 0], 20)
    for size, heads in ((SIZE + 8, HEADS), (SIZE, HEADS - 1)):
        with pytest.raises(ShapeError):
            paged_attention(torch.empty(2, heads, size, device="meta"), cache, cache, batch)
    k = torch.empty(2, KV_HEADS, SIZE + 8, device="meta")
    with pytest.raises(ShapeError, match="head_size"):
        write_kv(k, k, cache, cache.clone(), integers[:, 0].long())
