"""8-bit caches: numbers and scales are those of the definition, bit for bit."""

import math

import pytest
import torch

from pagetile.ops.write_kv import write_kv
from pagetile.ops.write_kv.reference import measure, quantise

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS = 6, 5, 3


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def write(request, mirror):
    def call(k, v, k_cache, v_cache, slots, k_scale, v_scale):
        arguments = (k, v, k_cache, v_cache, slots, k_scale, v_scale)
        with mirror(*arguments, impl=request.param) as there:
            scales = dict(zip(("k_scale", "v_scale"), there[5:], strict=True))
            write_kv(*there[:5], **scales, impl=request.param)

    return call


def inputs(kind, dtype, code, sizes=(24, 40), seed=0):
    """Numbers of all magnitudes, zeros, infinities and NaN; caches of 1s; scales of NaN."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.tensor([7, -1, 29, 0, 12, 3])
    magnitude = torch.logspace(-6, 3, len(slots) * NUM_KV_HEADS).view(len(slots), NUM_KV_HEADS, 1)
    new = [
        (magnitude * torch.randn(*magnitude.shape[:2], size, generator=generator)).to(dtype)
        for size in sizes
    ]
    for rows in new:
        rows[2, 1] = 0.0
        rows[3, 0, 5], rows[4, 2, 1], rows[5, 1, :2] = math.nan, math.inf, -math.inf
    caches = [
        torch.ones(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, size, dtype=torch.uint8).view(code)
        for size in sizes
    ]
    if kind == "token":
        scales = [torch.full(cache.shape[:3], math.nan) for cache in caches]
    elif kind == "head":
        scales = [torch.tensor([0.01, 0.2, 3.0]), torch.tensor([1.0, 0.003, 0.125])]
    else:
        scales = [torch.tensor(0.02), torch.tensor([0.5])]
    return *new, *caches, slots, *scales


def expect(new, cache, slots, scale):
    """The definition, a token at a time."""
    cache, scale = cache.clone(), scale.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            if scale.dim() == 3:
                scale[place] = measure(new[token], cache.dtype)
            row = scale[place] if scale.dim() == 3 else scale.reshape(-1).expand(NUM_KV_HEADS)
            cache[place] = quantise(new[token], row, cache.dtype).to(cache.dtype)
    return cache, scale


def assert_same_codes(cache, expected):
    """Equal bits, except for the many NaNs of float8_e5m2."""
    if cache.dtype == E5M2:
        is_nan = expected.float().isnan()
        assert torch.equal(cache.float().isnan(), is_nan)
        cache, expected = (t.view(torch.uint8).masked_fill(is_nan, 0) for t in (cache, expected))
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", ["one", "head", "token"])
@pytest.mark.parametrize("code", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_codes_and_scales_are_those_of_the_definition(write, kind, code, dtype):
    k, v, k_cache, v_cache, slots, k_scale, v_scale = inputs(kind, dtype, code)
    expected = [expect(k, k_cache, slots, k_scale), expect(v, v_cache, slots, v_scale)]
    write(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    for cache, scale, (codes, scales) in zip(
        (k_cache, v_cache), (k_scale, v_scale), expected, strict=True
    ):
        assert_same_codes(cache, codes)
        torch.testing.assert_close(scale, scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("code", [E4M3, E5M2, INT8], ids=str)
def test_numbers_halfway_between_two_codes_go_to_the_even_one(write, code):
    k, v, k_cache, v_cache, slots, *_ = inputs("one", torch.float32, code, sizes=(256, 256))
    codes = torch.arange(256, dtype=torch.uint8).view(code).float().nan_to_num(0, 0, 0)
    codes = codes.clamp(-127, 127) if code == INT8 else codes
    ordered = codes.sort().values
    k[:], v[:] = (ordered + ordered.roll(1)) / 2, ordered
    v[..., 0], k[..., 0] = 2 * ordered[0], 2 * ordered[-1]  # clamped
    one = torch.tensor(1.0)
    expected = expect(k, k_cache, slots, one)[0], expect(v, v_cache, slots, one)[0]
    write(k, v, k_cache, v_cache, slots, one, one)
    assert_same_codes(k_cache, expected[0])
    assert_same_codes(v_cache, expected[1])


def test_scales_may_have_any_strides(write):
    k, v, k_cache, v_cache, slots, k_scale, v_scale = inputs("token", torch.float32, INT8)
    expected = expect(k, k_cache, slots, k_scale)[1], expect(v, v_cache, slots, v_scale)[1]
    both = torch.full((NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, 2), math.nan)
    there = both.permute(3, 1, 2, 0).unbind(0)
    write(k, v, k_cache, v_cache, slots, *there)
    for scale, wanted in zip(there, expected, strict=True):
        torch.testing.assert_close(scale, wanted, rtol=0, atol=0, equal_nan=True)
