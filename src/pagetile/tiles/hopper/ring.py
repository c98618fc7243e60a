"""Rings of tiles in shared memory, between a producer warp and consumer warpgroups.

The producer waits until a slot is *empty* and starts copies into it; when all bytes have arrived it
is *full*. Every consumer waits for that, reads, and releases the slot::

            wait empty ─ copies ─▶ full
    slot        ▲                    │
                └── release (×C) ◀───┘ wait full

Use number ``n`` of a ring of ``S`` slots takes slot ``n % S`` for the ``n // S``-th time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .record import record


@gluon.constexpr_function
def _atoms(rows, columns):
    """Layout of a tile of swizzled atoms of 8 rows × 64 columns, row of atoms after row of atoms.

    A page's rows are then contiguous in shared memory, and a single TMA copy fills them. With
    atoms in column order it takes a copy for every 64 columns.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    bases += [[0, 64 << i] for i in range((int(columns) // 64).bit_length() - 1)]
    bases += [[8 << i, 0] for i in range((int(rows) // 8).bit_length() - 1)]
    return gl.SharedLinearLayout(bases, [], 1024)


@record
class PipelineBarriers:
    """A full and an empty barrier for each slot of each stream."""

    full: gl.shared_memory_descriptor  # [STREAMS * STAGES, 1]
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def slot(self, stream, use):
        """The slot of a stream's ``use``-th item."""
        return stream * self.STAGES + use % self.STAGES

    @gluon.jit
    def wait_empty(self, stream, use):
        """Wait until all consumers have released the slot's previous use, if there was one."""
        mbarrier.wait(self.empty.index(self.slot(stream, use)), (use // self.STAGES & 1) ^ 1)

    @gluon.jit
    def expect(self, stream, use, BYTES: gl.constexpr):
        """Expect the bytes of copies; returns the barrier that the copies signal."""
        ready = self.full.index(self.slot(stream, use))
        mbarrier.expect(ready, BYTES)
        return ready

    @gluon.jit
    def fill(self, stream, use):
        """Signal that this producer has filled its part of the slot without TMA."""
        mbarrier.arrive(self.full.index(self.slot(stream, use)))

    @gluon.jit
    def wait_full(self, stream, use):
        """Wait until a use's bytes have arrived."""
        mbarrier.wait(self.full.index(self.slot(stream, use)), use // self.STAGES & 1)

    @gluon.jit
    def release(self, stream, use):
        """Signal that this consumer has read the use; Gluon synchronises its warps first."""
        mbarrier.arrive(self.empty.index(self.slot(stream, use)))

    @gluon.jit
    def release_if(self, stream, use, is_read):
        """Release a use if ``is_read``; without a branch."""
        mbarrier.arrive(self.empty.index(self.slot(stream, use)), pred=is_read)

    @gluon.jit
    def release_last(self, stream, use):
        """Release the previous use, if there was one; without a branch."""
        last = self.slot(stream, use + self.STAGES - 1)
        mbarrier.arrive(self.empty.index(last), pred=use > 0)


@gluon.jit
def make_barriers(
    STREAMS: gl.constexpr, STAGES: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Make the barriers of slots that are all empty."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STREAMS * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STREAMS * STAGES, 1], BARRIER)
    for i in gl.static_range(STREAMS * STAGES):
        mbarrier.init(full.index(i), PRODUCERS)
        mbarrier.init(empty.index(i), CONSUMERS)
    return PipelineBarriers(full, empty, STAGES)


@record
class Ring:
    """``STAGES`` slots of ``PARTS`` tiles each."""

    tiles: gl.shared_memory_descriptor  # [STAGES * PARTS, rows, columns]
    barriers: PipelineBarriers
    PARTS: gl.constexpr

    @gluon.jit
    def tile(self, use, PART: gl.constexpr):
        """One tile of a use, in shared memory."""
        return self.tiles.index(self.barriers.slot(0, use) * self.PARTS + PART)

    @gluon.jit
    def operand(self, use, ATOMS: gl.constexpr):
        """A use's tile as an operand of ``wgmma``."""
        tile = self.tile(use, 0)
        if ATOMS:
            ROWS: gl.constexpr = tile.shape[0]
            COLUMNS: gl.constexpr = tile.shape[1]
            tile = tile._reinterpret(tile.dtype, [ROWS, COLUMNS], _atoms(ROWS, COLUMNS))
        return tile

    @gluon.jit
    def expect(self, use):
        """Expect a whole slot's bytes; returns the barrier that the copies signal."""
        NUMBERS: gl.constexpr = self.PARTS * self.tiles.shape[1] * self.tiles.shape[2]
        return self.barriers.expect(0, use, NUMBERS * self.tiles.dtype.primitive_bitwidth // 8)


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STREAMS: gl.constexpr = 1,
):
    """Make an empty ring; each of several ``STREAMS`` has its own barriers and share of parts."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tiles = gl.allocate_shared_memory(dtype, [STAGES * PARTS, ROWS, COLUMNS], LAYOUT)
    return Ring(tiles, make_barriers(STREAMS, STAGES, 1, CONSUMERS), PARTS)
