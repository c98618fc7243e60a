"""The problem of copying between two caches: what chooses its implementation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...shapes import Form, is_dense


@dataclass(frozen=True)
class Problem:
    """The forms of a source and a destination cache."""

    source: Form
    destination: Form
    is_pinned: bool
    """Whether the host's cache is pinned, if one is on the host and one on a GPU."""

    @property
    def has_whole_blocks(self) -> bool:
        """Whether a block is contiguous on either side."""
        return all(is_dense(x.shape[1:], x.strides[1:]) for x in (self.source, self.destination))


def may_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views may share memory.

    Compares addresses, not storages: a storage made from NumPy or DLPack may lie in another.
    """
    (start, end), (other_start, other_end) = _span(a), _span(b)
    return start < other_end and other_start < end


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return first, first + (last + 1) * x.element_size() if x.numel() else first
