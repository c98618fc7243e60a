"""Epilogue of a tile of attention on Hopper: sinks, the division, and the stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..triton.online_softmax import LN_2, LOG2_E, finite
from .config import COLUMNS, ROWS
from .layouts import part_of, part_start, wide_rows


@gluon.jit
def times(acc, factor):
    """Accumulators times a factor for each row."""
    products = ()
    for i in gl.static_range(len(acc)):
        each = gl.convert_layout(factor, gl.SliceLayout(1, acc[i].type.layout), assert_trivial=True)
        products = products + (acc[i] * each[:, None],)  # type: ignore[assignment] # noqa: RUF005
    return products


@gluon.jit
def finish(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens, head, acc,
    m, l, config, WG: gl.constexpr,
):  # fmt: skip
    """Add the sinks, divide, and write a warpgroup's rows of ``out`` and ``lse``."""
    PACK: gl.constexpr = config.PACK
    TOKENS: gl.constexpr = ROWS // PACK
    factor = finish_rows(lse, sinks, num_heads, first, num_tokens, head, m, l, True, config, WG)
    result = times(acc, factor)
    if config.STAGED and num_tokens >= (WG + 1) * TOKENS:
        _store_by_tma(staged, result, first + WG * TOKENS, head * PACK, config, WG)
    else:
        for i in gl.static_range(len(result)):
            store_rows(
                out, token_stride, head_stride, first, num_tokens, head, result[i], config,
                part_start(config.V_SIZE, i), WG,
            )  # fmt: skip


@gluon.jit
def finish_rows(
    lse, sinks, num_heads, first, num_tokens, head, m, l, STORES: gl.constexpr, config,
    WG: gl.constexpr,
):  # fmt: skip
    """Add the sinks, and write ``lse`` if ``STORES``; return the factor of each row's sums."""
    PACK: gl.constexpr = config.PACK
    row = gl.arange(0, ROWS, m.type.layout)
    token = WG * (ROWS // PACK) + row // PACK
    at = (first + token).to(gl.int64) * num_heads + head * PACK + row % PACK
    decay = 1.0
    if config.HAS_SINKS:
        m, l, decay = _add_sinks(m, l, gl.load(sinks + head * PACK + row % PACK))
    empty = l == 0.0
    if STORES:
        value = gl.where(empty, float("-inf"), (m + gl.log2(l)) * LN_2)
        gl.store(lse + at, value, _is_query(row, token, num_tokens, PACK))
    return gl.where(empty, 0.0, decay / l)


@gluon.jit
def _is_query(row, token, num_tokens, PACK: gl.constexpr):
    """Whether rows are queries of the sequence."""
    is_query = token < num_tokens
    if ROWS % PACK > 0:  # the token of a warpgroup's empty last rows is the next warpgroup's
        is_query = is_query & (row < ROWS // PACK * PACK)
    return is_query


@gluon.jit
def _add_sinks(m, l, sinks):
    """Add one logit to each row's softmax; return its state and the factor of earlier sums."""
    sinks *= LOG2_E
    new_m = gl.maximum(m, sinks)
    pivot = finite(new_m)
    decay = gl.exp2(m - pivot)
    return new_m, l * decay + gl.exp2(sinks - pivot), decay


@gluon.jit
def _store_by_tma(staged, result, token, head, config, WG: gl.constexpr):
    """Store the results of a full tile by TMA, through shared memory."""
    desc, tiles = staged
    tile = tiles.index(WG)
    CHUNKS: gl.constexpr = tile.shape[1] // COLUMNS
    SHAPE: gl.constexpr = desc.block_shape
    boxes = tile._reinterpret(tile.dtype, [CHUNKS, SHAPE[0], SHAPE[1], COLUMNS], desc.layout)
    tma.store_wait(0)
    for i in gl.static_range(len(result)):
        part_of(tile, config.V_SIZE, i).store(result[i].to(tile.dtype))
    fence_async_shared()
    for c in gl.static_range(CHUNKS):
        tma.async_copy_shared_to_global(desc, [token, head, c * COLUMNS], boxes.index(c))


@gluon.jit
def store_rows(
    out, token_stride, head_stride, first, num_tokens, head, result, config, START: gl.constexpr,
    WG: gl.constexpr,
):  # fmt: skip
    """Store columns from ``START`` on of the rows that belong to the sequence."""
    WIDTH: gl.constexpr = result.shape[1]
    PACK: gl.constexpr = config.PACK
    WIDE: gl.constexpr = wide_rows(WIDTH)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    token = WG * (ROWS // PACK) + row // PACK
    at = (first + token).to(gl.int64) * token_stride + (head * PACK + row % PACK) * head_stride
    column = START + gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))[None, :]
    inside = _is_query(row, token, num_tokens, PACK)[:, None]
    if START + WIDTH > config.V_SIZE:
        inside = inside & (column < config.V_SIZE)
    result = gl.convert_layout(result.to(out.dtype.element_ty), WIDE)
    gl.store(out + at[:, None] + column, result, inside)
