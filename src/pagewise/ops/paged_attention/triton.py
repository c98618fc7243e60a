"""Paged attention on a GPU by Triton: from a checked call to one launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...tiles.state import AttentionOutput
from ...tiles.triton.forward import forward_kernel
from ...tiles.triton.launch import INTERPRETED, POINTERS, Launcher, refuse
from ...tiles.triton.workspace import borrow
from .problem import Options, PagedBatch, Problem
from .triton_decode import decode_kernel
from .triton_plan import GpuPlan, make_gpu_plan, power_of_2

_DOTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_STRIDES = (
    "out_token", "out_head", "q_token", "q_head",
    "k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head",
)  # fmt: skip
_SCALE_STRIDES = ("ks_block", "ks_slot", "ks_head", "vs_block", "vs_slot", "vs_head")
_NO_WINDOW = 1 << 30
_OLDEST_E4M3 = (8, 9)
_NARROW = 1 << 23  # strides up to here, times a slot, fit in 32 bits


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run ``problem``, or None if it can."""
    for name, dtype in (("q", problem.q_dtype), ("k_cache", problem.kv_dtype)):
        if dtype == torch.float64:
            return f"{name} is float64; float32, float16, bfloat16 and 8 bits run"
    reason = refuse(device)
    is_e4m3 = problem.kv_dtype == torch.float8_e4m3fn
    if reason is None and device.kind == "cuda" and is_e4m3 and device.capability < _OLDEST_E4M3:
        return f"k_cache is float8_e4m3fn, which {device.name} cannot convert; e5m2 and int8 run"
    return reason


def run(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor,
    plan: GpuPlan | None = None,
) -> AttentionOutput:
    """Launch the kernel of the plan's path."""
    plan = plan or make_gpu_plan(problem, DeviceInfo.of(q.device))
    batch = pack(batch)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    call = problem, q, k_cache, v_cache, batch, options, out, lse, plan
    if plan.path == "decode":
        launch_decode(*call, PORTABLE)
    else:
        _launch_prefill(*call)
    return AttentionOutput(out, lse)


def pack(batch: PagedBatch) -> PagedBatch:
    """The batch with its lengths side by side, as kernels read them."""
    if batch.seq_lens.is_contiguous() and batch.cu_seqlens_q.is_contiguous():
        return batch
    return replace(
        batch, seq_lens=batch.seq_lens.contiguous(), cu_seqlens_q=batch.cu_seqlens_q.contiguous()
    )


@dataclass(frozen=True, eq=False)  # a key by what it is, not by what is in it
class DecodeKernel:
    """A kernel with the parameters of ``triton_decode``'s."""

    kernel: Any
    launcher: type[Launcher] = Launcher
    takes_pairs: bool = False
    """Whether it takes 8-bit caches as pairs of codes, in int16."""


PORTABLE = DecodeKernel(decode_kernel)


def launch_decode(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor,
    lse: Tensor,
    plan: GpuPlan,
    kernel: DecodeKernel,
) -> None:
    """Share a batch's keys out over the plan's programs."""
    if problem.num_tokens == 0:
        return
    slopes, sinks = _floats(options.alibi_slopes), _floats(options.sinks)
    k_scale, v_scale = options.k_scale, options.v_scale
    call = _prepare_decode(
        kernel, problem, plan, options.causal, options.logits_soft_cap is not None,
        slopes is not None, sinks is not None, _is_aligned(out, q, k_cache, v_cache),
        out.stride(), q.stride(), k_cache.stride(), v_cache.stride(),
        batch.block_tables.stride(0),
        None if k_scale is None else k_scale.stride(),
        None if v_scale is None else v_scale.stride(),
    )  # fmt: skip
    parts, part_sums, arrivals = borrow(q.device, *call.workspace)
    call.launcher(
        call.grid,
        out, lse, parts, part_sums, arrivals, q, k_cache, v_cache,
        batch.block_tables, batch.seq_lens, batch.cu_seqlens_q,
        _or(slopes, lse), _or(sinks, lse), _or(k_scale, lse), _or(v_scale, lse),
        problem.num_seqs, problem.num_kv_heads, call.max_splits,
        options.softmax_scale, options.logits_soft_cap or 0.0,
        min(options.sliding_window or _NO_WINDOW, _NO_WINDOW), problem.block_size,
        *call.strides,
    )  # fmt: skip


