"""Helpers of the Triton window kernels: tiles of rows, of bias, of mask, and of scores.

Scores are in base 2: products are multiplied by ``scale · log2(e)`` and the bias by ``log2(e)``. A
program's bias tile is the same in every window, so it is loaded once, rounded to float16, and kept
in registers or shared memory, if it fits. Windows of one region, which most are, skip the mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....tiles.triton.online_softmax import LOG2_E
from .. import problem

NO_BIAS, TABLE, DENSE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RELOADED, REGISTERS, SHARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_MASK, REGIONS, MATRIX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MAX_LOGIT_SCALE = tl.constexpr(problem.MAX_LOGIT_SCALE)
LARGEST = tl.constexpr(60_000.0)  # bound of a cached bias times log2(e), to fit in float16


@triton.jit
def load_rows(at, rows, stride, D: tl.constexpr, HEAD_SIZE: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """Load tokens of one head of one window, ``[len(rows), D]``; 0 past the end."""
    d = tl.arange(0, D)
    inside = (rows < NUM_TOKENS)[:, None] & (d < HEAD_SIZE)[None, :]
    return tl.load(at + rows[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def head_scale(logit_scale, softmax_scale, head, COSINE: tl.constexpr):
    """The factor of a head's q·k."""
    scale = softmax_scale
    if COSINE:
        learned = tl.minimum(tl.load(logit_scale + head).to(tl.float32), MAX_LOGIT_SCALE)
        scale = softmax_scale * tl.exp2(learned * LOG2_E)
    return scale


@triton.jit
def normalise(x, eps, COSINE: tl.constexpr):
    """Divide rows by their norms, if the attention is cosine attention."""
    if COSINE:
        wide = x.to(tl.float32)
        x = (wide * inverse_norm(wide, eps)[:, None]).to(x.dtype)
    return x


@triton.jit
def inverse_norm(wide, eps):
    """``1 / max(|row|, eps)``."""
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), eps)


@triton.jit
def normalise_gradient(gradient, x, eps):
    """Turn gradients of normalised rows into the rows', and return ``Σ unit · gradient`` a row."""
    wide = x.to(tl.float32)
    inverse = inverse_norm(wide, eps)
    unit = wide * inverse[:, None]
    along = tl.sum(unit * gradient, 1)
    projected = tl.where(inverse * eps < 1.0, along, 0.0)  # a norm below eps is a constant
    result = (gradient - unit * projected[:, None]) * inverse[:, None]
    if x.dtype == tl.float16:
        # A row of zeros has a gradient of up to 1 / eps. It must stay finite, because it is later
        # multiplied by zeros, and 0 · inf is NaN.
        result = tl.minimum(tl.maximum(result, -65504.0), 65504.0)
    return result, along


