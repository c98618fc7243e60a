"""Attention problems with their inputs: the same numbers in pages and, for the peers, dense."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagewise import PagedBatch
from torch import Tensor

__all__ = ["Dense", "Inputs", "Workload"]

SPARE_BLOCKS = 4
NO_BLOCK = 2147480000  # a table entry that nobody may follow


@dataclass(frozen=True)
class Workload:
    """One call of paged attention: lengths, heads, types."""

    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    prefill: bool = False
    """Whether all tokens are new; otherwise each sequence has one new token."""

    def __str__(self) -> str:
        lengths = "/".join(map(str, self.seq_lens))
        if len(set(self.seq_lens)) == 1:
            lengths = f"{len(self.seq_lens)} × {self.seq_lens[0]}"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{lengths}, {heads}, blocks of {self.block_size}, {dtype}"

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        slot = 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize
        return sum(self.seq_lens) * slot

    @property
    def flops(self) -> int:
        """Of both products; a causal square counts half."""
        pairs = sum(n * n // 2 if self.prefill else n for n in self.seq_lens)
        return 4 * pairs * self.num_heads * self.head_size


@dataclass(frozen=True)
class Dense:
    """Sequences of one length as the peers want them: ``[num_seqs, heads, length, head_size]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    block_tables: Tensor
    """int64 ``[num_seqs, blocks]``: the same sequences in the pages."""


@dataclass(frozen=True)
class Inputs:
    """A workload with random numbers in it."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: PagedBatch
    dense: tuple[Dense, ...]
    """All sequences at once if they are equally long, otherwise one by one."""

    @staticmethod
    def of(workload: Workload) -> Inputs:
        """Random inputs, blocks in random order, NaN in every slot that holds no token."""
        random = torch.Generator().manual_seed(0)
        tables = _block_tables(workload, random)
        num_blocks = sum(len(table) for table in tables) + SPARE_BLOCKS
        shape = (num_blocks, workload.block_size, workload.num_kv_heads, workload.head_size)
        k_cache = torch.full(shape, torch.nan, dtype=workload.dtype)
        v_cache = torch.full(shape, torch.nan, dtype=workload.dtype)
        dense = []
        for seq_len, table in zip(workload.seq_lens, tables, strict=True):
            kv_shape = (seq_len, workload.num_kv_heads, workload.head_size)
            q_shape = (seq_len if workload.prefill else 1, workload.num_heads, workload.head_size)
            q, k, v = (
                torch.randn(shape, generator=random).to(workload.dtype)
                for shape in (q_shape, kv_shape, kv_shape)
            )
            _fill(k_cache, table, k)
            _fill(v_cache, table, v)
            one = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
            dense.append(Dense(*one, table[None]))
        q = torch.cat([each.q[0].transpose(0, 1) for each in dense])
        return Inputs(q, k_cache, v_cache, _batch(workload, tables), _stack(dense))


def _block_tables(workload: Workload, random: torch.Generator) -> list[Tensor]:
    counts = [-(-n // workload.block_size) for n in workload.seq_lens]
    order = torch.randperm(sum(counts) + SPARE_BLOCKS, generator=random)
    return list(order[: sum(counts)].split(counts))


def _fill(cache: Tensor, table: Tensor, values: Tensor) -> None:
    size = cache.shape[1]
    slots = (table[:, None] * size + torch.arange(size)).flatten()
    cache.flatten(0, 1)[slots[: len(values)]] = values


def _batch(workload: Workload, tables: list[Tensor]) -> PagedBatch:
    lengths = torch.tensor(workload.seq_lens, dtype=torch.int32)
    width = max(len(table) for table in tables) + 1
    block_tables = torch.full((len(tables), width), NO_BLOCK, dtype=torch.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    longest = max(workload.seq_lens)
    if not workload.prefill:
        return PagedBatch.decode(block_tables, lengths, longest)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    return PagedBatch(block_tables, lengths, starts, longest, longest)


def _stack(dense: list[Dense]) -> tuple[Dense, ...]:
    if len({each.k.shape for each in dense}) > 1:
        return tuple(dense)
    columns = zip(*((each.q, each.k, each.v, each.block_tables) for each in dense), strict=True)
    return (Dense(*(torch.cat(column) for column in columns)),)
