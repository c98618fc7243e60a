import itertools
import math

import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.ops.write_kv import write_kv

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def write(request, mirror):
    def call(*arguments, **scales):
        tensors = [*arguments, *scales.values()]
        rounds = arguments[0].dtype != arguments[2].dtype
        with mirror(*tensors, impl=request.param, rounds=rounds) as there:
            scales = dict(zip(scales, there[5:], strict=True))
            write_kv(*there[:5], **scales, impl=request.param)

    return call


def inputs(
    slots, *, num_blocks=6, block_size=5, num_kv_heads=3, sizes=(24, 40), dtype=F32, kv_dtype=F32
):
    """New keys and values, caches full of NaN, and the slots."""
    generator = torch.Generator().manual_seed(len(slots))
    new = [
        torch.randn(len(slots), num_kv_heads, size, generator=generator).to(dtype) for size in sizes
    ]
    caches = [
        torch.full((num_blocks, block_size, num_kv_heads, size), math.nan, dtype=kv_dtype)
        for size in sizes
    ]
    return *new, *caches, torch.tensor(slots, dtype=torch.int64)


def written_by_hand(new, cache, slots):
    cache, block_size = cache.clone(), cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if slot != -1:
            cache[slot // block_size, slot % block_size] = new[token].to(cache.dtype)
    return cache


def assert_same_memory(cache, expected):
    """Equal bit for bit, including NaN in the slots that nothing was written to."""
    as_integers = torch.int32 if cache.dtype == F32 else torch.int16
    assert torch.equal(cache.contiguous().view(as_integers), expected.view(as_integers))


SLOTS = [
    [],
    [-1],
    [0],
    [29],
    [29, 0],
    [4, 5, 9, 10],
    [-1, 7, -1, -1, 3],
    list(range(30)),
    list(range(29, -1, -1)),
    torch.randperm(30, generator=torch.Generator().manual_seed(0))[:17].tolist(),
]


@pytest.mark.parametrize("slots", SLOTS, ids=lambda slots: f"{len(slots)}-slots")
def test_each_token_lands_in_its_slot_and_nowhere_else(write, slots):
    k, v, k_cache, v_cache, slot_mapping = inputs(slots)
    expected = [
        written_by_hand(k, k_cache, slot_mapping),
        written_by_hand(v, v_cache, slot_mapping),
    ]
    write(k, v, k_cache, v_cache, slot_mapping)
    assert_same_memory(k_cache, expected[0])
    assert_same_memory(v_cache, expected[1])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize(("dtype", "kv_dtype"), list(itertools.product((F32, F16, BF16), repeat=2)))
def test_other_types_are_rounded_as_torch_rounds_them(write, dtype, kv_dtype):
    k, v, k_cache, v_cache, slots = inputs(list(range(0, 30, 2)), dtype=dtype, kv_dtype=kv_dtype)
    special = [math.inf, -math.inf, 0.0, -0.0, 65504.0, 65520.0, 1e-7, 3e38, 1e-40, 1.00390625]
    k[3, 1, :10] = torch.tensor(special).to(dtype)
    write(k, v, k_cache, v_cache, slots)
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache.flatten(0, 1)[slots], new.to(kv_dtype))


