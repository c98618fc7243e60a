"""Load and store tiles of a sequence's rows, dense or ragged: by pointers, or by TMA."""

import triton
import triton.language as tl


@triton.jit
def find_sequence(starts, seq, length, RAGGED: tl.constexpr):
    """The first row of a sequence in its tensor, and its number of rows."""
    start = tl.zeros([], tl.int64)
    if RAGGED:
        start = tl.load(starts + seq).to(tl.int64)
        length = (tl.load(starts + seq + 1) - start).to(tl.int32)
    return start, length


@triton.jit
def describe(
    tensor, token, num_rows, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The ``tensor`` argument of ``load_tile``: with TMA a descriptor, else the pointer itself."""
    if TMA:
        tensor = tl.make_tensor_descriptor(tensor, [num_rows, SIZE], [token, 1], [ROWS, D])
    return tensor


@triton.jit
def load_tile(
    tensor, row, token, num_rows, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows ``row`` to ``row + ROWS`` of a ``[num_rows, SIZE]`` matrix from ``describe``, else 0."""
    if TMA:
        tile = tensor.load([row, 0])
    else:
        rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
        at = tensor + row * token + rows[:, None] * token + columns[None, :]
        inside = (row + rows < num_rows)[:, None]
        if SIZE < D:
            inside = inside & (columns < SIZE)[None, :]
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    tensor, value, row, token, num_rows, ROWS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr
):
    """Store the rows and columns of a tile that exist."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
    at = tensor + row * token + rows[:, None] * token + columns[None, :]
    inside = (row + rows < num_rows)[:, None]
    if SIZE < D:
        inside = inside & (columns < SIZE)[None, :]
    tl.store(at, value.to(tensor.dtype.element_ty), mask=inside)
