"""vLLM's cache operators: what is written, copied and converted, and what is left unchanged."""

import math

import pytest
import torch
from vllm_cases import BF16, E4M3, E5M2, F16, F32

from pagetile.errors import DTypeError, ShapeError
from pagetile.integrations.vllm_ops import (
    convert_fp8,
    copy_blocks,
    pack_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
    unpack_cache,
)

IMPLEMENTATIONS = ["cpu", pytest.param("triton", marks=pytest.mark.interpret)]
NUM_BLOCKS, NUM_HEADS = 7, 3


def new_tokens(dtype, size, num_tokens=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(num_tokens, 3, NUM_HEADS, size, generator=generator).to(dtype)
    return qkv[:, 1], qkv[:, 2]  # views of one tensor, as models have them


def packed_cache(dtype, size, block_size, fill):
    x = 16 // dtype.itemsize
    shapes = (
        (NUM_BLOCKS, NUM_HEADS, size // x, block_size, x),
        (NUM_BLOCKS, NUM_HEADS, size, block_size),
    )
    return [torch.full(shape, fill, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize(("dtype", "size"), [(F32, 64), (F16, 80), (BF16, 128), (F16, 8)], ids=str)
def test_reshape_and_cache(dtype, size, block_size, impl, mirror):
    key, value = new_tokens(dtype, size)
    slots = torch.tensor(
        [3, -1, 5 * block_size + 7, 0, 2 * block_size]
    )  # the last token is padding
    key_cache, value_cache = packed_cache(dtype, size, block_size, math.nan)
    with mirror(key, value, key_cache, value_cache, slots, impl=impl, rounds=False) as there:
        reshape_and_cache(*there, "auto", torch.tensor(2.0), torch.tensor(2.0))
    k_cache, v_cache = unpack_cache(key_cache, value_cache)
    for cache, new in ((k_cache, key), (v_cache, value)):
        written = torch.zeros(NUM_BLOCKS * block_size, dtype=torch.bool)
        written[slots[slots >= 0]] = True
        rows = cache.flatten(0, 1)
        assert rows[~written].isnan().all()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(rows[slot], new[token])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=str)
def test_reshape_and_cache_of_padding_only_writes_nothing(slots, impl, mirror):
    key, value = new_tokens(F32, 64)
    caches = packed_cache(F32, 64, 8, 5.0)
    slots = torch.tensor(slots, dtype=torch.int64)
    with mirror(key, value, *caches, slots, impl=impl) as there:
        reshape_and_cache(*there, "auto", 1.0, 1.0)
    assert all((cache == 5).all() for cache in caches)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_reshape_and_cache_in_8_bits(dtype, name, impl, mirror):
    code = E5M2 if name == "fp8_e5m2" else E4M3
    key, value = (rows * torch.logspace(-4, 5, 6)[:, None, None] for rows in new_tokens(F32, 64))
    key[2, 1, 3], value[3, 2, 5], key[4, 0, 0] = math.nan, math.inf, -math.inf
    key, value = key.to(dtype), value.to(dtype)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor([0.03])
    slots = torch.tensor([9, 0, 40, -1, 17, 55])
    caches = packed_cache(torch.uint8, 64, 8, 1)
    # Rounding to float8 under the interpreter is not a GPU's.
    typed = torch.empty(0, dtype=code)
    with mirror(key, value, *caches, slots, k_scale, v_scale, typed, impl=impl) as there:
        reshape_and_cache(*there[:5], name, *there[5:7])
    k_cache, v_cache = unpack_cache(*caches)
    largest = torch.finfo(code).max
    for cache, new, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        expected = torch.ones_like(cache).flatten(0, 1)
        codes = (new.float() / scale).clamp(-largest, largest).to(code).view(torch.uint8)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = codes[token]
        numbers, wanted = cache.flatten(0, 1).view(code), expected.view(code)
        torch.testing.assert_close(numbers.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e5m2"])
def test_reshape_and_cache_flash(name, layout):
    key, value = new_tokens(F16, 64)
    dtype = F16 if name == "auto" else torch.uint8
    caches = torch.zeros(NUM_BLOCKS, 2, 16, NUM_HEADS, 64, dtype=dtype)
    if layout == "HND":
        caches = torch.zeros(NUM_BLOCKS, 2, NUM_HEADS, 16, 64, dtype=dtype).transpose(2, 3)
    slots = torch.tensor([33, -1, 5])
    scale = torch.tensor([0.5, 0.25, 2.0])
    reshape_and_cache_flash(key, value, *caches.unbind(1), slots, name, scale, scale)
    for cache, new in zip(caches.unbind(1), (key, value), strict=True):
        expected = new[2].float()
        if name != "auto":
            code = E5M2 if name == "fp8_e5m2" else E4M3
            cache = cache.view(code)
            expected = (expected / scale[:, None]).to(code).float()
        assert torch.equal(cache[0, 5].float(), expected)
        assert cache.float().abs().sum(-1).count_nonzero() == 2 * NUM_HEADS


@pytest.mark.parametrize("dtype", [F32, BF16, torch.uint8], ids=str)
def test_packing_both_ways(dtype):
    k_cache, v_cache = (torch.randint(0, 100, (5, 16, 2, 64)).to(dtype) for _ in range(2))
    key_cache, value_cache = pack_cache(k_cache, v_cache)
    x = 16 // dtype.itemsize
    assert key_cache.shape == (5, 2, 64 // x, 16, x)
    assert value_cache.shape == (5, 2, 64, 16)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert key_cache[3, 1, 2, 7, 1] == k_cache[3, 7, 1, 2 * x + 1]
    assert value_cache[3, 1, 9, 7] == v_cache[3, 7, 1, 9]
    for back, cache in zip(unpack_cache(key_cache, value_cache), (k_cache, v_cache), strict=True):
        assert torch.equal(back, cache)
    with pytest.raises(ShapeError, match=r"value_cache has 32"):
        unpack_cache(key_cache, value_cache[:, :, :32])
    with pytest.raises(ShapeError, match=r"head_size=36, expected a multiple of x=8"):
        pack_cache(torch.zeros(5, 16, 2, 36, dtype=F16), torch.zeros(5, 16, 2, 36, dtype=F16))


def test_copy_blocks_in_every_layer():
    caches = [packed_cache(dtype, 16, 8, 0) for dtype in (F16, F16)]
    for layer in caches:
        for cache in layer:
            cache += torch.arange(NUM_BLOCKS).view(-1, *[1] * (cache.dim() - 1)).half()
    keys, values = zip(*caches, strict=True)
    copy_blocks(list(keys), list(values), torch.tensor([[3, 0], [0, 1]]))
    for cache in (*keys, *values):
        assert cache.flatten(1)[:, 5].tolist() == [3, 0, 2, 3, 4, 5, 6]
    with pytest.raises(ShapeError, match="key_caches has 2 caches but value_caches has 1"):
        copy_blocks(list(keys), list(values[:1]), torch.tensor([[3, 0]]))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.uint8], ids=str)
def test_swap_blocks(dtype):
    src, dst = (torch.randint(0, 100, (n, 2, 8, 16)).to(dtype) for n in (5, 7))
    before, size = dst.clone(), src.element_size() * src.stride(0)
    swap_blocks(src, dst, size, torch.tensor([[4, 0], [1, 6]]))
    assert torch.equal(dst[0], src[4])
    assert torch.equal(dst[6], src[1])
    assert torch.equal(dst[1:6], before[1:6])
    with pytest.raises(ShapeError, match="src has strides"):
        swap_blocks(src.transpose(1, 2), dst, size, torch.tensor([[0, 0]]))
    with pytest.raises(ShapeError, match="expected a multiple of block_size_in_bytes=48"):
        swap_blocks(src, dst, 48, torch.tensor([[0, 0]]))
    with pytest.raises(DTypeError, match="block_size_in_bytes is of type Tensor"):
        swap_blocks(src, dst, torch.tensor([[0, 0]]), torch.tensor([[0, 0]]))


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_swap_blocks_between_devices(direction):
    src, dst = (torch.randn(9, 2, 8, 16, device=device) for device in direction)
    swap_blocks(src, dst, src.element_size() * src.stride(0), torch.tensor([[4, 0], [1, 6]]))
    torch.cuda.synchronize()
    assert torch.equal(dst[0].cpu(), src[4].cpu())
    assert torch.equal(dst[6].cpu(), src[1].cpu())


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_convert_fp8_both_ways(dtype, name):
    code = E5M2 if name == "fp8_e5m2" else E4M3
    numbers = torch.linspace(-3, 3, 1000).view(10, 100).to(dtype)
    codes, back = torch.empty(10, 100, dtype=torch.uint8), torch.empty(10, 100, dtype=dtype)
    convert_fp8(codes, numbers, 0.25, name)
    assert torch.equal(codes.view(code), (numbers.float() / 0.25).to(code))
    convert_fp8(back, codes, 0.25, name)
    assert torch.equal(back, (codes.view(code).float() * 0.25).to(dtype))
    torch.testing.assert_close(back, numbers, rtol=0.13, atol=0.001)


def test_convert_fp8_clamps_keeps_nan_and_refuses_what_it_cannot():
    numbers = torch.tensor([1e6, -1e6, math.nan, math.inf])
    codes = torch.empty(4, dtype=torch.uint8)
    convert_fp8(codes, numbers)
    assert codes.view(E4M3)[:2].tolist() == [448, -448]
    assert codes.view(E4M3).isnan().tolist() == [False, False, True, False]
    with pytest.raises(DTypeError, match="kv_dtype is 'auto', expected one of fp8"):
        convert_fp8(codes, numbers, 1.0, "auto")
    with pytest.raises(DTypeError, match="input is uint8"):
        convert_fp8(codes, codes)
    with pytest.raises(DTypeError, match="input is float32, but kv_cache_dtype='fp8' is kept"):
        convert_fp8(torch.empty(4), numbers)
    with pytest.raises(ShapeError, match=r"output is \[3\] but input is \[4\]"):
        convert_fp8(codes[:3], numbers)