@pytest.mark.parametrize("size", [8, 16, 24, 128])
@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_every_size_of_head_and_block_works(write, size, block_size):
    slots = [0, 2, block_size, 5 * block_size + block_size // 2]
    slots = list(dict.fromkeys(slots))
    k, v, k_cache, v_cache, slot_mapping = inputs(slots, block_size=block_size, sizes=(size, 8))
    expected = written_by_hand(k, k_cache, slot_mapping)
    write(k, v, k_cache, v_cache, slot_mapping)
    assert_same_memory(k_cache, expected)


def test_caches_may_be_views_with_any_strides(write):
    k, v, k_cache, v_cache, slots = inputs([3, 29, 11])
    expected = [written_by_hand(k, k_cache, slots), written_by_hand(v, v_cache, slots)]
    # Heads before slots, keys beside values, and gaps of NaN between.
    whole = torch.full((7, 3, 6, 24 + 40 + 3), math.nan)
    k_view = whole[1:, :, :5, 1:25].transpose(1, 2)
    v_view = whole[1:, :, :5, 26:66].transpose(1, 2)
    write(k, v, k_view, v_view, slots)
    assert_same_memory(k_view, expected[0])
    assert_same_memory(v_view, expected[1])
    assert int((~whole.isnan()).sum()) == 3 * 3 * (24 + 40)


def test_new_tokens_and_slots_may_be_views_with_any_strides(write):
    k, v, k_cache, v_cache, slots = inputs([3, 29, 11, -1])
    expected = [written_by_hand(k, k_cache, slots), written_by_hand(v, v_cache, slots)]
    packed = torch.cat([v, k], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
    transposed = k.transpose(1, 2).contiguous().transpose(1, 2)
    pairs = torch.stack([slots, slots + 1], dim=1)
    write(transposed, packed[..., :40], k_cache, v_cache, pairs[:, 0])
    assert_same_memory(k_cache, expected[0])
    assert_same_memory(v_cache, expected[1])


@pytest.mark.parametrize("slot", [30, -2, 2**40])
def test_a_slot_outside_the_cache_is_named_and_nothing_is_written(write, slot, monkeypatch):
    # On a GPU values are checked under the debug flag only.
    monkeypatch.setattr("pagetile.ops.write_kv.api.is_debugging", lambda: True)
    arguments = inputs([3, slot, 5])
    with pytest.raises(ShapeError, match=rf"slot_mapping\[1\] is {slot}, .* = 30"):
        write(*arguments)
    assert arguments[2].isnan().all()
    assert arguments[3].isnan().all()


WRONG = [
    ("v", lambda t: t[:2], ShapeError, "v has num_tokens=2 but k has 3"),
    ("v", lambda t: t[:, :2], ShapeError, "v has num_kv_heads=2 but k has 3"),
    ("k_cache", lambda t: t[..., :16], ShapeError, "k_cache has head_size=16 but k has 24"),
    ("v_cache", lambda t: t[..., :16], ShapeError, "v_cache has v_head_size=16 but v has 40"),
    ("v_cache", lambda t: t[:, :4], ShapeError, "v_cache has block_size=4 but k_cache has 5"),
    ("v_cache", lambda t: t[:5], ShapeError, "v_cache has num_blocks=5 but k_cache has 6"),
    ("k_cache", lambda t: t[0], ShapeError, "k_cache has 3 dimensions"),
    ("slot_mapping", lambda t: t[:2], ShapeError, "slot_mapping has num_tokens=2 but k has 3"),
    ("slot_mapping", lambda t: t.int(), DTypeError, "slot_mapping is int32, expected int64"),
    ("k", lambda t: t.int(), DTypeError, "k is int32, expected float32"),
    ("v", lambda t: t.half(), DTypeError, "v is float16, expected float32"),
    ("v_cache", lambda t: t.half(), DTypeError, "v_cache is float16, expected float32"),
    (
        "k_cache",
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        ShapeError,
        "k_cache has stride 3 in its last dimension, expected 1",
    ),
]


@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG)
def test_a_wrong_argument_is_named_and_nothing_is_written(write, name, change, error, message):
    names = ("k", "v", "k_cache", "v_cache", "slot_mapping")
    arguments = dict(zip(names, inputs([3, 4, 5]), strict=True))
    caches = arguments["k_cache"], arguments["v_cache"]
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        write(*arguments.values())
    assert all(cache.isnan().all() for cache in caches)


def test_a_slot_that_comes_twice_is_named_when_debugging(write, monkeypatch):
    monkeypatch.setattr("pagetile.ops.write_kv.api.is_debugging", lambda: True)
    arguments = inputs([5, -1, -1])
    write(*arguments)  # -1 writes nothing, however often it comes
    arguments = inputs([5, 3, 5])
    with pytest.raises(ShapeError, match="slot_mapping has slot 5 twice, expected each slot at"):
        write(*arguments)
    assert arguments[2].isnan().all()


def test_one_tensor_for_keys_and_values_is_refused(write):
    k, v, k_cache, _, slots = inputs([3, 4, 5], sizes=(24, 24))
    with pytest.raises(ShapeError, match="k_cache and v_cache are the same tensor"):
        write(k, v, k_cache, k_cache, slots)
    assert k_cache.isnan().all()


def test_bytes_of_an_8_bit_float_cache_are_to_be_viewed(write):
    k, v, k_cache, v_cache, slots = inputs([3, 4, 5])
    k_cache, v_cache = (cache.to(torch.uint8) for cache in (k_cache, v_cache))
    with pytest.raises(DTypeError, match=r"k_cache is uint8.*k_cache\.view\(torch\.float8_e4m3fn"):
        write(k, v, k_cache, v_cache, slots)


def test_a_head_size_that_is_no_multiple_of_8_is_an_error(write):
    with pytest.raises(ShapeError, match="head_size is 12, expected a multiple of 8"):
        write(*inputs([0], sizes=(12, 8)))


def test_float64_goes_to_the_reference():
    arguments = inputs([4], dtype=torch.float64, kv_dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="cpu cannot run this: k is float64"):
        write_kv(*arguments, impl="cpu")
    write_kv(*arguments)
    assert torch.equal(arguments[2][0, 4], arguments[0][0])
