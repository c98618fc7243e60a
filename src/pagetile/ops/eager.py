"""Direct calls of an operator's functions, where only autograd needs to see the operator.

torch passes a custom operator and its gradient through several dispatchers, which takes the host
some 115 µs for a forward and a backward pass; a small kernel takes ten. Compilers, tracers,
dispatch modes and subclasses of ``Tensor`` need the operator, and ``torch.func`` needs it in a
``torch.autograd.Function`` with a ``setup_context``. Plain eager code needs neither, so there the
same functions run as a plain ``torch.autograd.Function``. The backward pass checks again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedError

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""Any other subclass of ``Tensor`` may intercept operations, or have no data."""

# Bound once: operations ask in every call.
_count_modes, _get_tracing_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state

_P = ParamSpec("_P")
_R = TypeVar("_R")


def call_uncompiled(function: Callable[_P, _R], *args: _P.args, **arguments: _P.kwargs) -> _R:
    """Break the graph that is being compiled, and call the function eagerly.

    A compiler that traced into it would trace Numba's own code, and fail.

    Raises:
        UnsupportedError: ``torch.export`` traces the call: its graphs have no breaks.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            f"{function.__name__} with these arguments cannot be part of an exported program: call "
            "it outside of the module that torch.export traces"
        )
    torch._dynamo.graph_break(
        f"{function.__name__} with these arguments breaks the graph: call it outside of the "
        "function that is compiled with fullgraph=True"
    )
    apart: Callable[_P, _R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return apart(*args, **arguments)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type that autocast computes tensors like ``x`` in; ``None`` where it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast, so that float32 stays float32."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def needs_gradient(*inputs: Any) -> bool:
    """Return whether a gradient, of either mode, goes through a call with these inputs."""
    return is_recorded(*inputs) or has_tangent(*inputs)


def is_recorded(*inputs: Any) -> bool:
    """Return whether autograd records a call with these inputs for a backward pass."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation (``jvp``) is active for any tensor."""
    return forward_ad._current_level >= 0


def has_tangent(*inputs: Any) -> bool:
    """Return whether forward-mode differentiation (``jvp``) goes through these inputs."""
    if torch.compiler.is_compiling() or not in_forward_mode():
        return False
    tensors = (x for x in inputs if isinstance(x, Tensor))
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]


def refuse_tangents(name: str, *inputs: Any) -> None:
    """Raise UnsupportedError for tangents: torch would treat a kernel's derivative as zero."""
    if has_tangent(*inputs):
        raise UnsupportedError(
            f"{name} has no forward-mode derivative (jvp, jacfwd): use reverse mode (backward, "
            "torch.autograd.grad)"
        )


def has_dispatch_observers(*inputs: Any) -> bool:
    """Return whether anything but autograd intercepts a call with these inputs.

    Compilers, tracers, dispatch modes, ``torch.func`` transforms and subclasses of ``Tensor``.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._len_torch_dispatch_stack()
        or torch._ops._len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
        or torch._C._are_functorch_transforms_active()
        or any(isinstance(x, Tensor) and _is_special(x) for x in inputs)
    )


def needs_operator(x: Tensor) -> bool:
    """Return whether a call with ``x`` has to be an operator: it is traced, or ``x`` has no data.

    Tracers are compilers, ``torch.jit.trace`` and dispatch modes.
    """
    if torch.compiler.is_compiling() or _count_modes() or _get_tracing_state():
        return True
    if type(x) in PLAIN_TYPES:
        return x.is_meta
    return isinstance(x, Tensor)


def refuse_observers(operation: str) -> None:
    """Raise UnsupportedError under a tracer, which does not see that a kernel writes memory.

    Dispatch modes that only watch, such as torch's counter of operations, do no harm.
    """
    modes = map(torch._C._get_dispatch_mode, _TRACING_MODES) if _count_modes() else ()
    if (
        _get_tracing_state()
        or torch._C._are_functorch_transforms_active()
        or any(mode is not None for mode in modes)
    ):
        raise UnsupportedError(
            f"{operation} cannot run under torch.func's transforms, with fake tensors or in a "
            "traced function, which do not see what it writes: call it outside of them"
        )


_MODE_KEYS = torch._C._TorchDispatchModeKey
_TRACING_MODES = _MODE_KEYS.FAKE, _MODE_KEYS.PROXY, _MODE_KEYS.FUNCTIONAL


def check_readable(operation: str, **tensors: Any) -> None:
    """Raise UnsupportedError for a tensor whose elements do not lie in memory as strides say.

    A kernel would read other memory, or none.

    Args:
        operation: Its name, for the message.
        **tensors: Its tensors; others and None are left out.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise UnsupportedError(
                f"{operation} cannot run under torch.func's transforms (vmap, grad, jvp, "
                f"functionalize), of which {name} is a part: call it outside of the function that "
                "is transformed"
            )
        if x.layout != torch.strided:
            raise UnsupportedError(
                f"{name} is of layout {x.layout}, expected a dense tensor: pass {name}.to_dense()"
            )
        if x.is_neg() or x.is_conj():
            raise UnsupportedError(
                f"{name} is a view that is negated when it is read, expected the numbers "
                f"themselves: pass {name}.resolve_neg()"
            )
        if x.numel() and not x.is_meta and not x.data_ptr():
            raise UnsupportedError(
                f"{name} is of type {type(x).__name__} and has no memory, expected a tensor with "
                "its storage"
            )


