"""The argument contract of attention, always checked before any work."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from ...errors import ShapeError, plural
from ...shapes import bind, check_contiguous_rows, check_device, check_dtype, is_debugging
from ...tiles.types import ALL_FLOATS
from ..attention_checks import check_flag, check_heads, check_options, is_size
from .block_mask import BlockMask
from .problem import Lengths, Options, Problem


def check(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options) -> Problem:
    """Raise ShapeError or DTypeError naming the argument at fault, or return the problem."""
    is_ragged = lengths.cu_seqlens_q is not None
    sizes = (_bind_ragged if is_ragged else _bind_dense)(q, k, v, lengths, options)
    check_dtype("q", q, *ALL_FLOATS)
    check_dtype("k", k, q.dtype)
    check_dtype("v", v, q.dtype)
    biases = {"alibi_slopes": options.alibi_slopes, "sinks": options.sinks}
    for name, bias in biases.items():
        if bias is not None:
            check_dtype(name, bias, *ALL_FLOATS)
    block_mask = options.block_mask
    mask = None if block_mask is None else block_mask.mask
    check_device("q", q.device, k=k, v=v, block_mask=mask, **biases)
    check_contiguous_rows(q=q, k=k, v=v)
    widths = {"head_size": sizes["head_size"], "v_head_size": sizes["v_head_size"]}
    try:
        check_heads(sizes["num_heads"], sizes["num_kv_heads"], "k", **widths)
    except ShapeError as error:
        if is_ragged or not _divides_as_bhsd(q, k):
            raise
        raise ShapeError(
            f"{error}. q {list(q.shape)} looks like [batch, heads, sequence, size]: if it is, "
            'pass layout="BHSD"'
        ) from None
    check_flag("causal", options.causal)
    check_options(options.sliding_window, options.logits_soft_cap)
    return Problem(
        num_seqs=sizes["num_seqs"],
        num_tokens=q.shape[:-2].numel(),
        max_query_len=sizes["max_query_len"],
        max_seq_len=sizes["max_seq_len"],
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_size=sizes["head_size"],
        v_head_size=sizes["v_head_size"],
        dtype=q.dtype,
        is_ragged=is_ragged,
        has_alibi=options.alibi_slopes is not None,
        logits_soft_cap=options.logits_soft_cap,
        block_q=0 if block_mask is None else block_mask.block_q,
        block_k=0 if block_mask is None else block_mask.block_k,
        num_masks=0 if block_mask is None else math.prod(block_mask.mask.shape[:2]),
    )


def _divides_as_bhsd(q: Tensor, k: Tensor) -> bool:
    """Return whether heads would be whole groups if dimensions 1 and 2 were swapped."""
    heads, kv_heads = q.shape[1], k.shape[1]
    is_divisible = heads > 0 and kv_heads > 0 and heads % kv_heads == 0
    return is_divisible and bool(q.shape[2] % max(1, k.shape[2]))


def _bind_dense(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> dict[str, int]:
    if q.dim() == 3:
        raise ShapeError(
            f"q has 3 dimensions {list(q.shape)} but cu_seqlens_q is None: a ragged batch needs "
            "cu_seqlens_q, a dense one has 4 dimensions: [batch query_len num_heads head_size]"
        )
    for name in ("cu_seqlens_k", "max_query_len", "max_seq_len"):
        if getattr(lengths, name) is not None:
            raise ShapeError(f"{name} is given but cu_seqlens_q is None: it is for ragged batches")
    sizes = bind(
        q=(q, "batch query_len num_heads head_size"),
        k=(k, "batch seq_len num_kv_heads head_size"),
        v=(v, "batch seq_len num_kv_heads v_head_size"),
        alibi_slopes=(options.alibi_slopes, "num_heads"),
        sinks=(options.sinks, "num_heads"),
    )
    if options.block_mask is not None:
        _check_block_mask(options.block_mask, sizes)
    renamed = {"batch": "num_seqs", "query_len": "max_query_len", "seq_len": "max_seq_len"}
    return {renamed.get(name, name): size for name, size in sizes.items()}


def _check_block_mask(block_mask: BlockMask, sizes: dict[str, int]) -> None:
    """Raise ShapeError unless the mask has a block for every query and key, and no others."""
    expected = [
        ("batch", (1, sizes["batch"])),
        ("num_heads", (1, sizes["num_heads"])),
        ("q_blocks", (-(-sizes["query_len"] // block_mask.block_q),)),
        ("k_blocks", (-(-sizes["seq_len"] // block_mask.block_k),)),
    ]
    for (name, wanted), size in zip(expected, block_mask.mask.shape, strict=True):
        if size not in wanted:
            raise ShapeError(
                f"block_mask has {name}={size}, expected {' or '.join(map(str, wanted))}: "
                f"query_len is {sizes['query_len']} with block_q={block_mask.block_q}, seq_len is "
                f"{sizes['seq_len']} with block_k={block_mask.block_k}"
            )


def _bind_ragged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, options: Options
) -> dict[str, int]:
    if options.block_mask is not None:
        raise ShapeError("block_mask is given and cu_seqlens_q too: it is for dense batches")
    sizes = bind(
        q=(q, "num_tokens num_heads head_size"),
        k=(k, "num_keys num_kv_heads head_size"),
        v=(v, "num_keys num_kv_heads v_head_size"),
        cu_seqlens_q=(lengths.cu_seqlens_q, "length"),
        cu_seqlens_k=(lengths.cu_seqlens_k, "length"),
        alibi_slopes=(options.alibi_slopes, "num_heads"),
        sinks=(options.sinks, "num_heads"),
    )
    if sizes["length"] == 0:
        raise ShapeError(
            "cu_seqlens_q is empty, expected num_seqs + 1 entries, the first of them 0"
        )
    tensors = {"cu_seqlens_q": lengths.cu_seqlens_q, "cu_seqlens_k": lengths.cu_seqlens_k}
    for name, starts in tensors.items():
        if starts is None:
            raise ShapeError(f"{name} is None, expected int32 [num_seqs + 1]: the batch is ragged")
        check_dtype(name, starts, torch.int32)
    check_device("q", q.device, **tensors)
    longest = {"max_query_len": lengths.max_query_len, "max_seq_len": lengths.max_seq_len}
    for (name, length), everything in zip(
        longest.items(), (sizes["num_tokens"], sizes["num_keys"]), strict=True
    ):
        if length is not None and not is_size(length):
            raise ShapeError(f"{name} is {length!r}, expected an integer of the host, 0 or more")
        sizes[name] = everything if length is None else min(length, everything)
    return {**sizes, "num_seqs": sizes["length"] - 1}


def check_starts(problem: Problem, q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """Raise ShapeError naming the first start that is out of bounds.

    Values are checked on a CPU, or under ``PAGETILE_DEBUG=1``.
    """
    if not problem.is_ragged or q.is_meta or (q.device.type != "cpu" and not is_debugging()):
        return
    _check_starts("cu_seqlens_q", lengths.cu_seqlens_q, "q", q, "max_query_len", problem)
    _check_starts("cu_seqlens_k", lengths.cu_seqlens_k, "k", k, "max_seq_len", problem)


def _check_starts(
    name: str, starts: Tensor | None, of: str, tensor: Tensor, limit: str, problem: Problem
) -> None:
    values: list[int] = [] if starts is None else starts.tolist()
    most = getattr(problem, limit)
    if values[0] != 0:
        raise ShapeError(f"{name}[0] is {values[0]}, expected 0")
    for i, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ShapeError(
                f"{name}[{i + 1}] is {end} but {name}[{i}] is {start}: no sequence ends before it "
                "starts"
            )
        if end - start > most:
            raise ShapeError(
                f"{limit} is {most} but sequence {i} has {end - start}: "
                f"{name}[{i}] is {start}, {name}[{i + 1}] is {end}"
            )
    if values[-1] != tensor.shape[0]:
        raise ShapeError(
            f"{name} ends with {values[-1]} but {of} has {plural(tensor.shape[0], 'row')}: the "
            "last sequence ends where they end"
        )
