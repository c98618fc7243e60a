"""How threads hold what the kernels on Hopper share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["product_layout", "wide_rows"]


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
