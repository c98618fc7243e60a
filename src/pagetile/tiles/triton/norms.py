"""RMS norms, rounded as Transformers' models round them."""

import triton
import triton.language as tl


@triton.jit
def normalise(x, scale, weight, KIND: tl.constexpr, dtype: tl.constexpr):
    """``x * scale * weight`` in float32, rounded to ``dtype`` where the ``KIND`` of norm does.

    ``scale`` is a row's ``1 / sqrt(mean(x²) + eps)``.
    """
    x *= scale
    if KIND == "rounded":
        x = x.to(dtype).to(tl.float32)
    if KIND == "shifted":
        weight += 1.0
    return (x * weight).to(dtype).to(tl.float32)
