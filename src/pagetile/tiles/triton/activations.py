"""Activations of a gated feed-forward layer, as torch computes them in float32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, NAME: tl.constexpr):
    """``silu``, ``gelu`` (by the error function), ``gelu_tanh`` or ``relu`` of float32 numbers."""
    if NAME == "silu":
        # x / (1 + exp(-x)): far below 0 the exponential is infinite, and the quotient -0.
        y = x / (1.0 + tl.exp(-x))
    elif NAME == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(inner) = 1 - 2 / (1 + exp(2 inner)), right at both infinities.
        y = 0.5 * x * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)))
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.maximum(x, 0.0)
    return y
