"""Head norms, rotary embedding and cache write of a merged projection in one launch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import needs_gradient
from ...shapes import Form, bind, check_device, check_dtype, form
from ..rows import RowsProblem
from .problem import Heads, Problem

IMPLEMENTATIONS = ("cpu", "triton", "reference")


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the queries for attention; write keys and values to their slots.

    Equals ``rms_norm`` of the heads of queries and keys, ``rotate``, and ``write_kv``.

    Args:
        qkv: ``[num_tokens, heads.width]`` float32, float16 or bfloat16: a token's queries, keys
            and values, head after head.
        cos: ``[1, num_tokens, n]`` as for ``rotate``; ``None`` (with ``sin``): no rotation.
        sin: The same.
        heads: How a row is divided.
        k_cache: As for ``write_kv``, and so the three below.
        v_cache: ``[num_blocks, block_size, num_kv_heads, v_head_size]``.
        slot_mapping: int64 ``[num_tokens]``; -1 writes nothing.
        k_scale: Scales of an 8-bit cache.
        v_scale: The same.
        impl: ``auto``, ``cpu``, ``triton`` or ``reference``.

    Returns:
        ``[num_tokens, num_heads, head_size]``.

    Raises:
        ShapeError: Sizes disagree.
        DTypeError: The types differ.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.
    """
    norms = [norm for norm in (heads.q_norm, heads.k_norm) if norm is not None]
    is_learned = needs_gradient(qkv, *(norm.weight for norm in norms))
    angles = None if cos is None or sin is None else (form(cos), form(sin))
    sizes = heads.num_heads, heads.num_kv_heads, heads.head_size, heads.v_head_size
    module = _dispatch(
        form(qkv), angles, sizes, heads.is_shared, tuple(form(norm.weight) for norm in norms),
        form(k_cache), form(v_cache), form(slot_mapping), is_learned, impl,
    )  # fmt: skip
    q: Tensor = module.run(qkv, cos, sin, heads, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


@functools.lru_cache(maxsize=1024)
def _dispatch(
    qkv: Any, angles: Any, sizes: Any, is_shared: bool, weights: Any, k_cache: Any, v_cache: Any,
    slot_mapping: Any, is_learned: bool, impl: str,
) -> Any:  # fmt: skip
    """Check tensors of these forms, and choose the module that runs."""
    num_heads, num_kv_heads, head_size, v_head_size = sizes
    qkv, k_cache, v_cache, slots = (Form(*f) for f in (qkv, k_cache, v_cache, slot_mapping))
    width = Heads(*sizes).width
    if len(qkv.shape) != 2 or qkv.shape[1] != width:
        raise ShapeError(f"qkv is {list(qkv.shape)}, expected [num_tokens, {width}]")
    bind(
        qkv=(qkv, f"num_tokens {width}"),
        k_cache=(k_cache, f"num_blocks block_size {num_kv_heads} {head_size}"),
        v_cache=(v_cache, f"num_blocks block_size {num_kv_heads} {v_head_size}"),
        slot_mapping=(slots, "num_tokens"),
    )
    check_dtype("slot_mapping", slots, torch.int64)
    check_device("qkv", qkv.device, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots)
    is_regular = qkv.strides[1] == 1 and slots.strides[0] == 1 and v_cache.dtype == k_cache.dtype
    is_regular &= k_cache.strides[3] == 1 and v_cache.strides[3] == 1
    if angles is not None:
        cos, sin = (Form(*fields) for fields in angles)
        found = bind(qkv=(qkv, f"num_tokens {width}"), cos=(cos, "1 num_tokens n"),
                     sin=(sin, "1 num_tokens n"))  # fmt: skip
        rotated = (2 if is_shared else 1) * found["n"]
        if rotated % 2 or not 0 < rotated <= head_size:
            raise ShapeError(f"cos turns {rotated} numbers of a head of {head_size}")
        for name, angle in (("cos", cos), ("sin", sin)):
            check_dtype(name, angle, qkv.dtype)
            is_regular &= angle.strides[2] == 1
    for weight in weights:
        if tuple(weight[0]) != (head_size,):
            raise ShapeError(f"the weight of a norm is {list(weight[0])}, expected [{head_size}]")
        is_regular &= weight[1] == (1,)
    rows = RowsProblem(
        size=max(head_size, v_head_size),
        num_rows=qkv.shape[0] * (num_heads + 2 * num_kv_heads),
        dtype=qkv.dtype,
        is_regular=is_regular,
        needs_gradient=is_learned,
        norm_dtypes=tuple(weight[2] for weight in weights),
    )
    problem = Problem(rows, k_cache.dtype)
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(qkv.device), impl)
