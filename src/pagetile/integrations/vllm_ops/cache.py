"""vLLM's cache operators by their own signatures: write, copy and convert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError, plural
from ...ops.copy_blocks import copy_blocks as copy_cache_blocks
from ...ops.eager import check_readable, refuse_observers
from ...ops.scales import LARGEST_CODE
from ...ops.write_kv import write_kv
from ...ops.write_kv.api import CacheSpans, check_caches_apart
from ...shapes import (
    Form,
    bind,
    check_apart,
    check_contiguous_rows,
    check_device,
    check_dtype,
    check_tensors,
    check_written_once,
    dtype_name,
    forms,
    is_debugging,
)
from ...tiles.types import FLOATS
from . import operator
from .attention import as_scale, as_scales, is_interpreting
from .checks import check_one_number, check_packed
from .layout import FLOAT8, as_float8

_CHUNK = 1 << 24
"""Elements that are converted at a time: a cache would not fit a second time in float32."""


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Write new tokens' keys and values to their slots of an x-packed cache, in place.

    In an 8-bit cache it writes ``x / scale``, rounded to the nearest code and clamped to the
    largest one; NaN stays NaN.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size]``, float32, float16 or bfloat16.
        value: The same for values.
        key_cache: ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``: of the key's type
            with ``"auto"``, otherwise uint8.
        value_cache: ``[num_blocks, num_kv_heads, head_size, block_size]``, of the same type.
        slot_mapping: int64 ``[n]`` with n up to ``num_tokens`` (keys may be padded):
            ``block * block_size + offset``, each slot at most once; negative writes nothing.
        kv_cache_dtype: ``"auto"``, ``"fp8"`` (e4m3), ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        k_scale: What keys are divided by, one number (float32 tensor or float). Not read with
            ``"auto"``.
        v_scale: The same for values.

    Raises:
        ShapeError: Sizes disagree, the cache is not x-packed, or (on a CPU, and on a GPU under
            ``PAGETILE_DEBUG=1``) a slot lies outside the cache. Nothing is written then.
        DTypeError: An argument has a wrong type.

    Examples:
        >>> key_cache, value_cache = torch.zeros(2, 1, 2, 8, 4), torch.zeros(2, 1, 8, 8)
        >>> key = torch.arange(8.0).view(1, 1, 8)
        >>> slots = torch.tensor([9])
        >>> reshape_and_cache(key, key, key_cache, value_cache, slots, "auto", 1.0, 1.0)
        >>> key_cache[1, 0, :, 1].tolist(), value_cache[1, 0, :, 1].tolist()[:3]
        ([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]], [0.0, 1.0, 2.0])
    """
    if torch.compiler.is_compiling():
        operator.write(
            key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale,
            is_packed=True,
        )  # fmt: skip
        return
    refuse_observers("reshape_and_cache")
    key_cache = as_float8("key_cache", key_cache, kv_cache_dtype)
    value_cache = as_float8("value_cache", value_cache, kv_cache_dtype)
    tensors = forms(
        key=key, value=value, key_cache=key_cache, value_cache=value_cache,
        slot_mapping=slot_mapping,
    )  # fmt: skip
    spans = _bind_packed(*tensors)
    check_readable(
        "reshape_and_cache", key=key, value=value, key_cache=key_cache, value_cache=value_cache
    )
    scales = as_scales(kv_cache_dtype, k_scale, v_scale, key)
    check_one_number(k_scale=scales[0], v_scale=scales[1])
    check_caches_apart(key, value, key_cache, value_cache, spans)
    key, value = key[: len(slot_mapping)], value[: len(slot_mapping)]
    if key.is_cpu or is_debugging():
        _check_slots(slot_mapping, key_cache.shape[0] * key_cache.shape[3])
    if key.is_cpu and not is_interpreting():
        _write_packed(key, value, key_cache, value_cache, slot_mapping, *scales)
    else:
        from . import triton_cache

        triton_cache.run(key, value, key_cache, value_cache, slot_mapping, *scales)


@functools.lru_cache(maxsize=1024)
def _bind_packed(
    key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any
) -> CacheSpans:
    """Check tensors by their forms; return spans of the first four."""
    key, value, key_cache, value_cache, slot_mapping = (
        Form(*fields) for fields in (key, value, key_cache, value_cache, slot_mapping)
    )
    check_packed(key_cache, value_cache)
    bind(
        value_cache=(value_cache, "num_blocks num_kv_heads head_size block_size"),
        key=(key, "num_tokens num_kv_heads head_size"),
        value=(value, "num_tokens num_kv_heads head_size"),
        slot_mapping=(slot_mapping, "num_slots"),
    )
    _check_new(key, value, key_cache, slot_mapping)
    check_device(
        "key", key.device, value=value, key_cache=key_cache, value_cache=value_cache,
        slot_mapping=slot_mapping,
    )  # fmt: skip
    check_written_once(key_cache=key_cache, value_cache=value_cache)
    return CacheSpans.of(key, value, key_cache, value_cache)


