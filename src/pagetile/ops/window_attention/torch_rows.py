"""Taking rows by an index in eager torch: anything, anywhere.

On a CPU ``index_select`` is as fast as a copy. On a GPU it is not: see ``triton_rows``.
"""

from __future__ import annotations

from torch import Tensor

from ...device import DeviceInfo


def supports(problem: None, device: DeviceInfo) -> str | None:
    """Everything, everywhere."""
    return None


def take(x: Tensor, index: Tensor, absent: Tensor, filling: Tensor | None) -> Tensor:
    """``x[:, index]`` with ``filling`` or zeros where the index is negative: at ``absent``."""
    if not absent.numel():
        return x.index_select(1, index)
    rows = x.index_select(1, index.clamp(min=0))
    if filling is None:
        return rows.index_fill_(1, absent, 0)
    return rows.index_copy_(1, absent, filling.expand(len(x), len(absent), *filling.shape))