def _is_special(x: Tensor) -> bool:
    return is_batched(x) or type(x) not in PLAIN_TYPES


def is_batched(x: Tensor) -> bool:
    """Return whether ``x`` stands for several tensors: a gradient of ``is_grads_batched``."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(x))


def align_saved(x: Tensor) -> Tensor:
    """Return a saved result at an address that kernels can load 16 bytes from at once.

    It was allocated so, but a hook on saved tensors may return a view that begins anywhere.
    """
    return x.clone() if x.data_ptr() % 16 else x


def choose_gradient(function: Any, operator_call: Any, *inputs: Any) -> Any:
    """Return ``function``, or the operator's call where a derivative or an observer may need it."""
    needs_operator_call = torch.is_grad_enabled() or has_dispatch_observers(*inputs)
    return operator_call if needs_operator_call else function


def refuse_second_derivative(operator: Any) -> Callable[..., Any]:
    """Return a call of a gradient operator, whose own derivative raises."""

    def keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise UnsupportedError(
            f"{operator._qualname} has no derivative: differentiate once, or use the model's own "
            "attention (swin.unpatch(model) where swin.patch was called)"
        )

    return _make_operator_call(operator._qualname, operator, keep_nothing, refuse)


def make_calls(
    name: str,
    forward: Callable[..., Any],
    operator: Any,
    remember: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., tuple[Any, ...]],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Register an operator's gradient; return the direct call and the operator's.

    Args:
        name: Shown by profiles and ``grad_fn``.
        forward: Returns one output, or a tuple of them, from the inputs.
        operator: The same for torch's dispatchers.
        remember: Saves for backward, from the context, inputs and outputs.
        differentiate: Returns all inputs' gradients, from the context and the outputs' gradients.
    """
    operator_call = _make_operator_call(name, operator, remember, differentiate)
    return _make_function(name, forward, remember, differentiate), operator_call


def _make_operator_call(
    name: str,
    operator: Any,
    remember: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., Any],
) -> Callable[..., Any]:
    """Register an operator's gradient; return a call that observers see, ``torch.func`` included.

    The function that ``register_autograd`` makes has no ``setup_context``, which transforms need.
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
            level: Any = torch._C._functorch.peek_interpreter_stack()
            if level.key() != torch._C._functorch.TransformType.Functionalize:  # it has no rule
                return transformed.apply(*inputs)
        return operator(*inputs)

    return call


def _make_function(
    name: str,
    forward: Callable[..., Any],
    remember: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., tuple[Any, ...]],
) -> Callable[..., Any]:
    """Return what ``register_autograd`` makes of an operator, as a function without dispatch."""

    def run(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        remember(ctx, inputs, output)
        return output

    body = {"forward": staticmethod(run), "backward": staticmethod(differentiate)}
    function: Any = type(name, (torch.autograd.Function,), body)

    def call(*inputs: Any) -> Any:
        if is_recorded(*inputs):
            return function.apply(*inputs)
        # Like an operator's, the results must not be views to autograd.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(*inputs)

    return call
