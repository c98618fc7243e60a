"""Look up rows of a table by index, in one launch that starts before the previous kernel ends."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...ops.dispatch import choose
from ...ops.eager import needs_gradient
from ...shapes import Form, check_device, check_dtype, form, is_dense
from ..rows import RowsProblem

IMPLEMENTATIONS = ("triton", "reference")


def take_rows(table: Tensor, rows: Tensor, *, impl: str = "auto") -> Tensor:
    """``table[rows]``; on a GPU a number outside of the table reads its first or last row.

    Args:
        table: ``[num_rows, size]`` float32, float16 or bfloat16.
        rows: int64 ``[...]``, without gaps.
        impl: ``auto``, ``triton`` or ``reference``, which alone has a gradient.

    Returns:
        ``[..., size]`` without gaps.

    Raises:
        ShapeError: ``table`` is not a matrix.
        DTypeError: ``rows`` is not int64.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    Examples:
        >>> import torch
        >>> take_rows(torch.eye(3), torch.tensor([2, 0]))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    module = _dispatch(form(table), form(rows), needs_gradient(table), impl)
    out: Tensor = module.run(table, rows)
    return out


@functools.lru_cache(maxsize=1024)
def _dispatch(table: Any, rows: Any, is_learned: bool, impl: str) -> Any:
    """Check tensors of these forms, and choose the module that runs."""
    table, rows = Form(*table), Form(*rows)
    if len(table.shape) != 2:
        raise ShapeError(f"table is {list(table.shape)}, expected [num_rows, size]")
    check_dtype("rows", rows, torch.int64)
    check_device("table", table.device, rows=rows)
    is_dense_table = is_dense(table.shape, table.strides) and 0 not in table.shape
    problem = RowsProblem(
        size=table.shape[1],
        num_rows=rows.shape.numel(),
        dtype=table.dtype,
        is_regular=is_dense_table and is_dense(rows.shape, rows.strides),
        needs_gradient=is_learned,
    )
    return choose(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(table.device), impl)
