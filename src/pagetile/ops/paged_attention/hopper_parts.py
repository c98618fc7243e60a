"""Heads of decode in one part or two: tuples of tiles in shared memory, operands and sums.

A part is a power of two of columns, as Triton's tensors are; see ``tiles.hopper.layouts``. 8-bit
values are in pairs, and columns of caches, rings and operands count pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...tiles.hopper.layouts import num_parts, part_size, part_start
from ...tiles.hopper.packed import split_packed, widen_packed

__all__ = [
    "add_scores",
    "add_values",
    "as_float32",
    "as_operand",
    "as_operands",
    "columns_of",
    "convert_packed",
    "join_halves",
    "load_operands",
    "make_tiles",
    "no_results",
    "times",
    "times_rows",
]


@gluon.jit
def make_tiles(dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory of ``STAGES`` tiles, or of one if 0, for each part of ``WIDTH`` columns."""
    parts = ()
    for i in gl.static_range(num_parts(WIDTH)):
        tiles = _make_part(dtype, STAGES, ROWS, part_size(WIDTH, i))
        parts = parts + (tiles,)  # type: ignore[assignment] # noqa: RUF005
    return parts


@gluon.jit
def _make_part(dtype: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    # Eight rows beside each other lie in different banks, also where several fit in 128 bytes.
    layout: gl.constexpr = gl.SwizzledSharedLayout(
        8, max(1, 64 // WIDTH), min(8, WIDTH // 8), [1, 0]
    )
    shape: gl.constexpr = [STAGES, ROWS, WIDTH] if STAGES > 0 else [ROWS, WIDTH]
    return gl.allocate_shared_memory(dtype, shape, layout)


@gluon.jit
def as_operand(x, memory, layout: gl.constexpr):
    """Convert by way of shared memory: an operand's registers hold neighbouring columns."""
    memory.store(x)
    return memory.load(layout)


@gluon.jit
def as_operands(parts, memory, layout: gl.constexpr):
    """Every part by ``as_operand``, each through memory of its own."""
    operands = ()
    for i in gl.static_range(len(parts)):
        part = as_operand(parts[i].to(memory[i].dtype), memory[i], layout)
        operands = operands + (part,)  # type: ignore[assignment] # noqa: RUF005
    return operands


@gluon.jit
def load_operands(rings, stage, TRANSPOSED: gl.constexpr, layout: gl.constexpr):
    """The parts of a tile of keys or values, from the rings to registers."""
    operands = ()
    for i in gl.static_range(len(rings)):
        tile = rings[i].index(stage)
        if TRANSPOSED:
            tile = tile.permute((1, 0))
        operands = operands + (tile.load(layout),)  # type: ignore[assignment] # noqa: RUF005
    return operands


@gluon.jit
def as_float32(parts):
    """The parts in float32."""
    numbers = ()
    for i in gl.static_range(len(parts)):
        numbers = numbers + (parts[i].to(gl.float32),)  # type: ignore[assignment] # noqa: RUF005
    return numbers


@gluon.jit
def times(parts, factor):
    """The parts times one number."""
    products = ()
    for i in gl.static_range(len(parts)):
        products = products + (parts[i] * factor,)  # type: ignore[assignment] # noqa: RUF005
    return products


@gluon.jit
def times_rows(parts, factor):
    """The parts times a number for each row."""
    products = ()
    for i in gl.static_range(len(parts)):
        each = gl.convert_layout(factor, gl.SliceLayout(1, parts[i].type.layout))
        products = products + (parts[i] * each[:, None],)  # type: ignore[assignment] # noqa: RUF005
    return products


@gluon.jit
def convert_packed(packed, FORMAT: gl.constexpr, SPLITS: gl.constexpr):
    """Both halves of packed parts: their even and odd columns, or every first and second pair."""
    first, second = (), ()
    for i in gl.static_range(len(packed)):
        if SPLITS:
            one, other = split_packed(packed[i], FORMAT)
        else:
            one, other = widen_packed(packed[i], FORMAT)
        first = first + (one,)  # type: ignore[assignment] # noqa: RUF005
        second = second + (other,)  # type: ignore[assignment] # noqa: RUF005
    return first, second


@gluon.jit
def add_scores(q, k, s):
    """Add the products of queries and keys, part by part."""
    for i in gl.static_range(len(q)):
        s = mma_v2(q[i], k[i], s)
    return s


@gluon.jit
def no_results(v_rings, TILE_M: gl.constexpr, mma: gl.constexpr):
    """Zero accumulators, one for each part of a value's columns."""
    acc = ()
    for i in gl.static_range(len(v_rings)):
        part = gl.full([TILE_M, v_rings[i].shape[2]], 0.0, gl.float32, mma)
        acc = acc + (part,)  # type: ignore[assignment] # noqa: RUF005
    return acc


@gluon.jit
def add_values(p, v, acc, decay):
    """Decayed sums plus weighted values, part by part."""
    sums = ()
    for i in gl.static_range(len(acc)):
        part = mma_v2(p, v[i], acc[i] * decay[:, None])
        sums = sums + (part,)  # type: ignore[assignment] # noqa: RUF005
    return sums


@gluon.jit
def join_halves(even, odd):
    """Accumulators of all columns from those of the even and of the odd ones."""
    joined = ()
    for i in gl.static_range(len(even)):
        both = gl.join(even[i], odd[i]).reshape([even[i].shape[0], 2 * even[i].shape[1]])
        part = gl.convert_layout(both, even[i].type.layout)
        joined = joined + (part,)  # type: ignore[assignment] # noqa: RUF005
    return joined


@gluon.jit
def columns_of(acc, PART: gl.constexpr, V_SIZE: gl.constexpr, PER: gl.constexpr):
    """The numbers of a part's columns."""
    START: gl.constexpr = PER * part_start(V_SIZE // PER, PART)
    return START + gl.arange(0, acc[PART].shape[1], gl.SliceLayout(0, acc[PART].type.layout))
