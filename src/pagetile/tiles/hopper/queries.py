"""Queries of bfloat16 as float16, each row times a power of two: for keys of 8 bits.

Float16 holds every 8-bit value, and one instruction converts two of them; to bfloat16 it takes
four. A product's operands have one type, so queries become float16, too. Its three more bits of
mantissa hold a bfloat16 exactly, but its exponents are few: so each row is multiplied by the power
of two that brings its largest number to 2 ** 14 .. 2 ** 15. Numbers from 2 ** -31 of that on stay
exact; smaller ones are rounded to multiples of 2 ** -38 of it, far below the rounding of sums in
float32. Scores are multiplied by the inverse of the row's power.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .names import barrier
from .record import record
from .ring import PipelineBarriers, make_barriers

__all__ = ["HalfQueries", "convert_queries", "make_half_queries"]

LARGEST = gl.constexpr(14)  # exponent of a row's largest number
BIAS = gl.constexpr(127)  # of float32's exponents


@record
class HalfQueries:
    """What float16 queries were divided by, and when bfloat16 ones have arrived."""

    factors: gl.shared_memory_descriptor  # float32 [SLOTS, rows]
    arrived: PipelineBarriers

    @gluon.jit
    def load(self, slot, LAYOUT: gl.constexpr):
        """The factors of a tile's rows."""
        return self.factors.index(slot).load(LAYOUT)


@gluon.jit
def make_half_queries(ROWS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr):
    """Memory for ``STAGES`` uses of ``PARTS`` tiles."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * PARTS, ROWS], LAYOUT)
    return HalfQueries(factors, make_barriers(1, STAGES, 1, 1))


@gluon.jit
def convert_queries(ring, halves, use, is_negative, config):
    """Convert a use's tiles in place once they have arrived, and fill the use.

    ``is_negative``: change their signs, instead of the keys'.
    """
    ROWS: gl.constexpr = ring.tiles.shape[1]
    STEP: gl.constexpr = 4 * gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    halves.arrived.wait_full(0, use)
    for part in gl.static_range(ring.PARTS):
        tile = ring.tile(use, part)
        half = tile._reinterpret(gl.float16, tile.shape, tile.layout)
        factors = halves.factors.index(ring.barriers.slot(0, use) * ring.PARTS + part)
        for first in gl.static_range(0, ROWS, STEP):
            q = tile.slice(first, STEP).load(LAYOUT).to(gl.float32)
            factor, inverse = _find_factors(gl.max(gl.abs(q), 1))
            factor = gl.where(is_negative, -factor, factor)
            half.slice(first, STEP).store((q * factor[:, None]).to(gl.float16))
            factors.slice(first, STEP).store(inverse)
    if not config.LATE_FENCE:
        fence_async_shared()
    barrier()
    ring.barriers.fill(0, use)


@gluon.jit
def _find_factors(largest):
    """Powers of two that bring numbers to 2 ** LARGEST, and their inverses; both are normal."""
    exponent = largest.to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(gl.maximum(exponent, LARGEST + 1), 2 * BIAS)
    factor = 2 * BIAS + LARGEST - exponent << 23
    inverse = exponent - LARGEST << 23
    return factor.to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)
