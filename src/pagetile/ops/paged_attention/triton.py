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
from ...shapes import Form, power_of_2
from ...tiles.state import AttentionOutput
from ...tiles.triton.forward import forward_kernel
from ...tiles.triton.launch import (
    INTERPRETED,
    POINTERS,
    PRODUCTS,
    Launch,
    Launcher,
    as_floats,
    begins_early,
    window_of,
)
from ...tiles.triton.quantise import refuse_cache
from ...tiles.triton.workspace import borrow
from .batch import PagedBatch
from .plan import (
    MERGED_AT_ONCE,
    MOST_MERGED,
    GpuPlan,
    choose_prefix_splits,
    fit_to_prefill,
    make_gpu_plan,
    short_len,
)
from .problem import Arguments, CallForm, Problem
from .triton_decode import decode_kernel, merge_kernel
from .triton_prefixes import prefix_kernel

_PACKED = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
FETCHED_KEYS = 256
MERGE_WARPS = 4
"""Warps of a merging CTA; more would wait for each other."""
_SLOTS = 256  # the largest block size

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


def pack(batch: PagedBatch) -> PagedBatch:
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
    is_packed: bool
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
        if not self.is_packed:
            batch, slopes, sinks = pack(batch), as_floats(slopes), as_floats(sinks)
        scratch = borrow(device, self.scratch) if self.scratch else ()
        self.launch.here(
            device, out, lse, *scratch, q, k_cache, v_cache, batch.block_tables, batch.seq_lens,
            batch.cu_seqlens_q, slopes, sinks, k_scale, v_scale, listed,
        )  # fmt: skip
        if self.merge is not None:
            self.merge.here(device, out, lse, *scratch[:2], batch.cu_seqlens_q, sinks, v_scale)
        return AttentionOutput(out, lse)


def make_plan(problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False) -> GpuPlan:
    """Return the plan that ``prepare`` uses where it is given none."""
    return make_gpu_plan(problem, device, batch_invariant=batch_invariant)


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
    strides = _strides(problem, form, 2 if paired else 1)
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
    return PreparedLaunch(launch, out_rows, lse_rows, scratch, is_packed(form), merge, short)


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
        q, batch, shared = call.q, pack(call.batch), call.batch.shared_prefixes
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
    strides = _strides(problem, form, 1)
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
    types = _types(problem, form, strides, paired)
    constants = _constants(problem, form, plan, paired)
    constants["FETCHED"] = _fetched_keys(problem)
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


def is_packed(form: CallForm) -> bool:
    """Return whether lengths, slopes and sinks are contiguous and of the kernels' types."""
    lengths = (form.seq_lens, form.cu_seqlens_q)
    biases = [bias for bias in (form.alibi_slopes, form.sinks) if bias is not None]
    return all(array.strides == (1,) for array in (*lengths, *biases)) and all(
        bias.dtype == torch.float32 for bias in biases
    )


