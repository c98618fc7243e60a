"""Sizes and enumerations that the host code and the kernels on Hopper share."""

PIECE = 64
"""Tokens of one matrix product, and query rows of a program of the row kernel."""
SUM_KEYS = 16
"""Keys of one tile of the bias gradient as the row kernel writes its sums."""
SUM_OFFSETS = 16
"""Offsets that one program of ``sum_tiles`` inverts."""
MAX_REGIONS = 8
"""Regions of a window whose mask is a matrix product of one-hot columns."""
ONE_HOT_COLUMNS = 2 * MAX_REGIONS
"""Inner dimension of that product."""
ONLINE_TILE = 32
"""Columns of a tile that keeps running maxima or compares regions. With wider tiles ptxas runs out
of registers and stops overlapping matrix products in the whole kernel."""
ONE_HOT, COMPARED = 1, 2
"""Mask classes of windows; 0 has one region and needs no mask. ``ONE_HOT``: masked by a product.
``COMPARED``: too many regions, or too large a mask value, for that; regions are compared."""
NO_BIAS, TABLE, DENSE = range(3)
"""Kinds of bias: none, a table read at relative offsets, or a matrix for each head."""
ONE_TILE_TOKENS = PIECE
"""Most tokens of a window that ``one_tile`` runs."""
REGION_WORDS = 2 * PIECE + 4
"""int32 words of a window's region bits: two for each query, one flag, and padding to 16 bytes."""
Q_STAGES = 2
"""Windows whose stationary rows (queries, or keys in the column kernel) are in shared memory."""
