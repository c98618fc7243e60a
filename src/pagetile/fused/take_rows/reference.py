"""The same by torch's own operation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ...device import DeviceInfo
from .problem import Problem


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Nothing is refused here."""
    return None


def run(table: Tensor, rows: Tensor) -> Tensor:
    """``[..., size]``."""
    return functional.embedding(rows, table)
