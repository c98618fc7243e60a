import pytest
import torch

from pagetile import write_kv
from pagetile.errors import DTypeError, OutOfBlocksError, ShapeError
from pagetile.kv_cache import BlockPool
from pagetile.kv_cache.storage import KVCache, LayerSpec

LAYERS = [LayerSpec(2, 64, 64), LayerSpec(1, 32, 8)]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def tensors(cache):
    return [t for t in (*cache.k, *cache.v, *cache.k_scale, *cache.v_scale) if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *EIGHT_BITS], ids=str)
def test_bytes_are_those_of_all_tensors(dtype):
    cache = KVCache(LAYERS, BlockPool(5, 4), dtype=dtype)
    assert cache.num_bytes == sum(t.numel() * t.element_size() for t in tensors(cache))
    one_block = cache.num_bytes // 5

    def fit(memory):
        return KVCache.blocks_that_fit(LAYERS, memory, block_size=4, dtype=dtype)

    assert (fit(one_block), fit(3 * one_block - 1), fit(3 * one_block)) == (1, 2, 3)
    with pytest.raises(OutOfBlocksError, match="1 byte too few"):
        fit(one_block - 1)


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_8_bits_have_a_scale_for_each_tokens_head(dtype):
    cache = KVCache(LAYERS, BlockPool(5, 4), dtype=dtype)
    for scales in (cache.k_scale, cache.v_scale):
        assert [scale.shape for scale in scales] == [(5, 4, 2), (5, 4, 1)]
        assert all(scale.dtype == torch.float32 for scale in scales)


def test_the_tensors_of_all_layers_are_no_cache():
    """A stack of them, which the error once recommended, is refused too."""
    cache, k, slots = KVCache(LAYERS, BlockPool(5, 4)), torch.zeros(1, 2, 64), torch.tensor([0])
    with pytest.raises(DTypeError, match=r"pass one of its tensors, such as k_cache\[0\]"):
        write_kv(k, k, cache.k, cache.v, slots)


def test_16_bits_have_no_scales():
    cache = KVCache(LAYERS, BlockPool(5, 16), dtype=torch.bfloat16)
    assert cache.k_scale == cache.v_scale == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, *EIGHT_BITS], ids=str)
def test_a_copied_block_is_copied_in_every_layer_with_its_scales(dtype):
    cache = KVCache(LAYERS, BlockPool(5, 4), dtype=dtype)
    before = []
    for i, tensor in enumerate(tensors(cache)):
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        values.view(torch.uint8).random_(generator=torch.Generator().manual_seed(i))
        tensor.copy_(values)
        before.append(values.view(torch.uint8))
    cache.copy([(3, 0), (3, 4)])
    for tensor, old in zip(tensors(cache), before, strict=True):
        found = tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        assert torch.equal(found, old[[3, 1, 2, 3, 3]])


def test_layers_may_come_one_by_one():
    cache = KVCache((layer for layer in LAYERS), BlockPool(2, 16))
    assert len(cache.k) == len(cache.v_scale) == len(LAYERS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "bfloat16"}, DTypeError, "dtype is 'bfloat16', expected torch.float16, another"),
        ({"dtype": torch.int32}, DTypeError, "dtype is torch.int32, expected"),
        (
            {"pool": 2},
            DTypeError,
            r"pool is of type int, expected a BlockPool\(num_blocks, block_size\)",
        ),
        ({"pool": BlockPool(2, 257)}, ShapeError, "block_size is 257, expected 1 to 256"),
        ({"layers": LAYERS[0]}, DTypeError, "expected a list of one LayerSpec for each layer"),
        ({"layers": [3]}, DTypeError, "a layer is of type int, expected a LayerSpec"),
        ({"layers": [LayerSpec(2, 4, 8)]}, ShapeError, "head_size is 4, expected a multiple of 8"),
    ],
    ids=["dtype name", "int32", "no pool", "large blocks", "one layer", "no layer", "small heads"],
)
def test_an_argument_that_is_no_cache_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        KVCache(**{"layers": LAYERS, "pool": BlockPool(2, 16), **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"memory_bytes": 1e9}, ShapeError, r"memory_bytes=1000000000\.0, expected an integer"),
        ({"block_size": 0}, ShapeError, "block_size=0, expected at least 1"),
        ({"dtype": "float16"}, DTypeError, "dtype is 'float16', expected torch.float16"),
        ({"layers": []}, ShapeError, "layers is empty, expected one LayerSpec for each layer"),
        ({"layers": LAYERS[0]}, DTypeError, "expected a list of one LayerSpec for each layer"),
    ],
    ids=["float bytes", "no tokens", "dtype name", "no layers", "one layer"],
)
def test_a_question_about_memory_that_has_no_answer_is_named(changes, error, message):
    asked = {"layers": LAYERS, "memory_bytes": 10**9, "block_size": 16, "dtype": torch.float16}
    with pytest.raises(error, match=message):
        KVCache.blocks_that_fit(**{**asked, **changes})


@pytest.mark.parametrize(
    "sizes", [(-1, 64, 64), (2, -64, 64), (2, 64, 0), (2, 64, 64, -5), (2.0, 64, 64)], ids=str
)
def test_a_layers_sizes_are_positive_integers(sizes):
    with pytest.raises(ShapeError, match="expected"):
        LayerSpec(*sizes)
