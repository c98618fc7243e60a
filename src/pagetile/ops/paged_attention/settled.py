"""What is checked, chosen and prepared once for all calls that are alike, and who is alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...device import DeviceInfo
from ...shapes import recogniser
from ...tiles.state import AttentionOutput
from ..dispatch import choose
from .checks import alignment, check, check_plan, form_of
from .plan import Plan
from .problem import CallForm, Problem

__all__ = ["IMPLEMENTATIONS", "Settled", "choose_for", "settle"]

IMPLEMENTATIONS = ("hopper", "hopper_prefill", "triton", "cpu", "reference")
"""In the order in which ``impl="auto"`` tries them."""


class Settled:
    """A form of calls that was checked, and who runs them."""

    __slots__ = ("_alignment", "_recognises", "problem", "run", "softmax_scale")

    def __init__(self, form: CallForm, problem: Problem, run: Callable[..., AttentionOutput]):
        self._alignment = form.has_aligned_caches, form.is_aligned
        self._recognises: Callable[..., bool] | None = None
        self.problem, self.run, self.softmax_scale = problem, run, form.softmax_scale

    def serves(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None) -> bool:
        """Whether a call that differs at most in these is of this form.

        It takes less of the host's time than to describe them. Of a form that was not learned
        none is.
        """
        is_like = self._recognises is not None and self._recognises(q, k_cache, v_cache)
        return is_like and self._alignment == alignment(q, k_cache, v_cache, out)

    def learn(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Serve calls like this one, which is of this form."""
        self._recognises = recogniser(q, k_cache, v_cache)


@functools.lru_cache(maxsize=1024)
def settle(description: tuple[Any, ...], plan: Plan | None, impl: str) -> Settled:
    """Check a call that ``describe`` saw, choose who runs it, and prepare what can be."""
    form = form_of(description)
    problem = check(form)
    if not isinstance(form.softmax_scale, float):  # equal floats find what is settled here
        form = form._replace(softmax_scale=float(form.softmax_scale))
    name, module = choose_for(problem, DeviceInfo.of(form.q.device), impl)
    check_plan(plan, name)
    if hasattr(module, "prepare"):
        return Settled(form, problem, module.prepare(problem, form, plan))
    return Settled(form, problem, functools.partial(module.run, problem, plan=plan))


def choose_for(problem: Problem, device: DeviceInfo, impl: str) -> tuple[str, Any]:
    """The name of the implementation that runs, and its module."""
    module = choose(__package__, IMPLEMENTATIONS, problem, device, impl)
    return module.__name__.rpartition(".")[2], module
