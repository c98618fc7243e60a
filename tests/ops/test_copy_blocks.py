import itertools
import math

import numpy as np
import pytest
import torch

from pagetile.device import refusing_to_wait
from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.ops.copy_blocks import copy_blocks

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def copy(request, mirror):
    def call(caches, pairs):
        pairs = torch.as_tensor(pairs)
        both = [cache if isinstance(cache, tuple) else (cache, cache) for cache in caches]
        with mirror(*itertools.chain(*both), impl=request.param, rounds=False) as there:
            there = list(zip(there[::2], there[1::2], strict=True))
            caches = [s if a is b else (s, d) for (a, b), (s, d) in zip(both, there, strict=True)]
            copy_blocks(caches, pairs, impl=request.param)

    return call


def blocks(num_blocks=7, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-100, 100, (num_blocks, *(shape or (5, 2, 8))), generator=generator)
    return numbers.to(dtype)


def copied_by_hand(source, destination, pairs):
    result, source = destination.clone(), source.clone()
    for src, dst in pairs:
        result.view(torch.uint8)[dst] = source.view(torch.uint8)[src]
    return result


def assert_same_memory(cache, expected):
    assert torch.equal(cache.contiguous().view(torch.uint8), expected.view(torch.uint8))


PAIRS = {
    "one": [[3, 5]],
    "one source twice": [[3, 5], [3, 6]],
    "a source that is overwritten": [[3, 0], [0, 1]],
    "a swap": [[2, 4], [4, 2]],
    "a ring": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 0]],
    "onto itself": [[2, 2], [2, 3]],
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_destination_becomes_its_source_as_it_was(copy, pairs, dtype):
    caches = [blocks(dtype=dtype), blocks(7, 3, 1, 16, dtype=dtype, seed=1)]
    expected = [copied_by_hand(cache, cache, pairs) for cache in caches]
    copy(caches, pairs)
    for cache, wanted in zip(caches, expected, strict=True):
        assert_same_memory(cache, wanted)


def test_nothing_to_copy_copies_nothing(copy):
    cache = blocks()
    before = cache.clone()
    copy([cache], torch.empty(0, 2, dtype=torch.int64))
    copy([], [[3, 5]])
    assert torch.equal(cache, before)


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_blocks_travel_from_one_cache_to_another(copy, pairs):
    source, destination = blocks(), blocks(9, seed=1)
    expected, before = copied_by_hand(source, destination, pairs), source.clone()
    copy([(source, destination)], pairs)
    assert_same_memory(destination, expected)
    assert torch.equal(source, before)


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_two_views_of_one_cache_are_one_cache(copy, pairs):
    cache = blocks()
    expected = copied_by_hand(cache, cache, pairs)
    copy([(cache, cache[:])], pairs)
    assert_same_memory(cache, expected)


def test_views_that_lie_one_block_apart_read_before_they_write(copy):
    whole = blocks(7)
    expected = whole.clone()
    expected[1:] = whole[:6]
    copy([(whole[:6], whole[1:])], [[i, i] for i in range(6)])
    assert_same_memory(whole, expected)


def test_unused_blocks_keep_every_bit(copy):
    cache = torch.full((6, 4, 2, 8), math.nan)
    cache[2] = 1.0
    copy([cache], [[2, 4]])
    assert (cache[[2, 4]] == 1.0).all()
    assert cache[[0, 1, 3, 5]].isnan().all()


def test_blocks_may_lie_apart_in_memory(copy):
    """Keys and values of a block are adjacent: a cache is every second block of the whole."""
    whole = blocks(7, 2, 5, 2, 8)
    k_cache, v_cache = whole.unbind(1)
    v_before = v_cache.clone()
    expected = copied_by_hand(k_cache.contiguous(), k_cache.contiguous(), PAIRS["a swap"])
    copy([k_cache], PAIRS["a swap"])
    assert_same_memory(k_cache, expected)
    assert torch.equal(v_cache, v_before)


def test_a_block_that_is_not_contiguous_goes_to_the_reference():
    cache = blocks().transpose(1, 2)
    expected = copied_by_hand(cache.contiguous(), cache.contiguous(), PAIRS["a ring"])
    copy_blocks([cache], torch.tensor(PAIRS["a ring"]))
    assert_same_memory(cache, expected)


