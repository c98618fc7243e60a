"""Triton's interpreter without two thirds of its work, none of which changes a result.

::

    Triton 3.6 and 3.7 do                                                    here
    at each call of a helper: replace the language's functions again         once a launch
    at each integer operation: compute it in int64, compare it with the      nothing, as long as
    limits, and drop the answer, since device_assert is off without debug    device_assert is off
    at each use of a type: build the table of NumPy's types                  once a type
"""

from dataclasses import replace
from functools import cache

from triton import language
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_find_numpy_type = interpreter._get_np_dtype
_numpy_types = {}
_describe_block = language.block_type.__init__
_block_types = {}
_patched = set()
"""The modules of the language that the running launch has replaced the functions of."""


def hasten():
    """Replace what is slow in the interpreter; see above."""
    interpreter._patch_lang_tensor = _with_index
    interpreter._patch_lang = _patch_once
    interpreter.GridExecutor.__call__ = _run
    interpreter._get_np_dtype = _numpy_type
    language.block_type.__init__ = _block_type
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


def _with_index(tensor, scope):
    """Triton 3.6 takes int() of an array of one number, which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _numpy_type(kind):
    scalar = kind.scalar  # of a block or of one number, it is the same
    if scalar.name not in _numpy_types:
        _numpy_types[scalar.name] = _find_numpy_type(scalar)
    return _numpy_types[scalar.name]


def _block_type(self, element_ty, shape):
    key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
    if key not in _block_types:
        _describe_block(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    vars(self).update(_block_types[key], element_ty=element_ty)


def _run(self, *args, **kwargs):
    _patched.clear()
    try:
        return _launch(self, *args, **kwargs)
    finally:
        _patched.clear()


def _patch_once(function):
    modules = _languages(function)
    if modules <= _patched:
        return interpreter._LangPatchScope()
    scope = _patch_lang(function)
    _patched.update(modules)
    return scope


@cache
def _languages(function):
    """Return the names of the language's modules that a function's own module has."""
    return frozenset(
        module.__name__
        for module in (language, language.core)
        if any(value is module for value in function.__globals__.values())
    )
