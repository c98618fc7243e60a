"""The residual addition and its norms on a CPU, in one pass (``rms_norm.cpu``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.cpu.arrays import refuse
from ..rms_norm import Norm
from ..rms_norm.cpu import fold_once, norm_rows
from ..rows import MOST_ROWS, RowsProblem


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = problem.refuse(MOST_ROWS, "a tensor has gaps between its elements")
    return reason or refuse(device, residual=problem.dtype)


def run(
    residual: Tensor, x: Tensor, before: Norm | None, after: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """The sum, and its norm."""
    if x.dim() > residual.dim():
        x = x.sum(0).to(residual.dtype)
    hidden = torch.empty_like(residual)
    normed = None if after is None else torch.empty_like(residual)
    rows = fold_once(x.shape, x.stride())
    norm_rows(x, rows, before, after, out=normed, hidden=hidden, residual=residual)
    return hidden, normed
