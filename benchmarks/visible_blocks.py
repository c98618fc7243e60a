"""Decode over a part of each sequence's blocks, against the call over all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagetile import PagedBatch, explain_paged_attention, paged_attention
from pagetile.analysis.timing import ratio
from pagetile.testing import TABLE_POISON

from .case import Check, Measurement, Target
from .gate import Rows, check_timed_call, chosen
from .gpu_timing import time_in_turns

_MOST_SEQS = 4


@dataclass(frozen=True)
class VisibleBlocksCase:
    """One new token for each sequence; each KV head attends to random blocks of its own.

    Metrics: ``x dense``, how many times as fast as the same call without ``visible_blocks``;
    ``GB/s`` of the keys and values that are visible.
    """

    name: str
    num_seqs: int = 16
    length: int = 32768
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    visible: float = 1 / 8
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        lengths = f"{self.num_seqs} x {self.length}, {self.visible:.3g} of its blocks"
        return f"visible blocks: {lengths}, {heads}, blocks of {self.block_size}, bfloat16"

    @property
    def num_visible(self) -> int:
        """Blocks of a sequence that a KV head attends to."""
        return max(1, round(self.visible * (self.length // self.block_size)))

    def verify(self) -> list[Check]:
        """Rows of the timed call at full size, against float64."""
        inputs = _Inputs(self)
        arguments = inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch
        impl = chosen(explain_paged_attention(*arguments, visible_blocks=inputs.lists))
        return check_timed_call(inputs.attend, impl, inputs.rows(), self.about)

    def measure(self, repeats: int | None) -> Measurement:
        """Time both calls in turns, by graph replay, cache cold."""
        inputs = _Inputs(self)
        calls: dict[str, Callable[[], Any]] = {"pagetile": inputs.attend, "dense": inputs.see_all}
        times = time_in_turns(calls, self.device, repeats=repeats)
        own = times["pagetile"]
        keys = self.num_seqs * self.num_kv_heads * self.num_visible * self.block_size
        num_bytes = 2 * keys * self.head_size * inputs.k_cache.dtype.itemsize
        metrics = {
            "microseconds": own.median * 1e6,
            "GB/s": num_bytes / own.median / 1e9,
            "x dense": ratio(times["dense"], own),
        }
        return Measurement(times, metrics)


class _Inputs:
    """Sequences of whole blocks in random order, and ascending lists of visible blocks."""

    def __init__(self, case: VisibleBlocksCase) -> None:
        device = case.device
        generator = torch.Generator(device).manual_seed(0)
        per_seq = case.length // case.block_size
        num_blocks = case.num_seqs * per_seq
        kept = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
        self.k_cache, self.v_cache = (
            torch.randn(kept, generator=generator, device=device).bfloat16() for _ in range(2)
        )
        order = torch.randperm(num_blocks, generator=generator, device=device).int()
        self.tables = order.view(case.num_seqs, per_seq)
        tables = torch.nn.functional.pad(self.tables, (0, 2), value=TABLE_POISON)
        lengths = torch.full(
            (case.num_seqs,), per_seq * case.block_size, dtype=torch.int32, device=device
        )
        self.batch = PagedBatch.decode(tables, lengths, per_seq * case.block_size)
        drawn = torch.rand(
            (case.num_seqs, case.num_kv_heads, per_seq), generator=generator, device=device
        )
        self.lists = drawn.argsort(-1)[..., : case.num_visible].sort(-1).values.int()
        size = (case.num_seqs, case.num_heads, case.head_size)
        self.q = torch.randn(size, generator=generator, device=device).bfloat16()

    def attend(self, **options: Any) -> Any:
        """The call over the visible blocks."""
        return self.see_all(visible_blocks=self.lists, **options)

    def see_all(self, **options: Any) -> Any:
        """The call over all blocks."""
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, **options)

    def rows(self) -> Rows:
        """Some sequences' rows in float64."""
        num_seqs, num_heads = self.q.shape[:2]
        seqs = sorted(random.Random(0).sample(range(num_seqs), min(_MOST_SEQS, num_seqs)))
        group = num_heads // self.lists.shape[1]
        expected = torch.stack(
            [
                torch.stack([self._row(seq, head, head // group) for head in range(num_heads)])
                for seq in seqs
            ]
        )
        return Rows(torch.tensor(seqs, device=self.q.device), expected)

    def _row(self, seq: int, head: int, kv_head: int) -> Tensor:
        blocks = self.tables[seq, self.lists[seq, kv_head].long()].long()
        k, v = (
            c[blocks][:, :, kv_head].flatten(0, 1).double() for c in (self.k_cache, self.v_cache)
        )
        scores = k @ self.q[seq, head].double() * self.q.shape[-1] ** -0.5
        row: Tensor = scores.softmax(-1) @ v
        return row
