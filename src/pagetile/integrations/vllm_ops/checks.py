"""Argument checks of the operators, made before any launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError, plural
from ...shapes import (
    Form,
    bind,
    check_apart,
    check_contiguous_rows,
    check_device,
    check_dtype,
    check_written_once,
    dtype_name,
    is_debugging,
    span,
)
from ...tiles.types import FLOATS
from .layout import bind_packed, packing

PARTITION_SIZE = 512
"""Keys of a partition of ``paged_attention_v2``."""

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
"""They divide a partition. vLLM's own kernels know the first three."""

LARGEST_HEAD = 256

OUTPUTS = ("out", "exp_sum", "max_logits", "tmp_out")


class BlockSparse(NamedTuple):
    """The block-sparse arguments; a ``vert_stride`` of 1 or less stands for dense attention."""

    tp_rank: int
    local_blocks: int
    vert_stride: int
    block_size: int
    head_sliding_step: int

    @property
    def is_on(self) -> bool:
        """Return whether any block is left out."""
        return self.vert_stride > 1


@dataclass(frozen=True)
class Problem:
    """Sizes and element types of a call."""

    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    num_blocks: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    """float8 for caches of uint8."""
    spans: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes from the first to the last element of tensors, by the names of the arguments."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kernel_sizes(self) -> tuple[int, int, int, torch.dtype, torch.dtype]:
        """The parameters that a GPU kernel is compiled for."""
        return self.group, self.head_size, self.block_size, self.q_dtype, self.kv_dtype

    @property
    def x(self) -> int:
        """Adjacent elements of a key: x."""
        return packing(self.kv_dtype)


def check_packed(key_cache: Form | Tensor, value_cache: Form | Tensor) -> None:
    """Raise ShapeError unless both caches have the shapes and strides of the x-packed layout."""
    if len(key_cache.shape) != 5:
        raise ShapeError(
            f"key_cache has {plural(len(key_cache.shape), 'dimension')} {list(key_cache.shape)}, "
            "expected the 5 of an x-packed cache [num_blocks, num_kv_heads, head_size/x, "
            "block_size, x]: convert it with pack_cache, or call pagetile.paged_attention, which "
            "reads [num_blocks, block_size, num_kv_heads, head_size]"
        )
    x = packing(key_cache.dtype)
    if key_cache.shape[4] != x:
        raise ShapeError(
            f"key_cache has x={key_cache.shape[4]} (its shape is {list(key_cache.shape)}), "
            f"expected 16 bytes of {dtype_name(key_cache.dtype)}, x={x}: "
            "[num_blocks, num_kv_heads, head_size/x, block_size, x]"
        )
    block_size = bind_packed(key_cache, value_cache)["block_size"]
    if block_size not in BLOCK_SIZES:
        raise ShapeError(
            f"key_cache has block_size={block_size}, expected one of "
            f"{', '.join(map(str, BLOCK_SIZES))}"
        )
    check_dtype("value_cache", value_cache, key_cache.dtype)
    inner = {"key_cache": (block_size * x, x, 1), "value_cache": (block_size, 1)}
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        strides = cache.strides if isinstance(cache, Form) else cache.stride()
        lies = zip(cache.shape[2:], strides[2:], inner[name], strict=True)
        if any(size > 1 and stride != wanted for size, stride, wanted in lies):
            raise ShapeError(
                f"{name} has strides {list(strides)}, expected a contiguous "
                f"{list(cache.shape[2:])} for each block and head: call .contiguous()"
            )


_REQUIRED = ("out", "query", "key_cache", "value_cache", "block_tables", "seq_lens")
_OPTIONAL = ("alibi_slopes", "k_scale", "v_scale", "exp_sum", "max_logits", "tmp_out")
_SUMS = "num_seqs num_heads max_num_partitions"
_PATTERNS = {
    "query": "num_seqs num_heads head_size",
    "out": "num_seqs num_heads head_size",
    "value_cache": "num_blocks num_kv_heads head_size block_size",
    "block_tables": "num_seqs max_num_blocks_per_seq",
    "seq_lens": "num_seqs",
    "alibi_slopes": "num_heads",
    "exp_sum": _SUMS,
    "max_logits": _SUMS,
    "tmp_out": f"{_SUMS} head_size",
}
_ROWS = ("out", "query", "block_tables", "exp_sum", "max_logits", "tmp_out")
"""Tensors whose last dimension is contiguous."""