def _strides(problem: Problem, form: CallForm, per_pair: int) -> dict[str, int]:
    width = problem.v_head_size
    out = (problem.num_heads * width, width) if form.out is None else form.out.strides[:2]
    strides = {
        "out_token out_head": out,
        "q_token q_head": form.q.strides[:2],
        "k_block k_slot k_head": [stride // per_pair for stride in form.k_cache.strides[:3]],
        "v_block v_slot v_head": [stride // per_pair for stride in form.v_cache.strides[:3]],
        "table_stride": form.block_tables.strides[:1],
        "ks_block ks_slot ks_head": _scale_strides(form.k_scale),
        "vs_block vs_slot vs_head": _scale_strides(form.v_scale),
        "list_seq list_head": (0, 0)
        if form.visible_blocks is None
        else form.visible_blocks.strides[:2],
    }
    return {
        name: stride
        for names, group in strides.items()
        for name, stride in zip(names.split(), group, strict=True)
    }


def _scale_strides(scale: Form | None) -> tuple[int, ...]:
    """Return the strides of block, slot and head; 0 where one number is for all."""
    strides = () if scale is None or scale.shape in ((), (1,)) else scale.strides
    return (0, 0, 0, *strides)[-3:]


def _fetched_keys(problem: Problem) -> int:
    """Return how many keys of a work item to prefetch; rows must be multiples of 16 bytes."""
    sizes = problem.head_size, problem.v_head_size
    is_whole = all(size * problem.kv_dtype.itemsize % 16 == 0 for size in sizes)
    return FETCHED_KEYS if is_whole and problem.is_aligned else 0


def _types(
    problem: Problem, form: CallForm, strides: dict[str, int], paired: bool
) -> dict[str, str]:
    cache = torch.int16 if paired else problem.kv_dtype
    rows_pointer = POINTERS[problem.q_dtype] + ":16" * form.is_aligned
    pages_pointer = POINTERS[cache] + ":16" * (form.is_aligned or problem.is_aligned)
    factor = 16 // min(problem.q_dtype.itemsize, cache.itemsize)
    # Separate from q's, so that the strides of q do not change how cache rows are copied.
    rows, pages, scales = (
        {name: stride for name, stride in strides.items() if name.startswith(kinds)}
        for kinds in (("out_", "q_"), ("k_", "v_"), ("ks_", "vs_"))
    )
    return {
        **dict.fromkeys(("out", "q"), rows_pointer),
        "outs": POINTERS[problem.q_dtype] + ":16",
        **dict.fromkeys(("k_cache", "v_cache"), pages_pointer),
        **dict.fromkeys(("split_accs", "split_sums"), "*fp32:16"),
        **dict.fromkeys(("lse", "lses", "alibi_slopes", "sinks"), "*fp32"),
        **dict.fromkeys(("k_scale", "v_scale"), "*fp32" + ":16" * form.has_aligned_scales),
        **dict.fromkeys(
            ("arrivals", "block_tables", "seq_lens", "cu_seqlens_q", "visible_blocks"), "*i32"
        ),
        **dict.fromkeys(("cu_group_seqs", "prefix_lens"), "*i32"),
        **dict.fromkeys(("num_seqs", "num_kv_heads", "short", "max_splits"), "i32"),
        **dict.fromkeys(("num_groups", "num_tokens", "splits"), "i32"),
        **dict.fromkeys(("softmax_scale", "soft_cap"), "fp32"),
        **dict.fromkeys(("window", "block_size", "max_visible", "search_steps"), "i32"),
        **dict.fromkeys(strides, "i64"),
        **dict.fromkeys(rows, _stride_type(rows, factor, problem)),
        **dict.fromkeys(pages, _stride_type(pages, factor, problem)),
        **dict.fromkeys(scales, _stride_type(scales, 1, problem)),
        "table_stride": "i32",
    }


def _stride_type(strides: dict[str, int], factor: int, problem: Problem) -> str:
    # Sums of products with a slot and with a head are computed in this type.
    places = max(_SLOTS, problem.num_heads)
    kind = "i32" if max(map(abs, strides.values())) * places < 1 << 30 else "i64"
    while factor > 1 and any(stride % factor for stride in strides.values()):
        factor //= 2
    return f"{kind}:{factor}" if factor > 1 else kind


def _constants(problem: Problem, form: CallForm, plan: GpuPlan, paired: bool) -> dict[str, Any]:
    block_size, rows = problem.block_size, power_of_2(problem.rows)
    is_listed = problem.max_visible is not None
    num_entries = problem.num_seqs * (problem.num_kv_heads if is_listed else 1)
    num_groups = 1 if form.shared_prefixes is None else form.shared_prefixes[1].shape[0]
    unit = _scale_unit(problem, form)
    narrowest = 32 if paired else 16  # a power of two that a matrix product takes
    # From 64 rows on Triton uses wgmma, and then Triton 3.6 computes narrow values wrongly: 16
    # columns with keys of 128, and 32 with keys of 64.
    narrowest_v = max(narrowest, 64 if plan.tile_m >= 64 else 16)
    v_width = max(narrowest_v, power_of_2(problem.v_head_size))
    return {
        "GROUP": problem.group,
        "SIZE": problem.head_size,
        "V_SIZE": problem.v_head_size,
        # A power of two is a constant, divided by a shift; others are an argument of one kernel.
        "BLOCK_SIZE": block_size if block_size & (block_size - 1) == 0 else 0,
        "PACKED": _PACKED.get(problem.kv_dtype, "none") if paired else "none",
        "PAGED": True,
        "CAUSAL": form.causal,
        "HAS_CAP": form.logits_soft_cap is not None,
        "HAS_ALIBI": form.alibi_slopes is not None,
        "HAS_SINKS": form.sinks is not None,
        "SCALES": problem.scale_kind,
        "SPLIT_SHIFT": _log2((plan.split_size or plan.short_split_size) // plan.tile_n),
        "SPLITS_FIXED": plan.split_size > 0,
        "WHOLE": plan.whole_size // plan.tile_n,
        "LEAST": plan.least_size // plan.tile_n,
        "HALVED": plan.halving_size // plan.tile_n,
        "TILE_M": plan.tile_m,
        "TILE_N": plan.tile_n,
        "D": max(narrowest, power_of_2(problem.head_size)),
        "V": v_width,
        "SEQS": power_of_2(min(max(num_entries, 128), 1024)),
        "STAGES": plan.num_stages,
        "ROWS": rows,
        **_choose_merge(problem, plan, rows, v_width),
        "MERGE_ROWS": plan.merge_rows,
        "DOT": _dot(problem),
        "FETCH_REGS": plan.fetch_registers,
        "HEADS": plan.tile_heads,
        "PREFETCH": not INTERPRETED,
        "GROUPS": power_of_2(num_groups),
        "VISIBLE": is_listed,
        "SCALE_UNIT": unit,
        "SAME_PLACES": form.k_cache.strides[:3] == form.v_cache.strides[:3],
        # Single scales of tokens go through the L1 cache, which may hold stale ones. Lengths that
        # are not contiguous are copied by the previous kernel.
        "EARLY": form.allows_early_reads
        and not is_listed
        and (problem.scale_kind != "token" or unit > 1)
        and form.seq_lens.strides == form.cu_seqlens_q.strides == (1,),
    }


def _scale_unit(problem: Problem, form: CallForm) -> int:
    """Return how many neighbouring tokens' scales are loaded at once: 4, if 16 bytes hold them."""
    if problem.scale_kind != "token" or not form.has_aligned_scales or problem.block_size % 4:
        return 1
    strides = [_scale_strides(scale) for scale in (form.k_scale, form.v_scale)]
    return 4 if all(slot == 1 and not (block | head) % 4 for block, slot, head in strides) else 1


def _choose_merge(problem: Problem, plan: GpuPlan, rows: int, width: int) -> dict[str, int]:
    """Return how splits' states of some rows are merged: see ``hopper_merge``.

    Half of the states that are merged at once are still being loaded. More than eight dependent
    loads of one CTA take longer than merging groups first. Threads that are left over, at four
    columns per thread, merge other splits of the head.
    """
    pairs = problem.num_seqs * problem.num_kv_heads
    has_many = plan.split_size > 0 or pairs * MERGED_AT_ONCE <= 2 * plan.num_programs
    lanes = 1
    if plan.fetch_registers and not plan.merge_rows and has_many:  # Hopper's kernel merges
        lanes = max(1, plan.num_warps * (32 // min(32, width // 4)) // rows)
    at_once = _choose_at_once(plan.merge_rows or lanes * rows, width, plan.merge_rows > 0)
    loaded = lanes * max(1, at_once // 2)
    return {
        "AT_ONCE": at_once,
        "LANES": lanes,
        "MOST_MERGED": max(MOST_MERGED, 8 * loaded),
        "MERGE_GROUP": max(MERGED_AT_ONCE, loaded),
    }


def _choose_at_once(rows: int, width: int, is_apart: bool) -> int:
    """Return how many splits' states of some rows a merge loads at once."""
    if is_apart:  # a separate launch has all registers
        return max(1, MERGE_WARPS * 1024 // (rows * width))
    return max(1, min(MERGED_AT_ONCE, 8192 // (rows * width)))


def _log2(tiles: int) -> int:
    """Return the logarithm of a power of two; 0 if there is none."""
    return max(1, tiles).bit_length() - 1


def _dot(problem: Problem) -> Any:
    """Return the type of products: the elements' own, float16 for 8 bits, else float32."""
    if problem.kv_dtype.itemsize == 1:
        return tl.float32 if problem.q_dtype == torch.float32 else tl.float16
    return PRODUCTS[problem.q_dtype if problem.q_dtype == problem.kv_dtype else torch.float32]


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
