"""Scales of 8-bit caches. Random ones are among the cases of paged attention."""

import math
from dataclasses import replace

import pytest
import torch

from pagetile.errors import DTypeError, ShapeError
from pagetile.ops.write_kv import write_kv
from pagetile.testing import PagedCase, assert_matches, make_inputs

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
# Every run compiles kernels for two of them, 10 seconds each.
KINDS = [E4M3, INT8, pytest.param(E5M2, marks=pytest.mark.slow)]
CASE = PagedCase(
    (1, 3), (700, 9), 4, 2, 16, dtype=torch.bfloat16, kv_dtype=E4M3, scales="token"
)  # fmt: skip
NAMES = ("k_scale", "v_scale")
QUERIES = {E4M3: torch.bfloat16, E5M2: torch.float16, INT8: torch.float32}
"""Beside which caches of 8 bits are compiled for anyway: other pairs of types take 30 seconds."""


@pytest.fixture(params=["cpu", "reference"])
def attend(request):
    return lambda inputs: inputs.attend(impl=request.param)


def with_scales(inputs, change):
    """The inputs with both scales changed."""
    changed = {name: change(inputs.options[name]) for name in NAMES}
    return inputs.replace(options={**inputs.options, **changed})


def assert_same(result, expected):
    for got, wanted in zip(result, expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kv_dtype", KINDS, ids=str)
def test_every_code_means_what_torch_says(attend, kv_dtype):
    """With one key a sequence the result is its value: the 8-bit number times the scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    dtype = torch.float32 if kv_dtype == E5M2 else QUERIES[kv_dtype]  # float16 ends too soon
    inputs = make_inputs(PagedCase((1,), (1,), 2, 2, 128, dtype=dtype, kv_dtype=kv_dtype,
                                   scales="head", block_size=1))  # fmt: skip
    seq = inputs.batch.seq_lens.tolist().index(1)
    block, row = int(inputs.batch.block_tables[seq, 0]), int(inputs.batch.cu_seqlens_q[seq])
    inputs.v_cache[block, 0] = codes.view(2, 128)
    result = attend(with_scales(inputs, lambda _: torch.tensor([2.0, 0.5]))).out[row].float()
    expected = codes.float().view(2, 128) * torch.tensor([[2.0], [0.5]])
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("where", ["k_scale", "v_scale", "k_cache", "v_cache"])
@pytest.mark.parametrize("kv_dtype", KINDS, ids=str)
def test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other(attend, where, kv_dtype):
    if kv_dtype == INT8 and where.endswith("cache"):
        pytest.skip("int8 has no NaN")
    inputs = make_inputs(replace(CASE, dtype=QUERIES[kv_dtype], kv_dtype=kv_dtype))
    expected = attend(inputs)
    seq = inputs.batch.seq_lens.tolist().index(700)
    block, row = int(inputs.batch.block_tables[seq, 1]), int(inputs.batch.cu_seqlens_q[seq])
    if where.endswith("scale"):
        inputs.options[where][block, 3, 0] = math.nan
    else:
        getattr(inputs, where).view(torch.uint8)[block, 3, 0, 5] = 0xFF
    result = attend(inputs)
    heads = slice(0, 2)  # of KV head 0
    columns = slice(5, 6) if where == "v_cache" else slice(None)
    assert result.out[row, heads, columns].isnan().all()
    assert result.lse[row, heads].isnan().all() == where.startswith("k")
    for got, wanted in zip(result, expected, strict=True):
        got[row, heads] = wanted[row, heads]
    assert_same(result, expected)


@pytest.mark.parametrize("scales", ["head", "token"])
def test_scales_may_have_any_strides(attend, scales):
    inputs = make_inputs(replace(CASE, scales=scales))

    def strided(scale):
        room = torch.full((*reversed(scale.shape), 3), math.nan)
        view = room[..., 1].permute(*reversed(range(scale.dim())))
        return view.copy_(scale)

    other = with_scales(inputs, strided)
    assert other.options["k_scale"].stride(-1) > 1
    assert_same(attend(other), attend(inputs))


def test_one_number_is_that_scale_for_every_head(attend):
    inputs = make_inputs(replace(CASE, scales="tensor"))
    expected = attend(inputs)
    assert_same(attend(with_scales(inputs, lambda scale: scale.expand(1))), expected)
    assert_same(attend(with_scales(inputs, lambda scale: scale.expand(2).clone())), expected)


@pytest.mark.parametrize("kv_dtype", KINDS, ids=str)
def test_what_write_kv_quantises_is_attended_to_as_it_was(attend, kv_dtype):
    """Attention over a cache of the queries' type, and over the same in 8 bits with scales."""
    inputs = make_inputs(PagedCase((1, 3), (700, 9), 4, 2, 64, dtype=QUERIES[kv_dtype]))
    wide = inputs.k_cache, inputs.v_cache
    caches = [torch.empty_like(cache, dtype=kv_dtype) for cache in wide]
    scales = dict(zip(NAMES, (torch.empty(cache.shape[:3]) for cache in wide), strict=True))
    new = [cache.flatten(0, 1) for cache in wide]
    write_kv(*new, *caches, torch.arange(len(new[0])), **scales)
    small = inputs.replace(
        k_cache=caches[0], v_cache=caches[1], options={**inputs.options, **scales}
    )
    result, expected = attend(small), attend(inputs)
    assert_matches(result, small)
    half_step = {E4M3: 2**-4, E5M2: 2**-3, INT8: 1 / 254}[kv_dtype]  # of a number, or of the amax
    error = (result.out - expected.out).square().mean() / expected.out.square().mean()
    assert 0 < error.sqrt() < 2 * half_step


# --- errors --------------------------------------------------------------------------------


NUM_BLOCKS = len(make_inputs(CASE).k_cache)

REFUSED = {
    "no k_scale": (
        {"k_scale": None},
        DTypeError,
        r"k_cache is float8_e4m3fn but k_scale is None.*one number.*\[num_blocks, block_size, ",
    ),
    "no v_scale": ({"v_scale": None}, DTypeError, "v_cache is float8_e4m3fn but v_scale is None"),
    "float64": (
        {"k_scale": torch.ones(2).double()},
        DTypeError,
        "k_scale is float64, expected float32",
    ),
    "float16": ({"v_scale": torch.ones(()).half()}, DTypeError, "v_scale is float16, expected"),
    "two kinds": (
        {"v_scale": torch.ones(2)},
        ShapeError,
        "k_scale is one number a token but v_scale is one a head: give both alike",
    ),
    "three heads": (
        {"k_scale": torch.ones(3)},
        ShapeError,
        "k_scale has num_kv_heads=3 but k_cache has 2",
    ),
    "a matrix": ({"k_scale": torch.ones(16, 2)}, ShapeError, "k_scale has 2 dimensions"),
    "fewer blocks": (
        {"k_scale": torch.ones(NUM_BLOCKS - 1, 16, 2)},
        ShapeError,
        f"k_scale has num_blocks={NUM_BLOCKS - 1} but k_cache has {NUM_BLOCKS}",
    ),
    "shorter blocks": (
        {"v_scale": torch.ones(NUM_BLOCKS, 15, 2)},
        ShapeError,
        "v_scale has block_size=15 but v_cache has 16",
    ),
    "elsewhere": (
        {"k_scale": torch.ones((), device="meta")},
        ShapeError,
        "k_scale is on meta but k_cache is on cpu",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_scale_is_named(changes, error, message):
    inputs = make_inputs(CASE)
    with pytest.raises(error, match=message):
        inputs.attend(**changes)
    caches = inputs.k_cache, inputs.v_cache
    before = [cache.view(torch.uint8).clone() for cache in caches]
    new = torch.ones(1, 2, 16)
    scales = {**{name: inputs.options[name] for name in NAMES}, **changes}
    with pytest.raises(error, match=message):
        write_kv(new, new, *caches, torch.tensor([0]), **scales)
    assert_same([cache.view(torch.uint8) for cache in caches], before)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_16_bits_has_no_scales(name):
    inputs = make_inputs(PagedCase(dtype=torch.bfloat16))
    with pytest.raises(DTypeError, match=f"{name} was given but {name[0]}_cache is bfloat16: only"):
        inputs.attend(**{name: torch.ones(())})


def test_queries_of_an_8_bit_cache_are_not_float64():
    inputs = make_inputs(CASE)
    with pytest.raises(DTypeError, match="q is float64 but k_cache is float8_e4m3fn"):
        inputs.replace(q=inputs.q.double()).attend()


def test_a_case_has_scales_if_its_cache_has_8_bits():
    with pytest.raises(ValueError, match=r"scales is None but caches are torch\.int8"):
        PagedCase(kv_dtype=INT8)
    with pytest.raises(ValueError, match=r"scales is 'head' but caches are torch\.float32"):
        PagedCase(scales="head")