@triton.jit
def load_bias(
    bias, offsets, rows, columns, head, centre,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load a tile of bias times log2(e), with -inf past the last key.

    ``TRANSPOSED``: the tile's rows are keys and its columns queries.
    """
    if BIAS == TABLE:
        u = tl.load(offsets + rows, mask=rows < NUM_TOKENS, other=0)[:, None]
        other_u = tl.load(offsets + columns, mask=columns < NUM_TOKENS, other=0)[None, :]
        difference = other_u - u if TRANSPOSED else u - other_u
        at = (difference + centre) * num_heads + head
    else:
        i, j = rows[:, None], columns[None, :]
        at = (head * NUM_TOKENS + (j if TRANSPOSED else i)) * NUM_TOKENS + (i if TRANSPOSED else j)
    inside = (rows < NUM_TOKENS)[:, None] & (columns < NUM_TOKENS)[None, :]
    if BIAS == NO_BIAS:
        value = tl.zeros_like(at).to(tl.float32)
    else:
        value = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    is_key = (rows < NUM_TOKENS)[:, None] if TRANSPOSED else (columns < NUM_TOKENS)[None, :]
    return tl.where(is_key, value * LOG2_E, float("-inf"))


@triton.jit
def load_cached_bias(
    bias, offsets, rows, columns, head, centre, BIAS_CACHE: tl.constexpr,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load a tile of bias as the float16 that is kept."""
    tile = load_bias(
        bias, offsets, rows, columns, head, centre, num_heads, NUM_TOKENS, BIAS, TRANSPOSED
    )
    if BIAS == DENSE:  # a finite mask must stay finite, or a row masked throughout would be 0
        fits = tl.minimum(tl.maximum(tile, -LARGEST), LARGEST)
        tile = tl.where(tl.abs(tile) < float("inf"), fits, tile)
    if BIAS_CACHE == SHARED:
        tile = tl.maximum(tile, -LARGEST)  # -inf times a zero of the identity would be NaN
    return tile.to(tl.float16)


@triton.jit
def load_bias_tiles(
    bias, offsets, rows, first_column, head, centre, TILES: tl.constexpr, BIAS_CACHE: tl.constexpr,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load the bias tiles of adjacent columns as float16; empty if they are reloaded instead."""
    tiles = ()
    for t in tl.static_range(0 if BIAS_CACHE == RELOADED else len(TILES)):
        columns = first_column + tl.arange(0, TILES[t])
        tile = load_cached_bias(
            bias, offsets, rows, columns, head, centre, BIAS_CACHE, num_heads, NUM_TOKENS, BIAS,
            TRANSPOSED,
        )  # fmt: skip
        tiles += (tile,)  # type: ignore[assignment]
        first_column += TILES[t]
    return tiles


@triton.jit
def add_bias(
    s, scale, cached, bias, offsets, rows, columns, head, centre, BIAS_CACHE: tl.constexpr,
    num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scale a tile of products in float32, so that all kernels get the same scores, and add bias.

    A tile in shared memory is added by a product with the identity, which saves registers.
    """
    if BIAS_CACHE == SHARED:
        row, column = tl.arange(0, s.shape[0]), tl.arange(0, s.shape[0])
        identity = (row[:, None] == column[None, :]).to(tl.float16)
        return tl.dot(identity, cached, s * scale)
    if BIAS_CACHE == REGISTERS:
        return s * scale + cached.to(tl.float32)
    return s * scale + load_bias(
        bias, offsets, rows, columns, head, centre, num_heads, NUM_TOKENS, BIAS, TRANSPOSED
    )


@triton.jit
def apply_mask(
    s, mask, is_masked, rows, columns, mask_value, row_stride,
    NUM_TOKENS: tl.constexpr, MASK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Add a window's mask to a tile of scores; a window without ``is_masked`` has one region."""
    if MASK == REGIONS:  # noqa: SIM102
        if is_masked != 0:
            row_region = tl.load(mask + rows, mask=rows < NUM_TOKENS, other=0)
            column_region = tl.load(mask + columns, mask=columns < NUM_TOKENS, other=0)
            is_same = row_region[:, None] == column_region[None, :]
            s = tl.where(is_same, s, s + mask_value)
    if MASK == MATRIX:
        i, j = rows[:, None], columns[None, :]
        at = (j * row_stride + i) if TRANSPOSED else (i * row_stride + j)
        inside = (i < NUM_TOKENS) & (j < NUM_TOKENS)
        s = s + tl.load(mask + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    return s


@triton.jit
def score_tile(
    a, b, scale, cached, bias, offsets, mask, is_masked, rows, columns, head, centre, mask_value,
    mask_row, num_heads, NUM_TOKENS: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    BIAS_CACHE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2: ``scale · log2(e) · a bᵀ`` with bias and mask.

    ``cached`` is the bias tile, unless ``BIAS_CACHE`` is ``RELOADED``. ``mask`` points to the
    window's mask. ``TRANSPOSED``: the rows are keys (``a``) and the columns queries (``b``).
    """
    s = tl.dot(a, b.T, input_precision="tf32x3")
    s = add_bias(
        s, scale * LOG2_E, cached, bias, offsets, rows, columns, head, centre, BIAS_CACHE,
        num_heads, NUM_TOKENS, BIAS, TRANSPOSED,
    )  # fmt: skip
    return apply_mask(
        s, mask, is_masked, rows, columns, mask_value, mask_row, NUM_TOKENS, MASK, TRANSPOSED
    )


@triton.jit
def find_pivot(lse):
    """A row's log-sum-exp in base 2; 0 for a row without keys, whose weights are 0."""
    return tl.where(lse == float("-inf"), 0.0, lse * LOG2_E)


@triton.constexpr_function
def has_exact_pivots(bias, mask, bias_cache):
    """Whether gradients take pivots from ``find_pivots``: finite masks may hide all of a row.

    Next to scores of -1e9 the log-sum-exp has lost the logarithm of the sum. Regions hide no row,
    and a bias that is kept as float16 is bounded.
    """
    return mask == MATRIX or (bias == DENSE and bias_cache == RELOADED)


@triton.jit
def load_pivots(lse, at, is_row, second, EXACT: tl.constexpr):
    """Load what is subtracted from rows of scores: pivots, then logarithms of sums if ``EXACT``.

    ``lse``: log-sum-exps, or the result of ``find_pivots`` with sums ``second`` elements after the
    pivots. Pivots are inf past the end.
    """
    pivot = tl.load(lse + at, mask=is_row, other=float("inf"))
    log_sum = pivot
    if EXACT:
        log_sum = tl.load(lse + second + at, mask=is_row, other=0.0)
    else:
        pivot = find_pivot(pivot)
    return pivot, log_sum


@triton.jit
def load_mask_flag(needs_mask, window, MASK: tl.constexpr, ALWAYS: tl.constexpr):
    """Load whether a window has several regions; 1 with ``ALWAYS``, if masking costs no more."""
    answer = 1
    if MASK == REGIONS and not ALWAYS:
        answer = tl.load(needs_mask + window)
    return answer


@triton.jit
def find_masked_windows(
    needs_mask,  # int32 [num_masks]
    regions,  # [num_masks, num_tokens]
    num_tokens,
    window_stride,
    WIDTH: tl.constexpr,
):
    """Write a flag for each window of an image: whether it has more than one region."""
    window = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, WIDTH)
    first = tl.load(regions + window * window_stride)
    region = tl.load(regions + window * window_stride + token, mask=token < num_tokens, other=0)
    differs = (region != first) & (token < num_tokens)
    tl.store(needs_mask + window, tl.max(differs.to(tl.int32), 0))
