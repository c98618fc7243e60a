"""Softmax of a tile of scores in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.online_softmax import LOG2_E, finite
from .record import record


@record
class Scoring:
    """The parameters that turn products into scores."""

    window: gl.tensor
    scale: gl.tensor  # of products, or with a cap of their tanh; times log2(e)
    inner: gl.tensor  # of products before tanh, with a cap
    slopes: gl.tensor  # pointer to [num_heads] float32
    lists: gl.tensor  # pointer to the lists of tiles, of block-sparse attention

    @gluon.jit
    def times(self, factor, HAS_CAP: gl.constexpr):
        """The same for products that have to be multiplied by ``factor``."""
        scale = self.scale
        inner = self.inner
        if HAS_CAP:
            inner *= factor
        else:
            scale *= factor
        return Scoring(self.window, scale, inner, self.slopes, self.lists)


# (2 ** x - 1) / (2 ** x + 1) for eight elements in a thread's order: two columns of a row, the same
# of the row eight below, then the next two columns of both. Four elements of a row share one
# reciprocal, of their product; elements of two rows must not, since a row past a sequence's end
# belongs to the next sequence. x is clamped to 30, where the result is 1 up to rounding and the
# product does not overflow. 0f3F800000 is 1.0, 0fBF800000 -1.0.
_TANH = gl.constexpr(
    "{ .reg .f32 r, ab, cd, a, b, c, d;"
    + "".join(
        "".join(
            f"min.NaN.f32 ${i}, ${8 + i}, 0f41F00000; ex2.approx.ftz.f32 ${i}, ${i};"
            f"add.f32 {x}, ${i}, 0f3F800000; add.f32 ${i}, ${i}, 0fBF800000;"
            for i, x in zip(four, "abcd", strict=True)
        )
        + "mul.f32 ab, a, b; mul.f32 cd, c, d; mul.f32 r, ab, cd; rcp.approx.ftz.f32 r, r;"
        "mul.f32 cd, r, cd; mul.f32 ab, r, ab;"
        + "".join(
            f"mul.f32 {x}, {rest}, {x}; mul.f32 ${i}, ${i}, {x};"
            for i, x, rest in zip(four, "badc", ("cd", "cd", "ab", "ab"), strict=True)
        )
        for four in ((0, 1, 4, 5), (2, 3, 6, 7))
    )
    + "}"
)
_EIGHT_FROM_EIGHT = gl.constexpr(",".join(["=&f"] * 8 + ["f"] * 8))
# A capped score lies between -cap and cap, so a constant can replace a row's maximum. With cap / 8
# weights lie between 2 ** -104 and 2 ** 81 for the largest cap, 64. So bfloat16 holds them, and
# float32 their sums over 2 ** 20 keys, times values of up to 2 ** 25.
PART_OF_CAP = gl.constexpr(1 / 8)


@gluon.jit
def cap(s, inner):
    """Compute tanh of products times ``inner``, to 2.5 * 2 ** -23 plus the error of ``ex2.approx``.

    An element's last bit may depend on others of its row, so keys that the row does not see must
    be masked before.

    ``tanh.approx`` is faster, with an error of 2 ** -11: six times what tests allow.
    """
    powers = s * (inner * (2 * LOG2_E))
    return gl.inline_asm_elementwise(
        _TANH, _EIGHT_FROM_EIGHT, [powers], gl.float32, is_pure=True, pack=8
    )


@gluon.jit
def add_alibi(s, causal_limit, slope):
    """Add the row's slope times the key's distance from ``causal_limit``, the row's own key."""
    key = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    # A thread's columns are its lane's two bits plus constants. Converted separately, only the
    # lane's part takes instructions; conversions of whole columns would use the exponential unit.
    first = (key & 6).to(gl.float32)[None, :] - causal_limit.to(gl.float32)[:, None]
    further = (key & ~6).to(gl.float32)
    return gl.fma(slope[:, None], first + further[None, :], s)


@gluon.jit
def apply_mask(s, causal_limit, num_keys, other, scoring, config):
    """Set scores of invisible keys to ``other``; ``causal_limit`` is each row's own key."""
    N: gl.constexpr = s.shape[1]
    key = gl.arange(0, N, gl.SliceLayout(0, s.type.layout))[None, :]
    seen = (
        key <= gl.minimum(causal_limit, num_keys - 1)[:, None] if config.CAUSAL else key < num_keys
    )
    if config.HAS_WINDOW:
        seen = seen & (key > (causal_limit - scoring.window)[:, None])
    return gl.where(seen, s, other)


@gluon.jit
def update_softmax(s, m, l, scale):
    """Online softmax: a tile's weights, the factor of earlier sums, and the new ``m`` and ``l``."""
    new_m = gl.maximum(m, gl.max(s, 1) * scale)
    pivot = finite(new_m)
    p = gl.exp2(gl.fma(s, scale, -pivot[:, None]))
    decay = gl.exp2(m - pivot)
    return p, decay, new_m, l * decay + gl.sum(p, 1)


@gluon.jit
def bounded_weights(s, scale):
    """Weights of a tile's capped scores, with a constant for the rows' maximum: ``bound_of``."""
    return gl.exp2(gl.fma(s, scale, -PART_OF_CAP * scale))


@gluon.jit
def bound_of(l, scale):
    """The constant that replaces the maximum of rows with sums ``l``; -inf without keys."""
    return gl.where(l == 0.0, float("-inf"), PART_OF_CAP * scale)


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """Round weights to 16 bits, and pack neighbours in an int32.

    As loop-carried 16-bit values ptxas would swap the halves of registers at the end of each
    iteration and back at the beginning: an eighth of the loop's instructions.
    """
    M: gl.constexpr = weights.shape[0]
    N: gl.constexpr = weights.shape[1]
    convert: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    asm: gl.constexpr = "cvt.rn." + convert + ".f32 $0, $2, $1;"
    low, high = gl.split(gl.reshape(weights, [M, N // 2, 2]))
    return gl.inline_asm_elementwise(asm, "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Unpack the pairs of ``pack``, into a layout that needs no data movement."""
    M: gl.constexpr = pairs.shape[0]
    N: gl.constexpr = pairs.shape[1]
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    numbers = gl.reshape(gl.join(low, high), [M, 2 * N])
    return gl.convert_layout(numbers, LAYOUT, assert_trivial=True)
