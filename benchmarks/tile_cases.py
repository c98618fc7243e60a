"""The named cases of tiled attention and of scores, with their targets."""

from __future__ import annotations

import torch

from .case import Case, at_least, at_most
from .tiles import ScoresCase, TiledCase

CPU = (at_least("x best peer", 0.9), at_least("x best peer, backward", 1.0))


FORWARD_AIMS: dict[str, float] = {
    "1x16384": 660,
    "1x16384-full": 690,
    "4x4096-gqa": 610,
    "16x1024": 470,
    "32x512": 370,
    "1x16384-size-64": 510,
    "1x16384-size-256": 740,
}
"""Target of a forward pass with contiguous keys on an H200, in TFLOP/s."""


def _on_gpu(
    name: str, batch: int, length: int, heads: int, kv_heads: int, size: int, causal: bool = True
) -> TiledCase:
    targets = at_least("TFLOP/s", FORWARD_AIMS[name]), at_least("x best peer, backward", 0.85)
    return TiledCase(
        f"gpu-tiled-{name}", batch, length, heads, kv_heads, size, causal, targets=targets
    )


TILE_CASES: tuple[Case, ...] = (
    _on_gpu("1x16384", 1, 16384, 16, 16, 128),
    _on_gpu("1x16384-full", 1, 16384, 16, 16, 128, causal=False),
    _on_gpu("4x4096-gqa", 4, 4096, 32, 8, 128),
    _on_gpu("16x1024", 16, 1024, 16, 16, 128),
    _on_gpu("32x512", 32, 512, 16, 16, 128),
    _on_gpu("1x16384-size-64", 1, 16384, 32, 32, 64),
    _on_gpu("1x16384-size-256", 1, 16384, 8, 8, 256),
    TiledCase("tiled-1x2048", 1, 2048, 8, 8, 128, True, torch.float32, CPU, "cpu"),
    TiledCase("tiled-1x2048-full", 1, 2048, 8, 8, 128, False, torch.float32, CPU, "cpu"),
    TiledCase("tiled-2x1024-gqa", 2, 1024, 8, 2, 64, True, torch.float32, CPU, "cpu"),
    TiledCase("tiled-1x2048-bf16", 1, 2048, 8, 8, 128, device="cpu"),
    ScoresCase("gpu-scores-343", 2744, 3, 343, 16, targets=(at_most("microseconds", 600),)),
    ScoresCase("gpu-scores-49", 4096, 3, 49, 32),
    ScoresCase("scores-343", 64, 3, 343, 16, torch.float32, device="cpu"),
)
