"""The named cases, and what each should reach."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec

import torch

from pagewise.testing import PagedCase

from .attention import AttentionCase
from .cache_ops import CopyBlocksCase, WriteKVCase
from .case import Case, at_least, at_most
from .engine import EngineCase
from .swin_unetr import SwinUnetrCase

__all__ = ["can_run", "find_cases"]

DECODE = PagedCase(
    query_lens=(1,) * 8,
    seq_lens=(4096,) * 8,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    block_size=16,
    dtype=torch.bfloat16,
)
SKEWED = (20000, 8000, 2500, 1500, 500, 200, 60, 8)  # as many keys as DECODE has
PREFILL = replace(DECODE, query_lens=(2048,), seq_lens=(2048,))

COPY_SPEED = (at_least("share of copy bandwidth", 0.9),)

CASES: tuple[Case, ...] = (
    AttentionCase(
        "decode-8x4096-gqa",
        DECODE,
        (at_least("x sdpa", 12), at_least("share of read bandwidth", 0.40)),
    ),
    AttentionCase(
        "decode-8x4096-mha",
        replace(DECODE, num_kv_heads=32),
        (at_least("share of read bandwidth", 0.60),),
    ),
    AttentionCase(
        "decode-1x32768-gqa",
        replace(DECODE, query_lens=(1,), seq_lens=(32768,)),
        (at_most("time / 8x4096", 1.10),),
        beside=("8x4096", DECODE),
    ),
    AttentionCase(
        "decode-block-1",
        replace(DECODE, block_size=1),
        (at_most("time / block 128", 1.15),),
        beside=("block 128", replace(DECODE, block_size=128)),
    ),
    AttentionCase("decode-skewed-gqa", replace(DECODE, seq_lens=SKEWED), beside=("8x4096", DECODE)),
    AttentionCase("decode-8x4096-gqa-f16", replace(DECODE, dtype=torch.float16)),
    AttentionCase("decode-8x4096-gqa-f32", replace(DECODE, dtype=torch.float32)),
    AttentionCase(
        "prefill-2048-gqa-f32",
        replace(PREFILL, dtype=torch.float32),
        (at_least("x sdpa", 0.9),),
    ),
    AttentionCase("prefill-2048-gqa-bf16", PREFILL, (at_least("x sdpa", 0.9),)),
    EngineCase(
        "engine-64",
        (
            at_least("x padded generate", 1.5),
            at_least("x continuous batching", 1.5),
            at_most("KV waste", 0.04),
            at_least("equal to padded generate", 1.0),
        ),
    ),
    WriteKVCase("write-kv-64", 64, (at_most("host, microseconds", 15),)),
    WriteKVCase("write-kv-131072", 131072, COPY_SPEED),
    WriteKVCase("write-kv-131072-size-72", 131072, COPY_SPEED, head_size=72),
    WriteKVCase("write-kv-131072-block-1", 131072, COPY_SPEED, block_size=1),
    *(
        WriteKVCase(
            f"write-kv-131072-{code}-{scales}", 131072, COPY_SPEED, cache_dtype=dtype, scales=scales
        )
        for code, dtype in (("e4m3", torch.float8_e4m3fn), ("int8", torch.int8))
        for scales in ("head", "token")
    ),
    CopyBlocksCase("copy-blocks-512", 512, COPY_SPEED),
    CopyBlocksCase("copy-blocks-to-host", 512, COPY_SPEED, num_caches=8, where="to the host"),
    CopyBlocksCase("copy-blocks-from-host", 512, COPY_SPEED, num_caches=8, where="from the host"),
)
SWIN_CASES: tuple[Case, ...] = (
    SwinUnetrCase(
        "swin-unetr-96-fs48",
        (96, 96, 96),
        48,
        targets=(at_least("x MONAI", 1.5), at_most("peak / MONAI", 0.5)),
    ),
    SwinUnetrCase("swin-unetr-96-fs48-f16", (96, 96, 96), 48, dtype=torch.float16),
    SwinUnetrCase("swin-unetr-96-fs48-checkpoint", (96, 96, 96), 48, use_checkpoint=True),
    SwinUnetrCase("swin-unetr-96-fs24", (96, 96, 96), 24),
    SwinUnetrCase("swin-unetr-128-fs24", (128, 128, 128), 24),
)
if find_spec("monai"):  # is no dependency
    CASES += SWIN_CASES


def find_cases(names: Iterable[str]) -> list[Case]:
    """Cases by name, or by the beginning of their names; all of them if there are no names.

    Raises:
        KeyError: A name fits no case.
    """
    names = list(names)
    for name in names:
        if not any(case.name.startswith(name) for case in CASES):
            raise KeyError(name)
    return [case for case in CASES if not names or case.name.startswith(tuple(names))]


def can_run(case: Case) -> bool:
    """Whether this machine has what a case runs on."""
    return case.device == "cpu" or torch.cuda.is_available()
