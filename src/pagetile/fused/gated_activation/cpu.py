"""``activation(gate) * up`` on a CPU, in one pass over both halves of each row."""

from __future__ import annotations

import functools
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.simd import (
    LOG2_E,
    add,
    array_at,
    div,
    exp2,
    fma,
    load_first,
    maximum,
    mul,
    splat,
    store_first,
    sub,
    take_number,
    where_less,
    zeros,
)
from ...tiles.cpu.threads import no_scratch, on_team, run_together
from ..rows import MOST_ROWS, RowsProblem
from .api import ACTIVATIONS

_SMALL = 1 << 14
"""Elements that take as long as waking another thread."""

_Call = namedtuple("_Call", "out gate_up num_rows size activation counter")
_GELU, _GELU_TANH, _RELU = map(ACTIVATIONS.index, ("gelu", "gelu_tanh", "relu"))
_TWICE_ROOT = np.float32(2 * (2 / np.pi) ** 0.5)


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = problem.refuse(MOST_ROWS, "gate_up has gaps between its rows")
    return reason or refuse(device, gate_up=problem.dtype)


def run(gate_up: Tensor, activation: str) -> Tensor:
    """``[..., size]``."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    like, sizes = _describe(gate_up.dtype, out.numel() // size, size, ACTIVATIONS.index(activation))
    run_together(
        _gate_rows, DeviceInfo.of(gate_up.device).num_workers if out.numel() > _SMALL else 1,
        out.data_ptr(), gate_up.data_ptr(), like, sizes, np.zeros(1, np.int64),
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=4096)
def _describe(dtype: torch.dtype, *sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an empty array of the type of ``gate_up``, and the sizes."""
    return flat(torch.empty(0, dtype=dtype, device="cpu")), np.array(sizes, np.int64)


@entry()
def _gate_rows(parallel, num_threads, out, gate_up, like, sizes, counter):
    call = _Call(
        array_at(out, like.dtype), array_at(gate_up, like.dtype), sizes[0], sizes[1], sizes[2],
        counter,
    )  # fmt: skip
    on_team(parallel, num_threads, no_scratch, _take_rows, (call,))


@inner()
def _take_rows(call, scratch):
    """Compute rows until all are taken."""
    size = call.size
    while True:
        row = take_number(call.counter)
        if row >= call.num_rows:
            return
        to, gate_at, up_at = row * size, 2 * row * size, (2 * row + 1) * size
        for d in range(0, size, 16):
            gate = load_first(call.gate_up, gate_at + d, size - d)
            store_first(call.out, to + d, _activate(gate, call.activation), size - d)
            gate = load_first(call.out, to + d, size - d)  # rounded to the type
            up = load_first(call.gate_up, up_at + d, size - d)
            store_first(call.out, to + d, mul(gate, up), size - d)


@inner(inline="always")
def _activate(x, activation):
    """SiLU is ``x * sigmoid(x)``, and GELU by tanh ``x * sigmoid(2 * sqrt(2 / pi) * (x + …))``."""
    if activation == _RELU:
        return where_less(x, zeros(), zeros(), x)
    if activation == _GELU:
        return mul(x, _normal_cdf(x))
    exponent = x
    if activation == _GELU_TANH:
        cubic = mul(mul(x, x), x)
        exponent = mul(fma(cubic, splat(np.float32(0.044715)), x), splat(_TWICE_ROOT))
    exponent, most = mul(exponent, splat(-LOG2_E)), splat(np.float32(127))
    power = exp2(where_less(most, exponent, most, exponent))
    return div(x, add(splat(np.float32(1)), power))


_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
_TAIL_TERMS = tuple(np.float32(term / np.log(2) - (power == 0)) for power, term in enumerate(_ERFC))
"""Terms of ``P`` below in base 2, with the factor 1/2."""


@inner(inline="always")
def _normal_cdf(x):
    """``erfc(-x / sqrt(2)) / 2``, which keeps its digits in the tail.

    For z >= 0 and ``t = 1 / (1 + z / 2)``, ``erfc(z)`` is ``t * exp(P(t) - z²)`` to a relative
    1.2e-7 (Numerical Recipes, ``erfcc``).
    """
    one = splat(np.float32(1))
    t = div(one, fma(maximum(x, sub(zeros(), x)), splat(np.float32(0.125**0.5)), one))
    exponent = splat(_TAIL_TERMS[9])
    for term in _TAIL_TERMS[8::-1]:
        exponent = fma(exponent, t, splat(term))
    exponent = fma(mul(x, x), splat(-LOG2_E / np.float32(2)), exponent)
    tail = mul(t, exp2(exponent))
    return where_less(x, zeros(), tail, sub(one, tail))
