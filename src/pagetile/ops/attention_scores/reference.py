"""Attention scores in eager torch: the definition of correct."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...shapes import Form
from .problem import Problem


def prepare(
    problem: Problem, q: Form, k: Form, softmax_scale: float
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that computes scores of any tensors of these forms."""
    return functools.partial(run, problem, softmax_scale=softmax_scale)


def run(problem: Problem, q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """Accumulate in float32, or float64 for float64 tensors, and round once."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return (q.to(dtype) @ k.to(dtype).mT * softmax_scale).to(q.dtype)
