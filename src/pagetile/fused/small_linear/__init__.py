"""Products of few rows with a large matrix, with what comes before and after them."""

from .api import small_linear
from .plan import MOST_FEW, is_faster

__all__ = ["MOST_FEW", "is_faster", "small_linear"]
