"""RMS norms as Transformers' models round them."""

import triton
import triton.language as tl


@triton.jit
def normalise(x, scale, weight, KIND: tl.constexpr, dtype: tl.constexpr):
    """``x * scale * weight`` in float32, rounded to ``dtype`` where a kind of ``rms_norm`` does.

    ``scale`` is the reciprocal root of the mean of a row's squares.
    """
    x *= scale
    if KIND == "rounded":
        x = x.to(dtype).to(tl.float32)
    if KIND == "shifted":
        weight += 1.0
    return (x * weight).to(dtype).to(tl.float32)
