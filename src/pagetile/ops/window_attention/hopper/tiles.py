"""Helpers that the window kernels on Hopper share: bias, masks, products, results, and windows.

Windows are processed by mask class: those of one region need no mask, those of several one more
product (``forward_kernel``), and the few with too many regions compare regions element by element.
A branch around an asynchronous product would serialise all products, so each class has its own
loop. The loading warp finds the windows of the class and stores each one's index in its slot, and
-1 at the end of the class::

    slot        rows of window 4     rows of 9     -           rows of 2, one-hot    -
    windows     4                    9             -1          2                     -1
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ....tiles.hopper.layouts import product_layout, wide_rows
from ....tiles.hopper.record import record
from .. import problem
from . import constants

PIECE = gl.constexpr(constants.PIECE)
CHUNK = gl.constexpr(32)  # columns of bias that are built at once
ONLINE_TILE = gl.constexpr(constants.ONLINE_TILE)
ONE_HOT_COLUMNS = gl.constexpr(constants.ONE_HOT_COLUMNS)
SUM_KEYS = gl.constexpr(constants.SUM_KEYS)
LARGEST = gl.constexpr(60_000.0)  # bound of bias / scale, to fit in float16
MOST_BIAS = gl.constexpr(44_000.0)  # bound of the bias: times log2(e) it fits in float16
LEAST_SCORE = gl.constexpr(problem.LEAST_SCORE)
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
NO_BIAS = gl.constexpr(constants.NO_BIAS)
TABLE = gl.constexpr(constants.TABLE)
DENSE = gl.constexpr(constants.DENSE)
ONE_HOT = gl.constexpr(constants.ONE_HOT)
COMPARED = gl.constexpr(constants.COMPARED)


@gluon.constexpr_function
def bias_layout(columns, warps):
    """Shared-memory layout of a bias tile in the order in which threads hold scores."""
    threads = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    threads += [[16 << i, 0] for i in range(int(warps).bit_length() - 1)]
    blocks = [[0, 16 << i] for i in range((int(columns) // 16).bit_length() - 1)]
    return gl.SharedLinearLayout([[0, 1], [8, 0], [0, 8], *threads, *blocks])


@record
class StreamConfig:
    """Compile-time constants of a kernel whose warps form streams."""

    NUM_HEADS: gl.constexpr
    NUM_TOKENS: gl.constexpr
    HEAD_SIZE: gl.constexpr
    WIDTH: gl.constexpr
    BIAS: gl.constexpr
    MASK: gl.constexpr
    FULL_PIECES: gl.constexpr
    LAST_PIECE: gl.constexpr
    PIECE: gl.constexpr
    TILE: gl.constexpr
    STREAMS: gl.constexpr
    WARPS: gl.constexpr
    ROWS: gl.constexpr  # of a stream
    MASK_CLASSES: gl.constexpr  # number of mask classes


@record
class Bias:
    """The bias of a call: a table or a matrix for each head."""

    numbers: gl.tensor  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets: gl.tensor  # int32 [NUM_TOKENS]
    centre: gl.tensor  # of a table
    entry_stride: gl.tensor  # of a table
    head_stride: gl.tensor
    inverse: gl.tensor  # 1 / softmax_scale

    @gluon.jit
    def load(self, head, i, j, TRANSPOSED: gl.constexpr, config):
        """Float32 values of rows ``i`` and columns ``j``; ``TRANSPOSED``: rows are keys."""
        N: gl.constexpr = config.NUM_TOKENS
        inside = (i < N)[:, None] & (j < N)[None, :]
        if config.BIAS == TABLE:
            u = gl.load(self.offsets + i, i < N, 0)
            other_u = gl.load(self.offsets + j, j < N, 0)
            difference = u[:, None] - other_u[None, :]
            signed = -difference if TRANSPOSED else difference
            place = (signed + self.centre) * self.entry_stride
        elif TRANSPOSED:
            place = j[None, :] * N + i[:, None]
        else:
            place = i[:, None] * N + j[None, :]
        numbers = self.numbers + head * self.head_stride
        return gl.load(numbers + place, inside, 0.0).to(gl.float32)


@gluon.jit
def build_bias_tile(
    memory, bias, head, first_row, first_column, STREAM: gl.constexpr, TRANSPOSED: gl.constexpr,
    config,
):  # fmt: skip
    """Fill a stream's part of the bias tile, 32 columns at a time, with -inf past the end.

    The tile begins at ``first_column``. ``TRANSPOSED``: rows are keys and columns queries.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [config.WARPS, 1], [1, 0])
    PLACE: gl.constexpr = bias_layout(CHUNK, config.WARPS)
    i = first_row + gl.arange(0, config.ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
    for b in range(STREAM, memory.shape[0], config.STREAMS):
        j = first_column + b * CHUNK + column
        if config.BIAS == NO_BIAS:
            value = gl.zeros([config.ROWS, CHUNK], gl.float32, LAYOUT)
        else:
            value = bias.load(head, i, j, TRANSPOSED, config)
            if config.BIAS == DENSE:  # a mask, whose product might be finite or not by the scale
                least = gl.where(value < LEAST_SCORE, float("-inf"), -MOST_BIAS)
                value = gl.where(value < -MOST_BIAS, least, value)
            value *= bias.inverse
        largest = gl.minimum(LARGEST, MOST_BIAS * bias.inverse)
        fits = gl.minimum(gl.maximum(value, -largest), largest)
        value = gl.where(gl.abs(value) < float("inf"), fits, value)  # keeps -inf and NaN
        value = gl.where((j < config.NUM_TOKENS)[None, :], value, float("-inf")).to(gl.float16)
        memory.index(b)._reinterpret(gl.float16, [config.ROWS, CHUNK], PLACE).store(value)


@gluon.jit
def start_scores(bias, first, a, b, dtype: gl.constexpr, config):
    """Start ``bias + a bᵀ``; the columns of the bias tile begin at ``first``."""
    ROWS: gl.constexpr = a.shape[0]
    T: gl.constexpr = b.shape[0]
    tile = bias.index(first // CHUNK)
    tile = tile._reinterpret(gl.float16, [ROWS, T], bias_layout(T, config.WARPS))
    s = tile.load(product_layout(T, config.WARPS)).to(dtype)
    return warpgroup_mma(a, b.permute((1, 0)), s, is_async=True)


@gluon.jit
def apply_region_mask(s, regions, row, first, mask_value, num_tokens):
    """Add ``mask_value`` where the regions of row and column differ."""
    column = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    other_regions = gl.load(regions + column, column < num_tokens, 0)
    own_regions = gl.load(regions + row, row < num_tokens, 0)
    own_regions = gl.convert_layout(
        own_regions, gl.SliceLayout(1, s.type.layout), assert_trivial=True
    )
    mask = gl.where(own_regions[:, None] == other_regions[None, :], 0.0, mask_value)
    return s + mask.to(s.dtype)


@gluon.constexpr_function
def products_in_flight(tile, tiles, ahead, first, second):
    """Number of later products that may still be in flight when a tile's first ones are needed.

    ``ahead`` tiles are in flight, with ``first`` products each; the next tile's are issued after
    the ``second`` products of a tile.
    """
    started = min(int(tile) + int(ahead), int(tiles)) - int(tile) - 1
    return int(first) * started + int(second) * min(int(tile), int(ahead) - 1)


@gluon.jit
def rows_of(piece, FIRST: gl.constexpr, T: gl.constexpr):
    """``T`` rows of a piece from row ``FIRST`` on, as an operand of ``wgmma``."""
    RANK: gl.constexpr = len(piece.shape)
    WIDTH: gl.constexpr = piece.shape[RANK - 1]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(WIDTH * 2, 16, rank=2)
    eights = piece._reinterpret(piece.dtype, [piece.shape[RANK - 2] // 8, 8 * WIDTH], FLAT)
    return eights.index(FIRST // 8)._reinterpret(piece.dtype, [T, WIDTH], LAYOUT)


@gluon.jit
def store_rows(out, value, window, head, first_row, config):
    """Write a tile's rows of a window and head in whole 32-byte sectors."""
    WIDE: gl.constexpr = wide_rows(config.WIDTH, config.WARPS)
    value = gl.convert_layout(value.to(out.dtype.element_ty), WIDE)
    addresses, inside = row_addresses(out, window, head, first_row, config)
    gl.store(addresses, value, inside)


@gluon.jit
def row_addresses(out, window, head, first_row, config):
    """Addresses of a tile's rows of a window and head, and which of them exist."""
    WIDE: gl.constexpr = wide_rows(config.WIDTH, config.WARPS)
    row = first_row + gl.arange(0, config.ROWS, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, config.WIDTH, gl.SliceLayout(0, WIDE))[None, :]
    at = (window.to(gl.int64) * config.NUM_TOKENS + row) * (config.NUM_HEADS * config.HEAD_SIZE)
    inside = (row < config.NUM_TOKENS)[:, None]
    if config.WIDTH != config.HEAD_SIZE:
        inside = inside & (d < config.HEAD_SIZE)
    return out + at[:, None] + head * config.HEAD_SIZE + d, inside


@gluon.jit
def store_bias_sums(out, sums, chunk, head, first_row, tile, config):
    """Write a tile's sums in the accumulator's order, 16 bytes a thread (see ``sum_tiles``)."""
    KEY_TILES: gl.constexpr = (config.NUM_TOKENS + SUM_KEYS - 1) // SUM_KEYS
    ROW_TILES: gl.constexpr = (config.NUM_TOKENS + PIECE - 1) // PIECE
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    # Rows are split into (warp, half, row of eight), keys into (eight, pair, element).
    numbers = sums.reshape([4, 2, 8, 2, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([2, 128, 4])
    numbers = gl.convert_layout(numbers, LAYOUT, assert_trivial=True)
    eight = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = eight[:, None, None] * 512 + thread[None, :, None] * 4 + number[None, None, :]
    at = (chunk.to(gl.int64) * config.NUM_HEADS + head) * ROW_TILES + first_row // PIECE
    at = (at * KEY_TILES + tile) * (PIECE * SUM_KEYS)
    gl.store(out + at + place, numbers, tile < KEY_TILES)


@record
class Windows:
    """The windows of a program: every ``num_chunks``-th of all, to balance mask classes."""

    mask_classes: gl.tensor  # int32 [num_masks]
    num_masks: gl.tensor
    num_windows: gl.tensor
    num_chunks: gl.tensor
    chunk: gl.tensor
    count: gl.tensor

    @gluon.jit
    def at(self, place):
        """The window at a place; rotated, since mask classes repeat periodically over an image."""
        is_whole = place < self.num_windows // self.num_chunks
        rotated = (self.chunk + place) % self.num_chunks
        return place * self.num_chunks + gl.where(is_whole, rotated, self.chunk)

    @gluon.jit
    def find(self, base, MASK_CLASS: gl.constexpr, MASK: gl.constexpr):
        """One warp: a bit for each of 32 places from ``base`` on whose window is of the class."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        lane = gl.arange(0, 32, LANES)
        found = base + lane < self.count
        if MASK:
            place = self.at(base + lane) % self.num_masks
            mask_class = gl.load(self.mask_classes + place, found, -1)
            found = found & (mask_class == MASK_CLASS)
        return gl.sum(gl.where(found, 1 << lane, 0), 0)

    @gluon.jit
    def next(self, base, bits, MASK_CLASS: gl.constexpr, MASK: gl.constexpr):
        """Continue the search: its state, the next window of a class, and whether there is one."""
        while (bits == 0) & (base + 32 < self.count):
            base += 32
            bits = self.find(base, MASK_CLASS, MASK)
        lowest = gl.inline_asm_elementwise(
            "{ .reg .b32 x; brev.b32 x, $1; clz.b32 $0, x; }", "=r,r", [bits], gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        return base, bits & (bits - 1), self.at(base + lowest), bits != 0


@gluon.jit
def locate_work(mask_classes, num_masks, num_windows, num_chunks, config):
    """The windows, head and first row of this program."""
    NUM_TILES: gl.constexpr = (config.NUM_TOKENS + config.ROWS - 1) // config.ROWS
    program = gl.program_id(0)
    first_row = program % NUM_TILES * config.ROWS
    head = program // NUM_TILES % config.NUM_HEADS
    chunk = program // (NUM_TILES * config.NUM_HEADS)
    count = (num_windows - chunk + num_chunks - 1) // num_chunks
    windows = Windows(mask_classes, num_masks, num_windows, num_chunks, chunk, count)
    return windows, head, first_row


@gluon.jit
def zero_steps(anything, config):
    """Step 0 of every stream, as a tensor like ``anything``."""
    steps = ()
    for _ in gl.static_range(config.STREAMS):
        steps = steps + (anything * 0,)  # type: ignore[assignment] # noqa: RUF005
    return steps


@gluon.jit
def advance_steps(steps, taken):
    """Advance the streams that are ``taken`` by one step."""
    after = ()
    for s in gl.static_range(len(steps)):
        after = after + (steps[s] + taken[s].to(gl.int32),)  # type: ignore[assignment] # noqa: RUF005
    return after


@gluon.jit
def store_window_index(windows, slot, window):
    """One warp: store the index of the window whose rows a slot will hold."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    windows.index(slot).store(gl.full([1], window, gl.int32, LAYOUT))


@gluon.jit
def signal_end(barriers, windows, steps):
    """One warp: signal every stream that a mask class has no more windows."""
    after = ()
    for s in gl.static_range(len(steps)):
        barriers.wait_empty(s, steps[s])
        store_window_index(windows, barriers.slot(s, steps[s]), -1)
        barriers.fill(s, steps[s])
        after = after + (steps[s] + 1,)  # type: ignore[assignment] # noqa: RUF005
    return after


@gluon.jit
def wait_for_window(barriers, windows, stream, step, config):
    """The index of a stream's next window, or -1 at the end of a mask class."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [config.WARPS], [0])
    barriers.wait_full(stream, step)
    return gl.max(windows.index(barriers.slot(stream, step)).load(LAYOUT), 0)
