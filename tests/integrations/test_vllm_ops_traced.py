"""The functions are nodes of a compiled graph, and there give what they give without it."""

import pytest
import torch

from pagetile import copy_blocks
from pagetile.integrations import vllm_ops as ops

E4M3 = torch.float8_e4m3fn


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def caches(dtype="auto"):
    """Of 9 blocks of 16 tokens, 2 heads of 64."""
    if dtype == "auto":
        return randn(9, 2, 16, 16, 4), randn(9, 2, 64, 16, seed=1)
    key_cache, value_cache = randn(9, 2, 4, 16, 16), randn(9, 2, 64, 16, seed=1)
    return tuple(cache.to(E4M3).view(torch.uint8) for cache in (key_cache, value_cache))


def attend(dtype, k_scale, v_scale):
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    lengths = torch.tensor([40, 1, 16], dtype=torch.int32)
    last = 2, 0.125, tables, lengths, 16, 48, None, dtype, k_scale, v_scale

    def call(query, key_cache, value_cache):
        out, merged = torch.empty_like(query), torch.empty_like(query)
        parts = query.new_zeros(2, 3, 8, 1), query.new_zeros(3, 8, 1, 64)
        ops.paged_attention_v1(out, query, key_cache, value_cache, *last)
        ops.paged_attention_v2(merged, *parts[0], parts[1], query, key_cache, value_cache, *last)
        return out + 1, merged + 1, *parts

    return call, lambda: (randn(3, 8, 64, seed=2), *caches(dtype))


def write(function, dtype, k_scale, v_scale):
    slots = torch.tensor([17, -1, 40])

    def call(key, value, key_cache, value_cache):
        function(key, value, key_cache, value_cache, slots, dtype, k_scale, v_scale)
        return key_cache.clone()

    def make():
        new = randn(2, 3, 2, 64, seed=3).unbind(0)
        if function is ops.reshape_and_cache:
            return *new, *caches(dtype)
        type_of = torch.uint8 if dtype != "auto" else torch.float32
        return *new, *torch.zeros(2, 9, 16, 2, 64, dtype=type_of).unbind(0)

    return call, make


def copy(cache, source, to, pairs):
    """Inside one cache, and from one to another."""
    copy_blocks([cache, (source[4:], to)], pairs)
    return cache + 1


def copy_inside(key_cache, value_cache, pairs):
    ops.copy_blocks([key_cache], [value_cache], pairs)
    return key_cache.sum()


def swap(source, to, pairs):
    ops.swap_blocks(source, to, 16, pairs)
    return to * 2


def convert(codes, numbers):
    back = torch.empty_like(numbers)
    ops.convert_fp8(codes, numbers, 0.5)
    ops.convert_fp8(back, codes, 0.5)
    return back


PAIRS = torch.tensor([[3, 0], [0, 1]])
HALF = torch.tensor(0.5)
CASES = {
    "attend": attend("auto", 1.0, 1.0),
    "attend-fp8": attend("fp8", 0.5, HALF),
    "write": write(ops.reshape_and_cache, "auto", 1.0, 1.0),
    "write-fp8": write(ops.reshape_and_cache, "fp8", HALF, 0.25),
    "write-flash": write(ops.reshape_and_cache_flash, "auto", 1.0, 1.0),
    "write-flash-fp8": write(ops.reshape_and_cache_flash, "fp8_e5m2", 0.5, HALF),
    "copy": (copy, lambda: (*randn(3, 9, 4).unbind(0), PAIRS)),
    "copy-vllm": (copy_inside, lambda: (*caches(), PAIRS)),
    "swap": (swap, lambda: (randn(9, 4), randn(9, 4, seed=1), PAIRS)),
    "convert": (convert, lambda: (torch.empty(9, dtype=torch.uint8), randn(9))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_call_breaks_no_graph_and_gives_the_same(name):
    call, make = CASES[name]
    expected_inputs, inputs = make(), make()
    expected = call(*expected_inputs)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(inputs, expected_inputs, rtol=0, atol=0)


def test_a_list_of_pairs_in_a_full_graph_is_refused_with_what_to_do():
    cache = randn(9, 4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="copy_blocks with these arguments"):
        torch.compile(lambda: copy_blocks([cache], [(0, 1)]), fullgraph=True, backend="eager")()
