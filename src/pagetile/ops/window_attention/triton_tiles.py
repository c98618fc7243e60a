"""What the GPU kernels of window attention share: tiles of rows, of bias and of mask.

Scores live in powers of two: products are multiplied by ``scale · log2(e)``, the bias by
``log2(e)``. A tile of bias is the same for every window, so a program loads it once, rounded to
float16 as the products' operands are, and keeps it in registers. Most windows of a shifted map
hold one region: those pay for no mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...tiles.triton.online_softmax import LOG2_E

NO_BIAS, TABLE, DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NOWHERE, REGISTERS, SHARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_MASK, REGIONS, MATRIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MAX_LOGIT_SCALE = tl.constexpr(4.605170185988092)


@triton.jit
def load_rows(at, rows, stride, D: tl.constexpr, HEAD_SIZE: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """Some tokens of one head of one window, ``[len(rows), D]``; 0 past the end."""
    d = tl.arange(0, D)
    inside = (rows < NUM_TOKENS)[:, None] & (d < HEAD_SIZE)[None, :]
    return tl.load(at + rows[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def head_scale(logit_scale, softmax_scale, head, COSINE: tl.constexpr):
    """What multiplies a head's q·k."""
    scale = softmax_scale
    if COSINE:
        learned = tl.minimum(tl.load(logit_scale + head).to(tl.float32), MAX_LOGIT_SCALE)
        scale = softmax_scale * tl.exp2(learned * LOG2_E)
    return scale


@triton.jit
def normalise(x, eps, COSINE: tl.constexpr):
    """Rows as they enter a product."""
    if COSINE:
        wide = x.to(tl.float32)
        x = (wide * inverse_norm(wide, eps)[:, None]).to(x.dtype)
    return x


@triton.jit
def inverse_norm(wide, eps):
    """``1 / max(|row|, eps)``."""
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), eps)


@triton.jit
def unnormalise(gradient, x, eps):
    """From the gradient of normalised rows to the rows', and each row's share in the scale's."""
    wide = x.to(tl.float32)
    inverse = inverse_norm(wide, eps)
    unit = wide * inverse[:, None]
    along = tl.sum(unit * gradient, 1)
    kept = tl.where(inverse * eps < 1.0, along, 0.0)  # below eps the norm is a constant
    result = (gradient - unit * kept[:, None]) * inverse[:, None]
    if x.dtype == tl.float16:
        # A row of zeros has a gradient of up to 1 / eps, which must not become infinite: what
        # made it is 0 as well, and 0 · inf is no number.
        result = tl.minimum(tl.maximum(result, -65504.0), 65504.0)
    return result, along


@triton.jit
def load_bias(
    bias, offsets, rows, columns, head, centre,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """A tile of bias in powers of two; -inf where there is no key.

    ``FLIPPED``: the tile's rows are keys and its columns queries; there, too, keys end.
    """
    if BIAS == TABLE:
        u = tl.load(offsets + rows, mask=rows < NUM_TOKENS, other=0)[:, None]
        other_u = tl.load(offsets + columns, mask=columns < NUM_TOKENS, other=0)[None, :]
        difference = other_u - u if FLIPPED else u - other_u
        at = (difference + centre) * num_heads + head
    else:
        i, j = rows[:, None], columns[None, :]
        at = (head * NUM_TOKENS + (j if FLIPPED else i)) * NUM_TOKENS + (i if FLIPPED else j)
    inside = (rows < NUM_TOKENS)[:, None] & (columns < NUM_TOKENS)[None, :]
    if BIAS == NO_BIAS:
        value = tl.zeros_like(at).to(tl.float32)
    else:
        value = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    is_key = (rows < NUM_TOKENS)[:, None] if FLIPPED else (columns < NUM_TOKENS)[None, :]
    return tl.where(is_key, value * LOG2_E, float("-inf"))


@triton.jit
def load_biases(
    bias, offsets, rows, first_column, head, centre, TILES: tl.constexpr, KEPT: tl.constexpr,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """Bias for neighbouring tiles of columns, float16, if it is to be kept."""
    tiles = ()
    for t in tl.static_range(0 if KEPT == NOWHERE else len(TILES)):
        columns = first_column + tl.arange(0, TILES[t])
        tile = load_bias(
            bias, offsets, rows, columns, head, centre, num_heads, NUM_TOKENS, BIAS, FLIPPED
        )
        if KEPT == SHARED:
            tile = tl.maximum(tile, -60000.0)  # 0 · -inf is no number
        tiles += (tile.to(tl.float16),)  # type: ignore[assignment]
        first_column += TILES[t]
    return tiles


@triton.jit
def scale_and_add_bias(
    s, scale, kept, bias, offsets, rows, columns, head, centre, KEPT: tl.constexpr,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """A tile of products into scores with their bias.

    The scale comes after the product, in float32: all kernels must find the same scores. From
    shared memory the bias comes by a product with the unit matrix: no register holds it then.
    """
    if KEPT == SHARED:
        row, column = tl.arange(0, s.shape[0]), tl.arange(0, s.shape[0])
        unit = (row[:, None] == column[None, :]).to(tl.float16)
        return tl.dot(unit, kept, s * scale)
    if KEPT == REGISTERS:
        return s * scale + kept.to(tl.float32)
    return s * scale + load_bias(
        bias, offsets, rows, columns, head, centre, num_heads, NUM_TOKENS, BIAS, FLIPPED
    )


@triton.jit
def add_mask(
    s, mask, mixed, rows, columns, mask_value, row_stride,
    NUM_TOKENS: tl.constexpr, MASK: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """A tile of scores plus a window's mask; a window of one region (not ``mixed``) has none."""
    if MASK == REGIONS:  # noqa: SIM102
        if mixed != 0:
            mine = tl.load(mask + rows, mask=rows < NUM_TOKENS, other=0)
            theirs = tl.load(mask + columns, mask=columns < NUM_TOKENS, other=0)
            s = tl.where(mine[:, None] == theirs[None, :], s, s + mask_value)
    if MASK == MATRIX:
        i, j = rows[:, None], columns[None, :]
        at = (j * row_stride + i) if FLIPPED else (i * row_stride + j)
        inside = (i < NUM_TOKENS) & (j < NUM_TOKENS)
        s = s + tl.load(mask + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    return s


@triton.jit
def find_pivot(lse):
    """A row's log-sum-exp in powers of two; 0 if it saw no key, and has no weight to lose."""
    return tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)


@triton.jit
def is_mixed(mixed, window, MASK: tl.constexpr, ALWAYS: tl.constexpr):
    """Whether a window holds several regions; one tile is masked sooner than it is asked."""
    answer = 1
    if MASK == REGIONS and not ALWAYS:
        answer = tl.load(mixed + window)
    return answer


@triton.jit
def find_mixed(
    mixed,  # int32 [num_masks]
    regions,  # [num_masks, num_tokens]
    num_tokens,
    window_stride,
    WIDTH: tl.constexpr,
):
    """Note for each window of an image whether it holds more than one region."""
    window = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, WIDTH)
    first = tl.load(regions + window * window_stride)
    region = tl.load(regions + window * window_stride + token, mask=token < num_tokens, other=0)
    differs = (region != first) & (token < num_tokens)
    tl.store(mixed + window, tl.max(differs.to(tl.int32), 0))
