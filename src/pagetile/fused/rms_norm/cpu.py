"""RMS norms of rows on a CPU, with the addition between two of them.

::

    hidden[row] = residual[row] + before(x[row])        each rounded to the type
    out[row]    = after(hidden[row])

``rms_norm`` is the second line alone, of ``x``. Threads take runs of rows; few rows run on one.
"""

from __future__ import annotations

import functools
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.norms import KINDS, NONE, normalise
from ...tiles.cpu.simd import add, array_at, load_first, store_first, take_number
from ...tiles.cpu.threads import no_scratch, on_team, run_together
from ..rows import MOST_ROWS, Rows, RowsProblem, fold
from .api import Norm

_SMALL = 1 << 15
"""Elements that take as long as waking another thread."""
_RUN = 1 << 12
"""Elements of the rows that a thread takes at a time."""

_Call = namedtuple(
    "_Call",
    "out hidden residual x before before_eps after after_eps num_rows inner outer_stride "
    "inner_stride size run adds before_kind after_kind counter",
)


def supports(problem: RowsProblem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = problem.refuse(MOST_ROWS, "no two strides lead to all rows of x")
    return reason or refuse(device, x=problem.dtype)


def run(x: Tensor, weight: Tensor, eps: float, kind: str) -> Tensor:
    """``[..., size]`` like ``x``."""
    rows = fold_once(x.shape, x.stride())
    out = x.new_empty_strided(x.shape, rows.out_strides)
    norm_rows(x, rows, None, Norm(weight.contiguous(), eps, kind), out=out)
    return out


@functools.lru_cache(maxsize=4096)
def fold_once(shape: torch.Size, strides: tuple[int, ...]) -> Rows:
    """``fold`` of rows that ``supports`` does not refuse."""
    rows = fold(shape, strides)
    assert rows is not None, "refused by supports"
    return rows


def norm_rows(
    x: Tensor,
    rows: Rows,
    before: Norm | None,
    after: Norm | None,
    *,
    out: Tensor | None,
    hidden: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Write ``hidden`` and ``out``, which have no gaps; see the module's docstring.

    Args:
        x: The rows, of any strides.
        rows: Its ``fold``.
        before: Norm of ``x``.
        after: Norm of the sum, or of ``x`` if there is no residual.
        out: Where ``after``'s result goes.
        hidden: Where the sum goes.
        residual: What is added, without gaps.
    """
    kinds = [NONE if norm is None else KINDS[norm.kind] for norm in (before, after)]
    size = x.shape[-1]
    like, sizes = _describe(x.dtype, rows, size, residual is not None, *kinds)
    run_together(
        _norm_rows, DeviceInfo.of(x.device).num_workers if rows.num * size > _SMALL else 1,
        *(0 if t is None else t.data_ptr() for t in (out, hidden, residual, x)),
        *(0 if norm is None else norm.weight.data_ptr() for norm in (before, after)),
        *(0.0 if norm is None else norm.eps for norm in (before, after)),
        like, sizes, np.zeros(1, np.int64),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _describe(
    dtype: torch.dtype, rows: Rows, size: int, *others: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return an empty array of the type of ``x``, and the sizes."""
    like = flat(torch.empty(0, dtype=dtype, device="cpu"))
    return like, np.array([*rows[:4], size, max(1, _RUN // size), *others], np.int64)


@entry()
def _norm_rows(
    parallel, num_threads, out, hidden, residual, x, before, after, before_eps, after_eps, like,
    sizes, counter,
):  # fmt: skip
    """Tensors are passed as addresses, with ``like``'s type: arrays take longer to pass."""
    call = _Call(
        array_at(out, like.dtype), array_at(hidden, like.dtype), array_at(residual, like.dtype),
        array_at(x, like.dtype), array_at(before, like.dtype), before_eps,
        array_at(after, like.dtype), after_eps, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
        sizes[5], sizes[6] != 0, sizes[7], sizes[8], counter,
    )  # fmt: skip
    on_team(parallel, num_threads, no_scratch, _take_rows, (call,))


@inner()
def _take_rows(call, scratch):
    """Compute runs of rows until all are taken."""
    while True:
        first = take_number(call.counter) * call.run
        if first >= call.num_rows:
            return
        for row in range(first, min(call.num_rows, first + call.run)):
            _norm_row(call, row)


@inner()
def _norm_row(call, row):
    size, to, source = call.size, row * call.size, call.x
    at = row // call.inner * call.outer_stride + row % call.inner * call.inner_stride
    if call.before_kind != NONE:
        normalise(call.hidden, to, source, at, call.before, size, call.before_eps, call.before_kind)
        source, at = call.hidden, to
    if call.adds:
        for d in range(0, size, 16):
            x = load_first(source, at + d, size - d)
            x = add(load_first(call.residual, to + d, size - d), x)
            store_first(call.hidden, to + d, x, size - d)
        source, at = call.hidden, to
    if call.after_kind != NONE:
        normalise(call.out, to, source, at, call.after, size, call.after_eps, call.after_kind)
