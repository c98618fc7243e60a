"""Problems of paged attention on a GPU: inputs with blocks in random order, and their checks.

Table entries past a sequence's end are far out of range; the correctness gate adds the poisoned
problems of ``pagetile.testing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagetile import PagedBatch, explain_paged_attention, paged_attention
from pagetile.ops.paged_attention.plan import Plan
from pagetile.ops.paged_attention.problem import Problem
from pagetile.ops.scales import LARGEST_CODE
from pagetile.testing import (
    TABLE_POISON,
    PagedCase,
    PagedInputs,
    compare,
    make_inputs,
    oracle,
    tolerance,
)
from pagetile.testing.paged_oracle import Tolerance
from pagetile.tiles.state import AttentionOutput

from .case import Check
from .gate import Rows, check_timed_call, chosen, expected_rows


@dataclass(frozen=True)
class Shape:
    """A model's attention, and the form of its cache."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    kv_dtype: torch.dtype = torch.bfloat16
    scales: str | None = None
    logits_soft_cap: float | None = None

    def __str__(self) -> str:
        """In words."""
        kept = str(self.kv_dtype).removeprefix("torch.")
        kept += f" with a scale for each {self.scales}" if self.scales else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        capped = f", capped at {self.logits_soft_cap:g}" if self.logits_soft_cap else ""
        return f"{heads}, blocks of {self.block_size}, {kept}{capped}"

    @property
    def bytes_per_key(self) -> int:
        """Bytes of a token's key and value in the cache, without scales."""
        return 2 * self.num_kv_heads * self.head_size * self.kv_dtype.itemsize


LLAMA_8B = Shape()


