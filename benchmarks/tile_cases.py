"""The named cases of tiled attention and of scores, and what each should reach."""

from __future__ import annotations

import torch

from .case import Case, Target, at_least, at_most
from .tiles import ScoresCase, TiledCase

__all__ = ["TILE_CASES"]

CPU = (at_least("x best peer", 0.9), at_least("x best peer, backward", 1.0))


def _gpu(dense: float) -> tuple[Target, ...]:
    return at_least("TFLOP/s", dense), at_least("x best peer, backward", 0.85)


TILE_CASES: tuple[Case, ...] = (
    TiledCase("gpu-tiled-1x16384", 1, 16384, 16, 16, 128, targets=_gpu(660)),
    TiledCase("gpu-tiled-1x16384-full", 1, 16384, 16, 16, 128, False, targets=_gpu(690)),
    TiledCase("gpu-tiled-4x4096-gqa", 4, 4096, 32, 8, 128, targets=_gpu(610)),
    TiledCase("gpu-tiled-16x1024", 16, 1024, 16, 16, 128, targets=_gpu(470)),
    TiledCase("gpu-tiled-32x512", 32, 512, 16, 16, 128, targets=_gpu(370)),
    TiledCase("gpu-tiled-1x16384-size-64", 1, 16384, 32, 32, 64, targets=_gpu(510)),
    TiledCase("gpu-tiled-1x16384-size-256", 1, 16384, 8, 8, 256, targets=_gpu(740)),
    TiledCase("tiled-1x2048", 1, 2048, 8, 8, 128, True, torch.float32, CPU, "cpu"),
    TiledCase("tiled-1x2048-full", 1, 2048, 8, 8, 128, False, torch.float32, CPU, "cpu"),
    TiledCase("tiled-2x1024-gqa", 2, 1024, 8, 2, 64, True, torch.float32, CPU, "cpu"),
    TiledCase("tiled-1x2048-bf16", 1, 2048, 8, 8, 128, device="cpu"),
    ScoresCase("gpu-scores-343", 2744, 3, 343, 16, targets=(at_most("microseconds", 600),)),
    ScoresCase("gpu-scores-49", 4096, 3, 49, 32),
    ScoresCase("scores-343", 64, 3, 343, 16, torch.float32, device="cpu"),
)
