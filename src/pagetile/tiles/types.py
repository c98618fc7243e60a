"""The element types that kernels take, and how they refuse others."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_FLOATS = (*FLOATS, torch.float64)
"""With the one that is for references."""


def refuse_types(**dtypes: torch.dtype) -> str | None:
    """Why kernels cannot take arguments of these element types; None if they can."""
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            given = str(dtype).removeprefix("torch.")
            return f"{name} is {given}; float32, float16 and bfloat16 run"
    return None
