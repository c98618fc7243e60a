"""Launch plans of paged attention: tiles and splits, from host integers and the device only.

Plans of all implementations are made here: ``cpu`` (``tiles.cpu.plan``), the decode kernels of
``triton`` and ``hopper``, Triton's prefill and ``hopper_prefill``. Decode tiles are measured:
``decode_tiles.json`` has the fastest ones that ``python -m benchmarks tune`` found, by the GPU's
name and the kind of problem; for others a formula chooses.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...device import DeviceInfo
from ...shapes import dtype_name, power_of_2
from ...tiles.cpu.plan import Plan as CpuPlan
from ...tiles.cpu.plan import make_plan as make_cpu_plan
from ...tiles.forward_tiles import ForwardTiles, choose_forward_tiles
from ...tiles.hopper.dividing import divides_keys
from ...tiles.hopper.tiling import PACKED_FORMATS, TILINGS, refuse_cap, tiling_of
from .problem import Problem
from .unpacking import can_unpack, estimate

MEASURED = Path(__file__).with_name("decode_tiles.json")

DECODE_ROWS = 64
"""Up to this many rows (new tokens × group) of a sequence, CTAs share the keys of one sequence."""

HOPPER_ROWS = 16
"""Most rows that ``hopper_decode`` takes of 8-bit caches and of wide heads."""

SHORT_ROWS = 8
"""Up to this many rows, a sequence of a mixed batch goes to the decode kernel, not to prefill. One
new token of up to 16 heads does, too. With room for 16 rows of all sequences decode is slower."""

GPU_SPLIT_SIZE = 1024
"""Keys of one split where a result must not depend on the batch."""

PREFIX_ROWS = 64
"""Most rows of a tile of the kernel for shared prefixes: with 64, two CTAs fit a multiprocessor."""

MOST_PREFIX_SPLITS = 32
"""Most splits of a shared prefix; for every token the merge reads the state of each."""

MERGED_ROWS = 16
"""Up to this many rows of a head, the CTA that stores its last split merges all of them."""

MERGING_CTAS = 4
"""Most CTAs of a merge per multiprocessor: more are slower than more rows of each."""

WIDE_MERGING_CTAS = 14
"""The same if most heads have several wide splits, of which few rows are loaded at once."""

LEAST_SIZE = 128
"""Fewest keys of a CTA that make up for storing and merging the state of many rows."""

MERGED_AT_ONCE = 16
"""Partial states that a merge holds in registers; half of them are still being loaded."""

MOST_MERGED = 32
"""Up to this many splits one CTA merges all; more may be merged in groups first, which takes
another round of stores, counting and loads (2 µs)."""

WHOLE_SIZE = 256
"""Keys that a CTA reads in the time that merging two splits takes."""

LINE_BYTES = 128
"""Bytes of a line of the L2 cache. Neighbouring heads that share a line are read in one tile."""

NARROW = 80
"""Up to this width four heads may be read together, above it two: four heads of 112 are slower."""

LEAST_JOINED = 32
"""Fewest joined heads of all sequences: with fewer, merging more splits costs what reading
saves."""

IN_FLIGHT = 80 << 10
"""Bytes in flight with which a multiprocessor reads joined heads fastest; more are slower."""

_FEW_SPLITS = 8
_BUSY_BYTES = 60 << 10
"""Bytes in flight of a CTA alone on its multiprocessor, without the tile being computed."""
_HALVES = (torch.float16, torch.bfloat16)
_ROWS_OF_WARPGROUP = 64


@dataclass(frozen=True)
class GpuPlan:
    """Tiles, and how the keys of a decoding sequence are divided.

    With ``split_size`` 0 every CTA gets an equal range of the work queue, wherever that cuts a
    sequence: fastest, and the same bits on every call with the same batch. Otherwise keys are cut
    at multiples of ``split_size``, and a sequence's result does not depend on its neighbours in
    the batch, as long as all batches have the same ``max_query_len``, which chooses kernels and
    tiles.
    """

    path: str
    """``"decode"``, ``"prefill"``, or ``"prefix"`` for a prefix that sequences share."""
    tile_m: int
    """Rows of a tile."""
    tile_n: int
    """Keys of a tile."""
    num_warps: int
    """Warps that compute; Hopper's kernels have loading warps as well."""
    num_stages: int
    """Tiles in flight from memory at a time."""
    num_programs: int
    """CTAs of a persistent launch over a work queue; 0: one CTA for each tile of rows."""
    halving_size: int = 0
    """Only half of the CTAs take part where a CTA's range would have fewer keys than this."""
    split_size: int = 0
    whole_size: int = 0
    """Sequences of up to this many keys are not split where CTAs have little work, which the
    kernel decides from the lengths."""
    least_size: int = 0
    """Fewest keys of a CTA."""
    merge_rows: int = 0
    """Rows per CTA of the merge launch; 0: the last CTA of a head merges its splits."""
    short_split_size: int = 0
    """Longer sequences are then split at multiples of this many keys; 0: of ``tile_n``."""
    max_registers: int = 0
    """Register cap per thread; 0 means the compiler's default."""
    fetch_registers: int = 0
    """Register cap per thread of a loading warp."""
    divides_keys: bool = False
    """Whether a prefill's keys may be split: the kernel chooses the number of splits from the
    lengths, 1 where tiles occupy all multiprocessors."""
    unpacks: bool = False
    """Whether an 8-bit cache's blocks are unpacked to 16 bits first, in another launch."""
    tile_heads: int = 1
    """Neighbouring KV heads that share a tile."""


