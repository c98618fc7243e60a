"""``write_kv``: contract, checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError, UnsupportedError
from ...shapes import (
    Form,
    bind,
    check_apart,
    check_contiguous_rows,
    check_device,
    check_dtype,
    check_tensors,
    check_written_once,
    form,
    given,
    is_debugging,
    span,
)
from ...tiles.types import ALL_FLOATS
from ..attention_checks import check_cache_layout
from ..dispatch import choose
from ..eager import check_readable, needs_operator
from ..scales import LARGEST_CODE, bind_scales, check_cache_dtype
from .operator import write

IMPLEMENTATIONS = ("triton", "cpu", "reference")


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Write each new token's key and value to its slot of the cache, in place.

    In an 8-bit cache it writes ``x / scale``, rounded to the nearest representable value (ties to
    even) and clamped to ±448 in float8_e4m3fn, ±57344 in float8_e5m2, ±127 in int8. A scale for
    each token and head is computed here: the largest ``|x|`` divided by that bound. NaN stays NaN,
    except in int8, where it becomes 0.

    Args:
        k: ``[num_tokens, num_kv_heads, head_size]``; rounded to the cache's type if that differs.
        v: ``[num_tokens, num_kv_heads, v_head_size]``.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides, last dimension
            contiguous. A float type; or float8_e4m3fn, float8_e5m2 or int8 with scales.
        v_cache: ``[num_blocks, block_size, num_kv_heads, v_head_size]``.
        slot_mapping: int64 ``[num_tokens]``: ``block * block_size + offset``, each slot at most
            once; -1 writes nothing.
        k_scale: float32, with an 8-bit ``k_cache`` and only then. One number for all, or
            ``[num_kv_heads]``: what to divide by, more than 0. ``[num_blocks, block_size,
            num_kv_heads]``: where the new tokens' scales are written, NaN for a head that
            holds NaN or infinity.
        v_scale: The same for ``v_cache``, of the same kind.
        impl: ``"auto"``, or one of ``"triton"``, ``"cpu"``, ``"reference"``.

    Raises:
        ShapeError: Sizes disagree, what is written shares memory, or a slot lies outside the
            cache (on a GPU checked under ``PAGETILE_DEBUG=1`` only, like a repeated slot on any
            device); nothing is written then.
        DTypeError: An argument has an element type that it does not take, or an 8-bit cache has
            no scales.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64).unbind(0)
        >>> k = v = torch.ones(3, 2, 64)
        >>> write_kv(k, v, k_cache, v_cache, torch.tensor([5, -1, 40]))
        >>> k_cache[..., 0, 0].nonzero().tolist()  # slots 5 and 40 of blocks of 16
        [[0, 5], [2, 8]]

        In 8 bits, with a scale for each token and head, which ``write_kv`` computes:

        >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, dtype=torch.int8).unbind(0)
        >>> k_scale, v_scale = torch.zeros(2, 4, 16, 2).unbind(0)
        >>> slot = torch.tensor([5])
        >>> write_kv(k[:1], v[:1], k_cache, v_cache, slot, k_scale=k_scale, v_scale=v_scale)
        >>> k_cache[0, 5, 0, 0], round(1 / k_scale[0, 5, 0].item())
        (tensor(127, dtype=torch.int8), 127)
    """
    operands = k, v, k_cache, v_cache, slot_mapping
    is_operator = needs_operator(k)
    if is_operator and torch.compiler.is_compiling():  # checks run when the operator is called
        write(*operands, k_scale, v_scale, impl)
        return
    if torch._C._are_functorch_transforms_active():
        check_readable("write_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    try:
        tensors = form(k), form(v), form(k_cache), form(v_cache), form(slot_mapping)
    except (AttributeError, UnsupportedError):  # checked only after a failure: faster
        check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
        raise
    module, spans = _dispatch(*tensors, impl)
    if k_cache is v_cache and k.data_ptr() != v.data_ptr():
        raise ShapeError(
            "k_cache and v_cache are the same tensor, so values would overwrite keys: pass two"
        )
    kind, scales = "none", [k_scale, v_scale]
    if k_scale is not None or v_scale is not None:
        check_tensors(**given(k_scale=k_scale, v_scale=v_scale))
    if spans.has_scales or k_scale is not None or v_scale is not None:
        kind, *scales = bind_scales(k_scale, v_scale, k_cache, v_cache)
    if is_operator:
        write(*operands, k_scale, v_scale, impl)
        return
    if slot_mapping.device.type == "cpu" or is_debugging():
        _check_slots(slot_mapping.cpu(), k_cache.shape[0] * k_cache.shape[1])
    check_caches_apart(k, v, k_cache, v_cache, spans, has_own_scales=kind == "token")
    try:
        module.run(*operands, *scales)
    except RuntimeError:
        check_readable("write_kv", k=k, v=v, k_cache=k_cache, v_cache=v_cache)
        raise


@functools.lru_cache(maxsize=1024)
def _dispatch(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, impl: str) -> Any:
    """Check tensors by their forms; return the implementation, and spans of the first four."""
    k, v, k_cache, v_cache, slot_mapping = (
        Form(*fields) for fields in (k, v, k_cache, v_cache, slot_mapping)
    )
    check_cache_layout(k_cache=k_cache, v_cache=v_cache)
    sizes = bind(
        k=(k, "num_tokens num_kv_heads head_size"),
        v=(v, "num_tokens num_kv_heads v_head_size"),
        k_cache=(k_cache, "num_blocks block_size num_kv_heads head_size"),
        v_cache=(v_cache, "num_blocks block_size num_kv_heads v_head_size"),
        slot_mapping=(slot_mapping, "num_tokens"),
    )
    for name in ("head_size", "v_head_size"):
        if sizes[name] % 8:
            raise ShapeError(f"{name} is {sizes[name]}, expected a multiple of 8")
    check_contiguous_rows(k_cache=k_cache, v_cache=v_cache)
    check_written_once(k_cache=k_cache, v_cache=v_cache)
    check_dtype("k", k, *ALL_FLOATS)
    check_dtype("v", v, k.dtype)
    check_cache_dtype("k_cache", k_cache)
    check_dtype("v_cache", v_cache, k_cache.dtype)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_device("k", k.device, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    types = (k.dtype, k_cache.dtype)
    module = choose(__package__, IMPLEMENTATIONS, types, DeviceInfo.of(k.device), impl)
    return module, CacheSpans.of(k, v, k_cache, v_cache)


class CacheSpans(NamedTuple):
    """Bytes from the first to the last element of tensors of some forms."""

    k: int
    v: int
    k_cache: int
    v_cache: int
    has_scales: bool
    known: set[int]
    """Distances between two caches of these forms that have no element in common."""

    @staticmethod
    def of(k: Form, v: Form, k_cache: Form, v_cache: Form) -> CacheSpans:
        """Describe the tensors of a call."""
        has_scales = k_cache.dtype in LARGEST_CODE
        return CacheSpans(span(k), span(v), span(k_cache), span(v_cache), has_scales, set())


def check_caches_apart(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spans: CacheSpans,
    *,
    has_own_scales: bool = False,
) -> None:
    """Raise ShapeError if a cache shares memory with the other one or with what is written to it.

    One memory for both is fine where keys and values are one, too: values may be the first columns
    of the keys, unless each has scales of its own that are computed here.
    """
    k_span, v_span, k_cache_span, v_cache_span, _, known = spans
    new_k, new_v, to_k, to_v = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
    k_end, v_end = to_k + k_cache_span, to_v + v_cache_span
    if to_v < k_end and to_k < v_end and to_v - to_k not in known:
        is_one = to_k == to_v and k_cache.stride() == v_cache.stride() and not has_own_scales
        if not (is_one and new_k == new_v and k.stride() == v.stride()):
            check_apart("k_cache", k_cache, v_cache=v_cache)
            known.add(to_v - to_k)
    if (new_k < k_end and to_k < new_k + k_span) or (new_v < k_end and to_k < new_v + v_span):
        check_apart("k_cache", k_cache, k=k, v=v)
    if (new_k < v_end and to_v < new_k + k_span) or (new_v < v_end and to_v < new_v + v_span):
        check_apart("v_cache", v_cache, k=k, v=v)


def _check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    slots = slot_mapping.numpy()
    if len(slots) and (slots.max() >= num_slots or slots.min() < -1):
        at = int(((slots >= num_slots) | (slots < -1)).argmax())
        raise ShapeError(
            f"slot_mapping[{at}] is {slots[at]}, expected -1 or a slot below num_blocks * "
            f"block_size = {num_slots}"
        )
    if is_debugging():
        used = np.sort(slots[slots >= 0])
        twice = used[1:][used[1:] == used[:-1]]
        if len(twice):
            raise ShapeError(
                f"slot_mapping has slot {twice[0]} twice, expected each slot at most once: which "
                "of its tokens is kept would be left to chance"
            )
