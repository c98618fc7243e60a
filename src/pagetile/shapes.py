"""Shape checks by named dimensions, and other checks of tensors.

``bind`` checks the arguments in order. A name's first occurrence sets its size, and later ones must
agree. A size may be 0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from .errors import DTypeError, ShapeError, UnsupportedError, plural

# The guards of torch's compiled code (2.11 to 2.13): in C++, they take a tenth of Python's time.
_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


class Form(NamedTuple):
    """Shape, strides, type and device of a tensor: all that the checks here depend on.

    A form is hashable, so a call's checks run only once for all calls of its form::

        @functools.lru_cache
        def check(q, k): ...        # Form(*q), Form(*k) instead of tensors

        check(form(q), form(k))
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    """Return the fields of a tensor's ``Form`` as a plain tuple, which is faster to make.

    Raises:
        UnsupportedError: The tensor is nested; ``check_tensors`` gives its name as well.
    """
    if tensor.is_nested:
        raise _refuse_nested("an argument")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_dense(shape: Sequence[int], strides: Sequence[int], *, rows_apart: bool = False) -> bool:
    """Return whether a tensor is contiguous; with ``rows_apart``, gaps between rows are allowed.

    Rows (the last dimension) are contiguous even then, with one stride between all of them.
    """
    expected = 1
    for at in reversed(range(len(shape))):
        is_free = rows_apart and at == len(shape) - 2
        if shape[at] > 1 and strides[at] != expected and not is_free:
            return False
        expected = (strides[at] if is_free else expected) * shape[at]
    return True


def forms(**tensors: torch.Tensor) -> tuple[Any, ...]:
    """Return every tensor's ``form``, in their order.

    Raises:
        DTypeError: One is not a tensor; the message names it.
        UnsupportedError: One is a nested tensor.
    """
    try:
        return tuple(map(form, tensors.values()))
    except (AttributeError, UnsupportedError):  # checked only after a failure, to keep calls fast
        check_tensors(**tensors)
        raise


def span(tensor: Form) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if 0 in tensor.shape:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    return (last + 1) * tensor.dtype.itemsize


def check_written_once(**tensors: Form | None) -> None:
    """Raise ShapeError for a tensor that is written and has two elements at one address."""
    for name, tensor in tensors.items():
        if tensor is None or 0 in tensor.shape:
            continue
        reach = 0  # of the dimensions whose steps are shorter
        for stride, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
            if size > 1 and stride <= reach:
                raise ShapeError(
                    f"{name} is written, but its strides {list(tensor.strides)} put several "
                    f"elements of {list(tensor.shape)} at one address, as expand() does: pass "
                    f"{name}.contiguous(), and copy what is needed of it back"
                )
            reach += (size - 1) * stride


def check_apart(written: str, tensor: torch.Tensor, **others: torch.Tensor) -> None:
    """Raise ShapeError if ``tensor``, which is written, has elements in common with another one."""
    for name, other in others.items():
        if share_memory(tensor, other):
            raise ShapeError(
                f"{written} is written and shares memory with {name}: pass a copy of one of them, "
                f"for example {name}.clone()"
            )


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have an element in common, not only addresses between them."""
    start, other = a.data_ptr(), b.data_ptr()
    return 0 not in (start, other) and _share_memory(form(a), form(b), other - start)


@functools.lru_cache(maxsize=1024)
def _share_memory(a: Any, b: Any, distance: int) -> bool:
    """Return whether tensors of these forms, ``distance`` bytes apart, share an element."""
    import numpy as np

    def describe(tensor: Form, address: int) -> Any:
        size = tensor.dtype.itemsize
        strides = tuple(stride * size for stride in tensor.strides)
        fields = {"shape": tuple(tensor.shape), "strides": strides, "data": (address, True)}
        array = {**fields, "typestr": f"|V{size}", "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__=array))

    base = 1 << 60  # any: nothing is read
    try:
        found = np.shares_memory(
            describe(Form(*a), base),
            describe(Form(*b), base + distance),
            max_work=1 << 20,  # type: ignore[arg-type]  # any number will do
        )
    except np.exceptions.TooHardError:
        return False  # strides that no layout of caches has
    return bool(found)


def recogniser(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Return a function that tells whether its arguments are tensors of these forms, in order.

    It may return False for some that are, such as those of another class. It keeps no tensor.
    """
    known = [form(tensor) for tensor in tensors]
    return guard(*tensors) or (lambda *others: [form(other) for other in others] == known)


def guard(*tensors: torch.Tensor) -> Callable[..., bool] | None:
    """Return a ``recogniser`` that also compares the dispatch of the tensors.

    It returns False if autograd, autocast or ``torch.func.vmap`` takes part in a call but did not
    when it was made, or the reverse. It does not see all dispatch modes and forward-mode
    derivatives: check for these separately. None if torch has no such guards, or if one tensor is
    given twice.
    """
    sizes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    is_each_once = len({id(tensor) for tensor in tensors}) == len(tensors)
    if _Guards is not None and is_each_once:  # else it would reject all calls
        with suppress(TypeError):  # in a release with another signature
            guards = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            check: Callable[..., bool] = guards.check
            return check
    return None


@functools.cache
def is_debugging() -> bool:
    """Return whether values on a GPU are checked too, which waits for it: ``PAGETILE_DEBUG=1``.

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

    Examples:
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
                f"{name} has {plural(len(shape), 'dimension')} {list(shape)}, "
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


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def power_of_2(size: int) -> int:
    """The smallest power of two that is not less than ``size``."""
    return 1 << max(0, size - 1).bit_length()


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_tensors(**arguments: Any) -> None:
    """Raise DTypeError for an argument that is not a tensor, UnsupportedError for a nested one."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise DTypeError(
                f"{name} is of type {type(value).__name__}, expected a torch.Tensor"
                f"{_conversion(name, value)}"
            )
        if value.is_nested:
            raise _refuse_nested(name)


def _refuse_nested(name: str) -> UnsupportedError:
    """Return the error for a nested tensor, whose dimensions have no sizes or symbolic ones."""
    return UnsupportedError(
        f"{name} is a nested tensor, expected a dense one, such as "
        "torch.nested.to_padded_tensor(x, 0.0)"
    )


def _conversion(name: str, value: Any) -> str:
    """Return how to make a tensor of a value, as the end of a sentence."""
    if type(value).__name__ == "ndarray":  # NumPy's, without importing it
        return f": pass torch.from_numpy({name})"
    if isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value):
        return f": pass one of its tensors, such as {name}[0], or torch.stack({name})"
    if isinstance(value, (bool, int, float, list, tuple)):
        return f": pass torch.tensor({name}), on the device of the other tensors"
    return ""


def check_dtype(name: str, tensor: torch.Tensor | Form, *allowed: torch.dtype) -> None:
    """Raise DTypeError unless ``tensor`` has one of the allowed element types."""
    if tensor.dtype not in allowed:
        listed, given = " or ".join(map(dtype_name, allowed)), dtype_name(tensor.dtype)
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
