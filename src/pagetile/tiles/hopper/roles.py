"""Warp specialisation: streams of computing warps, and loading warps."""

from typing import Any

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
