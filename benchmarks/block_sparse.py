"""Block-sparse attention beside the dense call and FlexAttention with the same mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagetile import BlockMask, attention, explain_attention
from pagetile.analysis.timing import admit, ratio
from pagetile.tiles.state import AttentionOutput

from .case import Check, Measurement, Target
from .gate import Rows, check_timed_call, chosen, judge_peers
from .gpu_timing import time_in_turns

MOST_ROWS = 64


@dataclass(frozen=True)
class BlockSparseCase:
    """``attention`` of one sequence over a random part of its tiles.

    Metrics: ``x dense``, how many times as fast as the same call without a mask; ``x flex``.
    """

    name: str
    length: int = 16384
    num_heads: int = 16
    head_size: int = 128
    block: int = 128
    visible: float = 1 / 8
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        heads = f"{self.num_heads} heads of {self.head_size}"
        return f"attention: 1 x {self.length}, {heads}, {self.visible:.3g} of its tiles, bfloat16"

    def verify(self) -> list[Check]:
        """Random rows of the timed call at full size, against float64."""
        q, k, v, mask = self._draw()
        impl = chosen(explain_attention(q, k, v, block_mask=mask))

        def call(**options: Any) -> Any:
            out, lse = attention(q, k, v, block_mask=mask, **options)
            return AttentionOutput(out[0], lse[0])

        return check_timed_call(call, impl, self._rows(q, k, v, mask), self.about)

    def measure(self, repeats: int | None) -> Measurement:
        """Time the masked call, the dense one and FlexAttention in turns."""
        q, k, v, mask = self._draw()
        peers: dict[str, Callable[[], Tensor]] = {"flex": self._flex(q, k, v, mask)}
        rows = self._rows(q, k, v, mask)
        found, absent = admit(peers, judge_peers(rows, lambda out: out[0].transpose(0, 1)))
        calls: dict[str, Callable[[], Any]] = {
            "pagetile": lambda: attention(q, k, v, block_mask=mask),
            "dense": lambda: attention(q, k, v),
            **found,
        }
        times = time_in_turns(calls, self.device, repeats=repeats)
        own = times["pagetile"]
        metrics = {f"x {name}": ratio(times[name], own) for name in calls if name != "pagetile"}
        return Measurement(times, {"microseconds": own.median * 1e6, **metrics}, absent)

    def _draw(self) -> tuple[Tensor, Tensor, Tensor, BlockMask]:
        generator = torch.Generator(self.device).manual_seed(0)
        size = (1, self.length, self.num_heads, self.head_size)
        q, k, v = (
            torch.randn(size, generator=generator, device=self.device).bfloat16() for _ in range(3)
        )
        tiles = self.length // self.block
        drawn = torch.rand(
            (1, self.num_heads, tiles, tiles), generator=generator, device=self.device
        )
        return q, k, v, BlockMask(drawn < self.visible, self.block, self.block)

    def _rows(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Rows:
        generator = torch.Generator(self.device).manual_seed(1)
        tokens = torch.randint(self.length, (MOST_ROWS,), generator=generator, device=self.device)
        visible = mask.mask[0][:, tokens // self.block].repeat_interleave(self.block, dim=-1)
        wide_q, wide_k, wide_v = (t[0].double().transpose(0, 1) for t in (q[:, tokens], k, v))
        scores = wide_q @ wide_k.mT * self.head_size**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        return Rows(tokens, (weights @ wide_v).transpose(0, 1))

    def _flex(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Callable[[], Tensor]:
        transposed = [t.transpose(1, 2).contiguous() for t in (q, k, v)]

        @functools.cache
        def compiled() -> Callable[..., Any]:
            from torch.nn.attention.flex_attention import BlockMask as FlexMask
            from torch.nn.attention.flex_attention import flex_attention

            shown = mask.mask.int()
            flex_mask = FlexMask.from_kv_blocks(
                torch.zeros_like(shown[..., 0]), shown.argsort(dim=-1).int(),
                shown.sum(dim=-1).int(), shown.argsort(dim=-1, descending=True, stable=True).int(),
                BLOCK_SIZE=self.block,
            )  # fmt: skip
            torch.compiler.reset()
            flex: Any = torch.compile(flex_attention, dynamic=False)
            return functools.partial(flex, block_mask=flex_mask)

        return lambda: compiled()(*transposed)
