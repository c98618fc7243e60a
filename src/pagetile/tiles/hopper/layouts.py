"""Register layouts and column parts that the kernels on Hopper share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _parts(head_size, tiles=1):
    """Split a head's columns into products of power-of-two widths: one, or two if that wastes less.

    A head of 96 is 64 and 32, one of 112 is 128. Over several tiles side by side there is one part
    per tile: 160 over three tiles is 64, 64 and 32.
    """
    columns = -(-int(head_size) // 16) * 16  # K of wgmma is 16
    if int(tiles) > 1:
        rest = columns - 64 * (int(tiles) - 1)
        return (64,) * (int(tiles) - 1) + (1 << (rest - 1).bit_length(),)
    first = 1 << (columns.bit_length() - 1)
    rest = columns - first
    if rest == 0:
        return (first,)
    second = 1 << (rest - 1).bit_length()
    return (first, second) if second < first else (2 * first,)


@gluon.constexpr_function
def num_parts(head_size, tiles=1):
    """The number of parts of a head's columns: 1 or 2, or one per tile."""
    return len(_parts(head_size, tiles))


@gluon.constexpr_function
def part_size(head_size, part, tiles=1):
    """The number of columns of a part."""
    return _parts(head_size, tiles)[int(part)]


@gluon.constexpr_function
def part_start(head_size, part, tiles=1):
    """The first column of a part."""
    return sum(_parts(head_size, tiles)[: int(part)])


@gluon.jit
def part_of(tile, HEAD_SIZE: gl.constexpr, PART: gl.constexpr, TILES: gl.constexpr = 1):
    """A part's columns of ``tile`` in shared memory; of several ``TILES``, the part's own tile."""
    SIZE: gl.constexpr = part_size(HEAD_SIZE, PART, TILES)
    START: gl.constexpr = part_start(HEAD_SIZE, PART) if TILES == 1 else 0
    if tile.shape[1] > SIZE:
        tile = tile.slice(START, SIZE, dim=1)
    return tile


@gluon.constexpr_function
def product_layout(columns, warps=4):
    """The accumulator layout of ``wgmma``."""
    return gl.NVMMADistributedLayout([3, 0], [int(warps), 1], [16, int(columns), 16])


@gluon.constexpr_function
def wide_rows(width, warps=4):
    """Like the accumulator layout, but a quad of threads holds 16 neighbours, a 32-byte sector."""
    columns = [[0, 1 << i] for i in range(int(width).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns[:2], [8, 0], *columns[4:]],
        lane_bases=[*columns[2:4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(int(warps).bit_length() - 1)],
        block_bases=[],
        shape=[16 * int(warps), int(width)],
    )
