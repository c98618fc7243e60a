"""How threads hold what the kernels on Hopper share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["num_parts", "part_of", "part_size", "part_start", "product_layout", "wide_rows"]


@gluon.constexpr_function
def _parts(head_size):
    """What a head's columns are multiplied in: powers of two, one, or two that waste less.

    A head of 96 is 64 and 32, one of 112 is 128.
    """
    columns = -(-int(head_size) // 16) * 16  # a product takes sixteen at a time
    first = 1 << (columns.bit_length() - 1)
    rest = columns - first
    if rest == 0:
        return (first,)
    second = 1 << (rest - 1).bit_length()
    return (first, second) if second < first else (2 * first,)


@gluon.constexpr_function
def num_parts(head_size):
    """How many products take a head's columns: 1 or 2."""
    return len(_parts(head_size))


@gluon.constexpr_function
def part_size(head_size, part):
    """The columns of a part."""
    return _parts(head_size)[int(part)]


@gluon.constexpr_function
def part_start(head_size, part):
    """The columns before a part."""
    return sum(_parts(head_size)[: int(part)])


@gluon.jit
def part_of(tile, HEAD_SIZE: gl.constexpr, PART: gl.constexpr):
    """The columns of a part of a tile in shared memory."""
    SIZE: gl.constexpr = part_size(HEAD_SIZE, PART)
    if tile.shape[1] > SIZE:
        tile = tile.slice(part_start(HEAD_SIZE, PART), SIZE, dim=1)
    return tile


@gluon.constexpr_function
def product_layout(columns, warps=4):
    """How threads hold scores, or anything that a product makes."""
    return gl.NVMMADistributedLayout([3, 0], [int(warps), 1], [16, int(columns), 16])


@gluon.constexpr_function
def wide_rows(width, warps=4):
    """As the accumulators, but a thread has 4 neighbours and a quad 16, a whole sector."""
    columns = [[0, 1 << i] for i in range(int(width).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns[:2], [8, 0], *columns[4:]],
        lane_bases=[*columns[2:4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i, 0] for i in range(int(warps).bit_length() - 1)],
        block_bases=[],
        shape=[16 * int(warps), int(width)],
    )
