"""Operations do not depend on torch's default device and type of new tensors."""

import ast
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import pagetile
from pagetile import BlockMask, BlockPool, KVCache, LayerSpec, PagedBatch, SharedPrefixes
from pagetile.integrations import vllm_ops


@contextmanager
def defaults(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def randn(*shape):
    generator = torch.Generator("cpu").manual_seed(len(shape))
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def host(numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device="cpu")


def run_paged_attention():
    k_cache, v_cache = randn(2, 10, 16, 2, 64).unbind(0)
    batch = PagedBatch.of([[3, 8], [5]], [30, 7])
    listed = host([[[0, 1], [1, -1]], [[0, -1], [0, -1]]])
    q = randn(2, 8, 64)
    yield from pagetile.paged_attention(q, k_cache, v_cache, batch)
    yield from pagetile.paged_attention(q, k_cache, v_cache, batch, visible_blocks=listed)
    shared = SharedPrefixes(host([0, 2]), host([16]))
    batch = PagedBatch(host([[3, 8], [3, 5]]), host([30, 27]), host([0, 1, 2]), 1, 30, shared)
    yield from pagetile.paged_attention(q, k_cache, v_cache, batch)
    yield from pagetile.paged_attention(q, k_cache, v_cache, batch, impl="reference")


def run_attention():
    q, k, v = (randn(2, 40, 4, 64).requires_grad_() for _ in range(3))
    mask = BlockMask(torch.eye(3, dtype=torch.bool, device="cpu")[None, None], 16, 16)
    for options in ({"causal": True}, {"block_mask": mask}, {"impl": "reference"}):
        out, lse = pagetile.attention(q, k, v, **options)
        yield from (out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v)))


def run_window_attention():
    rows = randn(1, 6, 6, 3, 2, 16).requires_grad_()
    table = randn(25, 2).requires_grad_()
    for impl in ("cpu", "reference"):
        found = pagetile.shifted_window_attention(
            rows, window=(3, 3), shift=(1, 1), bias_table=table, impl=impl
        )
        yield from (found.out, *torch.autograd.grad(found.out.sum(), (rows, table)))
    q, k, v = randn(3, 4, 2, 9, 16)
    mask = torch.ones(4, 9, 9, dtype=torch.bool, device="cpu").tril()
    yield pagetile.window_attention(q, k, v, mask=mask).out
    yield pagetile.rel_offsets((3, 4))
    yield pagetile.shift_regions((6, 6), (3, 3), (1, 1))


def run_cache_operations():
    cache = KVCache([LayerSpec(2, 64, 64)], BlockPool(4, block_size=16))
    for part in (*cache.k, *cache.v):
        part.zero_()
    new, slots = randn(3, 2, 64), host([5, -1, 40], torch.int64)
    pagetile.write_kv(new, new, cache.k[0], cache.v[0], slots)
    cache.copy([(0, 1)])
    pagetile.copy_blocks(cache.k, [(2, 3)])
    pagetile.copy_blocks(cache.k, [])
    yield from (*cache.k, *cache.v)


def run_others():
    yield from pagetile.merge_states(randn(2, 5, 8, 64), randn(2, 5, 8))
    q, k = randn(2, 1, 2, 16, 16)
    yield pagetile.attention_scores(q, k)
    yield pagetile.attention_scores(q[:0], k[:0])


def run_vllm_ops():
    key_cache, value_cache = randn(9, 2, 16, 16, 4), randn(9, 2, 64, 16)
    query = randn(3, 8, 64)
    out = torch.empty_like(query)
    tables, lengths = host([[0, 1, 2], [3, 4, 5], [6, 7, 8]]), host([40, 1, 16])
    options = (2, 0.125, tables, lengths, 16, 48, None, "auto", 1.0, 1.0)
    vllm_ops.paged_attention_v1(out, query, key_cache, value_cache, *options)
    yield out
    sums = torch.zeros(2, 3, 8, 1, device="cpu", dtype=torch.float32)
    parts = torch.zeros(3, 8, 1, 64, device="cpu", dtype=torch.float32)
    vllm_ops.paged_attention_v2(out, *sums, parts, query, key_cache, value_cache, *options)
    yield from (out, *sums, parts)


RUNS = (
    run_paged_attention,
    run_attention,
    run_window_attention,
    run_cache_operations,
    run_others,
    run_vllm_ops,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("run", RUNS)
def test_results_are_the_same_whatever_new_tensors_are_by_default(run, dtype):
    expected = list(run())
    with defaults("meta", dtype):
        found = list(run())
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


MAKERS = {
    "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "tril_indices", "zeros",
}  # fmt: skip
FOLDERS = ("fused", "integrations/vllm_ops", "kv_cache", "ops", "tiles")
FLOATING = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"}


def test_every_new_tensor_names_its_device_and_type():
    """Also in code that only a GPU runs."""
    root = Path(find_spec("pagetile").origin).parent
    wrong = []
    for path in sorted(path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func.value) != "torch" or name not in MAKERS or None in given:
                continue
            if "device" not in given or (name in FLOATING and "dtype" not in given):
                wrong.append(f"{path.relative_to(root)}:{node.lineno}: torch.{name}")
    assert wrong == []
