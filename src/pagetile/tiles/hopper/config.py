"""Constants that the forward kernel is compiled for."""

from triton.experimental.gluon import language as gl

from .record import record

ROWS = gl.constexpr(64)  # of a warpgroup
COLUMNS = gl.constexpr(64)  # of a swizzled atom: 128 bytes


@record
class KernelConfig:
    """The constants that the forward kernel is compiled for."""

    HEAD_SIZE: gl.constexpr
    V_SIZE: gl.constexpr
    BLOCK_SIZE: gl.constexpr  # 0: keys are ragged, not paged
    BOX: gl.constexpr
    ATOMS: gl.constexpr
    GATHER: gl.constexpr
    PACK: gl.constexpr
    WARPGROUPS: gl.constexpr
    TOKENS: gl.constexpr  # query tokens of a tile
    CAUSAL: gl.constexpr
    HAS_WINDOW: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_ALIBI: gl.constexpr
    HAS_SINKS: gl.constexpr
    UNIFORM: gl.constexpr
    STAGED: gl.constexpr
    PINGPONG: gl.constexpr
    SPARSE: gl.constexpr  # tiles of keys are those on a list
    SPLITS: gl.constexpr  # programs may split a tile's keys
    KEY_TILES: gl.constexpr  # tiles of COLUMNS columns that hold a key's columns, if not 1
    DRAWS: gl.constexpr  # programs draw tiles from a shared queue
    EARLY: gl.constexpr  # a warpgroup releases its queries after their last product with keys
    PACKED: gl.constexpr  # format of 8-bit caches, which are gathered; or "none"
    SCALES: gl.constexpr  # scales of 8-bit caches, per "head" or "token"; or "none"
    HOLDS_Q: gl.constexpr  # warpgroups hold their queries in registers; requires EARLY
    BOUNDED: gl.constexpr  # scores are bounded, so that weights need no maximum: see ``softmax``
