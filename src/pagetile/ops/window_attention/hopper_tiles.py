"""What window attention's kernels on Hopper share: bias, regions, products and results.

See ``hopper_forward`` for how a program goes about its windows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.language.core import _aggregate as aggregate

from ...tiles.hopper.layouts import product_layout, wide_rows
from . import hopper_plan

__all__ = [
    "CAREFUL_TILE",
    "CHUNK",
    "FLAT",
    "MANY",
    "MARKS",
    "MIXED",
    "NO_BIAS",
    "PIECE",
    "SUM_KEYS",
    "Bias",
    "Form",
    "Stream",
    "compare",
    "make_bias",
    "place_rows",
    "products_after",
    "rows_of",
    "start_scores",
    "store_rows",
    "store_sums",
]

PIECE = gl.constexpr(hopper_plan.PIECE)
CHUNK = gl.constexpr(32)  # columns of bias that are made at once
CAREFUL_TILE = gl.constexpr(hopper_plan.CAREFUL_TILE)
MARKS = gl.constexpr(hopper_plan.MARKS)
SUM_KEYS = gl.constexpr(hopper_plan.SUM_KEYS)
LARGEST = gl.constexpr(60_000.0)  # of a finite bias over the scale: float16 holds no more
MOST_BIAS = gl.constexpr(44_000.0)  # of a finite bias: times log2(e), float16 holds no more
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
NO_BIAS = gl.constexpr(hopper_plan.NO_BIAS)
TABLE = gl.constexpr(hopper_plan.TABLE)
MIXED = gl.constexpr(hopper_plan.MIXED)
MANY = gl.constexpr(hopper_plan.MANY)


@gluon.constexpr_function
def bias_layout(columns, warps):
    """A tile of bias as threads hold scores: 16 bytes of one, then of the next."""
    threads = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    threads += [[16 << i, 0] for i in range(int(warps).bit_length() - 1)]
    rest = [[0, 16 << i] for i in range((int(columns) // 16).bit_length() - 1)]
    return gl.SharedLinearLayout([[0, 1], [8, 0], [0, 8], *threads, *rest])


@aggregate
class Form:
    """What a kernel of streams is compiled for."""

    NUM_HEADS: gl.constexpr
    NUM_TOKENS: gl.constexpr
    HEAD_SIZE: gl.constexpr
    WIDTH: gl.constexpr
    BIAS: gl.constexpr
    MASK: gl.constexpr
    GROUPS: gl.constexpr
    REST: gl.constexpr
    PIECE: gl.constexpr
    TILE: gl.constexpr
    STREAMS: gl.constexpr
    WARPS: gl.constexpr
    ROWS: gl.constexpr
    KINDS: gl.constexpr  # of windows that are looked for

    @gluon.constexpr_function
    def __init__(
        self, NUM_HEADS, NUM_TOKENS, HEAD_SIZE, WIDTH, BIAS, MASK, GROUPS, REST, PIECE, TILE,
        STREAMS, WARPS,
    ):  # fmt: skip
        self.NUM_HEADS = gl.constexpr(NUM_HEADS)
        self.NUM_TOKENS = gl.constexpr(NUM_TOKENS)
        self.HEAD_SIZE = gl.constexpr(HEAD_SIZE)
        self.WIDTH = gl.constexpr(WIDTH)
        self.BIAS = gl.constexpr(BIAS)
        self.MASK = gl.constexpr(MASK)
        self.GROUPS = gl.constexpr(GROUPS)
        self.REST = gl.constexpr(REST)
        self.PIECE = gl.constexpr(PIECE)
        self.TILE = gl.constexpr(TILE)
        self.STREAMS = gl.constexpr(STREAMS)
        self.WARPS = gl.constexpr(WARPS)
        self.ROWS = gl.constexpr(16 * WARPS)
        self.KINDS = gl.constexpr(3 if MASK else 1)


@aggregate
class Stream:
    """Which of the streams."""

    INDEX: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, INDEX):
        self.INDEX = gl.constexpr(INDEX)


@aggregate
class Bias:
    """What is added to scores, as it is given."""

    numbers: gl.tensor  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets: gl.tensor  # int32 [NUM_TOKENS]
    centre: gl.tensor  # of a table
    entry_stride: gl.tensor  # of a table
    head_stride: gl.tensor
    inverse: gl.tensor  # 1 / softmax_scale

    @gluon.constexpr_function
    def __init__(self, numbers, offsets, centre, entry_stride, head_stride, inverse):
        self.numbers = numbers
        self.offsets = offsets
        self.centre = centre
        self.entry_stride = entry_stride
        self.head_stride = head_stride
        self.inverse = inverse

    @gluon.jit
    def at(self, head, i, j, FLIPPED: gl.constexpr, form):
        """Of rows ``i`` and columns ``j``; ``FLIPPED``: rows are keys and columns queries."""
        N: gl.constexpr = form.NUM_TOKENS
        inside = (i < N)[:, None] & (j < N)[None, :]
        if form.BIAS == TABLE:
            u = gl.load(self.offsets + i, i < N, 0)
            other_u = gl.load(self.offsets + j, j < N, 0)
            apart = u[:, None] - other_u[None, :]
            place = ((-apart if FLIPPED else apart) + self.centre) * self.entry_stride
        elif FLIPPED:
            place = j[None, :] * N + i[:, None]
        else:
            place = i[:, None] * N + j[None, :]
        numbers = self.numbers + head * self.head_stride
        return gl.load(numbers + place, inside, 0.0).to(gl.float32)


@gluon.jit
def make_bias(
    memory, bias, head, first_row, first_column, STREAM: gl.constexpr, FLIPPED: gl.constexpr, form
):  # fmt: skip
    """Fill a stream's share of the tile of bias, 32 columns at a time; -inf where nobody is.

    The tile begins at ``first_column``. ``FLIPPED``: rows are keys and columns queries.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [form.WARPS, 1], [1, 0])
    PLACE: gl.constexpr = bias_layout(CHUNK, form.WARPS)
    i = first_row + gl.arange(0, form.ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
    for b in range(STREAM, memory.shape[0], form.STREAMS):
        j = first_column + b * CHUNK + column
        if form.BIAS == NO_BIAS:
            value = gl.zeros([form.ROWS, CHUNK], gl.float32, LAYOUT)
        else:
            value = bias.at(head, i, j, FLIPPED, form) * bias.inverse
        largest = gl.minimum(LARGEST, MOST_BIAS * bias.inverse)
        fits = gl.minimum(gl.maximum(value, -largest), largest)
        value = gl.where(gl.abs(value) < float("inf"), fits, value)  # -inf hides; NaN is not lost
        value = gl.where((j < form.NUM_TOKENS)[None, :], value, float("-inf")).to(gl.float16)
        memory.index(b)._reinterpret(gl.float16, [form.ROWS, CHUNK], PLACE).store(value)


@gluon.jit
def start_scores(bias, first, a, b, dtype: gl.constexpr, form):
    """Start the product ``a bᵀ`` from a tile of bias on, whose columns begin with ``first``."""
    ROWS: gl.constexpr = a.shape[0]
    T: gl.constexpr = b.shape[0]
    tile = bias.index(first // CHUNK)
    tile = tile._reinterpret(gl.float16, [ROWS, T], bias_layout(T, form.WARPS))
    s = tile.load(product_layout(T, form.WARPS)).to(dtype)
    return warpgroup_mma(a, b.permute((1, 0)), s, is_async=True)


@gluon.jit
def compare(s, regions, row, first, mask_value, num_tokens):
    """Add what stands between regions, one by one."""
    column = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    theirs = gl.load(regions + column, column < num_tokens, 0)
    ours = gl.load(regions + row, row < num_tokens, 0)
    ours = gl.convert_layout(ours, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    apart = gl.where(ours[:, None] == theirs[None, :], 0.0, mask_value)
    return s + apart.to(s.dtype)


@gluon.constexpr_function
def products_after(tile, tiles, ahead, first, second):
    """Products that may be under way when the first ones of a tile are done.

    ``ahead`` tiles are begun at once, by ``first`` products each; another one, when the ``second``
    products of a tile have been started.
    """
    begun = min(int(tile) + int(ahead), int(tiles)) - int(tile) - 1
    return int(first) * begun + int(second) * min(int(tile), int(ahead) - 1)


@gluon.jit
def rows_of(piece, FIRST: gl.constexpr, T: gl.constexpr):
    """Some rows of a piece, as products take them."""
    RANK: gl.constexpr = len(piece.shape)
    WIDTH: gl.constexpr = piece.shape[RANK - 1]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(WIDTH * 2, 16, rank=2)
    eights = piece._reinterpret(piece.dtype, [piece.shape[RANK - 2] // 8, 8 * WIDTH], FLAT)
    return eights.index(FIRST // 8)._reinterpret(piece.dtype, [T, WIDTH], LAYOUT)


@gluon.jit
def store_rows(out, value, window, head, first_row, form):
    """Write a tile's rows of a window and head, in whole sectors."""
    WIDE: gl.constexpr = wide_rows(form.WIDTH, form.WARPS)
    value = gl.convert_layout(value.to(out.dtype.element_ty), WIDE)
    places, inside = place_rows(out, window, head, first_row, form)
    gl.store(places, value, inside)


@gluon.jit
def place_rows(out, window, head, first_row, form):
    """Where a tile's rows of a window and head belong, and which of their numbers there are."""
    WIDE: gl.constexpr = wide_rows(form.WIDTH, form.WARPS)
    row = first_row + gl.arange(0, form.ROWS, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, form.WIDTH, gl.SliceLayout(0, WIDE))[None, :]
    at = (window.to(gl.int64) * form.NUM_TOKENS + row) * (form.NUM_HEADS * form.HEAD_SIZE)
    inside = (row < form.NUM_TOKENS)[:, None]
    if form.WIDTH != form.HEAD_SIZE:
        inside = inside & (d < form.HEAD_SIZE)
    return out + at[:, None] + head * form.HEAD_SIZE + d, inside


@gluon.jit
def store_sums(out, sums, chunk, head, first_row, tile, form):
    """Write a tile's sums as threads hold them, 16 bytes of each side by side (``hopper_sums``)."""
    KEY_TILES: gl.constexpr = (form.NUM_TOKENS + SUM_KEYS - 1) // SUM_KEYS
    ROW_TILES: gl.constexpr = (form.NUM_TOKENS + PIECE - 1) // PIECE
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    # Of a row: its warp, its eight, its place there; of a key: its eight, its pair, its place.
    numbers = sums.reshape([4, 2, 8, 2, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([2, 128, 4])
    numbers = gl.convert_layout(numbers, LAYOUT, assert_trivial=True)
    eight = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = eight[:, None, None] * 512 + thread[None, :, None] * 4 + number[None, None, :]
    at = (chunk.to(gl.int64) * form.NUM_HEADS + head) * ROW_TILES + first_row // PIECE
    at = (at * KEY_TILES + tile) * (PIECE * SUM_KEYS)
    gl.store(out + at + place, numbers, tile < KEY_TILES)
