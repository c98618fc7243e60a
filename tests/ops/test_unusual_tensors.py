"""Tensors without memory of their own, and calls that are traced: right, or refused with advice."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pagetile
from pagetile import PagedBatch, UnsupportedError
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(tensors):
    """Those of the older layout have no shape at all."""
    nested = torch.nested.nested_tensor([tensors[1][0], tensors[1][1]])
    with pytest.raises(UnsupportedError, match="k is a nested tensor"):
        pagetile.attention(tensors[1], nested, nested)


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
