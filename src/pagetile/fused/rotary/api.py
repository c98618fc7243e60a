"""Rotary position embedding as Transformers' models apply it, in one launch instead of ten."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import has_dispatch_observers, needs_gradient
from ...shapes import Form, bind, check_device, check_dtype, forms
from ..rows import RowsProblem

IMPLEMENTATIONS = ("triton", "reference")


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_shared: bool = False, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions' angles, in float32, rounded once.

    ::

        [first | second | rest]  ->  [first cos - second sin | second cos + first sin | rest]

    Args:
        q: ``[1, num_heads, num_tokens, head_size]``, by any strides: most often a view of a
            projection, which lies token by token.
        k: ``[1, num_kv_heads, num_tokens, head_size]``.
        cos: ``[1, num_tokens, n]``, a number for each of a head's first ``n``.
        sin: The same.
        is_shared: Both elements of a pair share an angle: ``2 n`` elements of a head are rotated.
        impl: ``auto``, ``triton`` or ``reference``, which alone has a gradient.

    Returns:
        Like ``q`` and ``k``; by ``triton`` both lie token by token, without gaps.

    Raises:
        ShapeError: Sizes disagree, or there is more than one row of tokens.
        DTypeError: The types differ.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> q, quarter = torch.tensor([[[[1.0, 2.0, 9.0]]]]), torch.ones(1, 1, 1)
        >>> rotate(q, q, 0 * quarter, quarter, is_shared=True)[0].flatten().tolist()
        [-2.0, 1.0, 9.0]
    """
    if impl == "auto" and has_dispatch_observers(q, k):
        impl = "reference"
    is_learned = needs_gradient(q, k, cos, sin)
    module = _dispatch(*forms(q=q, k=k, cos=cos, sin=sin), is_learned, is_shared, impl)
    found: tuple[Tensor, Tensor] = module.run(q, k, cos, sin, is_shared)
    return found


@functools.lru_cache(maxsize=1024)
def _dispatch(
    q: Any, k: Any, cos: Any, sin: Any, is_learned: bool, is_shared: bool, impl: str
) -> Any:
    """Check tensors of these forms, and choose the module that runs."""
    q, k, cos, sin = (Form(*fields) for fields in (q, k, cos, sin))
    sizes = bind(
        q=(q, "1 num_heads num_tokens head_size"),
        k=(k, "1 num_kv_heads num_tokens head_size"),
        cos=(cos, "1 num_tokens n"),
        sin=(sin, "1 num_tokens n"),
    )
    rotated = (2 if is_shared else 1) * sizes["n"]
    if rotated % 2 or not 0 < rotated <= sizes["head_size"]:
        raise ShapeError(f"cos turns {rotated} numbers of a head of {sizes['head_size']}")
    for name, other in (("k", k), ("cos", cos), ("sin", sin)):
        check_dtype(name, other, q.dtype)
    check_device("q", q.device, k=k, cos=cos, sin=sin)
    problem = RowsProblem(
        size=sizes["head_size"],
        num_rows=sizes["num_tokens"] * max(sizes["num_heads"], sizes["num_kv_heads"]),
        dtype=q.dtype,
        is_regular=all(x.strides[-1] == 1 or x.shape[-1] == 1 for x in (q, k, cos, sin)),
        needs_gradient=is_learned,
    )
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(q.device), impl)
