import math

import numpy as np
import pytest
import torch
from numba import njit

from pagetile.device import DeviceInfo
from pagetile.tiles.cpu import simd
from pagetile.tiles.cpu.arrays import flat
from pagetile.tiles.cpu.simd import (
    add,
    div,
    exp2,
    first_lane,
    fma,
    lane_numbers,
    load,
    load_half,
    load_one,
    log2,
    max_lanes,
    maximum,
    mul,
    splat,
    store,
    store_half,
    store_one,
    store_quarter,
    sub,
    sum_each,
    sum_lanes,
    take_number,
    tanh,
    where_less,
    zeros,
)
from pagetile.tiles.cpu.simd_pairs import (
    dot_pairs,
    interleave,
    load_pairs,
    round_pairs,
    splat_pair,
    store_pairs,
    zip_high,
    zip_low,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def numbers(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


@njit
def convert(to, source):
    for i in range(0, len(source), 16):
        store(to, i, load(source, i))


@njit
def convert_half(to, to_at, source, source_at):
    store_half(to, to_at, load_half(source, source_at))


# --- memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_number_of_16_bits_loads_as_torch_converts_it(dtype):
    every = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    loaded = torch.empty(1 << 16)
    convert(flat(loaded), flat(every))
    expected = every.float()
    assert torch.equal(loaded.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(loaded.view(torch.int32)[known], expected.view(torch.int32)[known])


def hard_to_round():
    """float32 of every exponent, ties between two neighbours of 16 bits, and the odd ones out."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64, generator=generator)
    every = torch.arange(1 << 16)
    ties_bf16 = (every << 16)[:, None] + torch.tensor([0x7FFF, 0x8000, 0x8001])
    ties_f16 = every.to(torch.uint16).view(F16).float().view(torch.int32)[:, None].long()
    ties_f16 = ties_f16 + torch.tensor([0xFFF, 0x1000, 0x1001])
    bits = torch.cat([random, ties_bf16.flatten(), ties_f16.flatten()]) & 0xFFFFFFFF
    floats = (bits - (bits >> 31 << 32)).int().view(F32)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65519.9, 65520.0, 3.4e38, 1e-45]
    floats = torch.cat([floats, torch.tensor(special), -torch.tensor(special)])
    return torch.nn.functional.pad(floats, (0, -len(floats) % 16))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_storing_rounds_as_torch_does(dtype):
    source = hard_to_round()
    stored = torch.empty(len(source), dtype=dtype)
    convert(flat(stored), flat(source))
    expected = source.to(dtype)
    assert torch.equal(stored.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(stored.view(torch.int16)[known], expected.view(torch.int16)[known])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_half_touches_eight_elements(dtype):
    source, to = torch.arange(40.0).to(dtype), torch.full((40,), -1.0, dtype=dtype)
    convert_half(flat(to), 5, flat(source), 3)
    assert torch.equal(to[5:13], source[3:11])
    assert (to[:5] == -1).all()
    assert (to[13:] == -1).all()
    whole = torch.full((16,), -1.0)
    load_half_only(flat(whole), flat(source), 3)
    assert whole.tolist() == [*range(3, 11), *[0] * 8]


@njit
def load_half_only(to, source, at):
    store(to, 0, load_half(source, at))


@njit
def store_quarters(to, source):
    vector = load(source, 0)
    store_quarter(to, 1, vector, 2)
    store_quarter(to, 7, vector, 0)
    store_quarter(to, 12, vector, 3)


def test_a_quarter_is_four_lanes():
    to = np.full(20, -1, np.float32)
    store_quarters(to, np.arange(16, dtype=np.float32))
    expected = [-1, 8, 9, 10, 11, -1, -1, 0, 1, 2, 3, -1, 12, 13, 14, 15, -1, -1, -1, -1]
    assert to.tolist() == expected


@njit
def copy_ones(to, x, start):
    for i in range(len(to)):
        store_one(to, i, load_one(x, start + i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_single_numbers_travel_as_lanes_do(dtype):
    x = torch.randn(21)
    rounded = x.to(dtype)
    to = torch.empty(18, dtype=dtype)
    copy_ones(flat(to), flat(x), 3)
    assert torch.equal(to, rounded[3:])
    back = torch.empty(18)
    copy_ones(flat(back), flat(rounded), 3)
    assert torch.equal(back, rounded[3:].float())


# --- functions ----------------------------------------------------------------------------


@njit
def exp2_all(to, x):
    for i in range(0, len(x), 16):
        store(to, i, exp2(load(x, i)))


@njit
def log2_all(to, x):
    for i in range(0, len(x), 16):
        store(to, i, log2(load(x, i)))


@njit
def tanh_all(to, x):
    for i in range(0, len(x), 16):
        store(to, i, tanh(load(x, i)))


def applied(function, x):
    to = np.empty_like(x)
    function(to, x)
    return to


def test_exp2_is_within_one_and_a_half_units_in_the_last_place():
    x = np.linspace(-126, 126, 1 << 20, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    ulps = np.abs(applied(exp2_all, x) - exact) / np.spacing(exact.astype(np.float32))
    assert ulps.max() < 1.5


def test_exp2_of_an_integer_is_exact():
    x = np.arange(-126, 114, dtype=np.float32)
    assert (applied(exp2_all, x) == np.exp2(x)).all()


def test_exp2_far_below_is_zero():
    x = np.array([-127, -127.4, -149, -1e4, -3e38, -np.inf, -128, -150] * 8, np.float32)
    assert (applied(exp2_all, x) == 0).all()
    between = np.linspace(-127, -126, 1 << 10, dtype=np.float32)
    found = applied(exp2_all, between)
    assert (found >= 0).all()
    assert (found <= 2.0**-126).all()
    assert np.isnan(applied(exp2_all, np.full(16, np.nan, np.float32))).all()


@pytest.mark.parametrize(("low", "high"), [(0.6, 1.5), (0.999, 1.001), (1, 1e6), (1e-37, 1e38)])
def test_log2_is_exact_to_a_few_units_in_the_last_place(low, high):
    x = np.geomspace(low, high, 1 << 18).astype(np.float32)
    exact = np.log2(x.astype(np.float64))
    errors = np.abs(applied(log2_all, x) - exact)
    assert (errors <= 1.2e-7 * np.maximum(1, np.abs(exact))).all()
    assert (errors <= 2.5e-7 * np.abs(exact)).all()
    assert (applied(log2_all, np.exp2(np.arange(-126, 114)).astype(np.float32)) % 1 == 0).all()


def test_tanh_is_exact_to_a_few_units_in_the_last_place():
    magnitudes = np.concatenate([np.logspace(-30, 2, 1 << 18), np.linspace(0, 20, 1 << 18)])
    x = np.concatenate([magnitudes, -magnitudes]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    errors = np.abs(applied(tanh_all, x) - exact)
    assert errors.max() < 2e-7
    assert (errors <= 6e-7 * np.abs(exact)).all()


def test_tanh_of_the_largest_numbers_is_one():
    x = np.array([30, 1e10, 3e38, np.inf, -30, -1e10, -3e38, -np.inf] * 2, np.float32)
    assert (applied(tanh_all, x) == np.sign(x)).all()


# --- lanes --------------------------------------------------------------------------------


@njit
def arithmetic(to, a, b, c):
    x, y, z = load(a, 0), load(b, 0), load(c, 0)
    store(to, 0, add(x, y))
    store(to, 16, sub(x, y))
    store(to, 32, mul(x, y))
    store(to, 48, div(x, y))
    store(to, 64, fma(x, y, z))
    store(to, 80, maximum(x, y))
    store(to, 96, where_less(x, y, z, x))
    store(to, 112, splat(a[3]))
    store(to, 128, lane_numbers())
    store(to, 144, zeros())


def test_arithmetic_is_lane_by_lane():
    a, b, c = numbers(3, 16)
    b[5] = a[5]  # not less
    to = np.empty(160, np.float32)
    arithmetic(to, a, b, c)
    exact_fma = (a.astype(np.float64) * b + c).astype(np.float32)
    got = dict(zip(range(10), to.reshape(10, 16), strict=True))
    assert (got[0] == a + b).all()
    assert (got[1] == a - b).all()
    assert (got[2] == a * b).all()
    assert (got[3] == a / b).all()
    np.testing.assert_allclose(got[4], exact_fma, rtol=1e-6, atol=1e-7)
    assert (got[5] == np.maximum(a, b)).all()
    assert (got[6] == np.where(a < b, c, a)).all()
    assert (got[7] == a[3]).all()
    assert (got[8] == np.arange(16)).all()
    assert (got[9] == 0).all()


def test_no_comparison_with_nan_is_true():
    a, b, c = (np.full(16, x, np.float32) for x in (np.nan, 2.0, 3.0))
    to = np.empty(160, np.float32)
    arithmetic(to, a, b, c)
    assert (to[80:96] == 2).all()  # maximum: b where a is NaN
    assert np.isnan(to[96:112]).all()  # where_less: not less, so a itself


@njit
def across(x):
    vector = load(x, 0)
    return sum_lanes(vector), max_lanes(vector), first_lane(vector)


def test_reductions_take_every_lane():
    for lane in range(16):
        x = np.zeros(16, np.float32)
        x[lane] = 5
        assert across(x)[:2] == (5, 5)
        assert across(x - 9)[:2] == (5 - 144, -4)
    x = numbers(16)
    total, greatest, first = across(x)
    assert total == pytest.approx(float(x.astype(np.float64).sum()), abs=2e-6)
    assert (greatest, first) == (x.max(), x[0])
    assert across(np.full(16, -np.inf, np.float32))[1] == -np.inf


@njit
def sums_of_rows(to, x):
    store(to, 0, sum_each((
        load(x, 0), load(x, 16), load(x, 32), load(x, 48), load(x, 64), load(x, 80),
        load(x, 96), load(x, 112), load(x, 128), load(x, 144), load(x, 160), load(x, 176),
        load(x, 192), load(x, 208), load(x, 224), load(x, 240),
    )))  # fmt: skip


def test_sum_each_adds_the_lanes_of_each_vector():
    x, to = numbers(16, 16), np.empty(16, np.float32)
    sums_of_rows(to, x.ravel())
    np.testing.assert_allclose(to, x.astype(np.float64).sum(axis=1), atol=4e-6)
    ones = np.arange(256, dtype=np.float32)
    sums_of_rows(to, ones)
    assert (to == ones.reshape(16, 16).sum(axis=1)).all()


def test_a_sum_depends_neither_on_the_other_vectors_nor_on_its_place():
    x, to = numbers(16, 16), np.empty(16, np.float32)
    sums_of_rows(to, x.ravel())
    expected = to.copy()
    for shift in range(16):
        others = numbers(16, 16, seed=shift + 1, scale=1e6)
        others[shift] = x[3]
        sums_of_rows(to, others.ravel())
        assert to[shift] == expected[3]


# --- pairs of bfloat16 ----------------------------------------------------------------------


@njit
def rearrange(to, a, b, index):
    """Pairs seen through the first of two rows of products with 1 and 0 stay exact."""
    x, y = load_pairs(a, 0), load_pairs(b, 0)
    store(to, 0, dot_pairs(zeros(), zip_low(x, y), splat_pair(index, 0)))
    store(to, 16, dot_pairs(zeros(), zip_low(x, y), splat_pair(index, 2)))
    store(to, 32, dot_pairs(zeros(), zip_high(x, y), splat_pair(index, 0)))
    store(to, 48, dot_pairs(zeros(), zip_high(x, y), splat_pair(index, 2)))


@njit
def dot(to, acc, a, b):
    store(to, 0, dot_pairs(load(acc, 0), load_pairs(a, 0), load_pairs(b, 0)))


needs_bf16_dot = pytest.mark.skipif(
    not DeviceInfo.of(torch.device("cpu")).bf16_dot, reason="this CPU has no AVX512-BF16"
)


@needs_bf16_dot
def test_zipping_pairs_the_lanes_of_two_vectors():
    a, b = torch.arange(32.0).bfloat16(), torch.arange(100.0, 132.0).bfloat16()
    first_then_second = torch.tensor([1.0, 0.0, 0.0, 1.0]).bfloat16()
    to = np.empty(64, np.float32)
    rearrange(to, flat(a), flat(b), flat(first_then_second))
    assert to[:16].tolist() == a[:16].tolist()
    assert to[16:32].tolist() == b[:16].tolist()
    assert to[32:48].tolist() == a[16:].tolist()
    assert to[48:].tolist() == b[16:].tolist()


@needs_bf16_dot
def test_dot_pairs_adds_two_products_to_each_lane():
    a, b = (torch.from_numpy(numbers(32, seed=seed)).bfloat16() for seed in (1, 2))
    acc, to = numbers(16), np.empty(16, np.float32)
    dot(to, acc, flat(a), flat(b))
    products = (a.double() * b.double()).view(16, 2).sum(dim=1).numpy()
    np.testing.assert_allclose(to, acc + products, rtol=0, atol=1e-6)


@njit
def round_and_interleave(to, a, b):
    rounded = round_pairs(load(a, 0), load(b, 0))
    store_pairs(to, 0, rounded)
    store_pairs(to, 32, interleave(rounded))


@needs_bf16_dot
def test_rounding_two_vectors_to_bfloat16_and_interleaving_them():
    a, b = (torch.from_numpy(numbers(16, seed=seed)) for seed in (1, 2))
    a[:3] = torch.tensor([torch.inf, 1 + 2**-8, 1 + 3 * 2**-8])  # two ties, to even
    to = torch.zeros(64, dtype=torch.bfloat16)
    round_and_interleave(flat(to), flat(a), flat(b))
    assert torch.equal(to[:32], torch.cat([a, b]).bfloat16())
    assert torch.equal(to[32:], torch.stack([a, b], dim=1).flatten().bfloat16())


# --- threads ------------------------------------------------------------------------------


@njit(nogil=True)
def take_all(counter, end, mine):
    taken = 0
    while True:
        number = take_number(counter)
        if number >= end:
            return taken
        mine[number] += 1
        taken += 1


def test_every_number_is_taken_once():
    from concurrent.futures import ThreadPoolExecutor

    counter, end = np.zeros(1, np.int64), 200_000
    shares = np.zeros((4, end), np.int64)
    take_all(np.zeros(1, np.int64), 1, np.zeros(1, np.int64))  # compiled before they race
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda mine: take_all(counter, end, mine), shares))
    assert (shares.sum(axis=0) == 1).all()


def test_the_stand_ins_of_16_bit_types_are_distinct():
    arrays = {dtype: flat(torch.zeros(4, dtype=dtype)).dtype for dtype in (F32, F16, BF16)}
    assert arrays == {F32: np.float32, F16: np.int16, BF16: np.uint16}
    assert simd.LANES == 16
