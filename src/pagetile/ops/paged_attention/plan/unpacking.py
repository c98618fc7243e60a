"""The rule by which prefill over an 8-bit cache unpacks its blocks first, and its constants.

Either every tile of queries converts the keys that it reads, or one kernel converts all keys once
and the kernel for 16-bit caches reads the result (decision 35). The choice depends on host integers
only, not on lengths that only the device knows.
"""

from __future__ import annotations

from ..problem import Problem

PAGE = 128
"""Keys of an unpacked page: whole tiles of the forward kernel, one TMA box each."""

MOST_BYTES = 512 << 20
"""Most bytes of unpacked keys and values."""

MOST_SEQS = 2048
"""Most sequences of a call, since each program reads all their lengths."""

# Measured on an H200 (decision 35); RATE is lower, for the H100's bandwidth.
CONVERTING = 0.2e-12
"""Extra seconds of a multiprocessor per row and element of a visible key or value, if elements are
converted for every tile of rows."""
UNPACKING = 8e-6
"""Seconds of another launch and its dependent loads."""
RATE = 2.6e12
"""Bytes a second of unpacking: an element is read as one byte and written as two."""


def can_unpack(problem: Problem, short: int) -> bool:
    """Return whether blocks of a call over an 8-bit cache can be unpacked: whether there is room.

    Scales for each token multiply scores, which the kernel for 16-bit caches does not do. Keys
    times a scale would be rounded, and the log-sum-exp would be off by as much.

    Args:
        problem: A call.
        short: Sequences with up to this many new tokens are left to another launch.
    """
    if problem.scale_kind != "head" or problem.num_seqs > MOST_SEQS:
        return False
    width = problem.num_kv_heads * (problem.head_size + problem.v_head_size)
    pages = count_pages(problem, short, problem.max_seq_len)
    return 0 < 2 * pages * PAGE * width <= MOST_BYTES


def count_pages(problem: Problem, short: int, longest: int) -> int:
    """Return an upper bound of the pages of a call's unpacked keys.

    Args:
        problem: A call.
        short: Sequences with up to this many new tokens are left to another launch.
        longest: Upper bound of a sequence's keys.
    """
    return _count_seqs(problem, short) * _pages_of(problem, longest)


def estimate(
    problem: Problem, num_workers: int, *, tile_m: int, short: int, divides_keys: bool
) -> tuple[float, float]:
    """Return the seconds that converting keys for every tile costs, and those of unpacking first.

    Converting takes as long as all rows' keys on all multiprocessors or, with few tiles, as one
    tile's on one. Upper bounds stand for lengths, so unpacking is overestimated where lengths
    differ.

    Args:
        problem: A call over an 8-bit cache.
        num_workers: Multiprocessors.
        tile_m: Rows of a tile.
        short: Sequences with up to this many new tokens are left to another launch.
        divides_keys: Whether several multiprocessors may share the keys of a tile.
    """
    size = problem.head_size + problem.v_head_size
    longest, window = problem.max_seq_len, problem.sliding_window
    seen = max(0.0, longest - problem.max_query_len / 2)  # by a token, on average
    if window is not None:
        seen, longest = min(seen, window), min(longest, window + tile_m)
    converting = problem.num_tokens * problem.num_heads * seen / num_workers
    if not divides_keys:
        converting = max(converting, tile_m * longest)
    keys = count_pages(problem, short, problem.max_seq_len) * PAGE * problem.num_kv_heads
    return converting * size * CONVERTING, UNPACKING + keys * size * 3 / RATE


def _count_seqs(problem: Problem, short: int) -> int:
    """Return an upper bound of the sequences with more than ``short`` new tokens."""
    return min(problem.num_seqs, problem.num_tokens // (short + 1))


def _pages_of(problem: Problem, longest: int) -> int:
    """Return an upper bound of the pages that a sequence's new tokens see."""
    pages = -(-longest // PAGE)
    if problem.sliding_window is None:
        return pages
    seen = problem.sliding_window + problem.max_query_len
    return min(pages, -(-seen // PAGE) + 1)
