"""Makes Triton's interpreter faster without changing results.

::

    Triton 3.6 and 3.7 do                                                    here
    at each call of a helper: replace the language's functions again         once a launch
    at each launch: search the language for what to replace                  once a process
    at each integer operation: compute it in int64, compare it with the      nothing, as long as
    limits, and drop the answer, since device_assert is off without debug    device_assert is off
    at each use of a type: build the table of NumPy's types                  once a type
    at each value: describe its shape anew                                   once a shape
    at each operation of two values: find their common type and shape        only if they differ
    at each operation with a Python number: make a tensor of it, convert     once a number, type
    it and broadcast it                                                      and shape
    at each sum, product and comparison: copy both operands to the shape     NumPy broadcasts
    of the result
    at each call of a builtin: copy its keywords, and look for _semantic     set _semantic
"""

import inspect
from dataclasses import replace
from functools import cache

import numpy as np
from triton import language
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_patch_builtin = interpreter._patch_builtin
_launch = interpreter.GridExecutor.__call__
_find_numpy_type = interpreter._get_np_dtype
_numpy_types = {}
_describe_block = language.block_type.__init__
_block_types = {}
_describe_tensor = language.tensor.__init__
_shapes = {}
_semantics = interpreter.interpreter_semantic.__class__
_match_types = _semantics.binary_op_type_checking_impl
_match_shapes = _semantics.broadcast_impl_value
_constants = {}
_operations = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and_": np.bitwise_and,
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
_own_operations = {name: getattr(_semantics, name) for name in _operations}
_comparisons = {"less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal"}
_numeric = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("fp16", "fp32", "fp64"),
}
_builtins = {}
_patched = set()
"""The modules of the language that the running launch has replaced the functions of."""


def hasten():
    """Replace slow parts of the interpreter; see the module docstring."""
    interpreter._patch_lang_tensor = _with_index
    interpreter._patch_lang = _patch_once
    interpreter._patch_builtin = _patch_known_builtins
    interpreter.GridExecutor.__call__ = _run
    interpreter._get_np_dtype = _numpy_type
    language.block_type.__init__ = _block_type
    language.tensor.__init__ = _tensor
    _semantics.binary_op_type_checking_impl = _match_types_that_differ
    _semantics.broadcast_impl_value = _match_shapes_that_differ
    for name in _operations:
        setattr(_semantics, name, _by_numpy(name))
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
        _block_types[key] = dict(vars(self), sizes=key[1:])
    vars(self).update(_block_types[key], element_ty=element_ty)


def _sizes(kind):
    """Return a block's sizes, () of a single number, and None of a type made before ``hasten``."""
    return getattr(kind, "sizes", None) if kind.is_block() else ()


def _tensor(self, handle, type):
    sizes = _sizes(type)
    if sizes not in _shapes:
        _describe_tensor(self, handle, type)
        if sizes is not None:
            own = ("handle", "type", "dtype")
            _shapes[sizes] = {name: one for name, one in vars(self).items() if name not in own}
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    vars(self).update(_shapes[sizes])


def _match_types_that_differ(self, lhs, rhs, *args, **options):
    if type(rhs) in (int, float) and isinstance(lhs, language.tensor):
        return _match_number(self, lhs, rhs, args, options)
    if isinstance(lhs, language.tensor) and isinstance(rhs, language.tensor):
        kind = lhs.dtype
        is_alike = kind is rhs.dtype and not kind.is_ptr()
        if is_alike and not (
            len(args) > 3 or options.get("div_or_mod")
        ):  # halves are divided wider
            return self.broadcast_impl_value(lhs, rhs)
    return _match_types(self, lhs, rhs, *args, **options)


def _match_number(self, lhs, number, args, options):
    """Keep the tensor that a number becomes beside one of this type and shape."""
    sizes = _sizes(lhs.type)
    # By its digits: 0.0 equals -0.0, and NaN does not equal itself.
    key = (repr(number), lhs.dtype.name, sizes, args, tuple(options.items()))
    if key not in _constants:
        left, right = _match_types(self, lhs, number, *args, **options)
        if left is not lhs or sizes is None:  # the tensor is converted as well
            return left, right
        right.handle.data.flags.writeable = False  # operations make new arrays
        _constants[key] = right
    return lhs, _constants[key]


def _match_shapes_that_differ(self, lhs, rhs):
    sizes = _sizes(lhs.type)
    if sizes is not None and sizes == _sizes(rhs.type):
        return lhs, rhs
    return _match_shapes(self, lhs, rhs)


def _by_numpy(name):
    """Return an operation that leaves broadcasting of tensors of one type to NumPy."""
    own, operation = _own_operations[name], _operations[name]
    kinds = {*_numeric, "int1"} if name == "and_" else _numeric
    is_comparison, is_sum = name in _comparisons, name == "add"

    def compute(self, lhs, rhs, *options, **named):
        if not isinstance(lhs, language.tensor):
            return own(self, lhs, rhs, *options, **named)
        kind = lhs.dtype
        if is_sum and kind.is_ptr() and isinstance(rhs, language.tensor):
            if not rhs.dtype.is_int_signed():
                return own(self, lhs, rhs, *options, **named)
            handle = self.builder.create_addptr(lhs.handle, rhs.handle)
            return language.tensor(handle, _broadcast_type(kind, lhs, rhs, handle))
        if kind.name not in kinds:
            return own(self, lhs, rhs, *options, **named)
        if type(rhs) in (int, float):
            lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs)
        if not isinstance(rhs, language.tensor) or rhs.dtype is not lhs.dtype:
            return own(self, lhs, rhs, *options, **named)
        handle = self.builder.binary_op(lhs.handle, rhs.handle, operation)
        kind = language.int1 if is_comparison else lhs.dtype
        return language.tensor(handle, _broadcast_type(kind, lhs, rhs, handle))

    return compute


def _broadcast_type(kind, lhs, rhs, handle):
    """Return the type of a result whose elements are of a kind, and whose shape NumPy found."""
    if not (lhs.type.is_block() or rhs.type.is_block()):
        return kind
    sizes = handle.data.shape
    if lhs.dtype is kind and _sizes(lhs.type) == sizes:
        return lhs.type
    return language.block_type(kind, list(sizes))


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


def _patch_known_builtins(owner, *args):
    """``owner`` is a module of the language or its tensor, as they are between launches."""
    if owner not in _builtins:
        members = inspect.getmembers(owner)
        builtins = [each for each in members if language.core.is_builtin(each[1])]
        _builtins[owner] = [(name, _with_semantic(member)) for name, member in builtins]
    scope = args[-1]
    for name, member in _builtins[owner]:
        scope.set_attr(owner, name, member)


def _with_semantic(member):
    """Return a builtin with the interpreter's semantics, without the check for them."""
    is_check = member.__code__ is language.add.__code__
    function = member.__wrapped__ if is_check else member

    def call(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


@cache
def _languages(function):
    """Return the names of the language's modules that a function's own module has."""
    return frozenset(
        module.__name__
        for module in (language, language.core)
        if any(value is module for value in function.__globals__.values())
    )