@functools.lru_cache(maxsize=1024)
def bind_attention(
    forms: tuple[Any, ...], optional: tuple[Any, ...], num_kv_heads: int, block_size: int
) -> Problem:
    """Check the tensors of a call by their forms.

    Args:
        forms: Forms of the tensors in ``_REQUIRED``.
        optional: Forms of those in ``_OPTIONAL``, or None.
        num_kv_heads: The caller's argument.
        block_size: The caller's argument.

    Raises:
        ShapeError: Sizes, strides or devices disagree.
        DTypeError: An element type is wrong.
    """
    names = (*_REQUIRED, *_OPTIONAL)
    given = zip(names, (*forms, *optional), strict=True)
    tensors = {name: Form(*each) for name, each in given if each is not None}
    query, key_cache, value_cache = (tensors[name] for name in names[1:4])
    check_packed(key_cache, value_cache)
    sizes = bind(**{name: (tensors.get(name), words) for name, words in _PATTERNS.items()})
    for name, size in (("num_kv_heads", num_kv_heads), ("block_size", block_size)):
        if sizes[name] != size:
            raise ShapeError(
                f"{name} is {size}, but value_cache has {name}={sizes[name]} (its shape is "
                f"{list(value_cache.shape)})"
            )
    if sizes["num_heads"] % num_kv_heads:
        raise ShapeError(
            f"query has {sizes['num_heads']} heads, expected a multiple of num_kv_heads="
            f"{num_kv_heads}: every KV head serves equally many query heads"
        )
    if sizes["head_size"] % 8 or sizes["head_size"] > LARGEST_HEAD:
        raise ShapeError(
            f"query has head_size={sizes['head_size']}, expected a multiple of 8 up to "
            f"{LARGEST_HEAD}"
        )
    _check_types(tensors)
    check_one_number(k_scale=tensors.get("k_scale"), v_scale=tensors.get("v_scale"))
    check_contiguous_rows(**{name: tensors.get(name) for name in _ROWS})
    check_device("query", query.device, **tensors)
    check_written_once(**{name: tensors.get(name) for name in OUTPUTS})
    return Problem(
        sizes["num_seqs"], sizes["num_heads"], num_kv_heads, sizes["head_size"], block_size,
        sizes["num_blocks"], query.dtype, key_cache.dtype,
        {name: span(tensor) for name, tensor in tensors.items()},
    )  # fmt: skip


def check_one_number(**scales: Form | Tensor | None) -> None:
    """Raise ShapeError for a scale that has not one element."""
    for name, scale in scales.items():
        if scale is not None and scale.shape.numel() != 1:
            raise ShapeError(
                f"{name} has shape {list(scale.shape)}, expected one number for the whole cache"
            )


def check_outputs(problem: Problem, outputs: Sequence[Tensor], **others: Tensor) -> None:
    """Raise ShapeError if an output shares memory with another tensor of a call.

    Args:
        problem: The call's.
        outputs: The first of ``OUTPUTS``, or all of them.
        **others: What is read.
    """
    named = dict(zip(OUTPUTS, outputs, strict=False))
    while named:
        name, output = named.popitem()
        start = output.data_ptr()
        end = start + problem.spans[name]
        for other, tensor in (named | others).items():
            at = tensor.data_ptr()
            if at < end and start < at + problem.spans[other]:
                check_apart(name, output, **{other: tensor})


def _check_types(tensors: dict[str, Form]) -> None:
    query, key_cache = tensors["query"], tensors["key_cache"]
    check_dtype("query", query, *FLOATS)
    others = {"out": query.dtype, "tmp_out": query.dtype}
    others |= dict.fromkeys(("block_tables", "seq_lens"), torch.int32)
    others |= dict.fromkeys(_OPTIONAL[:-1], torch.float32)
    for name, dtype in others.items():
        if name in tensors:
            check_dtype(name, tensors[name], dtype)
    if key_cache.dtype.itemsize > 1 and key_cache.dtype != query.dtype:
        raise DTypeError(
            f"key_cache is {dtype_name(key_cache.dtype)} but query is {dtype_name(query.dtype)}: "
            "with kv_cache_dtype='auto' both have one type"
        )
    if key_cache.dtype in (torch.uint8, torch.int8):
        raise DTypeError(
            f"key_cache is {dtype_name(key_cache.dtype)}, but kv_cache_dtype is 'auto': pass "
            "'fp8', 'fp8_e4m3' or 'fp8_e5m2'"
        )


def check_values(
    problem: Problem, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int
) -> None:
    """Raise ShapeError for a length or a block out of range.

    It looks at the tensors' elements: on a CPU always, on a GPU only under ``PAGETILE_DEBUG=1``,
    since it waits for the GPU.
    """
    if block_tables.device.type != "cpu" and not is_debugging():
        return
    tables, lengths = block_tables.cpu(), seq_lens.cpu()
    most = min(max_seq_len, tables.shape[1] * problem.block_size)
    for seq, length in enumerate(lengths.tolist()):
        if not 0 <= length <= most:
            raise ShapeError(
                f"seq_lens[{seq}] is {length}, expected 0 to {most}: max_seq_len={max_seq_len}, "
                f"and block_tables has room for {plural(tables.shape[1], 'block')} of "
                f"{problem.block_size}"
            )
        blocks = tables[seq, : -(-length // problem.block_size)]
        wrong = ((blocks < 0) | (blocks >= problem.num_blocks)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise ShapeError(
                f"block_tables[{seq}, {at}] is {int(blocks[at])}, expected 0 to "
                f"{problem.num_blocks - 1}"
            )
