"""Named dimensions: an argument's shape is checked against a pattern of words.

``bind`` walks the arguments in order. The first time a word is met it takes the size found
there; every later meeting must agree. Zero is a size like any other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from .errors import DTypeError, ShapeError

# What torch's compiled code asks before it runs (2.11 to 2.13): in C++, a tenth of the host's time.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


class Form(NamedTuple):
    """What these checks look at in a tensor; tensors of one form pass or fail alike.

    A form is a key, so the checks of a call need run only once for all calls of its form::

        @functools.lru_cache
        def check(q, k): ...        # Form(*q), Form(*k) instead of tensors

        check(form(q), form(k))
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    """The fields of a tensor's ``Form``, as a plain tuple: a call makes several of them."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_dense(shape: Sequence[int], strides: Sequence[int], *, rows_apart: bool = False) -> bool:
    """Whether elements follow each other without gaps; with ``rows_apart`` rows may lie apart.

    Rows, the last dimension, are whole even then, and one stride leads from each to the next.
    """
    expected = 1
    for at in reversed(range(len(shape))):
        is_free = rows_apart and at == len(shape) - 2
        if shape[at] > 1 and strides[at] != expected and not is_free:
            return False
        expected = (strides[at] if is_free else expected) * shape[at]
    return True


def forms(**tensors: torch.Tensor) -> tuple[Any, ...]:
    """Every tensor's ``form``, in their order.

    Raises:
        DTypeError: One is not a tensor; the message names it.
    """
    try:
        return tuple(map(form, tensors.values()))
    except AttributeError:  # asked for only then: a call is to cost little
        check_tensors(**tensors)
        raise


def recogniser(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function of as many arguments: whether they are tensors of these forms, in this order.

    It may say no to some that are, for example to those of another class, and keeps no tensor.
    """
    known = [form(tensor) for tensor in tensors]
    return guard(*tensors) or (lambda *others: [form(other) for other in others] == known)


def guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """A ``recogniser`` that also compares what torch's dispatcher would do with the tensors.

    It says no where autograd, autocast or ``torch.func.vmap`` takes part in a call and did not when
    it was made, or the reverse. Dispatch modes and forward-mode derivatives have to be asked for:
    it does not see all of them. None where torch has no such function, or one tensor comes twice.
    """
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    is_each_once = len({id(tensor) for tensor in tensors}) == len(tensors)
    if _Guards is not None and is_each_once:  # else it says no to all
        with suppress(TypeError):  # of a release that asks for something else
            guards = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            check: Callable[..., bool] = guards.check
            return check
    return None


@functools.cache
def is_debugging() -> bool:
    """Whether values on a GPU are checked too, which waits for it: ``PAGETILE_DEBUG=1``.

    The environment is read once.
    """
    return os.environ.get("PAGETILE_DEBUG") == "1"


def bind(**arguments: tuple[torch.Tensor | Form | None, str]) -> dict[str, int]:
    """Check tensors against patterns of dimension names and return the sizes.

    Args:
        **arguments: ``name=(tensor, pattern)``. A pattern is words and literal integers
            separated by blanks; ``None`` in place of a tensor skips the argument.

    Returns:
        The size of every dimension name.

    Raises:
        ShapeError: A tensor has another number of dimensions than its pattern, or a size that
            differs from an earlier argument's; the message names both.
        DTypeError: An argument is neither a tensor nor the form of one.

    Example:
        >>> import torch
        >>> q, k = torch.empty(7, 8, 64), torch.empty(9, 2, 64)
        >>> sizes = bind(q=(q, "num_tokens num_heads head_size"), k=(k, "n num_kv_heads head_size"))
        >>> sizes["num_tokens"], sizes["num_kv_heads"], sizes["head_size"]
        (7, 2, 64)
    """
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}
    for name, (tensor, pattern) in arguments.items():
        if tensor is None:
            continue
        words = pattern.split()
        if not isinstance(tensor, Form):
            check_tensors(**{name: tensor})
        shape = tuple(tensor.shape)
        if len(words) != len(shape):
            raise ShapeError(
                f"{name} has {len(shape)} dimensions {list(shape)}, "
                f"expected {len(words)}: [{pattern}]"
            )
        for word, size in zip(words, shape, strict=True):
            expected = int(word) if word.isdigit() else sizes.setdefault(word, size)
            if size != expected:
                owner = owners.get(word)
                against = f"but {owner} has {expected}" if owner else f"expected {expected}"
                raise ShapeError(
                    f"{name} has {word}={size} {against} (its shape is {list(shape)}: [{pattern}])"
                )
            owners.setdefault(word, name)
    return sizes


def given(**arguments: Any) -> dict[str, Any]:
    """Those that are not None: of arguments that may be left out."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_tensors(**arguments: Any) -> None:
    """Raise DTypeError for what is not a tensor; None is none."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise DTypeError(
                f"{name} is of type {type(value).__name__}, expected a torch.Tensor"
                f"{_conversion(name, value)}"
            )


def _conversion(name: str, value: Any) -> str:
    """How a tensor is made of a value that is none, as the end of a sentence."""
    if type(value).__name__ == "ndarray":  # NumPy's, without importing it
        return f": pass torch.from_numpy({name})"
    if isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value):
        return f": pass torch.stack({name})"
    if isinstance(value, (bool, int, float, list, tuple)):
        return f": pass torch.tensor({name}), on the device of the other tensors"
    return ""


def check_dtype(name: str, tensor: torch.Tensor | Form, *allowed: torch.dtype) -> None:
    """Raise DTypeError unless ``tensor`` has one of the allowed element types."""
    if tensor.dtype not in allowed:
        listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        given = str(tensor.dtype).removeprefix("torch.")
        target = str(allowed[0]) if len(allowed) == 1 else "..."
        raise DTypeError(
            f"{name} is {given}, expected {listed}: convert it with {name}.to({target})"
        )


def check_contiguous_rows(**tensors: torch.Tensor | Form | None) -> None:
    """Raise ShapeError unless the last dimension of every tensor is contiguous."""
    for name, x in tensors.items():
        if x is None or x.shape[-1] <= 1:
            continue
        stride = x.strides[-1] if isinstance(x, Form) else x.stride(-1)
        if stride != 1:
            raise ShapeError(
                f"{name} has stride {stride} in its last dimension, expected 1: "
                f"pass {name}.contiguous()"
            )


def check_device(name: str, device: torch.device, **tensors: torch.Tensor | Form | None) -> None:
    """Raise ShapeError unless every tensor lies on ``device``, where the tensor ``name`` is."""
    for other, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ShapeError(
                f"{other} is on {tensor.device} but {name} is on {device}: move one of them, for "
                f"example {other}.to({str(device)!r})"
            )
