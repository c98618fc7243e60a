"""Cases of paged attention, and their inputs with everything unused poisoned.

A cache that ``make_inputs`` builds, with blocks of 4 slots and sequences of 6 and 3 keys
(x = NaN, every other slot is random)::

    block        0        1        2        3        4
    slots     a4 a5 x x  x x x x  a0 a1 a2 a3  b0 b1 b2 x  x x x x

    block_tables = [[2, 0, 2147480000], [3, 2147480000, 2147480000], …]
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.paged_attention import PagedBatch, Problem, paged_attention
from ..tiles.state import AttentionOutput

__all__ = ["TABLE_POISON", "PagedCase", "PagedInputs", "make_inputs", "random_case"]

TABLE_POISON = 2147480000
"""What stands past a block table row's end: a read there leaves any cache."""

_SHORT_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class PagedCase:
    """A call of ``paged_attention`` without its numbers: lengths, sizes, types and features.

    The batch that ``make_inputs`` draws has one more sequence than the case names: one without
    keys, somewhere among them.

    Example:
        >>> case = PagedCase(query_lens=(1, 5), seq_lens=(30, 5), num_heads=8, sliding_window=4)
        >>> str(case)
        's2-h8/2-d64-b16-w4-f32'
    """

    query_lens: tuple[int, ...] = (1,)
    """New tokens of each sequence; 0, or more than its keys: the first rows then see none."""
    seq_lens: tuple[int, ...] = (17,)
    """Keys of each sequence, new tokens included; may be 0."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    v_head_size: int | None = None
    """``None``: as ``head_size``."""
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    """Element type of q and out."""
    kv_dtype: torch.dtype | None = None
    """Element type of the caches. ``None``: as ``dtype``."""
    softmax_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    strided: bool = False
    """Whether q, out, caches and tables are views of larger tensors, dimensions in any order."""
    shares_prefix: bool = False
    """Whether sequences hold the first one's first full blocks in common."""
    seed: int = 0
    """Of the numbers, the order of blocks and the strides."""

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens):
            raise ValueError(
                f"query_lens has {len(self.query_lens)} entries but seq_lens has "
                f"{len(self.seq_lens)}: one each a sequence"
            )

    def __str__(self) -> str:
        """A short name, good as a test's id."""
        types = [_SHORT_NAMES.get(dtype, str(dtype)) for dtype in (self.dtype, self.cache_dtype)]
        words = [
            f"s{len(self.seq_lens)}",
            f"h{self.num_heads}/{self.num_kv_heads}",
            f"d{self.head_size}" + f"/{self.v_head_size}" * (self.v_head_size is not None),
            f"b{self.block_size}",
            f"scale{self.softmax_scale}" * (self.softmax_scale is not None),
            "full" * (not self.causal),
            f"w{self.sliding_window}" * (self.sliding_window is not None),
            f"cap{self.logits_soft_cap}" * (self.logits_soft_cap is not None),
            "alibi" * self.has_alibi,
            "sinks" * self.has_sinks,
            "strided" * self.strided,
            "shared" * self.shares_prefix,
            "/".join(dict.fromkeys(types)),
        ]
        return "-".join(word for word in words if word)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Element type of the caches."""
        return self.kv_dtype or self.dtype

    @property
    def value_size(self) -> int:
        """Width of a head's values."""
        return self.head_size if self.v_head_size is None else self.v_head_size


@dataclass(frozen=True, eq=False)
class PagedInputs:
    """What a case becomes: the arguments of ``paged_attention``, and a place for its result."""

    case: PagedCase
    q: Tensor
    """``[num_tokens, num_heads, head_size]``."""
    k_cache: Tensor
    """``[num_blocks, block_size, num_kv_heads, head_size]``, NaN where no sequence has a key."""
    v_cache: Tensor
    """``[num_blocks, block_size, num_kv_heads, v_head_size]``, NaN at the same slots."""
    batch: PagedBatch
    options: dict[str, Any]
    """Keyword arguments: scale, mask, cap, ``alibi_slopes`` and ``sinks``."""
    out: Tensor
    """``[num_tokens, num_heads, v_head_size]`` of NaN, to be written."""

    @property
    def problem(self) -> Problem:
        """What ``make_plan`` is asked about."""
        return Problem(
            num_seqs=self.batch.num_seqs,
            num_tokens=self.q.shape[0],
            max_query_len=self.batch.max_query_len,
            max_seq_len=self.batch.max_seq_len,
            num_heads=self.q.shape[1],
            num_kv_heads=self.k_cache.shape[2],
            head_size=self.q.shape[2],
            v_head_size=self.v_cache.shape[3],
            block_size=self.k_cache.shape[1],
            q_dtype=self.q.dtype,
            kv_dtype=self.k_cache.dtype,
        )

    def attend(self, **changes: Any) -> AttentionOutput:
        """Call ``paged_attention`` on these inputs; ``changes`` are its keyword arguments."""
        options = {**self.options, **changes}
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, **options)

    def replace(self, **changes: Any) -> PagedInputs:
        """These inputs with some fields changed."""
        return dataclasses.replace(self, **changes)