Plan = CpuPlan | GpuPlan


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False) -> Plan:
    """Return the plan of the implementation that ``impl="auto"`` would choose on a device.

    Args:
        problem: A call.
        device: The device, which need not be this machine's.
        batch_invariant: Whether a sequence's result must have the same bits whatever other
            sequences are in the batch. On a CPU it always has; on a GPU it costs some of decode's
            speed, and holds among batches of one ``max_query_len``. Decode then keeps a partial
            result of every 1024 keys: ``rows * v_head_size * 4`` bytes each, with ``rows`` the next
            power of two of ``max_query_len * group``, for as many keys as ``max_seq_len`` and the
            block tables allow, of every sequence and KV head.

    Examples:
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> h200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
        >>> make_plan(problem, h200).split_size  # as many keys for each CTA
        0
        >>> make_plan(problem, h200, batch_invariant=True).split_size
        1024
    """
    if device.kind != "cuda":
        return make_cpu_plan(problem, device)
    is_hopper = device.capability == (9, 0)
    if is_hopper and refuse_hopper_prefill(problem) is None:
        return make_hopper_prefill_plan(problem, device, batch_invariant=batch_invariant)
    hopper = is_hopper and refuse_hopper_decode(problem) is None
    return make_gpu_plan(problem, device, batch_invariant=batch_invariant, hopper=hopper)


