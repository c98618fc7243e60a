"""Paged attention on a GPU by Triton: from a checked call to its launches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import ShapeError
from ...tiles.state import AttentionOutput
from ...tiles.triton.forward import forward_kernel
from ...tiles.triton.launch import Launch, Launcher, as_floats, begins_early, window_of
from ...tiles.triton.quantise import refuse_cache
from ...tiles.triton.workspace import borrow
from .batch import PagedBatch
from .plan import GpuPlan, make_gpu_plan
from .plan.decode import fit_to_prefill
from .plan.prefill import short_len
from .plan.prefixes import choose_prefix_splits
from .problem import Arguments, CallForm, Problem
from .triton_decode import decode_kernel, merge_kernel
from .triton_parameters import MERGE_WARPS, find_strides, list_constants, list_types
from .triton_prefixes import prefix_kernel

make_plan = make_gpu_plan

# Allocates as torch's compiled code does, without the dispatcher, in half of the time.
_allocate: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run ``problem``, or None if it can."""
    for name, dtype in (("q", problem.q_dtype), ("k_cache", problem.kv_dtype)):
        if dtype == torch.float64:
            return f"{name} is float64; float32, float16, bfloat16 and 8 bits run"
    return refuse_cache(device, problem.kv_dtype)


@dataclass(frozen=True, eq=False)  # a cache key by identity
class Kernel:
    """A kernel with the parameters of ``triton_decode``'s or, for prefill, some of them."""

    function: Any
    launcher: type[Launcher] = Launcher
    takes_pairs: bool = False
    """Whether it takes 8-bit caches as int16 pairs of packed 8-bit values."""
    joins_heads: bool = False
    """Whether a tile may have rows and keys of several KV heads."""
    is_early: bool = False
    """Whether it reads everything but queries before the previous kernel ends."""


DECODE = Kernel(decode_kernel)
MERGE = Kernel(merge_kernel)
PREFILL = Kernel(forward_kernel)
PREFIXES = Kernel(prefix_kernel)
EARLY_PREFIXES = Kernel(prefix_kernel, is_early=True)


def with_contiguous_lengths(batch: PagedBatch) -> PagedBatch:
    """Return the batch with contiguous lengths, as kernels read them."""
    if batch.seq_lens.is_contiguous() and batch.cu_seqlens_q.is_contiguous():
        return batch
    return replace(
        batch, seq_lens=batch.seq_lens.contiguous(), cu_seqlens_q=batch.cu_seqlens_q.contiguous()
    )


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """A launch with all arguments bound that calls of one form share."""

    launch: Launch
    out_rows: tuple[tuple[int, int, int], tuple[int, int, int]]
    """Sizes and strides of an ``out`` that is allocated here."""
    lse_rows: tuple[tuple[int, int], tuple[int, int]]
    scratch: tuple[int, int, int] | None
    """Sizes of what ``borrow`` returns."""
    is_ready: bool
    """Whether lengths, slopes and sinks are contiguous and of the kernels' types."""
    merge: Launch | None = None
    """The launch that merges the states stored by this one; ``None``: there is none."""
    short: PreparedLaunch | None = None
    """The launch for the short sequences of a mixed batch, which this one leaves out."""

    def __call__(self, call: Arguments, lse: Tensor | None = None) -> AttentionOutput:
        """Launch; allocate the results that are not given."""
        q, k_cache, v_cache, batch, _, _, _, _, slopes, sinks, k_scale, v_scale, listed, out = call
        device = q.get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call, lse)
        if out is None:
            out = _new_rows(device, *self.out_rows, q.dtype)
        if lse is None:
            lse = _new_rows(device, *self.lse_rows, torch.float32)
        if not self.lse_rows[0][0]:  # no tokens
            return AttentionOutput(out, lse)
        if self.short is not None:
            self.short(call._replace(out=out), lse)
        if not self.is_ready:
            batch = with_contiguous_lengths(batch)
            slopes, sinks = as_floats(slopes), as_floats(sinks)
        scratch = borrow(device, self.scratch) if self.scratch else ()
        self.launch.here(
            device, out, lse, *scratch, q, k_cache, v_cache, batch.block_tables, batch.seq_lens,
            batch.cu_seqlens_q, slopes, sinks, k_scale, v_scale, listed,
        )  # fmt: skip
        if self.merge is not None:
            self.merge.here(device, out, lse, *scratch[:2], batch.cu_seqlens_q, sinks, v_scale)
        return AttentionOutput(out, lse)


