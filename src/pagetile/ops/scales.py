"""Scales of 8-bit caches: an element is its stored 8-bit value times a scale.

There is one scale for a cache, for each KV head, or for each token and KV head. All elements of a
row have the same scale, so kernels multiply scores and weights by it, not elements::

    s[n] = (q · k[n]) * k_scale[n]          out = Σ_n (p[n] * v_scale[n]) v[n]
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..errors import DTypeError, ShapeError
from ..shapes import (
    Form,
    bind,
    check_apart,
    check_device,
    check_dtype,
    check_written_once,
    dtype_name,
    form,
    span,
)
from ..tiles.types import ALL_FLOATS

LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The element types of 8-bit caches, and the largest value that is written in each.

int8 uses ±127 only, so that the range is symmetric and the scale is amax / 127.
"""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The scale of a token whose elements are all 0: 0 / 0 would be NaN."""

_TOKEN = "num_blocks block_size num_kv_heads"


def check_cache_dtype(name: str, cache: Tensor | Form) -> None:
    """Raise DTypeError unless ``cache`` has an element type that caches may have."""
    if cache.dtype == torch.uint8:
        raise DTypeError(
            f"{name} is uint8, expected a floating type or int8. Bytes of an 8-bit float cache, "
            f"as vLLM keeps them, are read as {name}.view(torch.float8_e4m3fn) (not .to, which "
            "converts numbers)"
        )
    check_dtype(name, cache, *ALL_FLOATS, *LARGEST_CODE)


def bind_scales(
    k_scale: Tensor | None, v_scale: Tensor | None, k_cache: Tensor, v_cache: Tensor
) -> tuple[str, Tensor | None, Tensor | None]:
    """Check the scales of a pair of caches that are written, whose shapes agree already.

    Returns:
        The kind of scale, and both scales in its shape: ``"none"``; ``"head"``,
        ``[num_kv_heads]``, to which a scale of one number is expanded (stride 0); or
        ``"token"``, ``[num_blocks, block_size, num_kv_heads]``.

    Raises:
        ShapeError: A scale has another shape, is on another device, or is not like the other; or
            scales of tokens, which are written, share memory.
        DTypeError: A scale is not float32, is missing, or comes with a cache that has none.

    Examples:
        >>> cache = torch.zeros(4, 16, 2, 64, dtype=torch.int8)
        >>> kind, k_scale, _ = bind_scales(torch.tensor(0.5), torch.tensor(0.1), cache, cache)
        >>> kind, k_scale.tolist()
        ('head', [0.5, 0.5])
    """
    if k_scale is None and v_scale is None and k_cache.dtype not in LARGEST_CODE:
        return "none", None, None
    forms = (None if t is None else form(t) for t in (k_scale, v_scale, k_cache, v_cache))
    kind, k_span, v_span = _find_kind_of_forms(*forms)
    if kind == "token" and k_scale is not None and v_scale is not None:
        if -k_span < k_scale.data_ptr() - v_scale.data_ptr() < v_span:
            check_apart("k_scale", k_scale, v_scale=v_scale)
    elif kind == "head":
        heads = k_cache.shape[2]
        k_scale, v_scale = (
            scale.reshape(()).expand(heads) if scale is not None and scale.numel() == 1 else scale
            for scale in (k_scale, v_scale)
        )
    return kind, k_scale, v_scale


@functools.lru_cache(maxsize=1024)
def _find_kind_of_forms(*forms: Any) -> tuple[str, int, int]:
    """Return the kind of scale, and the bytes that each spans if it is of the kind "token"."""
    named: list[Any] = [None if form is None else Form(*form) for form in forms]
    kind = find_kind(*named)
    if kind != "token":
        return kind, 0, 0
    check_written_once(k_scale=named[0], v_scale=named[1])
    return kind, span(named[0]), span(named[1])


def find_kind(k_scale: Form | None, v_scale: Form | None, k_cache: Form, v_cache: Form) -> str:
    """Return the kind of scale, checked as by ``bind_scales``, from the tensors' forms."""
    k_kind = _find_kind("k_scale", k_scale, "k_cache", k_cache)
    v_kind = _find_kind("v_scale", v_scale, "v_cache", v_cache)
    if k_kind != v_kind:
        raise ShapeError(
            f"k_scale is one number a {k_kind} but v_scale is one a {v_kind}: give both alike"
        )
    return k_kind


def _find_kind(name: str, scale: Form | None, cache_name: str, cache: Form) -> str:
    given = dtype_name(cache.dtype)
    if cache.dtype not in LARGEST_CODE:
        if scale is None:
            return "none"
        raise DTypeError(
            f"{name} was given but {cache_name} is {given}: only an 8-bit cache has scales"
        )
    if scale is None:
        raise DTypeError(
            f"{cache_name} is {given} but {name} is None: give a float32 tensor, one number for "
            f"all, [num_kv_heads] or [{_TOKEN.replace(' ', ', ')}]"
        )
    check_dtype(name, scale, torch.float32)
    check_device(cache_name, cache.device, **{name: scale})
    if scale.shape in ((), (1,)):
        return "head"
    kind, pattern = ("token", _TOKEN) if len(scale.shape) == 3 else ("head", "num_kv_heads")
    bind(**{cache_name: (cache, f"{_TOKEN} size"), name: (scale, pattern)})
    return kind