def make_inputs(case: PagedCase) -> PagedInputs:
    """Draw a case's numbers: the same case gives the same inputs on every machine.

    Physical blocks are in random order. Unused slots of used blocks, unused blocks, ``out`` and
    (with ``strided``) all memory around the tensors hold NaN; table entries past a row's end
    hold ``TABLE_POISON``.

    Example:
        >>> inputs = make_inputs(PagedCase(query_lens=(2, 1), seq_lens=(2, 30), block_size=8))
        >>> inputs.batch.num_seqs, inputs.q.shape, inputs.attend(impl="reference").out.isnan().any()
        (3, torch.Size([4, 4, 64]), tensor(False))
    """
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    query_lens, seq_lens = list(case.query_lens), list(case.seq_lens)
    empty = rng.randint(0, len(seq_lens))
    query_lens.insert(empty, rng.randint(0, 1))
    seq_lens.insert(empty, 0)
    block_tables, used = _place(case, seq_lens, rng)

    def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator)
        return _spread(numbers.to(dtype), math.nan, rng if case.strided else None)

    num_tokens, kv = sum(query_lens), (*used.shape, case.num_kv_heads)
    q = tensor(case.dtype, num_tokens, case.num_heads, case.head_size)
    k_cache = tensor(case.cache_dtype, *kv, case.head_size)
    v_cache = tensor(case.cache_dtype, *kv, case.value_size)
    out = tensor(case.dtype, num_tokens, case.num_heads, case.value_size)
    k_cache[~used], v_cache[~used], out[:] = math.nan, math.nan, math.nan
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    batch = PagedBatch(
        _spread(block_tables, TABLE_POISON, rng if case.strided else None),
        torch.tensor(seq_lens, dtype=torch.int32),
        starts,
        max_query_len=max(query_lens) + rng.choice([0, 0, 7]),
        max_seq_len=max(seq_lens) + rng.choice([0, 0, 1000]),
    )
    options = {
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
        "alibi_slopes": torch.rand(case.num_heads, generator=generator) if case.has_alibi else None,
        "sinks": 2 * torch.randn(case.num_heads, generator=generator) if case.has_sinks else None,
    }
    return PagedInputs(case, q, k_cache, v_cache, batch, options, out)


def _place(case: PagedCase, seq_lens: list[int], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Give every sequence its blocks: the tables, and which slots are used."""
    lengths = [-(-seq_len // case.block_size) for seq_len in seq_lens]
    num_blocks = sum(lengths) + rng.randint(1, 4)
    free = rng.sample(range(num_blocks), num_blocks)
    block_tables = torch.full(
        (len(seq_lens), max(lengths) + rng.randint(0, 2)), TABLE_POISON, dtype=torch.int32
    )
    used = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    prefix: list[int] = []
    for seq, (length, seq_len) in enumerate(zip(lengths, seq_lens, strict=True)):
        blocks = prefix[: seq_len // case.block_size]
        blocks = blocks + [free.pop() for _ in range(length - len(blocks))]
        if case.shares_prefix and not prefix:
            prefix = blocks[: seq_len // case.block_size]
        block_tables[seq, :length] = torch.tensor(blocks, dtype=torch.int32)
        for i, block in enumerate(blocks):
            used[block, : seq_len - i * case.block_size] = True
    return block_tables, used


def _spread(tensor: Tensor, poison: float, rng: random.Random | None) -> Tensor:
    """The same tensor as a view of a larger, poisoned one, its leading dimensions in any order."""
    if rng is None:
        return tensor
    last = tensor.dim() - 1
    order = [*rng.sample(range(last), last), last]
    before = [rng.randint(0, 2) for _ in order]
    after = [rng.randint(0, 2) for _ in order[:-1]] + [rng.choice([0, 1, 3, 8])]
    sizes = [tensor.shape[dim] for dim in order]
    padded = [a + size + b for a, size, b in zip(before, sizes, after, strict=True)]
    view = torch.full(padded, poison, dtype=tensor.dtype)
    for dim, size in enumerate(sizes):
        view = view.narrow(dim, before[dim], size)
    view = view.permute([order.index(dim) for dim in range(tensor.dim())])
    return view.copy_(tensor)


_GROUPS = (1, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8)
_HEAD_SIZES = (8, 16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 192, 256)
_BLOCK_SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 16, 16, 17, 32, 33, 64, 100, 128, 255, 256)
_SCALES = (None, None, None, None, None, None, 0.0, 1.0, 0.5, 0.02, -0.1)
_MOST_WORK = 1 << 24  # multiply-adds of a case: some milliseconds for the oracle
_EXP = 64  # multiply-adds that take as long as a score's exponential


def random_case(rng: random.Random) -> PagedCase:
    """Any legal mix of lengths, sizes, types and features; mostly small, so that many can run.

    Example:
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
    return PagedCase(
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
        logits_soft_cap=rng.choice([0.5, 5.0, 30.0, 50.0]) if rng.random() < 0.2 else None,
        has_alibi=rng.random() < 0.2,
        has_sinks=rng.random() < 0.2,
        strided=rng.random() < 0.4,
        shares_prefix=rng.random() < 0.2,
        seed=rng.randrange(1 << 31),
    )


def _random_size(rng: random.Random) -> int:
    return rng.choice(_HEAD_SIZES) if rng.random() < 0.8 else 8 * rng.randint(1, 32)


def _random_lengths(
    rng: random.Random, most_scores: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key lengths of a batch of decode, prefill, chunks or all of them."""
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