def prepare(
    problem: Problem,
    form: CallForm,
    plan: GpuPlan | None = None,
    decode: Kernel = DECODE,
    *,
    overlaps_prefill: bool = False,
) -> PreparedLaunch:
    """Return the launch that calls of a form share.

    Args:
        problem: A call.
        form: Its form.
        plan: A plan of ``make_plan``; ``None`` makes one.
        decode: The kernel for few rows of a sequence.
        overlaps_prefill: Whether ``decode`` may overlap the call's prefill, launched before it.
    """
    device = DeviceInfo.of(form.q.device)
    plan = plan or make_gpu_plan(problem, device, hopper=decode is not DECODE)
    kernel = PREFILL if plan.path == "prefill" and decode is DECODE else decode
    if plan.tile_heads > 1:
        problem = _join_kv_heads(problem, plan, kernel)
    if kernel is decode and (plan.path != "decode" or plan.tile_m < problem.rows):
        raise ShapeError(
            f"the plan is for {plan.path} with tile_m={plan.tile_m}, but sequences have up to "
            f"{problem.rows} rows (max_query_len times heads of a group): make_plan of this problem"
        )
    paired = kernel.takes_pairs and problem.kv_dtype.itemsize == 1
    strides = find_strides(problem, form, 2 if paired else 1)
    launcher = _find_launcher(kernel, problem, form, plan, strides, paired, overlaps_prefill)
    # The block tables may bound lengths more tightly than max_seq_len.
    most_blocks = form.block_tables.shape[1]
    if problem.max_visible is not None:
        most_blocks = min(most_blocks, problem.max_visible)
    longest = min(problem.max_seq_len, most_blocks * problem.block_size)
    max_splits = -(-longest // plan.split_size) + 1 if plan.split_size else 0
    numbers = {
        "num_seqs": problem.num_seqs,
        "num_kv_heads": problem.num_kv_heads,
        "short": short_len(problem),
        "max_splits": max_splits,
        "softmax_scale": form.softmax_scale,
        "soft_cap": form.logits_soft_cap or 0.0,
        "window": window_of(form.sliding_window),
        "block_size": problem.block_size,
        "max_visible": problem.max_visible or 0,
        "search_steps": (problem.max_visible or 0).bit_length(),
        **strides,
    }
    short = merge = None
    if kernel is PREFILL:
        short = prepare_short(problem, form, plan)
        # An upper bound of the tiles for any distribution of tokens over sequences. Tiles are on
        # the x axis, because y has at most 65535.
        tiles = problem.num_tokens * problem.group // plan.tile_m + problem.num_seqs
        grid, scratch = (tiles, problem.num_kv_heads, 1), None
    else:
        pairs = problem.num_seqs * problem.num_kv_heads
        slots = pairs * max_splits if plan.split_size else 2 * plan.num_programs
        sums = slots * launcher.constants["ROWS"]
        notes = 2 * pairs if plan.merge_rows else 0
        grid = plan.num_programs, 1, 1
        # One counter of splits per head, and one per group of splits, by its first slot.
        scratch = sums * launcher.constants["V"], 2 * sums + notes, pairs + slots
    launch = launcher.bind(grid, *(numbers[name] for name in launcher.types if name in numbers))
    if scratch and plan.merge_rows:
        merging = _find_launcher(MERGE, problem, form, plan, strides, paired)
        grid = pairs, -(-problem.rows // plan.merge_rows), 1
        merge = merging.bind(grid, *(numbers[name] for name in merging.types if name in numbers))
    tokens, heads, width = problem.out_sizes
    out_rows = problem.out_sizes, (heads * width, width, 1)
    lse_rows = (tokens, heads), (heads, 1)
    return PreparedLaunch(launch, out_rows, lse_rows, scratch, is_ready(form), merge, short)


def _join_kv_heads(problem: Problem, plan: GpuPlan, kernel: Kernel) -> Problem:
    """Return the problem for a kernel whose tiles have several KV heads."""
    if (
        not kernel.joins_heads
        or problem.max_visible is not None
        or problem.num_kv_heads % plan.tile_heads
    ):
        raise ShapeError(
            f"the plan has tile_heads={plan.tile_heads}, which this call of {problem.num_kv_heads} "
            "KV heads does not take: make_plan of this problem"
        )
    return problem.join_kv_heads(plan.tile_heads)


def prepare_short(
    problem: Problem,
    form: CallForm,
    plan: GpuPlan | None,
    decode: Kernel = DECODE,
    *,
    prefill: GpuPlan | None = None,
) -> PreparedLaunch | None:
    """Return the launch for a mixed batch's sequences of up to ``short_len``; None if not mixed.

    ``prefill`` is the plan of the same call's prefill, if this launch may overlap it.
    """
    if not short_len(problem):
        return None
    short = replace(problem, max_query_len=short_len(problem))
    device, is_fixed = DeviceInfo.of(form.q.device), plan is not None and plan.split_size > 0
    own = make_gpu_plan(short, device, batch_invariant=is_fixed, hopper=decode is not DECODE)
    if prefill is not None:
        own = fit_to_prefill(own, prefill, problem, device)
    return prepare(short, form, own, decode, overlaps_prefill=prefill is not None)


@dataclass(frozen=True, eq=False)
class PrefixLaunch:
    """A launch of ``prefix_kernel`` with all arguments bound that calls of one form share."""

    launch: Launch
    outs_sizes: tuple[int, int, int, int]

    def __call__(self, call: Arguments) -> tuple[Tensor, Tensor]:
        """Return a state of each split of the prefixes: see ``prefix_kernel``."""
        q, batch, shared = call.q, with_contiguous_lengths(call.batch), call.batch.shared_prefixes
        assert shared is not None
        outs = q.new_empty(self.outs_sizes)
        lses = torch.empty(self.outs_sizes[:3], dtype=torch.float32, device=q.device)
        self.launch(
            outs, lses, q, call.k_cache, call.v_cache, batch.block_tables, batch.seq_lens,
            batch.cu_seqlens_q, shared.cu_group_seqs.contiguous(), shared.prefix_lens.contiguous(),
            as_floats(call.alibi_slopes), call.k_scale, call.v_scale,
        )  # fmt: skip
        return outs, lses


@functools.lru_cache(maxsize=256)
def prepare_prefixes(
    problem: Problem, form: CallForm, plan: GpuPlan, num_keys: int, *, is_settled: bool = False
) -> PrefixLaunch:
    """Return the launch over shared prefixes that calls of a form share.

    Args:
        problem: A call.
        form: Its form.
        plan: A plan of ``make_prefix_plan``.
        num_keys: Upper bound of the prefixes' lengths.
        is_settled: Whether the previous kernel writes queries only, so that all else may be read
            before it ends.
    """
    assert form.shared_prefixes is not None
    strides = find_strides(problem, form)
    is_early = is_settled and begins_early(form.q.device)
    kernel = EARLY_PREFIXES if is_early else PREFIXES
    launcher = _find_launcher(kernel, problem, form, plan, strides, paired=False)
    splits = choose_prefix_splits(problem, plan, num_keys)
    numbers = {
        "num_groups": form.shared_prefixes[1].shape[0],
        "num_tokens": problem.num_tokens,
        "num_kv_heads": problem.num_kv_heads,
        "splits": splits,
        "softmax_scale": form.softmax_scale,
        "soft_cap": form.logits_soft_cap or 0.0,
        "block_size": problem.block_size,
        "search_steps": problem.num_seqs.bit_length(),
        **strides,
    }
    grid = plan.num_programs, 1, 1
    launch = launcher.bind(grid, *(numbers[name] for name in launcher.types if name in numbers))
    return PrefixLaunch(launch, (splits, *problem.out_sizes))


def _find_launcher(
    kernel: Kernel, problem: Problem, form: CallForm, plan: GpuPlan, strides: dict[str, int],
    paired: bool, overlaps_prefill: bool = False,
) -> Launcher:  # fmt: skip
    """Return the launcher of this kernel, with those of all parameters that it has."""
    types = list_types(problem, form, strides, paired)
    constants = list_constants(problem, form, plan, paired)
    constants["INDEPENDENT"] = overlaps_prefill
    constants["EARLY"] &= not overlaps_prefill
    if kernel in (PREFIXES, EARLY_PREFIXES):
        constants["EARLY"] = kernel.is_early
    options = {"num_warps": MERGE_WARPS if kernel is MERGE else plan.num_warps}
    if kernel in (PREFILL, PREFIXES, EARLY_PREFIXES):
        options["num_stages"] = plan.num_stages
    if kernel is not PREFILL and begins_early(form.q.device):
        options["launch_pdl"] = True
    if plan.max_registers and kernel is not MERGE:
        options["maxnreg"] = plan.max_registers
    names = kernel.function.arg_names
    return _make_launcher(
        kernel,
        tuple((name, types[name]) for name in names if name in types),
        tuple((name, constants[name]) for name in names if name in constants),
        tuple(options.items()),
    )


@functools.lru_cache(maxsize=4096)
def _make_launcher(
    kernel: Kernel, types: tuple[Any, ...], constants: tuple[Any, ...], options: tuple[Any, ...]
) -> Launcher:
    """Return a cached launcher; calls that differ in lengths only share it."""
    return kernel.launcher(kernel.function, dict(types), dict(constants), **dict(options))


def is_ready(form: CallForm) -> bool:
    """Return whether lengths, slopes and sinks are contiguous and of the kernels' types."""
    lengths = (form.seq_lens, form.cu_seqlens_q)
    biases = [bias for bias in (form.alibi_slopes, form.sinks) if bias is not None]
    return all(array.strides == (1,) for array in (*lengths, *biases)) and all(
        bias.dtype == torch.float32 for bias in biases
    )


def _new_rows(
    device: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return an uninitialised tensor on the current GPU, or on the CPU if ``device`` is -1.

    ``device`` is a tensor's ``get_device()``.
    """
    if device >= 0 and _allocate is not None:
        new: Tensor = _allocate(sizes, strides, dtype)
        return new
    kind = "cuda" if device >= 0 else "cpu"
    return torch.empty_strided(sizes, strides, dtype=dtype, device=kind)
