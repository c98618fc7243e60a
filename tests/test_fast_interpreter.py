"""The parts of Triton's interpreter that ``fast_interpreter`` replaces change no result."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there is no interpreter")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("of the interpreter: tests/test_interpreter.py runs it", allow_module_level=True)

import fast_interpreter
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.interpret


@triton.jit
def _halve(x):
    return x // 2


@triton.jit
def _kernel(out, x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    values = tl.load(x + at)
    big = _halve(values) * 65536 + at  # past 32 bits: it wraps
    rows = tl.sum(tl.reshape(big.to(tl.float32), (2, SIZE // 2)), axis=1)
    tl.store(out + at, big.to(tl.float32) + tl.max(rows, axis=0) + tl.cdiv(values, 3))


def _launch():
    out = torch.full((16,), float("nan"))
    _kernel[(1,)](out, torch.arange(90000, 90016, dtype=torch.int32), 16)
    return out


def test_results_are_the_same_without_it(monkeypatch):
    fast = _launch()
    monkeypatch.setattr(interpreter, "_patch_lang", fast_interpreter._patch_lang)
    monkeypatch.setattr(interpreter, "_patch_builtin", fast_interpreter._patch_builtin)
    monkeypatch.setattr(interpreter, "_get_np_dtype", fast_interpreter._find_numpy_type)
    monkeypatch.setattr(tl.block_type, "__init__", fast_interpreter._describe_block)
    monkeypatch.setattr(tl.tensor, "__init__", fast_interpreter._describe_tensor)
    semantics = type(interpreter.interpreter_semantic)
    for name, own in (
        ("binary_op_type_checking_impl", fast_interpreter._match_types),
        ("broadcast_impl_value", fast_interpreter._match_shapes),
        *fast_interpreter._own_operations.items(),
    ):
        monkeypatch.setattr(semantics, name, own)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions())
    assert builder.options.sanitize_overflow
    assert torch.equal(_launch(), fast)
    assert not fast.isnan().any()


@triton.jit
def _number_kernel(out):
    at = tl.arange(0, 2)
    ones = at.to(tl.float32) * 0 + 1
    tl.store(out + at, ones * 1e-3 + ones * 1)
    tl.store(out + 2 + at, (at * 0 + 7) / 2 + (at.to(tl.int64) * 0 + 7) // 2)
    tl.store(out + 4 + at, ones * -0.0 + (at.to(tl.uint8) | 200).to(tl.float32))
    tl.store(out + 6 + at, tl.where(at > 0, ones.to(tl.float16) * 2049 + 1.0, 0.0))


def test_a_number_that_was_met_before_is_the_same_beside_another_type(monkeypatch):
    found = []
    for is_fast in (True, True, False):
        if not is_fast:
            semantics = type(interpreter.interpreter_semantic)
            own = fast_interpreter._match_types
            monkeypatch.setattr(semantics, "binary_op_type_checking_impl", own)
        out = torch.full((8,), float("nan"))
        _number_kernel[(1,)](out)
        found.append(out.view(torch.int32).tolist())
    assert found[0] == found[1] == found[2]
    assert not out.isnan().any()


@triton.jit
def _combine(out, x, y, scalar):
    rows, columns = tl.arange(0, 4), tl.arange(0, 8)
    left, right = tl.load(x + rows)[:, None], tl.load(y + columns)[None, :]
    one = tl.load(scalar)
    at = out + rows[:, None] * 8 + columns
    tl.store(at, (left + right).to(tl.float64))
    tl.store(at + 32, (left * right - one).to(tl.float64))
    tl.store(at + 64, (one - right * 3 + left * 0).to(tl.float64))
    is_less, is_equal = left < right, (left >= 3) & (right != one)
    tl.store(at + 96, is_less + 2 * is_equal + 4 * (left <= right) + 8 * (right > one))
    tl.store(at + 128, tl.where(left == right, one, left).to(tl.float64))


@pytest.mark.parametrize("other", [torch.int8, torch.uint8, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64, torch.float16])
def test_operations_of_any_types_and_shapes_are_triton_s(kind, other, monkeypatch):
    """Results are written by the type that they have: an overflow shows."""
    found = []
    x, y = torch.tensor([1, 3, 100, 127]).to(kind), torch.arange(1, 9).to(other)
    for is_fast in (True, False):
        if not is_fast:
            for name, own in fast_interpreter._own_operations.items():
                monkeypatch.setattr(type(interpreter.interpreter_semantic), name, own)
        out = torch.full((160,), float("nan"), dtype=torch.float64)
        _combine[(1,)](out, x, y, x[1:])
        found.append(out)
    assert torch.equal(*found)


def test_the_language_is_replaced_once_a_launch_and_comes_back(monkeypatch):
    replaced = []
    patch = fast_interpreter._patch_lang
    monkeypatch.setattr(
        fast_interpreter, "_patch_lang", lambda fn: replaced.append(fn.__name__) or patch(fn)
    )
    load = tl.load
    for _ in range(2):
        replaced.clear()
        _launch()
        assert replaced[0] == "_kernel"
        assert "_halve" not in replaced
        assert tl.load is load


def test_only_checks_that_cannot_fail_are_left_out():
    """Overflow of integers raises through device_assert, which does nothing without debug."""
    assert not interpreter.InterpreterOptions().debug
    assert not interpreter.interpreter_builder.options.sanitize_overflow
