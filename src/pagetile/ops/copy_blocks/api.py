"""``copy_blocks``: contract, checks, and the choice of an implementation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import DTypeError, ShapeError, plural
from ...shapes import (
    Form,
    bind,
    check_device,
    check_dtype,
    check_tensors,
    check_written_once,
    forms,
    share_memory,
    span,
)
from ..dispatch import choose
from ..eager import call_uncompiled, check_readable, refuse_observers
from .operator import copy
from .problem import Problem

IMPLEMENTATIONS = ("triton", "cpu", "reference")


def copy_blocks(
    caches: Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]],
    src_to_dst: Tensor | Sequence[tuple[int, int]],
    *,
    impl: str = "auto",
) -> None:
    """Copy whole blocks inside each cache, or from one cache to another, in place.

    All sources are read as they were before the call: one row of ``src_to_dst`` may read a block
    that another overwrites. Caches are copied in no particular order, so a cache that is written
    must be named only once.

    On a GPU, and between it and pinned host memory, the copy is queued on the current stream like
    a kernel, and the host does not wait. Synchronise before the host reads or overwrites that
    memory. With host memory that is not pinned, the host waits.

    Args:
        caches: The caches to copy in, one a layer for keys and one for values:
            ``[num_blocks, …]`` each, any type. A pair ``(source, destination)`` copies between
            two tensors, host and device included.
        src_to_dst: int64 ``[n, 2]`` on the CPU: source block, destination block; no destination
            twice. Or a list of pairs, as ``BlockTable.append`` returns it, which breaks the graph
            of ``torch.compile``.
        impl: ``"auto"``, or one of ``"triton"``, ``"cpu"``, ``"reference"``.

    Raises:
        ShapeError: A block lies outside a cache, a destination is named twice, a pair's blocks
            differ in shape, or a cache that is written is named twice. Nothing is written then.
        DTypeError: ``src_to_dst`` is not int64, or a pair differs in type.
        UnsupportedError: The named ``impl`` cannot copy between these. Nothing is written then.

    Examples:
        >>> cache = torch.arange(4.0)[:, None].repeat(1, 3)
        >>> copy_blocks([cache], torch.tensor([[3, 0], [0, 1]]))
        >>> cache[:, 0].tolist()
        [3.0, 0.0, 2.0, 3.0]
    """
    if torch.compiler.is_compiling():
        if isinstance(src_to_dst, Tensor):
            copy(caches, src_to_dst, impl)
        else:  # each new list would be compiled
            call_uncompiled(copy_blocks, caches, src_to_dst, impl=impl)
        return
    refuse_observers("copy_blocks")
    src_to_dst = _as_pairs(src_to_dst)
    bounds = _bound(src_to_dst)
    if isinstance(caches, Tensor):
        raise DTypeError("caches is a tensor, expected a list of caches: pass [cache]")
    if not isinstance(caches, Iterable):
        raise DTypeError(f"caches is {caches!r}, expected a list of caches: [*cache.k, *cache.v]")
    pairs = [cache if isinstance(cache, tuple) else (cache, cache) for cache in caches]
    for pair in pairs:
        if len(pair) != 2:
            raise ShapeError(f"caches has a tuple of {len(pair)}, expected (source, destination)")
    groups: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    spans = []
    for source, destination in pairs:
        if isinstance(source, list):
            raise DTypeError("caches has a list, expected tensors, or tuples (source, destination)")
        both = forms(cache=source, destination=destination)
        module, *both_spans = _dispatch(*both, _is_pinned(source, destination), impl)
        _check_blocks(source.shape[0], destination.shape[0], bounds)
        groups.setdefault(module, []).append((source, destination))
        spans.append(both_spans)
    _check_apart(pairs, spans)
    for module, group in groups.items():
        module.run(group, src_to_dst)


def _as_pairs(src_to_dst: Any) -> Tensor:
    """Return ``src_to_dst`` as a tensor, checked but for the block numbers."""
    if isinstance(src_to_dst, (list, tuple)):
        try:
            src_to_dst = torch.tensor(src_to_dst or np.empty((0, 2), np.int64), device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ShapeError(f"src_to_dst is {src_to_dst!r}, expected pairs of blocks") from error
    check_tensors(src_to_dst=src_to_dst)
    bind(src_to_dst=(src_to_dst, "n 2"))
    check_dtype("src_to_dst", src_to_dst, torch.int64)
    check_device("src_to_dst", torch.device("cpu"), src_to_dst=src_to_dst)
    pairs: Tensor = src_to_dst
    return pairs


def _check_apart(pairs: Sequence[tuple[Tensor, Tensor]], spans: Sequence[Sequence[int]]) -> None:
    """Raise ShapeError if an entry writes what another one reads or writes."""
    memory = []
    for entry, ((source, to), (span_read, span_written)) in enumerate(
        zip(pairs, spans, strict=True)
    ):
        try:
            read, written = source.data_ptr(), to.data_ptr()
        except RuntimeError:
            read = written = 0
        if not (read and written):
            check_readable("copy_blocks", source=source, destination=to)
            continue  # on meta, or empty
        memory.append((written, written + span_written, entry, True, to))
        if source is not to:
            memory.append((read, read + span_read, entry, False, source))
    memory.sort(key=itemgetter(0))
    for at, (_, end, entry, is_written, tensor) in enumerate(memory, 1):
        for start, _, other_entry, is_also, other in itertools.islice(memory, at, None):
            if start >= end:
                break
            if entry != other_entry and (is_written or is_also) and share_memory(tensor, other):
                raise ShapeError(
                    "caches has one that is written by two entries, or written by one and read by "
                    "another, in whole or in part: call copy_blocks once for each, in the order "
                    "that is meant"
                )


def _is_pinned(source: Tensor, destination: Tensor) -> bool:
    """Whether the host's side of a copy between host and GPU is pinned memory."""
    if source.is_cuda == destination.is_cuda:
        return False
    return (destination if source.is_cuda else source).is_pinned()


