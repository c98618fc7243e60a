"""Random cases that combine all lengths, sizes, types and features."""

from __future__ import annotations

import dataclasses
import random

import torch

from ..ops.scales import LARGEST_CODE
from .paged_cases import PagedCase

_GROUPS = (1, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8)
_HEAD_SIZES = (8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 192, 256)
_BLOCK_SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 16, 16, 17, 32, 33, 64, 100, 128, 255, 256)
_SCALES = (None, None, None, None, None, None, 0.0, 1.0, 0.5, 0.02, -0.1)
_CAPS = (0.5, 5.0, 30.0, 50.0)
_VISIBLE = (0.0, 0.1, 0.3, 0.6, 0.95)
_MOST_WORK = 1 << 24  # multiply-adds of a case: some milliseconds for the oracle
_EXP = 64  # multiply-adds that take as long as a score's exponential


def random_case(rng: random.Random) -> PagedCase:
    """Draw a legal combination of lengths, sizes, types and features; mostly small ones.

    Examples:
        >>> case = random_case(random.Random(7))
        >>> case == random_case(random.Random(7))
        True
    """
    num_kv_heads, head_size = rng.choice([1, 1, 2, 2, 3, 4]), _random_size(rng)
    num_heads = num_kv_heads * rng.choice(_GROUPS)
    v_head_size = _random_size(rng) if rng.random() < 0.3 else None
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.bfloat16])
    other = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    work = num_heads * (head_size + (v_head_size or head_size) + _EXP)
    query_lens, seq_lens = _random_lengths(rng, _MOST_WORK // work)
    longest = max(*query_lens, *seq_lens, 1)
    case = PagedCase(
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        v_head_size=v_head_size,
        block_size=rng.choice(_BLOCK_SIZES) if rng.random() < 0.8 else rng.randint(1, 256),
        dtype=dtype,
        kv_dtype=other if rng.random() < 0.25 else None,
        softmax_scale=rng.choice(_SCALES),
        causal=rng.random() < 0.8,
        sliding_window=rng.randint(1, rng.randint(1, longest + 8)) if rng.random() < 0.3 else None,
        logits_soft_cap=rng.choice(_CAPS) if rng.random() < 0.2 else None,
        has_alibi=rng.random() < 0.2,
        has_sinks=rng.random() < 0.2,
        strided=rng.random() < 0.4,
        shares_prefix=rng.random() < 0.2,
        visible_share=rng.choice(_VISIBLE) if rng.random() < 0.15 else None,
        seed=rng.randrange(1 << 31),
    )
    if case.shares_prefix:
        case = _lengthen(case, rng)
    if rng.random() < 0.75:
        return case
    scales = rng.choice(["tensor", "head", "token", "token"])
    return dataclasses.replace(case, kv_dtype=rng.choice(list(LARGEST_CODE)), scales=scales)


def vary(case: PagedCase, rng: random.Random) -> PagedCase:
    """Return a case with other lengths that kernels compiled for ``case`` can usually run.

    Sizes, types, features and the most new tokens of a sequence stay, because GPU kernels are
    compiled for them, which takes seconds.

    Args:
        case: The case to vary.
        rng: The random generator.

    Examples:
        >>> case = random_case(random.Random(7))
        >>> other = vary(case, random.Random(8))
        >>> other.head_size == case.head_size, other.seq_lens == case.seq_lens
        (True, False)
    """
    work = case.num_heads * (case.head_size + case.value_size + _EXP)
    most = max(case.query_lens)
    query_lens, seq_lens = map(list, _random_lengths(rng, _MOST_WORK // work))
    query_lens = [min(length, most) for length in query_lens]
    query_lens[0], seq_lens[0] = most, min(seq_lens[0], _MOST_WORK // work // max(1, most))
    longest = max(*query_lens, *seq_lens)
    window, cap = case.sliding_window, case.logits_soft_cap
    return dataclasses.replace(
        case,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        softmax_scale=rng.choice(_SCALES),
        sliding_window=window and rng.randint(1, rng.randint(1, longest + 8)),
        logits_soft_cap=cap and rng.choice(_CAPS),
        shares_prefix=rng.random() < 0.2,
        visible_share=None if case.visible_share is None else rng.choice(_VISIBLE),
        seed=rng.randrange(1 << 31),
    )


def _lengthen(case: PagedCase, rng: random.Random) -> PagedCase:
    """Add keys to every sequence, for prefixes long enough to be read once for a group."""
    more = rng.choice([0, 0, 512, 600, 1100])
    work = case.num_heads * (case.head_size + case.value_size + _EXP)
    if more * sum(case.query_lens) > _MOST_WORK // work:
        return case
    seq_lens = tuple(seq_len and seq_len + more for seq_len in case.seq_lens)
    return dataclasses.replace(case, seq_lens=seq_lens)


def _random_size(rng: random.Random) -> int:
    return rng.choice(_HEAD_SIZES) if rng.random() < 0.8 else 8 * rng.randint(1, 32)


def _random_lengths(
    rng: random.Random, most_scores: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw query and key lengths of a batch of decode, prefill, chunks or all of them."""
    query_lens, seq_lens = [], []
    kinds = rng.choice([["decode"], ["prefill"], ["chunk"], ["decode", "prefill", "chunk", "odd"]])
    for _ in range(rng.choice([1, 1, 2, 3, 4, 6])):
        ends = rng.choice([(0, 3), *[(1, 64)] * 5, *[(60, 300)] * 3, (300, 700), (1000, 1200)])
        seq_len = rng.randint(*ends)
        chunk = rng.randint(1, max(1, min(seq_len, rng.choice([4, 40, 400]))))
        more_than_keys = seq_len + rng.randint(0, 5) if seq_len < 50 else 0
        lengths = {"decode": 1, "prefill": seq_len, "chunk": chunk, "odd": more_than_keys}
        query_len = lengths[rng.choice(kinds)]
        query_len = min(query_len, max(1, most_scores // max(1, seq_len)))
        most_scores -= query_len * seq_len
        query_lens.append(query_len)
        seq_lens.append(seq_len)
    return tuple(query_lens), tuple(seq_lens)
