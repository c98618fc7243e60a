"""Attention of new tokens over a paged KV cache."""

from .api import explain_paged_attention, paged_attention, plan_paged_attention
from .batch import PagedBatch, SharedPrefixes
from .plan import Plan, make_plan
from .problem import Problem

__all__ = [
    "PagedBatch",
    "Plan",
    "Problem",
    "SharedPrefixes",
    "explain_paged_attention",
    "make_plan",
    "paged_attention",
    "plan_paged_attention",
]
