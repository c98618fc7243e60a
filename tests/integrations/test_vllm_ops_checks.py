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
        r"query has strides .* expected a contiguous last dimension",
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
            r"key and value have strides",
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
