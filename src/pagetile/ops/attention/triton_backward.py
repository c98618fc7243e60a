"""Attention backward in Triton: tile sizes and launches. See ``triton_gradients``."""

from __future__ import annotations

import contextvars
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import POINTERS, Launcher, is_aligned, refuse, window_of
from .problem import Lengths, Options, Problem, strides_of
from .tile_lists import fits_tiles, list_tiles
from .triton_block_sparse import LIST_TYPES, list_arguments
from .triton_gradients import key_gradients_kernel, prepare_kernel, query_gradients_kernel

_HOPPER = (9, 0)  # has TMA


@dataclass(frozen=True)
class GradientsTiles:
    """Tiles of one kernel: ``m`` queries by ``n`` keys."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    by_tma: bool = False


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    for name in ("head_size", "v_head_size"):
        if getattr(problem, name) > 256:
            return f"{name} is {getattr(problem, name)}; up to 256 run"
    return refuse(device, q=problem.dtype)


def key_tiles(problem: Problem, device: DeviceInfo) -> GradientsTiles:
    """Tiles of ``key_gradients_kernel``. Measured on an H200, as those below."""
    widest = max(problem.head_size, problem.v_head_size)
    if problem.dtype == torch.float32:
        return _float32_tiles(widest, GradientsTiles(64, 32, 4, 1))
    by_tma = device.capability >= _HOPPER
    if device.is_small and widest > 128:
        return GradientsTiles(32, 32, 4, 1)
    if widest > 128:
        return GradientsTiles(64, 64, 8, 1, by_tma)
    return GradientsTiles(64, 64, 4, 2 if widest > 64 else 3, by_tma)


def query_tiles(problem: Problem, device: DeviceInfo) -> GradientsTiles:
    """Tiles of ``query_gradients_kernel``."""
    widest = max(problem.head_size, problem.v_head_size)
    if problem.dtype == torch.float32:
        return _float32_tiles(widest, GradientsTiles(32, 64, 4, 1))
    by_tma = device.capability >= _HOPPER
    if device.is_small and widest > 64:
        return GradientsTiles(64, 32, 4, 2) if widest <= 128 else GradientsTiles(32, 32, 4, 1)
    if widest > 128:
        return GradientsTiles(128, 32, 8, 2, by_tma)
    if widest <= 64:
        return GradientsTiles(64, 64, 4, 3, by_tma)
    is_long = problem.max_query_len >= 8192
    return (
        GradientsTiles(128, 64, 8, 3, by_tma) if is_long else GradientsTiles(64, 64, 4, 2, by_tma)
    )


def _float32_tiles(widest: int, narrow: GradientsTiles) -> GradientsTiles:
    """``narrow``, or for wider heads tiles that fit in registers."""
    if widest <= 64:
        return narrow
    return GradientsTiles(32, 32, 4, 1) if widest <= 128 else GradientsTiles(16, 16, 4, 1)


def run_backward(
    problem: Problem,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Three launches: delta and lse2, dK and dV, dQ."""
    device = DeviceInfo.of(q.device)
    d_q, d_k, d_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    block_mask = options.block_mask if q.numel() and k.numel() else None
    tiles = key_tiles(problem, device), query_tiles(problem, device)
    launchers = make_launchers(
        GradientsConfig(
            problem.dtype, problem.group, problem.head_size, problem.v_head_size,
            problem.is_ragged, options.causal, options.logits_soft_cap is not None,
            options.alibi_slopes is not None,
            all(is_aligned(t) for t in (q, k, v, d_out)), block_mask is not None,
            block_mask is not None
            and not all(fits_tiles(block_mask, each.m, each.n) for each in tiles),
        ),
        *tiles,
    )  # fmt: skip
    delta, lse2 = prepare(problem, None, out, d_out, lse, d_lse)
    slopes = options.alibi_slopes
    slopes = lse2 if slopes is None else slopes.detach().float().contiguous()
    cu_q, cu_k = lengths.cu_seqlens_q, lengths.cu_seqlens_k
    starts = (
        lse2 if cu_q is None else cu_q.contiguous(), lse2 if cu_k is None else cu_k.contiguous()
    )  # fmt: skip
    lengths_of_all = delta.shape[1], problem.max_query_len, problem.max_seq_len

    def shared(each: GradientsTiles, by_keys: bool) -> tuple[tuple[Any, ...], tuple[int, ...], Any]:
        """Arguments of both kernels: those up to the lengths; then sizes and strides of lists."""
        tensors, numbers = (lse2, lse2), (0, 0, 0)
        list_strides: tuple[int, ...] = (0,) * 5
        if block_mask is not None:
            lists = list_tiles(
                block_mask, problem.max_query_len, problem.max_seq_len, each.m, each.n,
                causal=options.causal, sliding_window=options.sliding_window, by_keys=by_keys,
            )  # fmt: skip
            tensors, numbers, list_strides = list_arguments(block_mask, lists)
        return (lse2, delta, *starts, slopes, *tensors, *lengths_of_all), numbers, list_strides

    scalars = (
        options.softmax_scale, options.logits_soft_cap or 0.0,
        window_of(options.sliding_window),
    )  # fmt: skip
    strides = [s for t in (q, k, v, d_out) for s in strides_of(t)]
    n, m = launchers.keys.constants["TILE_N"], launchers.queries.constants["TILE_M"]

    def launch() -> None:
        triton.set_allocator(_allocate)
        # One-dimensional grids, since other axes have at most 65 535 programs.
        first, numbers, last = shared(tiles[0], True)
        launchers.keys(
            (-(-problem.max_seq_len // n) * problem.num_seqs * problem.num_kv_heads, 1, 1),
            d_k, d_v, q, k, v, d_out, *first, problem.num_kv_heads, *numbers, *scalars,
            *strides, *strides_of(d_k), *strides_of(d_v), *last,
        )  # fmt: skip
        first, numbers, last = shared(tiles[1], False)
        launchers.queries(
            (-(-problem.max_query_len // m) * problem.num_seqs * problem.num_heads, 1, 1),
            d_q, q, k, v, d_out, *first, problem.num_heads, *numbers, *scalars,
            *strides, *strides_of(d_q), *last,
        )  # fmt: skip

    # Triton's allocator is a context variable: set it in a copy, not in the caller's context.
    contextvars.copy_context().run(launch)
    return d_q, d_k, d_v


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate memory for the TMA descriptors that kernels create."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def prepare(
    problem: Problem,
    pitch: int | None,
    out: Tensor,
    d_out: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``delta`` and ``lse2`` of all rows (see ``triton_gradients``), ``pitch`` rows per sequence.

    ``None``: without padding. Padded rows get weights of 0.
    """
    num_seqs = 1 if problem.is_ragged else problem.num_seqs
    query_len = problem.num_tokens if problem.is_ragged else problem.max_query_len
    pitch = query_len if pitch is None else pitch
    num_rows = num_seqs * pitch
    delta = lse.new_empty((problem.num_heads, num_rows))
    lse2 = torch.empty_like(delta)
    launcher = make_prepare(
        problem.dtype, problem.v_head_size, is_aligned(d_out), d_lse is not None
    )
    launcher(
        (-(-num_rows // launcher.constants["TILE_M"]), problem.num_heads, 1),
        delta, lse2, out, d_out, lse, lse if d_lse is None else d_lse,
        num_rows, query_len, pitch, problem.num_heads,
        *out.stride()[-3:-1], *strides_of(d_out),
        *(0, 0, 0) if d_lse is None else strides_of(d_lse[..., None]),
    )  # fmt: skip
    return delta, lse2


@dataclass(frozen=True)
class GradientsConfig:
    """Compile-time parameters of the gradient kernels, except their tiles."""

    dtype: torch.dtype
    group: int
    head_size: int
    v_head_size: int
    is_ragged: bool
    is_causal: bool
    has_cap: bool
    has_alibi: bool
    is_aligned: bool
    is_sparse: bool = False
    has_blocks: bool = False
    """Whether tiles of a block-sparse call need the block mask."""


@dataclass(frozen=True)
class _Launchers:
    keys: Launcher
    queries: Launcher


@functools.lru_cache(maxsize=256)
def make_launchers(
    config: GradientsConfig, keys: GradientsTiles, queries: GradientsTiles
) -> _Launchers:
    """The launchers of both kernels."""
    d, d_v = (max(16, triton.next_power_of_2(n)) for n in (config.head_size, config.v_head_size))
    # Triton 3.6 gives wrong products where values are padded to less than 64 and keys are not.
    d, d_v = max(d, min(d_v, 64)), max(d_v, min(d, 64))
    pointer = POINTERS[config.dtype]
    allocated = f"{pointer}:16"  # allocated here, so aligned, with rows of multiples of 8
    given, stride = (allocated, "i64:8") if config.is_aligned else (pointer, "i64")
    tensors = dict.fromkeys(("q", "k", "v", "d_out"), given)
    shared = {
        "lse2": "*fp32:16", "delta": "*fp32:16", "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32",
        "alibi_slopes": "*fp32", **LIST_TYPES["pointers"],
        "num_rows": "i64", "query_len": "i32", "seq_len": "i32",
    }  # fmt: skip
    scalars = {**LIST_TYPES["numbers"], "scale": "fp32", "cap": "fp32", "window": "i32"}
    strides = _stride_types(("q", "k", "v", "do"), stride)
    constants = {
        "GROUP": config.group, "HEAD_SIZE": config.head_size, "V_HEAD_SIZE": config.v_head_size,
        "RAGGED": config.is_ragged, "CAUSAL": config.is_causal, "HAS_CAP": config.has_cap,
        "HAS_ALIBI": config.has_alibi, "SPARSE": config.is_sparse, "HAS_BLOCKS": config.has_blocks,
    }  # fmt: skip

    def make(kernel: Any, types: dict[str, str], tiles: GradientsTiles) -> Launcher:
        sizes = {"TILE_M": tiles.m, "TILE_N": tiles.n, "D": d, "DV": d_v}
        more = {"STAGES": tiles.num_stages, "TMA": config.is_aligned and tiles.by_tma}
        return Launcher(kernel, types, {**constants, **sizes, **more}, num_warps=tiles.num_warps)

    return _Launchers(
        make(
            key_gradients_kernel,
            {"d_k": allocated, "d_v": allocated, **tensors, **shared, "num_kv_heads": "i32",
             **scalars, **strides, **_stride_types(("dk", "dv"), "i64:8"), **LIST_TYPES["strides"]},
            keys,
        ),
        make(
            query_gradients_kernel,
            {"d_q": allocated, **tensors, **shared, "num_heads": "i32", **scalars,
             **strides, **_stride_types(("dq",), "i64:8"), **LIST_TYPES["strides"]},
            queries,
        ),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def make_prepare(
    dtype: torch.dtype, v_head_size: int, is_aligned: bool, has_d_lse: bool
) -> Launcher:
    """The launcher of ``prepare_kernel``."""
    pointer = POINTERS[dtype]
    given, stride = (f"{pointer}:16", "i64:8") if is_aligned else (pointer, "i64")
    types = {
        "delta": "*fp32:16", "lse2": "*fp32:16", "out": f"{pointer}:16",
        "d_out": given, "lse": "*fp32:16", "d_lse": "*fp32",
        "num_rows": "i64", "query_len": "i32", "pitch": "i32", "num_heads": "i32",
        "o_token": "i64:8", "o_head": "i64:8", **_stride_types(("do",), stride),
        **_stride_types(("dlse",), "i64"),
    }  # fmt: skip
    constants = {
        "HAS_D_LSE": has_d_lse,
        "V_HEAD_SIZE": v_head_size,
        "TILE_M": 64,
        "DV": max(16, triton.next_power_of_2(v_head_size)),
    }
    return Launcher(prepare_kernel, types, constants, num_warps=4)


def _stride_types(names: tuple[str, ...], kind: str) -> dict[str, str]:
    return {f"{name}_{axis}": kind for name in names for axis in ("seq", "token", "head")}
