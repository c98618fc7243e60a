"""The short way to an operator with a gradient, when only autograd is there to see it.

torch hands a custom operator and its gradient from dispatcher to dispatcher, which takes the host
some 115 µs a call and back; a small kernel runs in ten. Compilers, tracers, dispatch modes and
subclasses of ``Tensor`` need the operator, and transforms (``torch.func``) need it in a function
that they can take apart. Plain eager code does not: there the same functions run as a
``torch.autograd.Function``. A gradient asks again, since others may be there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedError

__all__ = [
    "autocast_type",
    "call_uncompiled",
    "choose_gradient",
    "has_tangent",
    "in_forward_mode",
    "is_batched",
    "is_plain",
    "make_last",
    "make_ways",
    "needs_gradient",
    "refuse_tangents",
    "wants_operator",
    "without_autocast",
]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""Any other subclass of ``Tensor`` may watch operations, or have no data."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def call_uncompiled(function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Break the graph that is being compiled, and call the function as it is.

    A compiler that went on into it would take Numba's own code apart, and fail.
    """
    apart: Callable[_P, _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return apart(*args, **kwargs)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """What autocast has tensors like ``x`` computed in; ``None`` where it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """What is in float32 stays so."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def needs_gradient(*inputs: Any) -> bool:
    """Whether a gradient, of either mode, goes through a call with these inputs."""
    return is_recorded(*inputs) or has_tangent(*inputs)


def is_recorded(*inputs: Any) -> bool:
    """Whether autograd keeps a call with these inputs for a backward pass."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )


def in_forward_mode() -> bool:
    """Whether anybody differentiates forward (``jvp``), whichever tensors take part."""
    return forward_ad._current_level >= 0


def has_tangent(*inputs: Any) -> bool:
    """Whether forward-mode differentiation (``jvp``) goes through a call with these inputs."""
    if torch.compiler.is_compiling() or not in_forward_mode():
        return False
    tensors = (x for x in inputs if isinstance(x, Tensor))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]


def refuse_tangents(name: str, *inputs: Any) -> None:
    """Raise UnsupportedError for them: torch would take a kernel's derivative for zero."""
    if has_tangent(*inputs):
        raise UnsupportedError(
            f"{name} has no forward-mode derivative (jvp, jacfwd): use reverse mode (backward, "
            "torch.autograd.grad)"
        )


def is_plain(*inputs: Any) -> bool:
    """Whether nobody but autograd watches a call with these inputs."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(x, Tensor) and _is_special(x) for x in inputs)
    )


def wants_operator(x: Tensor) -> bool:
    """Whether a call with it has to be an operator's: whoever takes part may have no data."""
    if torch.compiler.is_compiling():
        return True
    if type(x) in _PLAIN_TYPES:
        return x.is_meta
    return isinstance(x, Tensor)


def _is_special(x: Tensor) -> bool:
    return is_batched(x) or type(x) not in _PLAIN_TYPES


def is_batched(x: Tensor) -> bool:
    """Whether it stands for several tensors: a gradient of ``is_grads_batched``."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))


def choose_gradient(function: Any, watched: Any, *inputs: Any) -> Any:
    """``function``, or the same as somebody watches it: so one that has no derivative refuses."""
    return function if not torch.is_grad_enabled() and is_plain(*inputs) else watched


def make_last(operator: Any) -> Callable[..., Any]:
    """A gradient for all who watch, which has no derivative of its own."""

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise UnsupportedError(f"{operator._qualname} has no derivative: differentiate once")

    return _make_watched(operator._qualname, operator, keep_nothing, refuse)


def make_ways(
    name: str,
    forward: Callable[..., Any],
    operator: Any,
    remember: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., tuple[Any, ...]],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Give an operator its gradient; two ways to call it: for plain inputs, for all who watch.

    Args:
        name: What profiles and ``grad_fn`` show.
        forward: From inputs to one output, or to a tuple of them.
        operator: The same for torch's dispatchers.
        remember: From the context, inputs and outputs to what the context keeps.
        differentiate: From the context and the outputs' gradients to those of all inputs.
    """
    watched = _make_watched(name, operator, remember, differentiate)
    return _make_function(name, forward, remember, differentiate), watched


def _make_watched(
    name: str,
    operator: Any,
    remember: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., Any],
) -> Callable[..., Any]:
    """Give an operator its gradient, and call it for all who watch, ``torch.func`` included.

    What ``register_autograd`` makes of it has no ``setup_context``, which transforms need.
    """
    operator.register_autograd(differentiate, setup_context=remember)
    body = {
        "forward": staticmethod(operator),
        "setup_context": staticmethod(remember),
        "backward": staticmethod(differentiate),
        "generate_vmap_rule": True,
    }
    transformed: Any = type(name, (torch.autograd.Function,), body)

    def call(*inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
            return transformed.apply(*inputs)
        return operator(*inputs)

    return call


def _make_function(
    name: str,
    forward: Callable[..., Any],
    remember: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., tuple[Any, ...]],
) -> Callable[..., Any]:
    """What ``register_autograd`` does for an operator, as a function, for plain inputs."""

    def run(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        remember(ctx, inputs, output)
        return output

    body = {"forward": staticmethod(run), "backward": staticmethod(differentiate)}
    function: Any = type(name, (torch.autograd.Function,), body)

    def call(*inputs: Any) -> Any:
        if is_recorded(*inputs):
            return function.apply(*inputs)
        # To autograd the results are views of nothing, as an operator's are.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(*inputs)

    return call
