"""Tensors without memory of their own, and calls that are traced: right, or refused with advice."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pagetile
from pagetile import BlockMask, PagedBatch, UnsupportedError
from pagetile.integrations import vllm_ops

# Of jvp's own decompositions, of vmap's fallback, and of fake tensors' addresses.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning",
    "ignore:There is a performance drop",
    "ignore:Accessing the data pointer of FakeTensor",
)

TABLES = torch.tensor([[3, 8], [5, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([30, 7], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 2], dtype=torch.int32)
SLOTS = torch.tensor([5, 40])


def paged_attention(q, k_cache, v_cache):
    batch = PagedBatch(TABLES, LENGTHS, STARTS, 1, 30)
    return pagetile.paged_attention(q, k_cache, v_cache, batch).out


def write_kv(q, k_cache, v_cache):
    k_cache, v_cache = k_cache + 0, v_cache + 0
    pagetile.write_kv(q[:, :2], q[:, 2:4], k_cache, v_cache, SLOTS)
    return k_cache + v_cache


def copy_blocks(q, k_cache, v_cache):
    cache = q + 0
    pagetile.copy_blocks([cache], [(0, 1)])
    return cache


def reshape_and_cache(q, k_cache, v_cache):
    packed = vllm_ops.pack_cache(k_cache, v_cache)
    vllm_ops.reshape_and_cache(q[:, :2], q[:, 2:4], *packed, SLOTS, "auto", 1.0, 1.0)
    return packed[0].sum() + packed[1]


def paged_attention_v1(q, k_cache, v_cache):
    packed, out = vllm_ops.pack_cache(k_cache, v_cache), torch.empty_like(q)
    vllm_ops.paged_attention_v1(
        out, q, *packed, 2, 0.125, TABLES, LENGTHS, 16, 30, None, "auto", 1.0, 1.0
    )
    return out


def attention(q, k_cache, v_cache):
    rows = q[None, :, :2]
    return pagetile.attention(rows, rows, rows, layout="BSHD").out


def merge_states(q, k_cache, v_cache):
    return pagetile.merge_states(q[:, None], q[:, None, :, 0]).out


def attention_scores(q, k_cache, v_cache):
    rows = q[None].repeat(1, 1, 2, 1)
    return pagetile.attention_scores(rows, rows)


WRITERS = (write_kv, copy_blocks, reshape_and_cache, paged_attention_v1)
ALL = (paged_attention, attention, merge_states, attention_scores, *WRITERS)


def run_or_reason(call, *inputs):
    """The result of a call, or the text of our error."""
    try:
        return call(*inputs)
    except UnsupportedError as error:
        return str(error)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.randn(2, 10, 16, 2, 64, generator=generator)
    return torch.randn(2, 8, 64, generator=generator), k_cache, v_cache


TRANSFORMS = {
    "functionalize": lambda f: torch.func.functionalize(f),
    "vmap": lambda f: lambda q, *caches: torch.vmap(f, (0, None, None))(q[None], *caches)[0],
    "jvp": lambda f: lambda q, *caches: torch.func.jvp(lambda q: f(q, *caches), (q,), (q,))[0],
    "grad": lambda f: lambda q, *caches: torch.func.grad(lambda q: f(q, *caches).sum())(q),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", ALL)
def test_transforms_of_torch_func_get_the_result_or_a_reason(tensors, call, transform):
    """They ended in a crash, in the results of other memory, or in torch's own errors."""
    expected = call(*tensors)
    if transform == "grad":
        expected = torch.zeros_like(tensors[0], requires_grad=False)
        q = tensors[0].clone().requires_grad_()
        if call in (attention, merge_states, attention_scores):
            (expected,) = torch.autograd.grad(call(q, *tensors[1:]).sum(), q)
    found = run_or_reason(TRANSFORMS[transform](call), *tensors)
    if isinstance(found, str):
        assert call in (paged_attention, *WRITERS) or transform == "jvp"
        assert "torch.func" in found or "jvp" in found
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", ALL)
def test_a_traced_call_is_a_node_of_the_graph_or_refused(tensors, call):
    """A recorded call must not match: its result would be a constant of the graph."""
    for _ in range(3):
        expected = call(*tensors)
    graph = run_or_reason(make_fx(call), *(torch.zeros_like(tensor) for tensor in tensors))
    if isinstance(graph, str):
        assert call in WRITERS
        assert "traced" in graph
    else:
        torch.testing.assert_close(graph(*tensors), expected)


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("call", ALL)
def test_fake_tensors_get_shapes_or_a_reason(tensors, call, is_active):
    """``copy_blocks`` wrote to address 0."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(tensor) for tensor in tensors]
    expected = call(*tensors)
    with mode if is_active else nullcontext():
        found = run_or_reason(call, *fake)
    if isinstance(found, str):
        assert call in WRITERS[1:]
        assert "fake" in found.lower()
    else:
        assert isinstance(found, FakeTensor)
        assert found.shape == expected.shape


@pytest.mark.parametrize("call", ALL)
def test_negated_views_are_resolved_or_refused(tensors, call):
    q, *caches = tensors
    negated = torch._neg_view(-q)
    found = run_or_reason(call, negated, *caches)
    if isinstance(found, str):
        assert "resolve_neg()" in found
    else:
        torch.testing.assert_close(found, call(q, *caches))


def test_a_view_that_is_refused_leaves_both_caches_as_they_were(tensors):
    q, k_cache, v_cache = tensors
    before = k_cache.clone()
    with pytest.raises(UnsupportedError, match=r"v is .*resolve_neg"):
        pagetile.write_kv(q[:, :2], torch._neg_view(q[:, 2:4]), k_cache, v_cache, SLOTS)
    assert torch.equal(k_cache, before)


def test_sparse_tensors_are_refused(tensors):
    q, k_cache, v_cache = tensors
    batch = PagedBatch(TABLES, LENGTHS, STARTS, 1, 30)
    with pytest.raises(UnsupportedError, match=r"q is .*sparse_coo.*to_dense"):
        pagetile.paged_attention(q.to_sparse(), k_cache, v_cache, batch)
    with pytest.raises(UnsupportedError, match=r"source is .*sparse_coo"):
        pagetile.copy_blocks([(k_cache.to_sparse(), v_cache)], [(0, 1)])


ROWS, WINDOWS, CACHE = torch.ones(2, 5, 2, 16), torch.ones(2, 2, 9, 16), torch.ones(4, 16, 2, 16)
DECODE = PagedBatch.decode(torch.ones(2, 2, dtype=torch.int32), torch.full((2,), 20).int(), 20)
PAIRS = torch.tensor([[0, 1], [2, 3]])
PACKED = vllm_ops.pack_cache(CACHE, CACHE)
# (call with a tensor that becomes nested, that tensor)
NESTED = {
    "q": [
        (lambda x: pagetile.attention(x, ROWS, ROWS), ROWS),
        (lambda x: pagetile.explain_attention(x, ROWS, ROWS), ROWS),
        (lambda x: pagetile.attention_scores(x, WINDOWS, softmax_scale=1.0), WINDOWS),
        (lambda x: pagetile.window_attention(x, WINDOWS, WINDOWS), WINDOWS),
        (lambda x: pagetile.explain_window_attention(x, WINDOWS, WINDOWS), WINDOWS),
        (lambda x: pagetile.paged_attention(x, CACHE, CACHE, DECODE), ROWS[:, 0]),
        (lambda x: pagetile.explain_paged_attention(x, CACHE, CACHE, DECODE), ROWS[:, 0]),
        (lambda x: pagetile.plan_paged_attention(x, CACHE, CACHE, DECODE), ROWS[:, 0]),
    ],
    "k": [
        (lambda x: pagetile.attention(ROWS, x, x), ROWS),
        (lambda x: pagetile.attention_scores(WINDOWS, x), WINDOWS),
        (lambda x: pagetile.write_kv(x, ROWS[:, 0], CACHE, CACHE, SLOTS), ROWS[:, 0]),
    ],
    "sinks": [(lambda x: pagetile.attention(ROWS, ROWS, ROWS, sinks=x), ROWS[0, 0])],
    "alibi_slopes": [
        (
            lambda x: pagetile.paged_attention(ROWS[:, 0], CACHE, CACHE, DECODE, alibi_slopes=x),
            ROWS[0, 0],
        )
    ],
    "v_cache": [
        (lambda x: pagetile.paged_attention(ROWS[:, 0], CACHE, x, DECODE), CACHE),
        (lambda x: pagetile.write_kv(ROWS[:, 0], ROWS[:, 0], CACHE, x, SLOTS), CACHE),
    ],
    "block_tables": [
        (lambda x: PagedBatch.decode(x, DECODE.seq_lens, 20), DECODE.block_tables),
        (
            lambda x: pagetile.paged_attention(
                ROWS[:, 0], CACHE, CACHE, replace(DECODE, block_tables=x)
            ),
            DECODE.block_tables,
        ),
    ],
    "cache": [(lambda x: pagetile.copy_blocks([x], PAIRS), CACHE)],
    "destination": [(lambda x: pagetile.copy_blocks([(CACHE, x)], PAIRS), CACHE)],
    "src_to_dst": [(lambda x: pagetile.copy_blocks([CACHE], x), PAIRS)],
    "lses": [(lambda x: pagetile.merge_states(ROWS, x), ROWS[..., 0])],
    "bias": [(lambda x: pagetile.window_attention(*[WINDOWS] * 3, bias=x), ROWS[0])],
    "mask": [
        (lambda x: pagetile.window_attention(*[WINDOWS] * 3, mask=x), ROWS[0]),
        (pagetile.regions_from_mask, ROWS[0]),
        (BlockMask, ROWS > 0),
    ],
    "qkv": [(lambda x: pagetile.shifted_window_attention(x, window=(3,)), ROWS)],
    "key_cache": [
        (
            lambda x: vllm_ops.reshape_and_cache(
                ROWS[:, 0], ROWS[:, 0], x, PACKED[1], SLOTS, "auto", 1.0, 1.0
            ),
            PACKED[0],
        )
    ],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_refused_by_name(name, layout):
    """Those of the older layout have no shape at all, those of the newer one a symbolic one."""
    for call, tensor in NESTED[name]:
        nested = torch.nested.nested_tensor([*tensor.unbind()], layout=layout)
        with pytest.raises(UnsupportedError, match=f"^{name} is a nested tensor, expected a dense"):
            call(nested)


def as_module(call):
    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return call(*inputs)

    return Module()


def test_a_list_of_pairs_breaks_a_graph_and_cannot_be_exported(tensors):
    """``torch.export`` recursed without end."""
    compiled = torch.compile(copy_blocks, backend="eager")
    torch.testing.assert_close(compiled(*tensors), copy_blocks(*tensors))
    with pytest.raises(UnsupportedError, match="exported"):
        torch.export.export(as_module(copy_blocks), tensors)


@pytest.mark.parametrize("call", [paged_attention_v1, reshape_and_cache])
def test_vllms_functions_can_be_exported(tensors, call):
    exported = torch.export.export(as_module(call), tensors).module()
    torch.testing.assert_close(exported(*tensors), call(*tensors))