@functools.lru_cache(maxsize=1024)
def _dispatch(source: Any, destination: Any, is_pinned: bool, impl: str) -> Any:
    """Check caches of these forms; return the module that copies between them, and their spans."""
    source, destination = Form(*source), Form(*destination)
    for cache in (source, destination):
        if not cache.shape:
            raise ShapeError("caches has a tensor of 0 dimensions, expected [num_blocks, ...]")
    check_dtype("a destination cache", destination, source.dtype)
    if source.shape[1:] != destination.shape[1:]:
        raise ShapeError(
            f"blocks are {list(source.shape[1:])} in the source cache but "
            f"{list(destination.shape[1:])} in the destination"
        )
    is_on_gpu = source.device.type == "cuda"
    device = DeviceInfo.of(source.device if is_on_gpu else destination.device)
    check_written_once(destination=destination)
    problem = Problem(source, destination, is_pinned)
    module = choose(__package__, IMPLEMENTATIONS, problem, device, impl)
    return module, span(source), span(destination)


def _bound(src_to_dst: Tensor) -> tuple[list[int], list[int]]:
    """The lowest and highest block, of sources and of destinations."""
    if not len(src_to_dst):
        return [0, 0], [-1, -1]
    pairs = src_to_dst.numpy()
    destinations = np.sort(pairs[:, 1])
    twice = destinations[1:][destinations[1:] == destinations[:-1]]
    if len(twice):
        raise ShapeError(
            f"src_to_dst names destination block {twice[0]} twice, expected each at most once: "
            "remove one of the copies"
        )
    return pairs.min(axis=0).tolist(), pairs.max(axis=0).tolist()


def _check_blocks(
    num_sources: int, num_destinations: int, bounds: tuple[list[int], list[int]]
) -> None:
    sizes = (num_sources, num_destinations)
    for name, num_blocks, low, high in zip(("source", "destination"), sizes, *bounds, strict=True):
        if low < 0 or high >= num_blocks:
            wrong = low if low < 0 else high
            raise ShapeError(
                f"src_to_dst names {name} block {wrong}, expected 0 to {num_blocks - 1}: the cache "
                f"has {plural(num_blocks, 'block')}"
            )
