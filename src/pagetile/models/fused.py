"""Replaces a model's norms, and on a GPU rotary embeddings, by fused kernels during a step.

In Transformers' eager code an RMS norm is eight launches and a rotary embedding ten, in every
layer, which is most of a step of few tokens. Fused kernels are one launch each. They replace a
module's ``forward`` for the length of a step, as attributes of that one module::

    norm.forward       -> rms_norm(x, norm.weight)
    attention.forward  -> the same code, where ``apply_rotary_pos_emb`` means ``rotate``

A module is recognised by its results, not by its name: a norm computes one of ``rms_norm``'s
formulas on random inputs and weights, and likewise for ``rotate``. Other modules, and calls that
the kernels do not support, run the model's own code. The check at load runs with the replacements.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..device import DeviceInfo
from ..errors import PagetileError
from ..fused.rms_norm import KINDS, Norm, rms_norm
from ..fused.rotary import rotate
from ..tiles.types import FLOATS

Replacement = tuple[nn.Module, str, Any]
"""A module, the name of an attribute, and its value during a step."""

ROTARY = "apply_rotary_pos_emb"

_NEAR = 8
"""How many units of rounding two ways to compute one formula may differ by."""


def find_impl(device: torch.device, dtype: torch.dtype) -> str | None:
    """The implementation to replace a model's own code by; ``None`` where nothing is gained."""
    if device.type == "cpu":
        return "cpu" if dtype in FLOATS and importlib.util.find_spec("numba") else None
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from ..tiles.triton.launch import refuse

    return "triton" if refuse(DeviceInfo.of(device), weights=dtype) is None else None


@torch.no_grad()
def find_replacements(
    model: nn.Module, attention: Iterable[nn.Module], impl: str
) -> list[Replacement]:
    """Return replacements of a model's norms and of its attention modules' rotary embeddings."""
    found: list[Replacement] = []
    for module in model.modules():
        forward = _replace_norm(module, impl)
        if forward is not None:
            found.append((module, "forward", forward))
    made: dict[FunctionType, FunctionType | None] = {}
    for module in attention:
        function = own_forward(module)
        if function is None:
            continue
        if function not in made:
            made[function] = _replace_rotary(function, impl)
        with_ours = made[function]
        if with_ours is not None:
            found.append((module, "forward", MethodType(with_ours, module)))
    return found


def own_forward(module: nn.Module) -> FunctionType | None:
    """Return the class's function that a module runs; ``None`` if other code has replaced it."""
    function = getattr(type(module), "forward", None)  # a scripted module's class has none
    is_own = "forward" not in vars(module) and module._compiled_call_impl is None
    return function if is_own and isinstance(function, FunctionType) else None


# --- norms ------------------------------------------------------------------------------------


def read_norm(module: Any) -> Norm | None:
    """Return the norm that a module computes by one of ``rms_norm``'s formulas, or ``None``."""
    function = own_forward(module)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if function is None or not isinstance(eps, float) or not _is_shaped_as_norm(module, function):
        return None
    kind = _find_kind(module, function, eps)
    return None if kind is None else Norm(module.weight, eps, kind)


def _replace_norm(module: Any, impl: str) -> Callable[[Tensor], Tensor] | None:
    norm = read_norm(module)
    if norm is None:
        return None
    _, eps, kind = norm
    function = type(module).forward

    def forward(x: Tensor) -> Tensor:
        try:
            return rms_norm(x, module.weight, eps=eps, kind=kind, impl=impl)
        except PagetileError:  # what it does not take, the module's own code may
            return function(module, x)  # type: ignore[no-any-return]

    return forward


def _is_shaped_as_norm(module: nn.Module, function: FunctionType) -> bool:
    """Return whether a module has only a vector of weights, and takes only a tensor."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weight = tensors.get("weight")
    return (
        len(tensors) == 1
        and not any(True for _ in module.children())
        and type(weight) is nn.Parameter  # and no part of one that several GPUs share
        and weight.ndim == 1
        and weight.dtype in FLOATS
        and len(inspect.signature(function).parameters) == 2
    )


def _find_kind(module: Any, function: FunctionType, eps: float) -> str | None:
    """Return which of ``KINDS`` a module computes, from large rows and rows near ``eps``."""
    weight: Tensor = module.weight
    stand_in = copy.copy(module)  # of the same attributes, with random weights
    numbers = _random((5, weight.numel())).to(weight)
    stand_in.__dict__["_parameters"] = {"weight": nn.Parameter(numbers[0], requires_grad=False)}
    sizes = torch.tensor([30.0, 1.0, eps**0.5, 0.1 * eps**0.5], device=weight.device)
    x = ((numbers[1:].float() + 0.5) * sizes[:, None]).to(weight.dtype)[None]
    own = call_or_none(function, stand_in, x)
    computed = {k: rms_norm(x, numbers[0], eps=eps, kind=k, impl="reference") for k in KINDS}
    # In 16 bits two kinds differ little; the right one rounds like the module at every step.
    best = min(KINDS, key=lambda kind: difference(computed[kind], own))
    return best if _is_near(computed[best], own) else None


# --- rotary embeddings ------------------------------------------------------------------------


def _replace_rotary(forward: FunctionType, impl: str) -> FunctionType | None:
    """Return the same ``forward`` with ``apply_rotary_pos_emb`` replaced by ``rotate``."""
    own = forward.__globals__.get(ROTARY)
    if own is None or ROTARY not in forward.__code__.co_names:
        return None
    is_shared = _find_form(own)
    if is_shared is None:
        return None

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any) -> Any:
        # With angles of a wider type than q, the type of the result is not defined.
        if not others and not options and cos.dtype == q.dtype:
            try:
                return rotate(q, k, cos, sin, is_shared=is_shared, impl=impl)
            except PagetileError:  # what it does not take, the model's own function may
                pass
        return own(q, k, cos, sin, *others, **options)

    names = {**forward.__globals__, ROTARY: turn}
    made = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _find_form(own: Callable[..., Any]) -> bool | None:
    """Return ``rotate``'s ``is_shared`` for the formula of ``own``; ``None`` if it has another.

    With half as many angles as a head has columns, they rotate half of the head or all of it.
    """
    size, num_tokens = 16, 3
    q, k = (_random((1, heads, num_tokens, size)) for heads in (4, 2))
    whole, half = (_random((2, 1, num_tokens, n)) for n in (size, size // 2))

    def agrees(angles: Tensor, is_shared: bool) -> bool:
        found = call_or_none(own, q, k, *angles)
        computed = rotate(q, k, *angles, is_shared=is_shared, impl="reference")
        is_pair = isinstance(found, tuple) and len(found) == 2
        return is_pair and all(map(_is_near, computed, found))

    if agrees(half, True):
        return True
    takes_half = call_or_none(own, q, k, *half) is not None
    return False if agrees(whole, False) and (not takes_half or agrees(half, False)) else None


# --- both -------------------------------------------------------------------------------------


def call_or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a model's function on test inputs; return None if it fails."""
    try:
        return function(*arguments)
    except Exception:  # on any error the function is not replaced
        return None


def _is_near(computed: Tensor, own: Any) -> bool:
    return difference(computed, own) <= _NEAR * torch.finfo(computed.dtype).eps


def difference(computed: Tensor, own: Any) -> float:
    """Return the relative difference of two tensors; infinity if their shapes or types differ."""
    if not isinstance(own, Tensor) or (own.shape, own.dtype) != (computed.shape, computed.dtype):
        return torch.inf
    error = float((own.double() - computed.double()).norm() / computed.double().norm())
    return error if error == error else torch.inf


def _random(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
