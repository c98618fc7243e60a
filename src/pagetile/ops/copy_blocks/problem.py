"""What choosing an implementation needs to know of two caches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...shapes import Form, is_dense


@dataclass(frozen=True)
class Problem:
    """Blocks of one form are copied to where blocks of the other lie."""

    source: Form
    destination: Form
    is_pinned: bool
    """Whether what lies on the host is pinned; meant for caches on two kinds of devices."""

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a block is one piece of memory on either side."""
        return all(is_dense(x.shape[1:], x.strides[1:]) for x in (self.source, self.destination))


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views may have memory in common.

    Storages say less than addresses: one that is NumPy's, or DLPack's, may lie in another.
    """
    (start, end), (other_start, other_end) = _span(a), _span(b)
    return start < other_end and other_start < end


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return first, first + (last + 1) * x.element_size() if x.numel() else first
