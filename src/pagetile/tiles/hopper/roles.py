"""Warp specialisation: streams of computing warps, loading warps, and barriers of warpgroups."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _unwrap_if_constexpr, builtin

from .record import record


@record
class StreamIndex:
    """The number of a stream, as a constant."""

    INDEX: gl.constexpr


@builtin
def specialise(
    compute: Any, work: Any, streams: Any, warps: Any, registers: Any, loads: Any,
    load_warps: Any, load_registers: Any, _semantic: Any = None, _generator: Any = None,
) -> Any:  # fmt: skip
    """Run ``compute(*work, StreamIndex)`` in streams, and each ``role(*args)`` of ``loads``.

    A builtin, since Gluon cannot make a list of functions whose length is a constant. Warps and
    registers of a thread are those of each stream, and of each role of ``loads``; the first stream
    has the warps of the kernel.
    """
    others = _unwrap_if_constexpr(streams) - 1
    roles = [(compute, (*work, StreamIndex(stream))) for stream in range(1 + others)]
    return gl.warp_specialize(
        [*roles, *loads],
        [warps] * others + [load_warps] * len(loads),
        [registers] * others + [load_registers] * len(loads),
        _semantic=_semantic,
        _generator=_generator,
    )


@gluon.constexpr_function
def _barrier(action, number, warpgroups):
    # The compiler uses named barriers from 0 on, one for each partition; those from 8 on are free.
    return f"barrier.cta.{action}.aligned {8 + number}, {128 * warpgroups}; mov.u32 $0, 0;"


@gluon.jit
def _at_barrier(ACTION: gl.constexpr, NUMBER: gl.constexpr, WARPGROUPS: gl.constexpr):
    barrier: gl.constexpr = _barrier(ACTION, NUMBER, WARPGROUPS)
    gl.inline_asm_elementwise(barrier, "=r,~{memory}", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def scheduler_wait(GROUP: gl.constexpr):
    """Wait until the previous warpgroup has issued its products."""
    _at_barrier("sync", GROUP, 2)


@gluon.jit
def scheduler_arrive(GROUP: gl.constexpr):
    """Let a warpgroup issue its products."""
    _at_barrier("arrive", GROUP, 2)


@gluon.jit
def warpgroup_barrier(WARPGROUPS: gl.constexpr):
    """Wait for all warpgroups."""
    _at_barrier("sync", WARPGROUPS, WARPGROUPS)
