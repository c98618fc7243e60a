"""``paged_attention_v1`` and ``paged_attention_v2`` of vLLM, by their own signatures."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError, UnsupportedError
from ...ops.eager import check_readable, refuse_observers
from ...shapes import check_device, check_dtype, form, forms, is_debugging
from . import operator
from .checks import PARTITION_SIZE, BlockSparse, bind_attention, check_outputs, check_values
from .layout import as_float8


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of one new token a sequence over an x-packed cache; writes ``out``.

    The cache is read in place. Keys and values past a sequence's end, and table entries past its
    last block, may be anything. A sequence of length 0 gives 0. It can be captured in a CUDA graph
    and replayed with other lengths up to ``max_seq_len``.

    Args:
        out: ``[num_seqs, num_heads, head_size]``, of the query's type.
        query: ``[num_seqs, num_heads, head_size]``, float32, float16 or bfloat16.
        key_cache: ``[num_blocks, num_kv_heads, head_size / x, block_size, x]`` with
            ``x = 16 / element size``: of the query's type with ``"auto"``, otherwise uint8.
        value_cache: ``[num_blocks, num_kv_heads, head_size, block_size]``, of the same type.
        num_kv_heads: A divisor of ``num_heads``.
        scale: Multiplies q · k.
        block_tables: int32 ``[num_seqs, max_num_blocks_per_seq]``.
        seq_lens: int32 ``[num_seqs]``: keys of each sequence, the new token's included.
        block_size: Tokens of a block: a power of two from 8 to 256.
        max_seq_len: At least the longest sequence's length.
        alibi_slopes: float32 ``[num_heads]``; adds ``slope · (key position - last position)``.
        kv_cache_dtype: ``"auto"``, ``"fp8"`` (e4m3), ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        k_scale: What a stored key is multiplied by, one number (float32 tensor or float). Not read
            with ``"auto"``.
        v_scale: The same for values.
        tp_rank: Shifts the block-sparse pattern by that many GPUs' heads.
        blocksparse_local_blocks: Sparse blocks at a sequence's end that every head sees.
        blocksparse_vert_stride: Every n-th sparse block is visible, too; up to 1: all are.
        blocksparse_block_size: Tokens of a sparse block.
        blocksparse_head_sliding_step: By how much the pattern shifts from query head to query head,
            or, negative, from KV head to KV head.

    Raises:
        ShapeError: Sizes, strides or devices disagree; on a CPU (on a GPU under
            ``PAGETILE_DEBUG=1``) also a length or block out of range. Nothing is written then.
        DTypeError: An argument has a wrong type.

    Examples:
        >>> key_cache, value_cache = torch.randn(9, 2, 16, 16, 4), torch.randn(9, 2, 64, 16)
        >>> query = torch.randn(3, 8, 64)
        >>> out, tables = torch.empty_like(query), torch.arange(9, dtype=torch.int32).view(3, 3)
        >>> lengths = torch.tensor([40, 1, 16], dtype=torch.int32)
        >>> paged_attention_v1(
        ...     out, query, key_cache, value_cache, 2, 0.125, tables, lengths, 16, 48, None,
        ...     "auto", 1.0, 1.0,
        ... )
        >>> torch.allclose(out[1, 0], value_cache[3, 0, :, 0])  # one key: its value
        True
    """
    attend(
        (out,), query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
        blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip


def paged_attention_v2(  # noqa: D417 (the others are above)
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """``paged_attention_v1`` by partitions of 512 keys, each of which is written out as well.

    The result is merged from float32 states, not from ``tmp_out``. Partitions past a sequence's end
    are not written.

    Args:
        out: As for ``paged_attention_v1``.
        exp_sum: float32 ``[num_seqs, num_heads, max_num_partitions]``, to be written: each
            partition's sum of ``exp(logit - max_logit)``. ``max_num_partitions`` is at least
            ``max_seq_len / 512``, rounded up.
        max_logits: The same of largest logits; -inf where a partition has no visible key.
        tmp_out: ``[num_seqs, num_heads, max_num_partitions, head_size]`` of the query's type: each
            partition's attention.
        query: This and all others as for ``paged_attention_v1``.

    Raises:
        ShapeError: As ``paged_attention_v1``, or there are too few partitions.
        DTypeError: As ``paged_attention_v1``.
    """
    attend(
        (out, exp_sum, max_logits, tmp_out), query, key_cache, value_cache, num_kv_heads, scale,
        block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
        blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip


def attend(
    outputs: tuple[Tensor, ...],
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    *sparsity: int,
) -> None:
    """Check a call, and run it where its query is; ``outputs``: its own, and partitions' if any."""
    if torch.compiler.is_compiling():
        operator.attend(
            outputs, query, key_cache, value_cache, num_kv_heads, scale, block_tables,
            seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
            *sparsity,
        )  # fmt: skip
        return
    refuse_observers("paged_attention")
    out, partitions, sparse = outputs[0], outputs[1:] or None, BlockSparse(*sparsity)
    key_cache = as_float8("key_cache", key_cache, kv_cache_dtype)
    value_cache = as_float8("value_cache", value_cache, kv_cache_dtype)
    scales = as_scales(kv_cache_dtype, k_scale, v_scale, query)
    tensors = forms(
        out=out, query=query, key_cache=key_cache, value_cache=value_cache,
        block_tables=block_tables, seq_lens=seq_lens,
    )  # fmt: skip
    optional = (alibi_slopes, *scales, *(partitions or (None, None, None)))
    problem = bind_attention(
        tensors, tuple(None if x is None else form(x) for x in optional), num_kv_heads, block_size
    )
    _check_numbers(sparse, max_seq_len, partitions)
    check_values(problem, block_tables, seq_lens, max_seq_len)
    check_outputs(problem, outputs, query=query, key_cache=key_cache, value_cache=value_cache)
    if not problem.num_seqs:
        return
    run = _find_implementation(query.device, problem.kv_dtype)
    try:
        run(
            problem, out, query, key_cache, value_cache, float(scale), block_tables, seq_lens,
            max_seq_len, alibi_slopes, *scales, sparse, partitions,
        )  # fmt: skip
    except RuntimeError:
        check_readable("paged_attention", query=query, k=key_cache, v=value_cache, out=out)
        raise


def as_scales(
    kv_cache_dtype: str, k_scale: Tensor | float, v_scale: Tensor | float, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales as kernels read them, float32 on ``like``'s device; none with "auto"."""
    if kv_cache_dtype == "auto":
        return None, None
    return as_scale("k_scale", k_scale, like), as_scale("v_scale", v_scale, like)


def as_scale(name: str, scale: Tensor | float, like: Tensor) -> Tensor:
    """Return a scale as float32 on ``like``'s device.

    Raises:
        DTypeError: It is neither a float32 tensor nor a number.
        ShapeError: It is on another device, or (where its value is known without waiting for a
            GPU, and under ``PAGETILE_DEBUG=1``) it is not finite and more than 0.
    """
    if isinstance(scale, Tensor):
        check_dtype(name, scale, torch.float32)
        check_device("the tensors", like.device, **{name: scale})
        if not (scale.is_cpu or is_debugging()):
            return scale
        values = scale.flatten().tolist()
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool):
        values = [float(scale)]
        scale = torch.full((1,), values[0], dtype=torch.float32, device=like.device)
    else:
        raise DTypeError(
            f"{name} is of type {type(scale).__name__}, expected a float32 tensor or a float"
        )
    if wrong := [value for value in values if not 0 < value < math.inf]:
        raise ShapeError(
            f"{name} is {wrong[0]}, expected a finite number more than 0: keys and values are "
            "divided by it before they are rounded"
        )
    return scale


def _check_numbers(sparse: BlockSparse, max_seq_len: int, partitions: Any) -> None:
    if sparse.is_on and sparse.block_size < 1:
        raise ShapeError(
            f"blocksparse_block_size is {sparse.block_size}, expected the tokens of a sparse block"
        )
    if max_seq_len < 0:
        raise ShapeError(f"max_seq_len is {max_seq_len}, expected the longest sequence's length")
    if partitions is not None:
        given, wanted = partitions[0].shape[2], -(-max_seq_len // PARTITION_SIZE)
        if given < wanted:
            raise ShapeError(
                f"exp_sum has max_num_partitions={given}, expected at least {wanted}: "
                f"max_seq_len={max_seq_len} in partitions of {PARTITION_SIZE}"
            )


def _find_implementation(device: torch.device, kv_dtype: torch.dtype) -> Any:
    """The function that runs calls on a device: Triton on GPUs, Numba on CPUs."""
    if device.type == "cpu" and not is_interpreting():
        from .cpu import run

        return run
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"query is on {device.type}: CUDA GPUs and CPUs run")
    from . import triton_launch

    triton_launch.refuse_device(device, kv_dtype)
    return triton_launch.run


def is_interpreting() -> bool:
    """Whether Triton's kernels run on a CPU in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"
