"""Activations of a gated feed-forward layer, as torch computes them in float32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, NAME: tl.constexpr):
    """``silu``, ``gelu`` (by the error function), ``gelu_tanh`` or ``relu`` of float32 values."""
    if NAME == "silu":
        decay = tl.exp(-tl.abs(x))  # never infinite
        y = x * tl.where(x < 0, decay, 1.0) / (1.0 + decay)
    elif NAME == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        decay = tl.exp(-tl.abs(z))
        y = x * tl.where(z < 0, decay, 1.0) / (1.0 + decay)
    elif NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.maximum(x, 0.0)
    return y