@dataclass(frozen=True)
class _DecodeCall:
    """All of a decode launch that is the same in every call of one form."""

    launcher: Launcher
    grid: tuple[int, int, int]
    max_splits: int
    workspace: tuple[int, int, int]
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _prepare_decode(
    kernel: DecodeKernel, problem: Problem, plan: GpuPlan, causal: bool, has_cap: bool,
    has_alibi: bool, has_sinks: bool, is_aligned: bool,
    out: tuple[int, ...], q: tuple[int, ...], k_cache: tuple[int, ...], v_cache: tuple[int, ...],
    table: int, k_scale: tuple[int, ...] | None, v_scale: tuple[int, ...] | None,
) -> _DecodeCall:  # fmt: skip
    rows = problem.max_query_len * problem.group
    if plan.path != "decode" or plan.tile_m < rows:
        raise ShapeError(
            f"the plan is for {plan.path} with tile_m={plan.tile_m}, but sequences have up to "
            f"{rows} rows (max_query_len times heads of a group): make_plan of this problem"
        )
    per_pair = 2 if _is_paired(kernel, problem) else 1  # codes
    k_cache, v_cache = (tuple(s // per_pair for s in cache[:3]) for cache in (k_cache, v_cache))
    strides = (*out[:2], *q[:2], *k_cache, *v_cache)
    launcher = make_decode_launcher(
        kernel, _settle(problem), plan, causal, has_cap, has_alibi, has_sinks, strides,
        is_aligned, power_of_2(min(max(problem.num_seqs, 128), 1024)), power_of_2(rows),
    )  # fmt: skip
    kept, v_width = launcher.constants["ROWS"], launcher.constants["V"]
    pairs = problem.num_seqs * problem.num_kv_heads
    max_splits = -(-problem.max_seq_len // plan.split_size) + 1 if plan.split_size else 0
    slots = pairs * max_splits if plan.split_size else 2 * plan.num_programs
    return _DecodeCall(
        launcher,
        (plan.num_programs, 1, 1),
        max_splits,
        (slots * kept * v_width, 2 * slots * kept, pairs),
        (*strides, table, *_three(k_scale), *_three(v_scale)),
    )


@functools.lru_cache(maxsize=4096)
def make_decode_launcher(
    kernel: DecodeKernel, problem: Problem, plan: GpuPlan, causal: bool, has_cap: bool,
    has_alibi: bool, has_sinks: bool, strides: tuple[int, ...], is_aligned: bool, seqs: int,
    rows: int,
) -> Launcher:  # fmt: skip
    """A decode kernel for one form of call."""
    paired = _is_paired(kernel, problem)
    cache = torch.int16 if paired else problem.kv_dtype
    types = {
        **_pointers(problem.q_dtype, is_aligned, "out"),
        **dict.fromkeys(("lse", "parts", "part_sums"), "*fp32"),
        "arrivals": "*i32",
        **_pointers(problem.q_dtype, is_aligned, "q"),
        **_pointers(cache, is_aligned or problem.is_aligned, "k_cache", "v_cache"),
        **dict.fromkeys(("block_tables", "seq_lens", "cu_seqlens_q"), "*i32"),
        **dict.fromkeys(("alibi_slopes", "sinks", "k_scale", "v_scale"), "*fp32"),
        **dict.fromkeys(("num_seqs", "num_kv_heads", "max_splits"), "i32"),
        **dict.fromkeys(("softmax_scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("window", "block_size"), "i32"),
        # Apart: copies of the caches' rows may not depend on how q lies.
        **dict.fromkeys(_STRIDES[:4], _stride_type(strides[:4], 16 // problem.q_dtype.itemsize)),
        **dict.fromkeys(_STRIDES[4:], _stride_type(strides[4:], 16 // cache.itemsize)),
        "table_stride": "i32",
        **dict.fromkeys(_SCALE_STRIDES, "i64"),
    }
    v_width = _pad_values(problem, plan, paired)
    constants = {
        **_sizes(problem),
        "CODE": _code(problem.kv_dtype) if paired else "none",
        **_flags(problem, causal, has_cap, has_alibi, has_sinks),
        "SPLIT_TILES": plan.split_size // plan.tile_n if plan.split_size else 1,
        "SPLITS_FIXED": plan.split_size > 0,
        "TILE_M": plan.tile_m,
        "TILE_N": plan.tile_n,
        "D": _pad(problem.head_size, paired),
        "V": v_width,
        "SEQS": seqs,
        "STAGES": plan.num_stages,
        "ROWS": rows,
        "PARTS": max(1, min(16, 8192 // (rows * v_width))),
        "DOT": _dot(problem),
    }
    options = {"num_warps": plan.num_warps}
    if plan.max_registers:
        options["maxnreg"] = plan.max_registers
    if "FETCH_REGS" in kernel.kernel.arg_names:
        constants["FETCH_REGS"] = plan.fetch_registers
    else:
        constants["PREFETCH"] = not INTERPRETED
    return kernel.launcher(kernel.kernel, types, constants, **options)


def _launch_prefill(
    problem: Problem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    options: Options,
    out: Tensor,
    lse: Tensor,
    plan: GpuPlan,
) -> None:
    strides = (
        *out.stride()[:2], *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
    )  # fmt: skip
    launcher = make_prefill_launcher(
        _settle(problem), plan, options.causal, options.logits_soft_cap is not None,
        options.alibi_slopes is not None, options.sinks is not None, strides,
        _is_aligned(out, q, k_cache, v_cache),
    )  # fmt: skip
    k_scale, v_scale = options.k_scale, options.v_scale
    slopes, sinks = _floats(options.alibi_slopes), _floats(options.sinks)
    # As many tiles as there can be, however the tokens are spread over sequences.
    tiles = problem.num_tokens * problem.group // plan.tile_m + problem.num_seqs
    launcher(
        (tiles, problem.num_kv_heads, 1),  # along y there are at most 65535
        out, lse, q, k_cache, v_cache,
        batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, batch.cu_seqlens_q,
        _or(slopes, lse), _or(sinks, lse), _or(k_scale, lse), _or(v_scale, lse),
        problem.num_seqs, problem.num_kv_heads,
        options.softmax_scale, options.logits_soft_cap or 0.0,
        min(options.sliding_window or _NO_WINDOW, _NO_WINDOW), problem.block_size,
        *strides, batch.block_tables.stride(0),
        *_three(None if k_scale is None else k_scale.stride()),
        *_three(None if v_scale is None else v_scale.stride()),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def make_prefill_launcher(
    problem: Problem, plan: GpuPlan, causal: bool, has_cap: bool, has_alibi: bool,
    has_sinks: bool, strides: tuple[int, ...], is_aligned: bool,
) -> Launcher:  # fmt: skip
    """The kernel of ``tiles.triton.forward`` over pages, for one form of call."""
    factor = 16 // min(problem.q_dtype.itemsize, problem.kv_dtype.itemsize)
    types = {
        **_pointers(problem.q_dtype, is_aligned, "out"),
        "lse": "*fp32",
        **_pointers(problem.q_dtype, is_aligned, "q"),
        **_pointers(problem.kv_dtype, is_aligned, "k_cache", "v_cache"),
        **dict.fromkeys(("block_tables", "seq_lens", "cu_seqlens_k", "cu_seqlens_q"), "*i32"),
        **dict.fromkeys(("alibi_slopes", "sinks", "k_scale", "v_scale"), "*fp32"),
        **dict.fromkeys(("num_seqs", "num_kv_heads"), "i32"),
        **dict.fromkeys(("softmax_scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("window", "block_size"), "i32"),
        **dict.fromkeys(_STRIDES, _stride_type(strides, factor)),
        "table_stride": "i32",
        **dict.fromkeys(_SCALE_STRIDES, "i64"),
    }
    constants = {
        **_sizes(problem),
        "PAGED": True,
        **_flags(problem, causal, has_cap, has_alibi, has_sinks),
        "TILE_M": plan.tile_m,
        "TILE_N": plan.tile_n,
        "D": _pad(problem.head_size),
        "V": _pad_values(problem, plan),
        "DOT": _dot(problem),
    }
    return Launcher(
        forward_kernel, types, constants, num_warps=plan.num_warps, num_stages=plan.num_stages
    )


@functools.lru_cache(maxsize=4096)
def _settle(problem: Problem) -> Problem:
    """What a kernel is compiled for of a problem: a length is data, not another kernel."""
    return Problem(
        0, 0, 0, 0, problem.group, 1, problem.head_size, problem.v_head_size, problem.block_size,
        problem.q_dtype, problem.kv_dtype, problem.scale_kind, problem.is_aligned,
    )  # fmt: skip


def _is_paired(kernel: DecodeKernel, problem: Problem) -> bool:
    return kernel.takes_pairs and problem.kv_dtype.itemsize == 1


def _is_aligned(*tensors: Tensor) -> bool:
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return addresses % 16 == 0


def _pointers(dtype: torch.dtype, is_aligned: bool, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, POINTERS[dtype] + ":16" * is_aligned)


def _stride_type(strides: tuple[int, ...], factor: int) -> str:
    kind = "i32" if max(map(abs, strides)) < _NARROW else "i64"
    while factor > 1 and any(stride % factor for stride in strides):
        factor //= 2
    return f"{kind}:{factor}" if factor > 1 else kind


def _sizes(problem: Problem) -> dict[str, int]:
    block_size = problem.block_size
    return {
        "GROUP": problem.group,
        "SIZE": problem.head_size,
        "V_SIZE": problem.v_head_size,
        # A power of two divides by a shift; others are an argument, and one kernel serves all.
        "BLOCK_SIZE": block_size if block_size & (block_size - 1) == 0 else 0,
    }


def _flags(
    problem: Problem, causal: bool, has_cap: bool, has_alibi: bool, has_sinks: bool
) -> dict[str, Any]:
    return {
        "CAUSAL": causal,
        "HAS_CAP": has_cap,
        "HAS_ALIBI": has_alibi,
        "HAS_SINKS": has_sinks,
        "SCALES": problem.scale_kind,
    }


def _pad(size: int, paired: bool = False) -> int:
    """The width of a tile: a power of two that a matrix product takes."""
    return max(32 if paired else 16, power_of_2(size))


def _pad_values(problem: Problem, plan: GpuPlan, paired: bool = False) -> int:
    """The width of a tile of values.

    From 64 rows on warps multiply in groups of four, and then Triton 3.6 is wrong where values
    are narrow: 16 columns beside keys of 128, and 32 beside 64.
    """
    return max(_pad(problem.v_head_size, paired), 64 if plan.tile_m >= 64 else 16)


def _dot(problem: Problem) -> Any:
    """What is multiplied: the elements as they are, 8 bits as float16, a mixture as float32."""
    if problem.kv_dtype.itemsize == 1:
        return tl.float32 if problem.q_dtype == torch.float32 else tl.float16
    return _DOTS[problem.q_dtype if problem.q_dtype == problem.kv_dtype else torch.float32]


def _code(dtype: torch.dtype) -> str:
    names = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
    return names.get(dtype, "none")


def _three(scale: tuple[int, ...] | None) -> tuple[int, ...]:
    """A scale's strides of block, slot and head."""
    return (0, 0, 0, *(scale or ()))[-3:]


def _floats(biases: Tensor | None) -> Tensor | None:
    """ALiBi's slopes and sinks as the kernels read them; float32 already, as a rule."""
    if biases is None or (biases.dtype == torch.float32 and biases.stride(0) == 1):
        return biases
    return biases.float().contiguous()


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where a kernel looks at nothing."""
    return other if tensor is None else tensor