def _check_new(key: Form, value: Form, key_cache: Form, slot_mapping: Form) -> None:
    check_dtype("key", key, *FLOATS)
    check_dtype("value", value, key.dtype)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    if key_cache.dtype not in (key.dtype, *FLOAT8.values()):
        given, new = dtype_name(key_cache.dtype), dtype_name(key.dtype)
        raise DTypeError(
            f"key_cache is {given}, expected {new} as key is, with kv_cache_dtype='auto'; a cache "
            f"of uint8 takes one of {', '.join(FLOAT8)}"
        )
    if slot_mapping.shape[0] > key.shape[0]:
        raise ShapeError(
            f"slot_mapping has {plural(slot_mapping.shape[0], 'slot')} but key has "
            f"{plural(key.shape[0], 'token')}: every slot needs a token"
        )
    check_contiguous_rows(key=key, value=value)


def _check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    wrong = (slot_mapping >= num_slots).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ShapeError(
            f"slot_mapping[{at}] is {int(slot_mapping[at])}, expected a slot below num_blocks * "
            f"block_size = {num_slots}, or a negative number"
        )


def _write_packed(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """In torch, on a CPU."""
    written = slot_mapping >= 0
    slots, block_size, x = slot_mapping[written], *key_cache.shape[3:]
    blocks, offsets = slots // block_size, slots % block_size
    dtype = key_cache.dtype
    keys = _quantise(key[written], k_scale, dtype)
    key_cache[blocks, :, :, offsets] = keys.reshape(*keys.shape[:-1], keys.shape[-1] // x, x)
    value_cache[blocks, :, :, offsets] = _quantise(value[written], v_scale, dtype)


def _quantise(new: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return new
    # By a tensor: a GPU divides by a number as if it were multiplied by its reciprocal.
    codes = new.float() / scale.to(new.device).reshape(())
    return codes.clamp(-LARGEST_CODE[dtype], LARGEST_CODE[dtype]).to(dtype)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Write new tokens' keys and values into a cache that is not x-packed, in place.

    It is ``pagetile.write_kv`` with vLLM's arguments.

    Args:
        key: ``[num_tokens, num_kv_heads, head_size]``.
        value: The same for values.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides with a
            contiguous last dimension: of the key's type with ``"auto"``, otherwise uint8.
        value_cache: The same for values.
        slot_mapping: int64 ``[n]`` with n up to ``num_tokens``; negative writes nothing.
        kv_cache_dtype: ``"auto"``, ``"fp8"`` (e4m3), ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
        k_scale: What keys are divided by: one number, or float32 ``[num_kv_heads]``. Not read with
            ``"auto"``.
        v_scale: The same for values.

    Raises:
        ShapeError: Sizes disagree, or a slot lies outside the cache. Nothing is written then.
        DTypeError: An argument has a wrong type.
    """
    if torch.compiler.is_compiling():
        operator.write(
            key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale,
            is_packed=False,
        )  # fmt: skip
        return
    check_tensors(key=key, value=value, slot_mapping=slot_mapping)
    key_cache = as_float8("key_cache", key_cache, kv_cache_dtype)
    value_cache = as_float8("value_cache", value_cache, kv_cache_dtype)
    k_factor, v_factor = as_scales(kv_cache_dtype, k_scale, v_scale, key)
    count = slot_mapping.shape[0]
    new = key[:count], value[:count]
    write_kv(*new, key_cache, value_cache, slot_mapping, k_scale=k_factor, v_scale=v_factor)


def copy_blocks(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor
) -> None:
    """Copy whole blocks inside every layer's caches, in place.

    All sources are as they were before the call. The mapping goes to the host first, as in vLLM: on
    a GPU that waits for it.

    Args:
        key_caches: One a layer, ``[num_blocks, …]``, any layout and type.
        value_caches: As many.
        block_mapping: int64 ``[n, 2]``: source block, destination block; no destination twice.

    Raises:
        ShapeError: There are not as many value caches as key caches, or a block lies outside a
            cache. Nothing is written then.
        DTypeError: ``block_mapping`` is not int64.
    """
    if len(key_caches) != len(value_caches):
        raise ShapeError(
            f"key_caches has {len(key_caches)} caches but value_caches has {len(value_caches)}: "
            "there is one of each a layer"
        )
    check_tensors(block_mapping=block_mapping)
    copy_cache_blocks([*key_caches, *value_caches], block_mapping.cpu())


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """Copy blocks from one cache to another: between GPU and host, or on one device.

    Args:
        src: A contiguous tensor, taken as blocks of ``block_size_in_bytes``.
        dst: The same, to be written.
        block_size_in_bytes: Of a block in both: ``cache.element_size() * cache.stride(0)``.
        block_mapping: int64 ``[n, 2]`` on the CPU: block of ``src``, block of ``dst``.

    Raises:
        ShapeError: A tensor is not contiguous or holds no whole number of blocks, or a block lies
            outside it. Nothing is written then.
        DTypeError: An argument has a wrong type.
    """
    check_tensors(src=src, dst=dst, block_mapping=block_mapping)
    if isinstance(block_size_in_bytes, bool) or not isinstance(block_size_in_bytes, int):
        raise DTypeError(
            f"block_size_in_bytes is of type {type(block_size_in_bytes).__name__}, expected an "
            "int: the arguments are src, dst, block_size_in_bytes, block_mapping"
        )
    blocks = tuple(
        _as_blocks(name, tensor, block_size_in_bytes)
        for name, tensor in (("src", src), ("dst", dst))
    )
    copy_cache_blocks([(blocks[0], blocks[1])], block_mapping)


def _as_blocks(name: str, tensor: Tensor, size: int) -> Tensor:
    """The bytes of a tensor, ``[num_blocks, size]``."""
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} has strides {list(tensor.stride())}, expected a contiguous tensor of blocks "
            "that follow each other"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if size < 1 or num_bytes % size:
        raise ShapeError(
            f"{name} has {plural(num_bytes, 'byte')}, expected a multiple of "
            f"block_size_in_bytes={size}"
        )
    return tensor.view(-1).view(torch.uint8).view(-1, size)


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Convert a cache to 8 bits or back: ``input / scale`` or ``input · scale``.

    Args:
        output: Of as many elements as ``input``, to be written in the order of memory whatever the
            shapes are: uint8 where ``input`` is float32, float16 or bfloat16, one of these where it
            is uint8. float8 stands for uint8.
        input: Any shape.
        scale: One number.
        kv_dtype: ``"fp8"`` (e4m3), ``"fp8_e4m3"`` or ``"fp8_e5m2"``.

    Raises:
        ShapeError: The numbers of elements or the devices differ, or a tensor is not contiguous.
        DTypeError: Not exactly one of the two is of 8 bits, or ``kv_dtype`` is unknown.

    Examples:
        >>> codes, back = torch.empty(2, dtype=torch.uint8), torch.empty(2)
        >>> convert_fp8(codes, torch.tensor([3.0, -1000.0]), 0.5)
        >>> convert_fp8(back, codes, 0.5)
        >>> back.tolist()  # the largest code is 448
        [3.0, -224.0]
    """
    if torch.compiler.is_compiling():
        operator.convert(output, input, scale, kv_dtype)
        return
    check_tensors(output=output, input=input)
    if not isinstance(kv_dtype, str) or kv_dtype not in FLOAT8:
        raise DTypeError(f"kv_dtype is {kv_dtype!r}, expected one of {', '.join(FLOAT8)}")
    if output.numel() != input.numel():
        raise ShapeError(
            f"output is {list(output.shape)} but input is {list(input.shape)}, expected as many "
            "elements"
        )
    check_device("input", input.device, output=output)
    for name, tensor in (("output", output), ("input", input)):
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{name} has strides {list(tensor.stride())}, expected a contiguous tensor"
            )
    is_decoding = output.dtype in FLOATS
    wide, wide_name = (output, "output") if is_decoding else (input, "input")
    codes, codes_name = (input, "input") if is_decoding else (output, "output")
    check_dtype(wide_name, wide, *FLOATS)
    codes = as_float8(codes_name, codes, kv_dtype).view(-1)
    wide = wide.view(-1)
    check_apart("output", output, input=input)
    factor = as_scale("scale", scale, input).reshape(())
    for start in range(0, wide.numel(), _CHUNK):
        piece = slice(start, start + _CHUNK)
        if is_decoding:
            wide[piece] = (codes[piece].float() * factor).to(wide.dtype)
        else:
            codes[piece] = _quantise(wide[piece], factor, codes.dtype)
