"""Linear layers of few rows, fused with the norm before and the epilogue after them."""

from .api import partial_products, small_linear
from .plan import (
    is_faster,
    is_faster_in_parts,
    is_faster_in_parts_on_hopper,
    is_faster_in_ring,
    is_faster_on_cpu,
    is_resident,
)
from .problem import Problem

__all__ = [
    "Problem",
    "is_faster",
    "is_faster_in_parts",
    "is_faster_in_parts_on_hopper",
    "is_faster_in_ring",
    "is_faster_on_cpu",
    "is_resident",
    "partial_products",
    "small_linear",
]
