"""The residual addition and norms by torch's own operations."""

from __future__ import annotations

from torch import Tensor

from ..rms_norm import Norm, rms_norm


def run(
    residual: Tensor, x: Tensor, before: Norm | None, after: Norm | None
) -> tuple[Tensor, Tensor | None]:
    """The sum, and its norm."""
    if x.dim() > residual.dim():
        x = x.sum(0).to(residual.dtype)
    if before is not None:
        x = rms_norm(x, before.weight, eps=before.eps, kind=before.kind, impl="reference")
    hidden = residual + x
    if after is None:
        return hidden, None
    return hidden, rms_norm(hidden, after.weight, eps=after.eps, kind=after.kind, impl="reference")
