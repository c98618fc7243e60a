"""When prefill over an 8-bit cache unpacks its blocks first, and the numbers of the cost rule.

Every tile of queries that reads a key converts it, or one kernel converts all keys once and the
kernel for caches of 16 bits reads the result (decision 35). Host integers only: what is chosen
does not depend on lengths that only the device knows.
"""

from __future__ import annotations

from .problem import Problem

PAGE = 128
"""Keys of a page of unpacked ones: whole tiles of the forward kernel, copied as one box each."""

MOST_BYTES = 512 << 20
"""Of unpacked keys and values, at most."""

MOST_SEQS = 2048
"""Sequences of a call, at most: each program looks through all of them."""

# By a run on an H200 (decision 35); an H100 has less bandwidth, which RATE allows for.
CONVERTING = 0.2e-12
"""Seconds that one multiprocessor takes longer for a row, and an element of the key or the value
that it sees, where the element is converted for every tile of rows."""
UNPACKING = 8e-6
"""Seconds of a further launch, and of the loads that wait for each other in it."""
RATE = 2.6e12
"""Bytes a second: an element is read as one byte, and written as two."""


def can_unpack(problem: Problem, short: int) -> bool:
    """Return whether blocks of a call over an 8-bit cache can be unpacked: whether there is room.

    Scales of tokens multiply scores, which the kernel for caches of 16 bits does not do. If they
    multiplied keys, these would be rounded, and the log-sum-exp would be off by as much.

    Args:
        problem: A call.
        short: Sequences with up to so many new tokens are left to another launch.
    """
    if problem.scale_kind != "head" or problem.num_seqs > MOST_SEQS:
        return False
    width = problem.num_kv_heads * (problem.head_size + problem.v_head_size)
    pages = count_pages(problem, short, problem.max_seq_len)
    return 0 < 2 * pages * PAGE * width <= MOST_BYTES


def count_pages(problem: Problem, short: int, longest: int) -> int:
    """Return at least how many pages the unpacked keys of a call take.

    Args:
        problem: A call.
        short: Sequences with up to so many new tokens are left to another launch.
        longest: At least the most keys of a sequence.
    """
    return _count_seqs(problem, short) * _pages_of(problem, longest)


def estimate(
    problem: Problem, num_workers: int, *, tile_m: int, short: int, divides_keys: bool
) -> tuple[float, float]:
    """Return the seconds that converting keys for every tile costs, and those of unpacking first.

    Converting takes as long as all rows' keys on all multiprocessors, or as one tile's on one where
    tiles are few. Bounds are taken for lengths, which makes unpacking seem to take longer than it
    does where lengths differ.

    Args:
        problem: A call over an 8-bit cache.
        num_workers: Multiprocessors.
        tile_m: Rows of a tile.
        short: Sequences with up to so many new tokens are left to another launch.
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
    """Return at least how many sequences have more than ``short`` new tokens."""
    return min(problem.num_seqs, problem.num_tokens // (short + 1))


def _pages_of(problem: Problem, longest: int) -> int:
    """Return at least how many pages hold the keys of a sequence that its new tokens see."""
    pages = -(-longest // PAGE)
    if problem.sliding_window is None:
        return pages
    seen = problem.sliding_window + problem.max_query_len
    return min(pages, -(-seen // PAGE) + 1)
