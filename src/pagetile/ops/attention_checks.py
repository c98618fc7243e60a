"""Checks that all attention operations share, with the same error messages."""

from __future__ import annotations

import math
import sys
from numbers import Integral
from typing import Any

import torch
from torch import SymInt, Tensor

from ..errors import DTypeError, ShapeError, UnsupportedError
from ..shapes import Form


def check_heads(num_heads: int, num_kv_heads: int, keys: str, **sizes: int) -> None:
    """Raise ShapeError for heads that do not divide, or a head size that no kernel takes."""
    for name, size in sizes.items():
        if size % 8 or not 8 <= size <= 512:
            raise ShapeError(f"{name} is {size}, expected a multiple of 8 from 8 to 512")
    if num_heads == 0 or num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ShapeError(
            f"q has num_heads={num_heads}, expected a multiple of {keys}'s "
            f"num_kv_heads={num_kv_heads}"
        )


def check_cache_layout(**caches: Form) -> None:
    """Raise ShapeError for a cache in a layout of another library, and say how to convert it.

    Args:
        **caches: Forms of ``k_cache`` and ``v_cache``. Other mistakes are left to ``bind``.
    """
    for name, cache in caches.items():
        shape = list(cache.shape)
        if len(shape) != 5:
            continue
        if 2 in shape[:2]:
            hint = (
                "keys and values in one tensor are two caches here: pass "
                f"k_cache, v_cache = kv_cache.unbind({shape.index(2)})"
            )
        else:
            hint = (
                "pagetile.integrations.vllm_ops has the operators for vLLM's packed caches "
                "[num_blocks, num_kv_heads, head_size / x, block_size, x]"
            )
        raise ShapeError(
            f"{name} has 5 dimensions {shape}, expected 4: [num_blocks block_size num_kv_heads "
            f"head_size]; {hint}"
        )


def check_options(sliding_window: int | None, logits_soft_cap: float | None) -> None:
    """Raise ShapeError for a window or a cap that is out of range."""
    if sliding_window is not None and not is_size(sliding_window, least=1, bits=63):
        raise ShapeError(
            f"sliding_window is {sliding_window!r}, expected at least 1 (an integer of 64 bits), "
            "or None for all keys"
        )
    if logits_soft_cap is None:
        return
    if not 0 < as_number("logits_soft_cap", logits_soft_cap) < math.inf:
        raise ShapeError(
            f"logits_soft_cap is {logits_soft_cap}, expected a finite number more than 0, "
            "or None for no cap"
        )


def check_flag(name: str, value: Any) -> None:
    """Raise DTypeError unless ``value`` is True or False; other values have a truth value, too."""
    if not isinstance(value, bool):
        raise DTypeError(f"{name} is {value!r}, expected True or False")


def as_number(name: str, value: Any) -> float:
    """Return ``value`` as a float; it may be a symbol or a tensor of one element.

    Raises:
        DTypeError: It is not a number.
    """
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise DTypeError(f"{name} is {given}, expected a number")


def settle_scale(softmax_scale: Any, default: float) -> float:
    """Return the scale as a float, ``default`` for None.

    Raises:
        UnsupportedError: It requires a gradient: none is computed.
        DTypeError: It is not a number.
        ShapeError: It is not finite.
    """
    is_tensor = isinstance(softmax_scale, Tensor)
    if is_tensor and softmax_scale.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "softmax_scale requires a gradient, which is not computed: give "
            "q * softmax_scale for q, and 1.0 for softmax_scale"
        )
    scale = as_number("softmax_scale", default if softmax_scale is None else softmax_scale)
    if not abs(scale) <= sys.float_info.max:  # unlike isfinite(), a compiler guards this
        raise ShapeError(f"softmax_scale is {scale}, expected a finite number, or None")
    return scale


def default_scale(q: Tensor) -> float:
    """Return ``head_size ** -0.5``, or 1.0 for tensors that a later check will refuse."""
    try:
        return float(q.size(-1) ** -0.5)
    except (IndexError, ZeroDivisionError):
        return 1.0


def is_size(value: Any, *, least: int = 0, bits: int = 31) -> bool:
    """Return whether a value is an integer, not a tensor, in ``[least, 2 ** bits)``."""
    is_whole = isinstance(value, (Integral, SymInt)) and not isinstance(value, bool)
    return is_whole and bool(least <= value < 1 << bits)


def whole_window(sliding_window: Any) -> Any:
    """Return a window as an int of at most 2⁴⁰, so that differences fit in 64 bits."""
    if sliding_window is None:
        return None
    check_options(sliding_window, None)
    is_known = isinstance(sliding_window, Integral)
    return min(int(sliding_window), 1 << 40) if is_known else sliding_window
