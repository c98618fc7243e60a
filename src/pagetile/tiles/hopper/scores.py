"""From products to weights in the forward kernel: scales, cap, ALiBi, mask and softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.online_softmax import LOG2_E
from .config import ROWS
from .metadata import CAUSAL_LIMIT, HEAD, K_SCALE, NUM_KEYS
from .softmax import add_alibi, apply_mask, bounded_weights, cap, update_softmax


@gluon.jit
def start_softmax(
    s, k_scales, use, scoring, exists, SKIPS: gl.constexpr, metadata, tile_use, config,
    WG: gl.constexpr,
):  # fmt: skip
    """Return the weights of a tile's rightmost keys, and what the tile's other keys need.

    That is ``(scoring, slope, weights, causal_limit, m, l)``, the first with the tile's scales.
    ``exists`` is whether there is a tile at all; if not, weights are not computed where ``SKIPS``.
    """
    s = scale_keys(s, k_scales, use)
    scoring = _scale_scores(scoring, metadata, tile_use, config)
    slope = _find_slopes(s, scoring, exists, metadata, tile_use, config)
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    # A thread has rows n and n + 8. Where their tokens are not a constant number apart, both rows'
    # limits would take a register in the loop, so this is the first row's: see _find_row_limits.
    causal_limit = 0
    if ROWS % config.PACK == 0:
        causal_limit = gl.arange(0, ROWS, ROW) // config.PACK
    causal_limit += metadata.read(tile_use, CAUSAL_LIMIT) + WG * (ROWS // config.PACK)
    num_keys = metadata.read(tile_use, NUM_KEYS)
    weights = s
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l = gl.zeros([ROWS], gl.float32, ROW)
    rest = (causal_limit, num_keys, scoring, slope, config)
    if SKIPS:
        if exists:
            weights, m, l = _start_weights(s, m, l, rest)
    else:
        weights, m, l = _start_weights(s, m, l, rest)
    return scoring, slope, weights, causal_limit, m, l


@gluon.jit
def _start_weights(s, m, l, rest):
    """Return the weights of a tile's rightmost keys, and the new ``m`` and ``l``."""
    causal_limit, num_keys, scoring, slope, config = rest
    if config.BOUNDED:
        weights, l = update_bounded_softmax(s, l, causal_limit, num_keys, scoring, True, config)
    else:
        s = finish_scores(s, causal_limit, num_keys, scoring, slope, True, config)
        weights, _, m, l = update_softmax(s, m, l, scoring.scale)
    return weights, m, l


@gluon.jit
def scale_keys(s, k_scales, use):
    """Multiply products by each key's scale, with scales per token."""
    if len(k_scales) > 0:
        scale = k_scales[0].of_use(use).load(gl.SliceLayout(0, s.type.layout))
        s *= scale[None, :]
    return s


@gluon.jit
def _scale_scores(scoring, metadata, tile_use, config):
    """Include the scale of the tile's KV head in the scoring, with scales per head."""
    if config.SCALES == "head":
        scale = metadata.read(tile_use, K_SCALE).to(gl.float32, bitcast=True)
        scoring = scoring.times(scale, config.HAS_CAP)
    return scoring


@gluon.jit
def _find_slopes(s, scoring, exists, metadata, tile_use, config):
    """ALiBi's slope for each row of a tile, divided by the scale of scores; 0.0 without ALiBi."""
    slope = 0.0
    if config.HAS_ALIBI:
        at = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout)) % config.PACK
        at += metadata.read(tile_use, HEAD) * config.PACK
        slope = gl.load(scoring.slopes + at, exists, other=0.0) * (LOG2_E / scoring.scale)
    return slope


@gluon.jit
def _find_row_limits(causal_limit, s, config):
    """Each row's own key."""
    if ROWS % config.PACK > 0:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        causal_limit = row // config.PACK + causal_limit
    return causal_limit


@gluon.jit
def finish_scores(s, causal_limit, num_keys, scoring, slope, masked, config):
    """Apply cap, ALiBi and mask to products; ``scale`` is applied later."""
    causal_limit = _find_row_limits(causal_limit, s, config)
    if config.HAS_CAP:
        if masked:
            s = apply_mask(s, causal_limit, num_keys, 0.0, scoring, config)
        s = cap(s, scoring.inner)
    if config.HAS_ALIBI:
        s = add_alibi(s, causal_limit, slope)
    if masked:
        s = apply_mask(s, causal_limit, num_keys, float("-inf"), scoring, config)
    return s


@gluon.jit
def update_bounded_softmax(s, l, causal_limit, num_keys, scoring, masked, config):
    """Return the weights of a tile's capped and masked products, and the new sum of each row.

    A capped score is bounded, so there is no maximum and no rescaling. The mask comes after the
    exponentials: a branch between them and ``cap`` would keep them from overlapping.
    """
    causal_limit = _find_row_limits(causal_limit, s, config)
    if masked:
        s = apply_mask(s, causal_limit, num_keys, 0.0, scoring, config)
    weights = bounded_weights(cap(s, scoring.inner), scoring.scale)
    if masked:
        weights = apply_mask(weights, causal_limit, num_keys, 0.0, scoring, config)
    return weights, l + gl.sum(weights, 1)
