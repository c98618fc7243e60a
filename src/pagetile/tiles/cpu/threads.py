"""Run a kernel on torch's OpenMP threads.

Torch's products run on a team of OpenMP threads, which spin for milliseconds after their work is
done. Threads of another pool would compete with them for cores: attention between two linear layers
took twice as long that way. So a kernel starts a parallel region of the same team itself, in
compiled code: through Python's interpreter lock a call started 20 µs later. Without libgomp (macOS,
Windows), and in a forked child, which has no team, Python threads run it.

::

    @entry()
    def _run(parallel, num_threads, call, counter):
        on_team(parallel, num_threads, _make_scratch, _take_items, (call, counter))

    run_together(_run, num_threads, call, counter)
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...process import HOME
from .compile import allocating


def run_together(kernel: Callable[..., object], num_threads: int, *arguments: Any) -> None:
    """Call ``kernel(parallel, num_threads, *arguments)``, whose body is one ``on_team``.

    The kernel's threads take work items from an atomic counter, so one may start late or never. It
    may be called from several threads at once.

    Raises:
        MemoryError: A thread's scratch memory could not be allocated.
    """
    parallel = _openmp(os.getpid()) if num_threads > 1 else 0
    if parallel is None:
        _run_on_workers(lambda: kernel(0, 1, *arguments), num_threads)
    else:
        kernel(parallel, num_threads, *arguments)


@functools.lru_cache(maxsize=1)
def _openmp(process: int) -> int | None:
    """Return the address of ``GOMP_parallel(function, data, num_threads, flags)`` in libgomp."""
    if process != HOME:
        return None  # in a forked child libgomp would wait for threads that do not exist
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
        # Prefer torch's own copy: a program may have loaded another one, too.
        parallel = ctypes.CDLL(max(paths, key=lambda path: "torch" in path)).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    return ctypes.cast(parallel, ctypes.c_void_p).value


def _run_on_workers(function: Callable[[], object], num_threads: int) -> None:
    others = [_workers(os.getpid()).submit(function) for _ in range(num_threads - 1)]
    try:
        function()
    finally:
        for other in others:
            # A call that has not started yet would find no work left.
            if not other.cancel():
                other.result()


@functools.lru_cache(maxsize=1)
def _workers(process: int) -> ThreadPoolExecutor:
    """Return the process's thread pool; a forked child needs its own."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="pagetile")


# --- in compiled code ----------------------------------------------------------------------

_BYTES = ir.IntType(8).as_pointer()
_I32 = ir.IntType(32)
_REGION = ir.FunctionType(ir.VoidType(), [_BYTES])
_PARALLEL = ir.FunctionType(ir.VoidType(), [_REGION.as_pointer(), _BYTES, _I32, _I32])


@intrinsic
def on_team(typingctx, parallel, num_threads, make_scratch, work, arguments):
    """Call ``work(*arguments, make_scratch(*arguments))`` on each thread of a team.

    For compiled code. Returns when all have ended. ``parallel`` is the address of libgomp's
    ``GOMP_parallel``, or 0 for a single call on this thread. Raises MemoryError if a call failed.
    """
    made = typingctx.resolve_function_type(make_scratch, tuple(arguments), {})
    worked = typingctx.resolve_function_type(work, (*arguments, made.return_type), {})

    def codegen(context, builder, sig, args):
        values = [builder.extract_value(args[4], i) for i in range(len(arguments))]
        members = [_I32(0), *values]  # whether a call failed, and the arguments
        shared = cgutils.alloca_once_value(
            builder, cgutils.pack_struct(builder, members), name="shared"
        )
        calls = [(make_scratch.dispatcher, made), (work.dispatcher, worked)]
        region = _make_region(context, builder.module, calls, shared.type)
        data = builder.bitcast(shared, _BYTES)
        alone = builder.icmp_unsigned("==", args[0], args[0].type(0))
        with builder.if_else(alone) as (here, together):
            with here:
                builder.call(region, [data])
            with together:
                start = builder.inttoptr(args[0], _PARALLEL.as_pointer())
                builder.call(start, [region, data, builder.trunc(args[1], _I32), _I32(0)])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 0))
        with cgutils.if_unlikely(builder, cgutils.is_not_null(builder, failed)):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel found no memory",))
        return context.get_dummy_value()

    return types.void(parallel, num_threads, make_scratch, work, arguments), codegen


@allocating()
def no_scratch(call):
    """For ``on_team``: no thread needs memory of its own."""
    return 0


def _make_region(context, module, calls, shared):
    """The function that each thread of the team calls with a pointer to the shared struct."""
    region = ir.Function(module, _REGION, module.get_unique_name("region"))
    region.linkage = "internal"
    builder = ir.IRBuilder(region.append_basic_block())
    data = builder.bitcast(region.args[0], shared)
    given = cgutils.unpack_tuple(builder, builder.load(data))[1:]
    for dispatcher, signature in calls:
        compiled = dispatcher.get_compile_result(signature)
        context.active_code_library.add_linking_library(compiled.library)
        function = context.declare_function(module, compiled.fndesc)
        status, result = context.call_conv.call_function(
            builder, function, signature.return_type, signature.args, given
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_I32(1), cgutils.gep_inbounds(builder, data, 0, 0))
            builder.ret_void()
        given = [*given, result]
    scratch = calls[0][1].return_type
    context.nrt.decref(builder, scratch, given[-2])
    builder.ret_void()
    return region
