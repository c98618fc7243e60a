"""Strides, types and constants of the parameters of Triton's and Hopper's decode kernels.

The kernels for prefill, for merging and for shared prefixes have some of them, by the same names.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from ...shapes import Form, power_of_2
from ...tiles.triton.launch import INTERPRETED, POINTERS, PRODUCTS
from .plan import GpuPlan
from .plan.decode import MERGED_AT_ONCE, MOST_MERGED
from .problem import CallForm, Problem

MERGE_WARPS = 4
"""Warps of a merging CTA; more would wait for each other."""
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
_FETCHED_KEYS = 256
"""Keys of a work item of ``prefix_kernel`` that are prefetched to L2."""
_LARGEST_BLOCK = 256


def find_strides(problem: Problem, form: CallForm, per_unit: int = 1) -> dict[str, int]:
    """Return strides by parameters' names; those of caches in units of ``per_unit`` elements."""
    width = problem.v_head_size
    out = (problem.num_heads * width, width) if form.out is None else form.out.strides[:2]
    strides = {
        "out_token out_head": out,
        "q_token q_head": form.q.strides[:2],
        "k_block k_slot k_head": [stride // per_unit for stride in form.k_cache.strides[:3]],
        "v_block v_slot v_head": [stride // per_unit for stride in form.v_cache.strides[:3]],
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
    return _FETCHED_KEYS if is_whole and problem.is_aligned else 0


def list_types(
    problem: Problem, form: CallForm, strides: dict[str, int], paired: bool
) -> dict[str, str]:
    """Return types by parameters' names; ``paired``: caches are int16 pairs of 8-bit values."""
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
    places = max(_LARGEST_BLOCK, problem.num_heads)
    kind = "i32" if max(map(abs, strides.values())) * places < 1 << 30 else "i64"
    while factor > 1 and any(stride % factor for stride in strides.values()):
        factor //= 2
    return f"{kind}:{factor}" if factor > 1 else kind


def list_constants(problem: Problem, form: CallForm, plan: GpuPlan, paired: bool) -> dict[str, Any]:
    """Return constants by parameters' names."""
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
        "PACKED": _FORMATS.get(problem.kv_dtype, "none") if paired else "none",
        "PAGED": True,
        "CAUSAL": form.causal,
        "HAS_CAP": form.logits_soft_cap is not None,
        "HAS_ALIBI": form.alibi_slopes is not None,
        "HAS_SINKS": form.sinks is not None,
        "SCALES": problem.scale_kind,
        "SPLIT_SHIFT": _log2((plan.split_size or plan.short_split_size) // plan.tile_n),
        "SPLITS_FIXED": plan.split_size > 0,
        "WHOLE_TILES": plan.whole_size // plan.tile_n,
        "LEAST_TILES": plan.least_size // plan.tile_n,
        "HALVING_TILES": plan.halving_size // plan.tile_n,
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
        "FETCHED": _fetched_keys(problem),
        "FETCH_REGS": plan.fetch_registers,
        "HEADS": plan.tile_heads,
        "COMPILED": not INTERPRETED,
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
    if plan.merge_rows:  # a separate launch has all registers
        at_once = max(1, MERGE_WARPS * 1024 // (plan.merge_rows * width))
    else:
        at_once = max(1, min(MERGED_AT_ONCE, 8192 // (lanes * rows * width)))
    loaded = lanes * max(1, at_once // 2)
    return {
        "AT_ONCE": at_once,
        "LANES": lanes,
        "MOST_MERGED": max(MOST_MERGED, 8 * loaded),
        "MERGE_GROUP": max(MERGED_AT_ONCE, loaded),
    }


def _log2(tiles: int) -> int:
    """Return the logarithm of a power of two; 0 if there is none."""
    return max(1, tiles).bit_length() - 1


def _dot(problem: Problem) -> Any:
    """Return the type of products: float16 for 8 bits."""
    if problem.multiplies_float32:
        return tl.float32
    return tl.float16 if problem.kv_dtype.itemsize == 1 else PRODUCTS[problem.q_dtype]
