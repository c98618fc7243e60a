"""The named cases, and their targets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec

import torch

from pagetile.testing import PagedCase

from .attention import AttentionCase
from .block_sparse import BlockSparseCase
from .cache_ops import CopyBlocksCase, WriteKVCase
from .case import Case, Target, at_least, at_most
from .engine import EngineCase
from .generators import QWEN3
from .gpu_attention import GpuBlockSizesCase, GpuDecodeCase, GpuPrefillCase
from .gpu_inputs import Shape
from .linears import LinearCase
from .shared_prefix import SharedPrefixCase
from .swin_unetr import SwinUnetrCase
from .tile_cases import FORWARD_AIMS, TILE_CASES
from .visible_blocks import VisibleBlocksCase
from .vllm_ops import VLLM_CASES
from .window_workloads import WindowWorkloadsCase, find_workloads
from .windows import WindowCase

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

AHEAD_OF_PEERS = (at_least("x best peer", 1),)
COPY_SPEED = (at_least("share of copy bandwidth", 0.9),)

CASES: tuple[Case, ...] = (
    AttentionCase(
        "decode-8x4096-gqa",
        DECODE,
        (at_least("x sdpa", 1.3), at_least("share of read bandwidth", 0.40)),
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
        versus=("8x4096", DECODE),
    ),
    AttentionCase(
        "decode-block-1",
        replace(DECODE, block_size=1),
        (at_most("time / block 128", 1.15),),
        versus=("block 128", replace(DECODE, block_size=128)),
    ),
    AttentionCase("decode-skewed-gqa", replace(DECODE, seq_lens=SKEWED), versus=("8x4096", DECODE)),
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
    *(
        LinearCase(
            f"linear-{str(dtype).removeprefix('torch.')}-{num_rows}",
            num_rows,
            dtype,
            (at_least("share of read bandwidth", 0.8),) if num_rows < 8 else (),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for num_rows in (1, 4, 16, 64)
    ),
    *(
        EngineCase(
            f"engine-qwen3-0.6b-{num_prompts}-{str(dtype).removeprefix('torch.')}",
            (at_least("x padded generate", 1.5),),
            num_prompts=num_prompts,
            longest=64,
            max_tokens=32,
            model=QWEN3,
            dtype=dtype,
            peers=("padded generate",),
        )
        for num_prompts, dtype in (
            (1, torch.bfloat16),
            (8, torch.bfloat16),
            (32, torch.bfloat16),
            (8, torch.float32),
        )
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
        "swin-unetr-96-fs48-batch-1",
        (96, 96, 96),
        48,
        targets=(
            at_least("x MONAI", 1.5),
            at_least("x MONAI, both graphed", 1.5),
            at_most("peak / MONAI", 0.5),
        ),
    ),
    SwinUnetrCase("swin-unetr-96-fs48-batch-4", (96, 96, 96), 48, batch_size=4),
    SwinUnetrCase("swin-unetr-96-fs48-f16", (96, 96, 96), 48, dtype=torch.float16),
    SwinUnetrCase("swin-unetr-96-fs48-checkpoint", (96, 96, 96), 48, use_checkpoint=True),
    SwinUnetrCase("swin-unetr-96-fs24", (96, 96, 96), 24),
    SwinUnetrCase("swin-unetr-128-fs24", (128, 128, 128), 24),
)
LLAMA = Shape()
E4M3 = replace(LLAMA, kv_dtype=torch.float8_e4m3fn, scales="head")
SKEW = (131072, *[512] * 63)
EVEN = (sum(SKEW) // 64,) * 64


def _share(bound: float) -> tuple[Target, ...]:
    share = "share of read bandwidth"
    return at_least(share, bound), at_least(f"{share}, clean cache", bound)


# Shares of the read ceiling, and TFLOP/s: the best of today on an H200, and what lies beyond.
GPU_CASES: tuple[Case, ...] = (
    GpuDecodeCase(
        "gpu-decode-64x4096",
        (4096,) * 64,
        LLAMA,
        (*_share(0.96), at_most("host, microseconds", 15)),
    ),
    GpuDecodeCase("gpu-decode-256x2048", (2048,) * 256, LLAMA, _share(0.98)),
    GpuDecodeCase("gpu-decode-16x32768", (32768,) * 16, LLAMA, _share(0.99)),
    GpuDecodeCase("gpu-decode-1x131072", (131072,), LLAMA, _share(0.93)),
    GpuDecodeCase("gpu-decode-1x8192", (8192,), LLAMA, _share(0.45)),
    GpuDecodeCase("gpu-decode-8x4096", (4096,) * 8, LLAMA, _share(0.75)),
    GpuDecodeCase("gpu-decode-64x1024", (1024,) * 64, LLAMA, _share(0.84)),
    GpuDecodeCase("gpu-decode-mha", (4096,) * 32, replace(LLAMA, num_kv_heads=32), _share(0.99)),
    GpuDecodeCase("gpu-decode-64-heads", (2048,) * 128, replace(LLAMA, num_heads=64), _share(0.95)),
    GpuDecodeCase(
        "gpu-decode-size-64",
        (4096,) * 64,
        replace(LLAMA, num_heads=16, head_size=64),
        _share(0.90),
    ),
    GpuDecodeCase(
        "gpu-decode-size-256",
        (4096,) * 32,
        replace(LLAMA, num_heads=16, num_kv_heads=2, head_size=256),
        _share(0.86),
    ),
    *(
        GpuDecodeCase(f"gpu-decode-size-{size}", (4096,) * 64, replace(LLAMA, head_size=size))
        for size in (80, 96)
    ),
    GpuDecodeCase("gpu-decode-e4m3-64x4096", (4096,) * 64, E4M3, _share(0.84)),
    GpuDecodeCase("gpu-decode-e4m3-16x32768", (32768,) * 16, E4M3, _share(0.90)),
    GpuDecodeCase(
        "gpu-decode-e4m3-64-heads", (2048,) * 128, replace(E4M3, num_heads=64), _share(0.79)
    ),
    GpuDecodeCase("gpu-decode-e4m3-token-scales", (4096,) * 64, replace(E4M3, scales="token")),
    GpuDecodeCase("gpu-decode-int8", (4096,) * 64, replace(E4M3, kv_dtype=torch.int8)),
    GpuDecodeCase(
        "gpu-decode-skewed",
        SKEW,
        LLAMA,
        (at_least("GB/s / even", 0.85),),
        versus=("even", EVEN, LLAMA),
    ),
    *(
        GpuDecodeCase(
            f"gpu-decode-block-{size}",
            (4096,) * 64,
            replace(LLAMA, block_size=size),
            (at_least("GB/s / block 128", 0.95),),
            versus=("block 128", (4096,) * 64, replace(LLAMA, block_size=128)),
            has_compiled_peers=False,
        )
        for size in (1, 8, 16, 64)
    ),
    *(
        GpuPrefillCase(
            f"gpu-prefill-{name}",
            lengths,
            replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads, head_size=size),
            causal,
            (at_least("TFLOP/s in order", FORWARD_AIMS[name]), at_least("TFLOP/s", paged)),
        )
        for name, lengths, heads, kv_heads, size, causal, paged in (
            ("1x16384", (16384,), 16, 16, 128, True, 640),
            ("1x16384-full", (16384,), 16, 16, 128, False, 660),
            ("4x4096-gqa", (4096,) * 4, 32, 8, 128, True, 590),
            ("16x1024", (1024,) * 16, 16, 16, 128, True, 440),
            ("32x512", (512,) * 32, 16, 16, 128, True, 340),
            ("1x16384-size-64", (16384,), 32, 32, 64, True, 480),
            ("1x16384-size-256", (16384,), 8, 8, 256, True, 680),
        )
    ),
    *(
        GpuPrefillCase(
            f"gpu-prefill-1x16384-size-{size}",
            (16384,),
            replace(LLAMA, num_heads=heads, num_kv_heads=heads, head_size=size),
        )
        for size, heads in ((80, 16), (96, 16), (192, 8))
    ),
    *(
        GpuPrefillCase(
            f"gpu-prefill-1x8192-cap-size-{size}",
            (8192,),
            replace(LLAMA, num_heads=16, head_size=size, logits_soft_cap=50.0),
            targets=AHEAD_OF_PEERS,
        )
        for size in (128, 256)
    ),
    *(
        GpuBlockSizesCase(
            f"gpu-prefill-blocks-{name}",
            lengths,
            replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads, head_size=size),
            targets=(at_least("slowest / fastest", 0.92),),
        )
        for name, lengths, heads, kv_heads, size in (
            ("1x16384", (16384,), 16, 16, 128),
            ("4x4096-gqa", (4096,) * 4, 32, 8, 128),
            ("32x512", (512,) * 32, 16, 16, 128),
            ("1x16384-size-64", (16384,), 32, 32, 64),
            ("1x16384-size-256", (16384,), 8, 8, 256),
        )
    ),
)
ENGINE_CASES: tuple[Case, ...] = (
    EngineCase(
        "gpu-engine-qwen3-0.6b",
        shortest=100,
        longest=1024,
        max_tokens=64,
        device="cuda",
        model=QWEN3,
        dtype=torch.bfloat16,
    ),
    EngineCase("gpu-engine-64", device="cuda"),
)


def _slug(words: str) -> str:
    plain = words.lower().replace("³", "")
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")


VOLUME, IMAGE = (7, 7, 7), (7, 7)
F16, BF16 = torch.float16, torch.bfloat16
WindowSizes = tuple[str, tuple[int, ...], tuple[int, ...], int, int, int, torch.dtype]
WINDOW_WORKLOADS: tuple[WindowSizes, ...] = (
    ("unetr-fs24-128-s1", (70, 70, 70), VOLUME, 3, 8, 1, F16),
    ("unetr-fs48-96-s2", (28, 28, 28), VOLUME, 6, 16, 1, F16),
    ("unetr-fs48-96-s3", (14, 14, 14), VOLUME, 12, 16, 1, F16),
    ("swin-b-384-s1", (96, 96), (12, 12), 4, 32, 32, F16),
    ("swinv2-b-256-s1", (64, 64), (16, 16), 4, 32, 32, BF16),
    ("swinv2-b-384-s1", (96, 96), (24, 24), 4, 32, 16, BF16),
    ("video-swin-t-s1", (16, 56, 56), (8, 7, 7), 3, 32, 1, F16),
    ("swinir", (512, 512), (8, 8), 6, 30, 1, F16),
    ("8x8x8", (64, 64, 64), (8, 8, 8), 3, 32, 1, F16),
)
WINDOW_CASES: tuple[Case, ...] = (
    *(
        WindowWorkloadsCase(
            f"windows-all-{_slug(model)}",
            model,
            workloads,
            targets=(at_least("x SDPA at least", 1),),
        )
        for model, workloads in find_workloads().items()
    ),
    WindowCase(
        "windows-cpu-343",
        (49, 49, 49),
        VOLUME,
        3,
        8,
        dtype=torch.float32,
        targets=(at_least("x best peer", 2), at_least("x best peer, both", 2)),
        device="cpu",
    ),
    WindowCase("windows-cpu-swin-t", (56, 56), IMAGE, 3, 32, dtype=torch.float32, device="cpu"),
    WindowCase("windows-cpu-swin-t-bf16", (56, 56), IMAGE, 3, 32, dtype=BF16, device="cpu"),
    WindowCase(
        "windows-cpu-swinv2",
        (64, 64),
        (8, 8),
        3,
        32,
        dtype=torch.float32,
        device="cpu",
        cosine=True,
    ),
    WindowCase("windows-cpu-256", (64, 64), (16, 16), 4, 32, dtype=torch.float32, device="cpu"),
    WindowCase("windows-cpu-256-bf16", (64, 64), (16, 16), 4, 32, dtype=BF16, device="cpu"),
    WindowCase(
        "windows-2744x3x343x16",
        (98, 98, 98),
        VOLUME,
        3,
        16,
        targets=(at_most("microseconds", 450), at_most("backward / forward", 3)),
        has_compiled_peers=True,
    ),
    WindowCase(
        "windows-343x6x343x16",
        (49, 49, 49),
        VOLUME,
        6,
        16,
        targets=(at_most("microseconds", 130), at_most("backward / forward", 3)),
        has_compiled_peers=True,
    ),
    WindowCase(
        "windows-4096x3x49x32",
        (56, 56),
        IMAGE,
        3,
        32,
        images=64,
        targets=(at_most("microseconds", 70), at_most("backward / forward", 3)),
        has_compiled_peers=True,
    ),
    *(
        WindowCase(
            f"windows-{name}", grid, window, num_heads, head_size, images, dtype, AHEAD_OF_PEERS
        )
        for name, grid, window, num_heads, head_size, images, dtype in WINDOW_WORKLOADS
    ),
    WindowCase("windows-hat", (512, 512), (16, 16), 6, 30, targets=AHEAD_OF_PEERS),
    *(
        WindowCase(
            f"windows-cosine-{side}",
            (4 * side, 4 * side),
            (side, side),
            4,
            32,
            images,
            BF16,
            targets=AHEAD_OF_PEERS,
            cosine=True,
        )
        for side, images in ((8, 64), (16, 32), (24, 16))
    ),
)
CASES += GPU_CASES + ENGINE_CASES + TILE_CASES + WINDOW_CASES
SPARSE_CASES: tuple[Case, ...] = (
    BlockSparseCase("gpu-block-sparse", targets=(at_least("x dense", 6),)),
    VisibleBlocksCase("gpu-visible-blocks-16x32768", targets=(at_least("x dense", 6),)),
    SharedPrefixCase(
        "gpu-shared-prefix-256x32768", targets=(at_least("x plain", 25), at_least("x cascade", 1))
    ),
    # Too short for a gain: two runs of one call differ by as much as the target allows.
    SharedPrefixCase("gpu-shared-prefix-256x128", prefix=128, targets=(at_least("x plain", 0.98),)),
)
CASES += SPARSE_CASES + VLLM_CASES
if find_spec("monai"):  # not a dependency of this package
    CASES += SWIN_CASES


def find_cases(names: Iterable[str]) -> list[Case]:
    """Cases by name, or by the beginning of their names; without names, all.

    Raises:
        KeyError: A name matches no case.
    """
    names = list(names)
    for name in names:
        if not any(case.name.startswith(name) for case in CASES):
            raise KeyError(name)
    return [case for case in CASES if not names or case.name.startswith(tuple(names))]


def can_run(case: Case) -> bool:
    """Whether this machine has what a case runs on."""
    return case.device == "cpu" or torch.cuda.is_available()
