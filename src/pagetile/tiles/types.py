"""The element types that kernels support, and the reasons for refusing others."""

from __future__ import annotations

import torch

from ..shapes import dtype_name

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_FLOATS = (*FLOATS, torch.float64)
"""These and float64, which only references support."""


def refuse_types(**dtypes: torch.dtype) -> str | None:
    """Return why kernels do not support these element types; None if they do."""
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            return f"{name} is {dtype_name(dtype)}; float32, float16 and bfloat16 run"
    return None
