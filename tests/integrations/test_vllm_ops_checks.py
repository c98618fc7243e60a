"""Bad arguments of vLLM's operators: an error names them before anything is written."""

import pytest
import torch
from vllm_cases import F16, F32

from pagetile.errors import DTypeError, PagetileError, ShapeError
from pagetile.integrations import vllm_ops

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, SIZE = 6, 16, 2, 8, 64


def arguments(**changes):
    """A good call of ``paged_attention_v2``, with some arguments changed."""
    good = {
        "out": torch.full((3, HEADS, SIZE), 7.0),
        "exp_sum": torch.zeros(3, HEADS, 2),
        "max_logits": torch.zeros(3, HEADS, 2),
        "tmp_out": torch.zeros(3, HEADS, 2, SIZE),
        "query": torch.zeros(3, HEADS, SIZE),
        "key_cache": torch.zeros(NUM_BLOCKS, KV_HEADS, SIZE // 4, BLOCK_SIZE, 4),
        "value_cache": torch.zeros(NUM_BLOCKS, KV_HEADS, SIZE, BLOCK_SIZE),
        "num_kv_heads": KV_HEADS,
        "scale": 0.125,
        "block_tables": torch.zeros(3, 40, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 0, 600], dtype=torch.int32),
        "block_size": BLOCK_SIZE,
        "max_seq_len": 600,
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    return {**good, **changes}


def caches(dtype=F32, x=None, chunks=None, size=SIZE, block_size=BLOCK_SIZE, heads=KV_HEADS):
    x = x or 16 // dtype.itemsize
    key = torch.zeros(NUM_BLOCKS, heads, chunks or size // x, block_size, x, dtype=dtype)
    return {
        "key_cache": key,
        "value_cache": torch.zeros(NUM_BLOCKS, heads, size, block_size, dtype=dtype),
    }


BAD = {
    "not packed": (
        {"key_cache": torch.zeros(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE)},
        r"key_cache has 4 dimensions .* x-packed cache .* pack_cache",
    ),
    "wrong x": (caches(x=8), r"key_cache has x=8 .* expected 16 bytes of float32, x=4"),
    "chunks": (caches(chunks=8), r"key_cache has head_size=32 .* but value_cache has 64"),
    "block size": (caches(block_size=12), r"key_cache has block_size=12, expected one of 8, 16"),
    "said block size": ({"block_size": 32}, r"block_size is 32, but value_cache has block_size=16"),
    "said heads": ({"num_kv_heads": 4}, r"num_kv_heads is 4, but value_cache has num_kv_heads=2"),
    "group": (
        {**caches(heads=3), "num_kv_heads": 3},
        r"query has 8 heads, expected a multiple of num_kv_heads=3",
    ),
    "head size": (
        {"query": torch.zeros(3, HEADS, 32)},
        r"(out|value_cache) has head_size=64 but query has 32",
    ),
    "strides": (
        {"value_cache": torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, SIZE).transpose(2, 3)},
        r"value_cache has strides .* expected a contiguous \[64, 16\]",
    ),
    "query strides": (
        {"query": torch.zeros(3, SIZE, HEADS).transpose(1, 2)},
        r"query has stride \d+ in its last dimension, expected 1",
    ),
    "types": (caches(F16), r"key_cache is float16 but query is float32"),
    "value type": (
        {"value_cache": torch.zeros(NUM_BLOCKS, KV_HEADS, SIZE, BLOCK_SIZE, dtype=F16)},
        r"value_cache is float16, expected float32",
    ),
    "8 bits by auto": (caches(torch.uint8), r"key_cache is uint8, but kv_cache_dtype is 'auto'"),
    "no 8 bits": (
        {"kv_cache_dtype": "fp8"},
        r"key_cache is float32, but kv_cache_dtype='fp8' is kept as uint8",
    ),
    "unknown": ({"kv_cache_dtype": "int8"}, r"kv_cache_dtype is 'int8', expected 'auto' or one of"),
    "out": ({"out": torch.zeros(3, HEADS, SIZE, dtype=F16)}, r"out is float16, expected float32"),
    "tables": (
        {"block_tables": torch.zeros(3, 40, dtype=torch.int64)},
        r"block_tables is int64, expected int32",
    ),
    "lengths": (
        {"seq_lens": torch.zeros(3, dtype=torch.int64)},
        r"seq_lens is int64, expected int32",
    ),
    "slopes": ({"alibi_slopes": torch.zeros(4)}, r"alibi_slopes has num_heads=4 but query has 8"),
    "scale": (
        {**caches(torch.uint8), "kv_cache_dtype": "fp8", "k_scale": torch.ones(2)},
        r"k_scale has shape \[2\], expected one number",
    ),
    "no scale": (
        {**caches(torch.uint8), "kv_cache_dtype": "fp8", "v_scale": None},
        r"v_scale is of type NoneType",
    ),
    "partitions": (
        {"max_seq_len": 1025},
        r"exp_sum has max_num_partitions=2, expected at least 3: max_seq_len=1025",
    ),
    "sums": (
        {"max_logits": torch.zeros(3, HEADS, 3)},
        r"max_logits has max_num_partitions=3 but exp_sum has 2",
    ),
    "a length": (
        {"seq_lens": torch.tensor([5, 0, 601], dtype=torch.int32)},
        r"seq_lens\[2\] is 601, expected 0 to 600",
    ),
    "a block": (
        {"block_tables": torch.full((3, 40), 6, dtype=torch.int32)},
        r"block_tables\[0, 0\] is 6, expected 0 to 5",
    ),
    "no tensor": ({"query": None}, r"query is of type NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_named_and_nothing_is_written(name):
    changes, message = BAD[name]
    call = arguments(**changes)
    with pytest.raises(PagetileError, match=message):
        vllm_ops.paged_attention_v2(**call)
    assert name == "out" or (call["out"] == 7).all()


def test_the_good_call_is_good():
    call = arguments()
    vllm_ops.paged_attention_v2(**call)
    assert not call["out"].any()


def test_the_sparse_block_size():
    with pytest.raises(ShapeError, match="blocksparse_block_size is 0"):
        vllm_ops.paged_attention_v2(
            **arguments(), blocksparse_vert_stride=2, blocksparse_block_size=0
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (caches(x=8), ShapeError, r"key_cache has x=8"),
        (caches(F16), DTypeError, r"key_cache is float16, expected float32 as key is"),
        ({"slots": torch.tensor([96])}, ShapeError, r"slot_mapping\[0\] is 96, .* 96"),
        ({"slots": torch.tensor([1, 2, 3])}, ShapeError, r"slot_mapping has 3 slots but key has 2"),
        ({"slots": torch.tensor([1]).int()}, DTypeError, r"slot_mapping is int32, expected int64"),
        ({"key": torch.zeros(2, 3, SIZE)}, ShapeError, r"key has num_kv_heads=3 but"),
        ({"value": torch.zeros(2, KV_HEADS, 32)}, ShapeError, r"value has head_size=32 but"),
        (
            {"key": torch.zeros(2, SIZE, KV_HEADS).transpose(1, 2)},
            ShapeError,
            r"key has stride \d+ in its last dimension, expected 1",
        ),
        ({"kv_cache_dtype": "fp16"}, DTypeError, r"kv_cache_dtype is 'fp16'"),
    ],
)
def test_reshape_and_cache(changes, error, message):
    call = {
        "key": torch.ones(2, KV_HEADS, SIZE), "value": torch.ones(2, KV_HEADS, SIZE), **caches(),
        "slots": torch.tensor([3, 4]), "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0,
    }  # fmt: skip
    call |= changes
    with pytest.raises(error, match=message):
        vllm_ops.reshape_and_cache(*call.values())
    assert not call["key_cache"].any()


def write_flash(name, scale):
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.uint8)
    call_cache_operator(vllm_ops.reshape_and_cache_flash, name, scale, cache, cache.clone())


def write_packed(name, scale):
    caches = vllm_ops.pack_cache(*torch.zeros(2, 2, 16, 2, 64, dtype=torch.uint8))
    call_cache_operator(vllm_ops.reshape_and_cache, name, scale, *caches)


def call_cache_operator(operator, name, scale, *caches):
    new, scales = torch.ones(1, 2, 64), {"k_scale": 1.0, "v_scale": 1.0, name: scale}
    try:
        operator(new, new, *caches, torch.tensor([3]), "fp8", **scales)
    finally:
        assert not any(cache.any() for cache in caches)


def attend_with(name, scale):
    fp8 = {"kv_cache_dtype": "fp8", **caches(torch.uint8)}
    vllm_ops.paged_attention_v2(**arguments(**fp8, **{name: scale}))


SCALES = {
    "zero": (0.0, ShapeError, "finite number more than 0"),
    "negative": (-0.5, ShapeError, "finite number more than 0"),
    "NaN": (float("nan"), ShapeError, "finite number more than 0"),
    "infinite": (torch.tensor([float("inf")]), ShapeError, "finite number more than 0"),
    "a tensor of zero": (torch.zeros(()), ShapeError, "finite number more than 0"),
    "float64": (torch.ones(1, dtype=torch.float64), DTypeError, "is float64, expected float32"),
    "elsewhere": (torch.ones(1, device="meta"), ShapeError, "is on meta"),
    "of a wrong size": (torch.ones(3), ShapeError, "scale"),
    "a list": ([1.0], DTypeError, "is of type list"),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("call", [write_flash, write_packed, attend_with])
def test_scales_are_one_float32_number_more_than_0(call, name, scale):
    value, error, message = SCALES[scale]
    with pytest.raises(error, match=message) as raised:
        call(name, value)
    assert isinstance(raised.value, PagetileError)
    assert name in str(raised.value)


@pytest.mark.parametrize("scale", [0.0, float("nan"), torch.tensor(-1.0), None])
def test_a_conversion_takes_a_scale_more_than_0(scale):
    codes = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises((ShapeError, DTypeError), match="scale is"):
        vllm_ops.convert_fp8(codes, torch.ones(4), scale)
    assert not codes.any()


@pytest.mark.parametrize("name", [None, ["fp8"], 8, "fp4"])
def test_an_unknown_cache_type_is_named_whatever_it_is(name):
    fp8 = {**caches(torch.uint8), "kv_cache_dtype": name}
    with pytest.raises(DTypeError, match="kv_cache_dtype is"):
        vllm_ops.paged_attention_v2(**arguments(**fp8))
    with pytest.raises(DTypeError, match="kv_dtype is"):
        vllm_ops.convert_fp8(torch.zeros(4, dtype=torch.uint8), torch.ones(4), 1.0, name)


def test_outputs_and_caches_that_share_memory_are_refused():
    memory = torch.zeros(3, HEADS, SIZE)
    with pytest.raises(ShapeError, match=r"out is written.* query"):
        vllm_ops.paged_attention_v2(**arguments(out=memory, query=memory))
    sums = torch.zeros(3, HEADS, 3)
    with pytest.raises(ShapeError, match=r"max_logits is written.* exp_sum"):
        vllm_ops.paged_attention_v2(**arguments(exp_sum=sums[..., :2], max_logits=sums[..., 1:]))
    with pytest.raises(ShapeError, match=r"out is written.*strides"):
        vllm_ops.paged_attention_v2(**arguments(out=memory[:1].expand(3, -1, -1)))
    key_cache, value_cache = caches().values()
    new, slots = torch.ones(1, KV_HEADS, SIZE), torch.tensor([3])
    inside = value_cache[:1].view(-1)[: new.numel()].view(new.shape)
    with pytest.raises(ShapeError, match=r"v_cache is written.* k:"):
        vllm_ops.reshape_and_cache(inside, new, key_cache, value_cache, slots, "auto", 1.0, 1.0)
    flat = value_cache.view(key_cache.shape)
    with pytest.raises(ShapeError, match=r"k_cache is written.* v_cache"):
        vllm_ops.reshape_and_cache(new, new, flat, value_cache, slots, "auto", 1.0, 1.0)
    assert not value_cache.any()
    blocks = torch.zeros(8, 16)
    with pytest.raises(ShapeError, match="in whole or in part"):
        vllm_ops.copy_blocks([blocks[:5]], [blocks[4:]], torch.tensor([[0, 1]]))


def test_blocks_are_swapped_within_one_memory_as_they_were():
    memory = torch.arange(6.0).repeat_interleave(4)
    src, dst = memory[:16], memory[8:]  # blocks 0 to 3, and 2 to 5
    vllm_ops.swap_blocks(src, dst, 16, torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3]]))
    assert memory.view(6, 4)[:, 0].tolist() == [0, 1, 0, 1, 2, 3]