def refuse_hopper_decode(problem: Problem) -> str | None:
    """Return why ``hopper_decode`` cannot run ``problem``, or None if it can."""
    q, kv = map(dtype_name, (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _HALVES:
        return f"q is {q}; float16 and bfloat16 run"
    if problem.kv_dtype != problem.q_dtype and problem.kv_dtype.itemsize != 1:
        return f"q is {q} but k_cache is {kv}: equal types, and 8 bits, run"
    most = DECODE_ROWS if _is_grouped(problem) else HOPPER_ROWS
    if problem.rows > most:
        return f"{problem.rows} rows of a sequence share a KV head; up to {most} run"
    if problem.width > 256:
        return f"a head of {problem.width} is wider than 256"
    return _refuse_unaligned(problem)


def refuse_hopper_prefill(problem: Problem) -> str | None:
    """Return why Hopper's forward kernel cannot run ``problem``, or None if it can."""
    q, kv = map(dtype_name, (problem.q_dtype, problem.kv_dtype))
    if problem.q_dtype not in _HALVES:
        return f"q is {q}; float16 and bfloat16 run"
    for name in ("head_size", "v_head_size"):
        size, widest = getattr(problem, name), TILINGS[-1].width
        if size % 8 or size > widest:
            return f"{name} is {size}; multiples of 8 up to {widest} run"
    if problem.kv_dtype not in (problem.q_dtype, *PACKED_FORMATS):
        return f"q is {q} but k_cache is {kv}; equal types, and 8 bits, run"
    if problem.q_dtype == torch.float16 and problem.scale_kind == "token":
        return "q is float16, in which values times their token's scale may overflow"
    if problem.max_visible is not None:
        return "it takes no visible_blocks"
    if problem.rows <= DECODE_ROWS:
        return f"{problem.rows} rows of a sequence share a KV head; more than {DECODE_ROWS} run"
    return refuse_cap(problem.logits_soft_cap) or _refuse_unaligned(problem)


def _is_grouped(problem: Problem) -> bool:
    """Return whether ``hopper_decode`` can take more than 16 rows, by ``wgmma``."""
    sizes = problem.head_size, problem.v_head_size
    return problem.kv_dtype.itemsize == 2 and min(sizes) > 32 and max(sizes) <= 128


def _refuse_unaligned(problem: Problem) -> str | None:
    """Return why rows of the caches cannot be copied 16 bytes at a time, or None if they can."""
    unit = 16 // problem.kv_dtype.itemsize
    if problem.head_size % unit or problem.v_head_size % unit or not problem.is_aligned:
        return "rows of the caches do not begin at multiples of 16 bytes"
    return None


@functools.lru_cache(maxsize=4096)
def make_gpu_plan(
    problem: Problem, device: DeviceInfo, *, batch_invariant: bool = False, hopper: bool = False
) -> GpuPlan:
    """Choose the tiles of a decode kernel, or of Triton's prefill.

    Args:
        problem: A call.
        device: A GPU, or a CPU that interprets.
        batch_invariant: Whether a sequence's result must not depend on its neighbours.
        hopper: Whether the plan is for ``hopper_decode``.

    Examples:
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> make_gpu_plan(problem, DeviceInfo("cuda", 132, "NVIDIA H200")).path
        'decode'
    """
    if problem.rows > (16 if _is_bulky(problem) else DECODE_ROWS):
        return _make_triton_prefill_plan(problem, device, batch_invariant)
    # For a batch-invariant result, choose the tiles of one sequence.
    asked = replace(problem, num_seqs=1) if batch_invariant else problem
    tiles = choose_decode_tiles(asked, device, hopper)
    problem = problem.join_kv_heads(tiles.tile_heads)
    pairs = problem.num_seqs * problem.num_kv_heads
    is_many = problem.rows > MERGED_ROWS
    is_wide = hopper and is_many and _has_wide_splits(problem, device)
    # Half as many states to store and merge; one CTA keeps the memory busy.
    programs = 1 if is_wide else tiles.programs
    num_programs = _align(programs * device.num_workers, pairs)
    # Merging many short splits of a head takes longer than reading them, and so does waiting until
    # a second CTA fits with the previous kernel's. Then use one CTA on each multiprocessor, if
    # its tiles in flight keep the memory busy.
    is_few = pairs * _FEW_SPLITS <= num_programs * tiles.programs // programs
    halving_size = 4 * tiles.tile_n if is_many and programs == 2 else 0
    if not is_many and hopper and tiles.programs == 2 and is_few:
        row_bytes = (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
        keys = tiles.num_stages * tiles.tile_n * tiles.tile_heads
        keeps_busy = keys * row_bytes >= _BUSY_BYTES
        halving_size = 768 if keeps_busy else tiles.tile_n
    return GpuPlan(
        "decode",
        tile_m=_ROWS_OF_WARPGROUP if hopper and is_many else max(16, power_of_2(problem.rows)),
        tile_n=tiles.tile_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        num_programs=num_programs,
        halving_size=0 if batch_invariant else halving_size,
        least_size=0 if batch_invariant or not is_many else LEAST_SIZE,
        merge_rows=_choose_merge_rows(
            problem, device, batch_invariant=batch_invariant, is_wide=is_wide
        )
        if is_many
        else 0,
        split_size=GPU_SPLIT_SIZE if batch_invariant else 0,
        whole_size=0 if batch_invariant else WHOLE_SIZE if is_few else 2 * WHOLE_SIZE,
        short_split_size=0 if batch_invariant or is_few else WHOLE_SIZE,
        max_registers=tiles.max_registers,
        fetch_registers=tiles.fetch_registers,
        tile_heads=tiles.tile_heads,
    )


def fit_to_prefill(
    plan: GpuPlan, prefill: GpuPlan, problem: Problem, device: DeviceInfo
) -> GpuPlan:
    """Return the plan of a decode that overlaps a prefill, with a suitable number of CTAs.

    A CTA of the prefill occupies a multiprocessor. If few have tiles, decode gets the others, so
    that none of its CTAs waits. If all have several, CTAs of decode start one after the other, and
    smaller ones end at about the same time.

    Args:
        plan: The plan of the short sequences of a mixed batch.
        prefill: The plan of the others.
        problem: The call.
        device: A Hopper GPU.
    """
    rows = max(0, problem.num_tokens - problem.num_seqs) * problem.group
    tiles = -(-rows // prefill.tile_m) * problem.num_kv_heads
    num_programs = plan.num_programs
    if 2 * tiles <= device.num_workers:
        num_programs -= num_programs * tiles // device.num_workers
    elif tiles >= 4 * device.num_workers:
        num_programs *= 2
    return replace(plan, num_programs=num_programs)


def make_hopper_prefill_plan(
    problem: Problem,
    device: DeviceInfo,
    *,
    batch_invariant: bool = False,
    unpacks: bool | None = None,
) -> GpuPlan:
    """Return the tiles that ``tiles.hopper.forward`` is built with for a problem's heads.

    They depend on the head sizes, on whether it reads 8 bits and, for narrow heads and bfloat16
    scores with a cap, on ``divides_keys``. ``split_size`` is for the short sequences of a mixed
    batch: keys of others are not divided where a result must not depend on the batch.

    Args:
        problem: A call.
        device: A Hopper GPU.
        batch_invariant: Whether a sequence's result must not depend on its neighbours. Blocks are
            not unpacked then, which is chosen by all sequences' sizes.
        unpacks: Whether to unpack 8-bit blocks where there is room for that; None chooses.
    """
    sizes = problem.head_size, problem.v_head_size
    is_packed = problem.kv_dtype in PACKED_FORMATS
    is_capped = (
        problem.logits_soft_cap is not None and problem.q_dtype == torch.bfloat16 and not is_packed
    )
    short, wide = short_len(problem), tiling_of(*sizes, is_capped=is_capped)
    may_divide = not batch_invariant and divides_keys(
        wide,
        device.num_workers,
        num_seqs=problem.num_seqs,
        num_tokens=problem.num_tokens,
        max_query_len=problem.max_query_len,
        max_seq_len=problem.max_seq_len,
        num_heads=problem.num_heads,
        group=problem.group,
        short=short,
    )
    if unpacks is None:
        converting, unpacking = estimate(
            problem, device.num_workers, tile_m=_ROWS_OF_WARPGROUP * wide.warpgroups, short=short,
            divides_keys=may_divide,
        )  # fmt: skip
        unpacks = not batch_invariant and unpacking < converting
    unpacks = unpacks and is_packed and can_unpack(problem, short)
    is_packed = is_packed and not unpacks
    tiling = tiling_of(*sizes, splits=may_divide, is_packed=is_packed, is_capped=is_capped)
    return GpuPlan(
        "prefill",
        tile_m=_ROWS_OF_WARPGROUP * tiling.warpgroups,
        tile_n=tiling.tile_n,
        num_warps=4 * tiling.warpgroups,
        num_stages=tiling.stages,
        num_programs=device.num_workers,
        split_size=GPU_SPLIT_SIZE if batch_invariant else 0,
        max_registers=tiling.registers,
        divides_keys=may_divide,
        unpacks=unpacks,
    )


def _make_triton_prefill_plan(
    problem: Problem, device: DeviceInfo, batch_invariant: bool
) -> GpuPlan:
    tiles = _choose_forward_tiles(problem, device)
    split_size = GPU_SPLIT_SIZE if batch_invariant else 0  # for short sequences
    return GpuPlan("prefill", *tiles, num_programs=0, split_size=split_size)


def _choose_forward_tiles(problem: Problem, device: DeviceInfo) -> ForwardTiles:
    return choose_forward_tiles(
        problem.width,
        is_float32=_multiplies_float32(problem),
        is_8_bit=problem.kv_dtype.itemsize == 1,
        is_small=device.is_small,
    )


def make_prefix_plan(problem: Problem, device: DeviceInfo, num_rows: int) -> GpuPlan:
    """Choose the tiles of the kernel for shared prefixes.

    Two CTAs on a multiprocessor hide each other's loads where both fit.

    Args:
        problem: A call.
        device: A GPU, or a CPU that interprets.
        num_rows: At least the most rows (new tokens × group) of sequences that share a prefix.
    """
    tiles = _choose_forward_tiles(problem, device)
    most = min(tiles.tile_m, PREFIX_ROWS)
    tile_m = min(most, max(16, power_of_2(num_rows)))
    tile_n, num_stages = tiles.tile_n, tiles.num_stages
    if tile_m == PREFIX_ROWS and problem.width <= 128 and tile_n == 64:
        # There are free registers, and splits become more equal.
        tile_n, num_stages = 32, 4
    return GpuPlan(
        "prefix",
        tile_m=tile_m,
        tile_n=tile_n,
        num_warps=tiles.num_warps if most == tiles.tile_m else 4,
        num_stages=num_stages,
        num_programs=device.num_workers * (2 if problem.width <= 128 else 1),
    )


def choose_prefix_splits(problem: Problem, plan: GpuPlan, num_keys: int) -> int:
    """Return the most splits of a prefix, of which the kernel chooses a number.

    Enough to give every CTA one split if all tokens belong to one group; twice as many up to 16,
    which a merge loads at once, since other tokens may belong to no group.

    Args:
        problem: A call.
        plan: The plan of ``make_prefix_plan``.
        num_keys: At least the longest prefix.
    """
    tiles = -(-problem.num_tokens * problem.group // plan.tile_m) * problem.num_kv_heads
    fitting = plan.num_programs // max(1, tiles)
    most = max(fitting, min(2 * fitting, MERGED_AT_ONCE))
    return max(1, min(most, -(-num_keys // plan.tile_n), MOST_PREFIX_SPLITS))


def _is_bulky(problem: Problem) -> bool:
    """Return whether a decode tile of many rows leaves no room for keys or results."""
    return problem.width > (128 if _multiplies_float32(problem) else 256)


def _choose_merge_rows(
    problem: Problem, device: DeviceInfo, *, batch_invariant: bool, is_wide: bool
) -> int:
    """Return how many rows of a head a CTA merges: as few as let all CTAs run at once."""
    if batch_invariant:
        return 8
    ctas = WIDE_MERGING_CTAS if is_wide else MERGING_CTAS
    pairs, rows = max(1, problem.num_seqs * problem.num_kv_heads), 1
    while rows < problem.rows and pairs * -(-problem.rows // rows) > ctas * device.num_workers:
        rows *= 2
    return rows


def _has_wide_splits(problem: Problem, device: DeviceInfo) -> bool:
    """Return whether heads are split among CTAs and have more than 64 columns."""
    pairs = problem.num_seqs * problem.num_kv_heads
    return 64 < problem.width <= 128 and pairs <= device.num_workers


def _align(programs: int, pairs: int) -> int:
    """Return nearly as many CTAs, so that CTA ranges end where heads do if lengths are equal.

    ``pairs`` is the number of (sequence, KV head) pairs of a batch. A range that ends within a
    head costs a state that is stored and merged, and one state more than a merge loads at once
    costs as much as many.
    """
    if pairs < programs:
        splits = programs // max(1, pairs)
        loaded = MERGED_AT_ONCE // 2
        whole = splits // loaded * loaded
        fitting = (whole if whole >= 0.95 * splits else splits) * pairs
    else:
        fitting = next(n for n in range(programs, 0, -1) if pairs % n == 0)
    # With many heads per CTA few of them are cut, so using every multiprocessor matters more.
    # With unequal lengths, ranges end within heads anyway.
    return fitting if fitting >= 0.95 * programs and pairs <= 4 * programs else programs


def short_len(problem: Problem) -> int:
    """Return the most new tokens of a sequence that goes to decode in a mixed batch; 0: none does.

    A prefill tile of so few rows would be nearly empty, and one CTA would read all its keys.
    """
    is_mixed = problem.num_tokens < problem.num_seqs * problem.max_query_len
    rows = SHORT_ROWS if problem.group <= SHORT_ROWS else MERGED_ROWS
    return rows // problem.group if is_mixed else 0


def _multiplies_float32(problem: Problem) -> bool:
    """Return whether products are float32, as for two different 16-bit types."""
    q, kv = problem.q_dtype, problem.kv_dtype
    return torch.float32 in (q, kv) or (kv.itemsize == 2 and q != kv)


# --- tiles of the decode kernels ---------------------------------------------------------------


@dataclass(frozen=True)
class DecodeTiles:
    """Tiles of a decode kernel; only ``tile_heads`` depends on the number of sequences."""

    tile_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight from memory at a time."""
    programs: int
    """CTAs on a multiprocessor."""
    max_registers: int = 0
    """Register cap per thread; 0 means the compiler's default."""
    fetch_registers: int = 0
    """Register cap per thread of a loading warp."""
    tile_heads: int = 1
    """Neighbouring KV heads of a tile."""


def choose_decode_tiles(problem: Problem, device: DeviceInfo, hopper: bool) -> DecodeTiles:
    """Look up the measured tiles for a problem, or compute them.

    Args:
        problem: A call of few new tokens a sequence.
        device: The GPU.
        hopper: Whether for ``hopper_decode``.
    """
    found = _measured().get(device.name, {}).get(kind_of(problem, hopper))
    if found is not None:
        return DecodeTiles(**found)
    return _hopper_tiles(problem) if hopper else _portable_tiles(problem, device)


def kind_of(problem: Problem, hopper: bool) -> str:
    """Return the kind of problem, a key of ``decode_tiles.json``.

    Examples:
        >>> problem = Problem(64, 64, 1, 4096, 32, 8, 128, 128, 16, torch.bfloat16, torch.bfloat16)
        >>> kind_of(problem, hopper=True)
        'hopper, 16-bit keys, heads up to 128'
    """
    is_float32 = _multiplies_float32(problem)
    keys = "float32" if is_float32 else f"{8 * problem.kv_dtype.itemsize}-bit"
    scales = " with a scale for each token" if problem.scale_kind == "token" else ""
    width = next(n for n in (64, 128, 256, 512) if problem.width <= n)
    rows = "" if problem.rows <= 16 else ", more than 16 rows"
    tile_heads = _choose_tile_heads(problem) if hopper else 1
    joined = f", {tile_heads} in a tile" if tile_heads > 1 else ""
    kernel = "hopper" if hopper else "triton"
    return f"{kernel}, {keys} keys{scales}, heads up to {width}{rows}{joined}"


@functools.cache
def _measured() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(json.loads(MEASURED.read_text())) if MEASURED.exists() else {}


def _choose_tile_heads(problem: Problem) -> int:
    """Return how many neighbouring KV heads ``hopper_decode`` reads together.

    As many as fill whole lines of the L2 cache, or two of an 8-bit cache, which then share a
    softmax, if their rows fit a tile and the batch is large.
    """
    if problem.max_visible is not None:  # neighbouring heads read different keys
        return 1
    itemsize = problem.kv_dtype.itemsize
    heads = 2 if itemsize == 1 and problem.width <= 128 else 1
    most = heads if itemsize == 1 else 4 if problem.width <= NARROW else 2
    sizes = problem.head_size, problem.v_head_size
    while heads < most and any(heads * size * itemsize % LINE_BYTES for size in sizes):
        heads *= 2
    while heads > 1 and (
        problem.num_kv_heads % heads
        or heads * problem.rows > MERGED_ROWS
        or problem.num_seqs * problem.num_kv_heads < LEAST_JOINED * heads
    ):
        heads //= 2
    return heads


def _joined_tiles(problem: Problem, heads: int) -> DecodeTiles:
    if problem.kv_dtype.itemsize == 1:
        return DecodeTiles(64, 4, 2, 2, 128, 72, heads)
    if problem.width <= 64:
        return DecodeTiles(128 // heads, 4, 3, 2, 128, 80, heads)
    if heads == 4:
        return DecodeTiles(32, 4, 3, 1, 168, 88, heads)
    is_wide = problem.width > 128
    row_bytes = (problem.head_size + problem.v_head_size) * problem.kv_dtype.itemsize
    stage_bytes = (1 if is_wide else 2) * 32 * heads * row_bytes
    num_stages = 2 if 2 * stage_bytes >= IN_FLIGHT else 3
    if is_wide:
        return DecodeTiles(32, 4, num_stages, 1, 168, 88, heads)
    return DecodeTiles(32, 4, num_stages, 2, 128, 80, heads)


def _hopper_tiles(problem: Problem) -> DecodeTiles:
    heads = _choose_tile_heads(problem)
    if heads > 1:
        return _joined_tiles(problem, heads)
    is_wide = problem.width > 128
    if problem.rows > MERGED_ROWS:
        return DecodeTiles(64, 4, 3, 2, 128, 80)
    if problem.kv_dtype.itemsize == 1:
        return DecodeTiles(64, 4, 3, 1, 168, 88) if is_wide else DecodeTiles(64, 4, 3, 2, 128, 72)
    if problem.width <= 64:
        return DecodeTiles(64, 4, 3, 2, 128, 80)
    if is_wide:
        return DecodeTiles(32, 4, 3, 1, 168, 88)
    # With more rows the computing warps need more registers.
    return DecodeTiles(64, 4, 2, 2, 128, 80 if problem.rows <= 8 else 72)


def _portable_tiles(problem: Problem, device: DeviceInfo) -> DecodeTiles:
    """Return tiles whose rows, results and keys stay in registers."""
    width, has_many_rows = problem.width, problem.rows > 16
    is_8_bit = problem.kv_dtype.itemsize == 1
    if _multiplies_float32(problem):
        if width > 256 or (width > 128 and device.is_small):
            return DecodeTiles(16, 8, 1, 1)
        num_stages = 3 if width <= 64 else 1 if has_many_rows and device.is_small else 2
        return DecodeTiles(32, 4, num_stages, 2)
    if width <= 128:
        # More warps where one would not hold its part of the rows or of the scales.
        num_stages = 2 if has_many_rows and is_8_bit else 3
        return DecodeTiles(64, 8 if has_many_rows or is_8_bit else 4, num_stages, 2)
    if width > 256:
        return DecodeTiles(32, 8, 2, 1) if has_many_rows or is_8_bit else DecodeTiles(32, 4, 2, 2)
    return (
        DecodeTiles(32, 8, 2, 1) if has_many_rows else DecodeTiles(64, 8 if is_8_bit else 4, 2, 2)
    )