class Inputs:
    """A call on random numbers, and the same numbers as dense tensors for the peers."""

    def __init__(
        self,
        seq_lens: Sequence[int],
        shape: Shape,
        *,
        decode: bool,
        causal: bool = True,
        device: str = "cuda",
    ) -> None:
        self.shape, self.causal, self.seq_lens = shape, causal, tuple(seq_lens)
        generator = torch.Generator(device).manual_seed(0)
        counts = [-(-n // shape.block_size) for n in seq_lens]
        kept = (sum(counts) + 1, shape.block_size, shape.num_kv_heads, shape.head_size)
        self.scales: dict[str, Any] = _make_scales(shape, kept, device)
        self.k_cache, self.v_cache = (_draw(kept, shape, generator) for _ in range(2))
        order = torch.randperm(sum(counts), generator=generator, device=device).int()
        tables = torch.full((len(counts), max(counts)), TABLE_POISON, device=device).int()
        for row, blocks in zip(tables, torch.split(order, counts), strict=True):
            row[: len(blocks)] = blocks
        lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
        tokens = [1] * len(counts) if decode else list(seq_lens)
        starts = torch.tensor([0, *tokens], device=device).cumsum(0).int()
        self.batch = PagedBatch(tables, lengths, starts, max(tokens), max(seq_lens))
        size = (sum(tokens), shape.num_heads, shape.head_size)
        self.q = torch.randn(size, generator=generator, device=device).bfloat16()

    def attend(self, **options: Any) -> AttentionOutput:
        """The call."""
        return paged_attention(
            self.q, self.k_cache, self.v_cache, self.batch, causal=self.causal,
            logits_soft_cap=self.shape.logits_soft_cap, **self.scales, **options,
        )  # fmt: skip

    def explain(self) -> str:
        """Which implementations can run the call."""
        return explain_paged_attention(
            self.q, self.k_cache, self.v_cache, self.batch, causal=self.causal,
            logits_soft_cap=self.shape.logits_soft_cap, **self.scales,
        )  # fmt: skip

    def rows(self) -> Rows:
        """Random rows of the result in float64."""
        return expected_rows(
            self.q, self.k_cache, self.v_cache, self.batch, causal=self.causal,
            logits_soft_cap=self.shape.logits_soft_cap, **self.scales,
        )  # fmt: skip

    def check(self, what: str) -> list[Check]:
        """Compare the timed call with float64, and with the same call by implementation name."""
        return check_timed_call(self.attend, chosen(self.explain()), self.rows(), what)

    def in_tokens(self, result: Any) -> Tensor:
        """A peer's result as ``[num_tokens, num_heads, head_size]``.

        Peers over dense tensors return ``[num_seqs, heads, length, size]``, in decode also with a
        group's heads as rows; libraries return tokens.
        """
        if result.dim() == 4 and self.batch.max_query_len > 1:
            result = result.transpose(1, 2)
        tokens: Tensor = result.reshape(self.q.shape)
        if self.scales:  # only libraries take 8 bits, and their calls leave out the values' scales
            group = self.q.shape[1] // self.v_cache.shape[2]
            tokens = tokens * self.scales["v_scale"].repeat_interleave(group)[:, None]
        return tokens

    def in_order(self) -> Inputs:
        """The same work on large adjacent blocks: keys of a sequence in order, as if dense."""
        block_size = math.gcd(*self.seq_lens, 128)
        large = replace(self.shape, block_size=block_size)
        device = self.q.device
        other = Inputs(self.seq_lens, large, decode=False, causal=self.causal, device=device.type)
        first = torch.tensor([0, *self.seq_lens[:-1]], device=device).cumsum(0) // block_size
        width = other.batch.block_tables.shape[1]
        tables = (first[:, None] + torch.arange(width, device=device)).int()
        other.batch = replace(other.batch, block_tables=tables)
        return other

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[num_seqs, heads, length, head_size]`` of sequences of one length."""
        num_seqs, length = len(self.seq_lens), self.seq_lens[0]
        tables = self.batch.block_tables.long()
        k, v = (
            cache[tables].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
            for cache in (self.k_cache, self.v_cache)
        )
        q = self.q.view(num_seqs, -1, *self.q.shape[1:]).transpose(1, 2).contiguous()
        return q, k, v


def _make_scales(shape: Shape, kept: tuple[int, ...], device: str) -> dict[str, Tensor]:
    if shape.scales is None:
        return {}
    blocks, slots, heads = kept[:3]

    def draw() -> Tensor:
        if shape.scales == "token":  # as in a KVCache
            return torch.rand(blocks, heads, slots, device=device).transpose(1, 2)
        return torch.rand(heads, device=device)

    return {name: draw() / 50 + 0.01 for name in ("k_scale", "v_scale")}


def _draw(kept: tuple[int, ...], shape: Shape, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(kept, generator=generator, device=generator.device).to(torch.bfloat16)
    if shape.kv_dtype not in LARGEST_CODE:
        return numbers.to(shape.kv_dtype)
    return (numbers * 30).clamp(-127, 127).round().to(shape.kv_dtype)


def check_against_float64(
    shape: Shape,
    lengths: Sequence[int],
    *,
    decode: bool,
    causal: bool = True,
    impl: str = "auto",
    cut: Callable[[Problem], Plan] | None = None,
    device: str = "cuda",
) -> list[Check]:
    """Check a poisoned problem of some lengths, perhaps with a given implementation and plan."""
    case = PagedCase(
        query_lens=tuple(1 if decode else n for n in lengths),
        seq_lens=tuple(lengths),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        dtype=torch.bfloat16,
        kv_dtype=shape.kv_dtype,
        scales=shape.scales,
        causal=causal,
        logits_soft_cap=shape.logits_soft_cap,
    )
    inputs = make_inputs(case)
    there = inputs.to(device)
    expected, allowed = _expect(inputs, device)
    plan = cut and cut(inputs.problem)
    result = there.attend(out=there.out, impl=impl, plan=plan)  # filled with NaN before
    result = AttentionOutput(result.out.cpu(), result.lse.cpu())
    comparison = compare(result, inputs, expected, allowed)
    return [Check(f"poisoned: {case}", comparison.ratio <= 1, str(comparison))]


def _expect(inputs: PagedInputs, device: str) -> tuple[AttentionOutput, Tolerance]:
    """The oracle and its tolerance, computed on a device, since a CPU takes seconds for them."""
    try:
        there = inputs.to(device)
        with torch.device(device):
            expected = oracle(there)
            allowed = tolerance(there, expected)
        return AttentionOutput(expected.out.cpu(), expected.lse.cpu()), allowed
    except (AssertionError, RuntimeError):
        if device == "cpu":
            raise
    # Out of memory, or float32 products rounded by more than the tolerance: use the CPU.
    expected = oracle(inputs)
    return expected, tolerance(inputs, expected)
