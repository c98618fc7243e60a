"""Each tile's metadata, from the warp that loads keys to the computing warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .record import record

# Fields. Keys count from the first of the tile's rightmost tile.
NUM_TILES = gl.constexpr(0)  # of keys; 0: there is no more work
NUM_RIGHT = gl.constexpr(1)  # masked tiles after the rightmost
NUM_FULL = gl.constexpr(2)  # tiles that need no mask
CAUSAL_LIMIT = gl.constexpr(3)  # the first token's own key
NUM_KEYS = gl.constexpr(4)  # keys from the rightmost tile's first on
TOKEN = gl.constexpr(5)  # the first token's row in q
NUM_TOKENS = gl.constexpr(6)  # from there to the sequence's end
HEAD = gl.constexpr(7)
RECORD = gl.constexpr(8)  # where the tile's list begins, if SPARSE
SPLIT = gl.constexpr(9)  # index of the split, if SPLITS
COUNT = gl.constexpr(10)  # number of the tile's splits
SLOT = gl.constexpr(11)  # scratch slot of the first split
K_SCALE = gl.constexpr(12)  # bits of the head's scales
V_SCALE = gl.constexpr(13)


@record
class TileMetadata:
    """Each tile's metadata in shared memory, from the loading warp to the computing warpgroups."""

    fields: gl.shared_memory_descriptor  # [STAGES * FIELDS, 1] int32
    STAGES: gl.constexpr
    FIELDS: gl.constexpr

    @gluon.jit
    def write(self, use, FIELD: gl.constexpr, value):
        """Write a field of a use."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        field = self.fields.index(use % self.STAGES * self.FIELDS + FIELD)
        field.store(gl.full([1], value, gl.int32, LAYOUT))

    @gluon.jit
    def read(self, use, FIELD: gl.constexpr):
        """Read a field of a use, which must be full."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.fields.index(use % self.STAGES * self.FIELDS + FIELD).load(LAYOUT), 0)


@gluon.jit
def make_tile_metadata(STAGES: gl.constexpr, FIELDS: gl.constexpr):
    """Shared memory for the metadata of ``STAGES`` tiles."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [STAGES * FIELDS, 1], LAYOUT)
    return TileMetadata(fields, STAGES, FIELDS)
