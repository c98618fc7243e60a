"""Merge the splits of a tile's keys: the last program to arrive merges all partial results.

::

    m = max mᵢ        l = Σ lᵢ 2 ** (mᵢ - m)        acc = Σ accᵢ 2 ** (mᵢ - m)

in the order of the keys, so the bits do not depend on which program arrives last. Each warpgroup
stores, counts and merges the results of its own rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.online_softmax import finite
from .config import COLUMNS, ROWS
from .finish import finish, finish_rows, store_rows
from .layouts import part_start, wide_rows
from .names import barrier


@gluon.jit
def finish_split(
    out, staged, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens, head, acc,
    m, l, place, schedule, V_WIDTH: gl.constexpr, config, WG: gl.constexpr,
):  # fmt: skip
    """Write a tile with all its keys; otherwise store the split, and merge if it is the last."""
    split, count, slot = place
    if count == 1:
        finish(
            out, staged, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens,
            head, acc, m, l, config, WG,
        )  # fmt: skip
    else:
        _store_split(acc, m, l, slot + split, schedule, V_WIDTH, config, WG)
        barrier()  # all threads have stored before one of them counts
        arrivals = schedule.arrivals + slot * config.WARPGROUPS + WG
        arrived = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
        if arrived == count - 1:
            gl.store(arrivals, 0)
            for start in gl.static_range(0, V_WIDTH, COLUMNS):
                if start < config.V_SIZE:
                    _merge_columns(
                        out, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens,
                        head, slot, count, schedule, start, V_WIDTH, config, WG,
                    )  # fmt: skip


@gluon.jit
def _store_split(acc, m, l, slot, schedule, V_WIDTH: gl.constexpr, config, WG: gl.constexpr):
    """Store a warpgroup's sums over a split."""
    place = slot * config.WARPGROUPS + WG
    row = gl.arange(0, ROWS, m.type.layout)
    gl.store(schedule.sums + place * (2 * ROWS) + row, m)
    gl.store(schedule.sums + place * (2 * ROWS) + ROWS + row, l)
    for i in gl.static_range(len(acc)):
        _store_columns(acc[i], place, schedule, part_start(config.V_SIZE, i), V_WIDTH)


@gluon.jit
def _store_columns(acc, place, schedule, START: gl.constexpr, V_WIDTH: gl.constexpr):
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = START + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(schedule.accs + (place * ROWS + row) * V_WIDTH + column, acc)


@gluon.jit
def _add_split(
    state, schedule, slot, exists, START: gl.constexpr, V_WIDTH: gl.constexpr, config,
    WG: gl.constexpr,
):  # fmt: skip
    """Merge 64 columns of a split into ``state``, if the split exists."""
    m, l, acc = state
    LAYOUT: gl.constexpr = wide_rows(COLUMNS)
    place = slot * config.WARPGROUPS + WG
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = START + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    sums = schedule.sums + place * (2 * ROWS) + row
    at = (place * ROWS + row[:, None]) * V_WIDTH + column[None, :]
    # .cg: load from L2, where other programs' stores are; L1 may be stale.
    mask = gl.full([ROWS], exists, gl.int1, gl.SliceLayout(1, LAYOUT))
    split_m = gl.load(sums, mask, other=float("-inf"), cache_modifier=".cg")
    split_l = gl.load(sums + ROWS, mask, other=0.0, cache_modifier=".cg")
    mask = gl.full([ROWS, COLUMNS], exists, gl.int1, LAYOUT)
    split_acc = gl.load(schedule.accs + at, mask, other=0.0, cache_modifier=".cg")
    new_m = gl.maximum(m, split_m)
    pivot = finite(new_m)
    decay, weight = gl.exp2(m - pivot), gl.exp2(split_m - pivot)
    acc = acc * decay[:, None] + split_acc * weight[:, None]
    return new_m, l * decay + split_l * weight, acc


@gluon.jit
def _merge_columns(
    out, lse, sinks, num_heads, token_stride, head_stride, first, num_tokens, head, slot, count,
    schedule, START: gl.constexpr, V_WIDTH: gl.constexpr, config, WG: gl.constexpr,
):  # fmt: skip
    """Merge 64 columns of all splits of a tile, and write them."""
    LAYOUT: gl.constexpr = wide_rows(COLUMNS)
    AT_ONCE: gl.constexpr = 2  # splits whose loads are in flight
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    l = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, LAYOUT)
    for i in range(0, count, AT_ONCE):
        state = (m, l, acc)
        for j in gl.static_range(AT_ONCE):
            state = _add_split(
                state, schedule, slot + i + j, i + j < count, START, V_WIDTH, config, WG
            )
        m, l, acc = state
    factor = finish_rows(
        lse, sinks, num_heads, first, num_tokens, head, m, l, START == 0, config, WG
    )
    store_rows(
        out, token_stride, head_stride, first, num_tokens, head, acc * factor[:, None], config,
        START, WG,
    )  # fmt: skip