def test_when_one_cache_cannot_be_copied_none_is():
    good, bad = blocks(), blocks().transpose(1, 2)
    before = good.clone()
    with pytest.raises(UnsupportedError, match="cpu cannot run this: a block is not contiguous"):
        copy_blocks([good, bad], torch.tensor([[0, 1]]), impl="cpu")
    assert torch.equal(good, before)


def test_pairs_may_be_a_view(copy):
    cache, pairs = blocks(), torch.tensor(PAIRS["a ring"])
    expected = copied_by_hand(cache, cache, pairs.tolist())
    copy([cache], pairs.T.contiguous().T)
    assert_same_memory(cache, expected)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[7, 0]], r"source block 7, expected 0 to 6"),
        ([[-1, 0]], r"source block -1, expected 0 to 7"),
        ([[0, 1], [1, 9]], r"destination block 9, expected 0 to 7"),
        ([[0, 1], [1, -3]], r"destination block -3, expected 0 to 7"),
        ([[0, 1], [2, 1]], r"destination block 1 twice, expected each at most once"),
    ],
)
def test_a_wrong_block_is_named_and_nothing_is_written(copy, pairs, message):
    first, second = blocks(8), blocks(7)
    before = first.clone(), second.clone()
    with pytest.raises(ShapeError, match=message):
        copy([first, second], pairs)
    assert torch.equal(first, before[0])
    assert torch.equal(second, before[1])


def test_a_wrong_argument_is_named(copy):
    cache = blocks()
    with pytest.raises(DTypeError, match="src_to_dst is of type NoneType"):
        copy_blocks([cache], None)
    with pytest.raises(ShapeError, match=r"a tuple of 3, expected \(source, destination\)"):
        copy_blocks([(cache, cache, cache)], [(0, 1)])
    with pytest.raises(ShapeError, match=r"src_to_dst has 1 dimension \[2\], expected 2"):
        copy([cache], [0, 1])
    with pytest.raises(ShapeError, match=r"src_to_dst has 2=3 expected 2"):
        copy([cache], [[0, 1, 2]])
    with pytest.raises(DTypeError, match=r"src_to_dst is float32, expected int64"):
        copy([cache], [[0.0, 1.0]])
    with pytest.raises(DTypeError, match=r"a destination cache is float16, expected float32"):
        copy([(cache, cache.half())], [[0, 1]])
    with pytest.raises(ShapeError, match=r"\[5, 2, 8\] in the source .* \[5, 2, 16\] in the dest"):
        copy([(cache, blocks(7, 5, 2, 16))], [[0, 1]])
    with pytest.raises(
        UnsupportedError, match=r"impl is 'gpu', expected 'auto' or one of triton, cpu"
    ):
        copy_blocks([cache], torch.tensor([[0, 1]]), impl="gpu")


# --- between a GPU and its host -------------------------------------------------------------


@pytest.fixture(params=["auto", "reference"])
def impl(request):
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("pairs", [PAIRS["one source twice"], PAIRS["a ring"]])
def test_blocks_travel_to_the_host_and_back(impl, pinned, pairs):
    on_gpu, on_host = blocks(), blocks(9, seed=1)
    on_host = on_host.pin_memory() if pinned else on_host
    expected = copied_by_hand(on_gpu, on_host, pairs)
    copy_blocks([(on_gpu.cuda(), on_host)], torch.tensor(pairs), impl=impl)
    torch.cuda.synchronize()
    assert_same_memory(on_host, expected)

    there = blocks(seed=2).cuda()
    expected = copied_by_hand(on_host, there.cpu(), pairs)
    copy_blocks([(on_host, there)], torch.tensor(pairs), impl=impl)
    assert_same_memory(there.cpu(), expected)


@pytest.mark.gpu
def test_layers_of_different_shapes_and_types_are_copied_together():
    caches = [blocks(dtype=dtype, seed=i) for i, dtype in enumerate(DTYPES)]
    caches += [blocks(7, 3, 1, size, dtype=torch.int8) for size in (1, 2, 12)]
    expected = [copied_by_hand(cache, cache, PAIRS["a swap"]) for cache in caches]
    on_gpu = [cache.cuda() for cache in caches]
    copy_blocks(on_gpu, torch.tensor(PAIRS["a swap"]), impl="triton")
    for cache, wanted in zip(on_gpu, expected, strict=True):
        assert_same_memory(cache.cpu(), wanted)


