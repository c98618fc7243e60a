"""Which windows a program on Hopper takes, and in which order: kind by kind.

Windows of one region need no mask, those of several a product more (``hopper_forward``), and few
have so many that they are compared. A branch around a product would make all of them wait for one
another, so each kind has a loop of its own, and the loading warp looks for its windows. It writes
beside the rows that open a window's turn which window it is, and -1 when a kind is through::

    slot        rows of window 4     rows of 9     -           rows of 2 and marks    -
    windows     4                    9             -1          2                      -1
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

__all__ = [
    "Windows",
    "await_window",
    "count_turns",
    "end_kind",
    "name_window",
    "no_turns",
    "which_work",
]


@aggregate
class Windows:
    """A program's windows. Those next to each other go to different programs: kinds are alike."""

    kinds: gl.tensor  # int32 [num_masks]
    num_masks: gl.tensor
    num_windows: gl.tensor
    num_chunks: gl.tensor
    chunk: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, kinds, num_masks, num_windows, num_chunks, chunk, count):
        self.kinds = kinds
        self.num_masks = num_masks
        self.num_windows = num_windows
        self.num_chunks = num_chunks
        self.chunk = chunk
        self.count = count

    @gluon.jit
    def at(self, place):
        """One of every ``num_chunks``, and of the next ones the next: grids have periods."""
        is_whole = place < self.num_windows // self.num_chunks
        turned = (self.chunk + place) % self.num_chunks
        return place * self.num_chunks + gl.where(is_whole, turned, self.chunk)

    @gluon.jit
    def find(self, base, KIND: gl.constexpr, MASK: gl.constexpr):
        """One warp: a bit for each of 32 places from ``base`` on whose window is of a kind."""
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        lane = gl.arange(0, 32, LANES)
        found = base + lane < self.count
        if MASK:
            kind = gl.load(self.kinds + self.at(base + lane) % self.num_masks, found, -1)
            found = found & (kind == KIND)
        return gl.sum(gl.where(found, 1 << lane, 0), 0)

    @gluon.jit
    def next(self, base, bits, KIND: gl.constexpr, MASK: gl.constexpr):
        """Where the search stands, the next window of a kind, and whether there is one."""
        while (bits == 0) & (base + 32 < self.count):
            base += 32
            bits = self.find(base, KIND, MASK)
        lowest = gl.inline_asm_elementwise(
            "{ .reg .b32 x; brev.b32 x, $1; clz.b32 $0, x; }", "=r,r", [bits], gl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
        return base, bits & (bits - 1), self.at(base + lowest), bits != 0


@gluon.jit
def which_work(kinds, num_masks, num_windows, num_chunks, form):
    """Of a program: its windows, its head and first row."""
    NUM_TILES: gl.constexpr = (form.NUM_TOKENS + form.ROWS - 1) // form.ROWS
    program = gl.program_id(0)
    first_row = program % NUM_TILES * form.ROWS
    head = program // NUM_TILES % form.NUM_HEADS
    chunk = program // (NUM_TILES * form.NUM_HEADS)
    count = (num_windows - chunk + num_chunks - 1) // num_chunks
    windows = Windows(kinds, num_masks, num_windows, num_chunks, chunk, count)
    return windows, head, first_row


@gluon.jit
def no_turns(anything, form):
    """How many turns each stream has had at the beginning."""
    turns = ()
    for _ in gl.static_range(form.STREAMS):
        turns = turns + (anything * 0,)  # type: ignore[assignment] # noqa: RUF005
    return turns


@gluon.jit
def count_turns(turns, taken):
    """How many turns each stream has had when some have taken another."""
    after = ()
    for s in gl.static_range(len(turns)):
        after = after + (turns[s] + taken[s].to(gl.int32),)  # type: ignore[assignment] # noqa: RUF005
    return after


@gluon.jit
def name_window(windows, slot, window):
    """One warp: write down whose rows a slot will hold."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    windows.index(slot).store(gl.full([1], window, gl.int32, LAYOUT))


@gluon.jit
def end_kind(turns_at, windows, turns):
    """The same: tell every stream, in its turn, that there are no more windows of a kind."""
    after = ()
    for s in gl.static_range(len(turns)):
        turns_at.wait_empty(s, turns[s])
        name_window(windows, turns_at.slot(s, turns[s]), -1)
        turns_at.fill(s, turns[s])
        after = after + (turns[s] + 1,)  # type: ignore[assignment] # noqa: RUF005
    return after


@gluon.jit
def await_window(turns_at, windows, stream, turn, form):
    """The number of a stream's next window, or -1 at the end of a kind."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [form.WARPS], [0])
    turns_at.wait_full(stream, turn)
    return gl.max(windows.index(turns_at.slot(stream, turn)).load(LAYOUT), 0)