@pytest.mark.gpu
def test_caches_on_the_gpu_and_on_the_host_are_copied_together_without_waiting():
    def make():
        pinned = [blocks(seed=seed).pin_memory() for seed in (4, 5)]
        here, there, back = (blocks(seed=seed).cuda() for seed in (1, 2, 3))
        return [here, (there, pinned[0]), (pinned[1], back)]

    pairs = PAIRS["a ring"]
    copy_blocks(make(), torch.tensor(pairs))  # compiles
    caches = make()
    both = [cache if isinstance(cache, tuple) else (cache, cache) for cache in caches]
    expected = [copied_by_hand(source.cpu(), to.cpu(), pairs) for source, to in both]
    with refusing_to_wait():
        copy_blocks(caches, torch.tensor(pairs))
    torch.cuda.synchronize()
    for (_, to), wanted in zip(both, expected, strict=True):
        assert_same_memory(to.cpu(), wanted)


@pytest.mark.gpu
def test_a_cache_may_be_larger_than_32_bits_count():
    cache = torch.empty(2**32 // 4096 + 4, 4096, dtype=torch.int8, device="cuda")
    last = len(cache) - 1
    cache[last], cache[0], cache[last - 1] = 7, 1, 2
    copy_blocks([cache], torch.tensor([[last, 0], [1, last - 1]]))
    assert (cache[0] == 7).all()
    assert torch.equal(cache[last - 1], cache[1])


@pytest.mark.gpu
def test_host_memory_that_is_not_pinned_is_out_of_the_gpu_s_reach():
    with pytest.raises(UnsupportedError, match=r"the source is on cpu and not pinned"):
        copy_blocks([(blocks(), blocks().cuda())], torch.tensor([[0, 1]]), impl="triton")


def test_caches_that_are_written_twice_are_refused(copy):
    a, b, c = (blocks(seed=seed) for seed in range(3))
    before = a.clone(), b.clone()
    for caches in ([(a, b), (b, a)], [a, a], [(a, b), b], [(a, b), (c, b)]):
        with pytest.raises(ShapeError, match="written by two entries, or written by one and read"):
            copy(caches, [[0, 1]])
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    copy([(a, b), (a, c)], [[0, 1]])  # one source for two
    assert torch.equal(b[1], a[0])
    assert torch.equal(c[1], a[0])


def test_two_tensors_may_share_memory_without_torch_knowing(copy):
    memory = np.arange(6, dtype=np.float32)[:, None].repeat(8, axis=1)
    first, second = torch.from_numpy(memory[:5]), torch.from_numpy(memory[1:])
    expected = copied_by_hand(first, second, PAIRS["a ring"][:4])
    copy([(first, second)], PAIRS["a ring"][:4])
    assert_same_memory(second, expected)


@pytest.mark.parametrize("pairs", [[(1, 0), (2, 1)], ((1, 0), (2, 1)), []], ids=str)
def test_pairs_may_be_a_list_as_tables_return_it(pairs):
    cache = torch.arange(3.0)[:, None].repeat(1, 4)
    expected = cache.clone()
    for source, destination in pairs:
        expected[destination] = source
    copy_blocks([cache], pairs)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("caches", "pairs", "error", "message"),
    [
        (torch.zeros(3, 4), [(0, 1)], DTypeError, r"caches is a tensor.*pass \[cache\]"),
        ([[1.0]], [(0, 1)], DTypeError, r"caches has a list, expected .*\(source, destination\)"),
        ([1.0], [(0, 1)], DTypeError, "cache is of type float"),
        (None, [(0, 1)], DTypeError, "caches is None, expected a list of caches"),
        ([torch.tensor(1.0)], [(0, 0)], ShapeError, "caches has a tensor of 0 dimensions"),
        ([(torch.zeros(3, 4), None)], [(0, 1)], DTypeError, "destination is of type NoneType"),
        ([torch.zeros(3, 4)], "01", DTypeError, "src_to_dst is of type str"),
        ([torch.zeros(3, 4)], [(0, 1), (2,)], ShapeError, "expected pairs of blocks"),
        ([torch.zeros(3, 4)], [0, 1], ShapeError, "src_to_dst has 1 dimension"),
        ([torch.zeros(3, 4)], [(0.5, 1)], DTypeError, "src_to_dst is float32"),
    ],
    ids=str,
)
def test_arguments_that_are_no_caches_or_no_pairs_are_named(caches, pairs, error, message):
    with pytest.raises(error, match=message):
        copy_blocks(caches, pairs)
