"""Window attention on Hopper for windows of one tile, up to 64 tokens; forward and backward.

::

    S = q kᵀ + B / scale + M      P = 2 ** (scale · log2 e · S - pivot)      dP = dO vᵀ
    dS = P ∘ (dP - δ)     δ = (Σ P ∘ dP) / Σ P - dlse
    dQ = scale · dS k     dK = scale · dSᵀ q     dV = Pᵀ dO     dB = Σ over windows of dS

A program has four warps, and several programs share a multiprocessor to hide each other's latency.
It owns one head and takes every ``num_chunks``-th window. TMA loads the next windows into other
slots of shared memory while one is computed::

    slot 0    window c               window c + 3 n     ...        program of chunk c of n
    slot 1           window c + n               window c + 4 n
    slot 2                  window c + 2 n

The bias tile stays in shared memory in the accumulator's layout, and the bias gradient in
registers. Masks are bits, 64 a query: which keys share its region (``pack_regions``). With regions,
the kernel starts under PDL while ``pack_regions`` runs: it builds its bias tile and loads its first
windows before it waits for the bits.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ....device import DeviceInfo
from ....tiles.hopper.gluon_launcher import GluonLauncher, align
from ....tiles.hopper.layouts import product_layout
from ....tiles.hopper.names import barrier
from ....tiles.hopper.record import record
from ....tiles.state import AttentionOutput
from ....tiles.triton.launch import Launcher
from ....tiles.triton.online_softmax import LN_2, LOG2_E
from ..problem import Gradients, Operands, Problem, empty_like
from ..triton import finish
from ..triton.launchers import POINTER_TYPES
from . import constants, launch
from .auxiliary import pack_regions
from .launch import BiasGradient, KernelArguments, element_types, make_sums_launcher
from .plan import OneTilePlan, make_one_tile_plan
from .tiles import (
    CHUNK,
    FLAT,
    NO_BIAS,
    PIECE,
    Bias,
    build_bias_tile,
    rows_of,
    start_scores,
    store_bias_sums,
)

ROWS = PIECE
REGION_WORDS = gl.constexpr(constants.REGION_WORDS)
SCORES = gl.constexpr(product_layout(constants.PIECE))
ROW = gl.constexpr(gl.SliceLayout(1, SCORES))
SQUARE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@record
class OneTileConfig:
    """Compile-time constants of the kernels."""

    NUM_HEADS: gl.constexpr
    NUM_TOKENS: gl.constexpr
    WIDTH: gl.constexpr
    BIAS: gl.constexpr
    STAGES: gl.constexpr
    WARPS: gl.constexpr
    STREAMS: gl.constexpr
    ROWS: gl.constexpr


@gluon.jit
def _load_windows(descs, tiles, ready, slot, window, num_windows, head, config):
    """Start the TMA copies of a window, if it exists."""
    BYTES: gl.constexpr = len(descs) * ROWS * config.WIDTH * 2
    is_there = window < num_windows
    mbarrier.expect(ready.index(slot), BYTES, pred=is_there)
    for i in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(
            descs[i], [window, head, 0, 0], ready.index(slot), tiles[i].index(slot), pred=is_there
        )


@gluon.jit
def _make_barriers(config):
    """A barrier for each slot."""
    ready = gl.allocate_shared_memory(gl.int64, [config.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(config.STAGES):
        mbarrier.init(ready.index(i), 1)
    fence_async_shared()
    barrier()
    return ready


@gluon.jit
def _build_bias(numbers, offsets, head, centre, entry_stride, head_stride, inverse, config):
    """Build the bias tile, divided by the scale, with -inf past the last key."""
    memory = gl.allocate_shared_memory(gl.float16, [ROWS // CHUNK, ROWS * CHUNK], FLAT)
    bias = Bias(numbers, offsets, centre, entry_stride, head_stride, inverse)
    build_bias_tile(memory, bias, head, 0, 0, 0, False, config)
    barrier()
    return memory


@gluon.jit
def _load_region_bits(region_bits, window, num_windows, num_masks, row, MASK: gl.constexpr):
    """Load whether a window has several regions, and two words of bits for each query."""
    found = ()
    if MASK:
        at = region_bits + (window % num_masks).to(gl.int64) * REGION_WORDS
        found = (gl.load(at + 2 * ROWS, window < num_windows, 0),)  # type: ignore[assignment]
        for half in gl.static_range(2):
            found = found + (gl.load(at + row * 2 + half, window < num_windows, 0),)  # type: ignore[assignment] # noqa: RUF005
    return found


@gluon.jit
def _apply_mask(s, region_bits, mask_value):
    """Add ``mask_value`` between regions."""
    if len(region_bits) > 0:  # noqa: SIM102
        if region_bits[0] != 0:
            halves = s.reshape([ROWS, 2, 4, 4, 2]).permute((0, 2, 3, 4, 1)).split()
            low = _mask_half(halves[0], region_bits[1], mask_value)
            high = _mask_half(halves[1], region_bits[2], mask_value)
            s = gl.join(low, high).permute((0, 4, 1, 2, 3)).reshape([ROWS, ROWS])
            s = gl.convert_layout(s, SCORES, assert_trivial=True)
    return s


@gluon.jit
def _mask_half(s, word, mask_value):
    """Mask 32 keys of every row. Shifted once, a thread's word has its bits at constant places."""
    L: gl.constexpr = s.type.layout
    EIGHT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L)))
    ONE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    W: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    lane = gl.arange(0, 4, LANE)[None, None, :, None]
    bit = 1 << (
        8 * gl.arange(0, 4, EIGHT)[None, :, None, None] + gl.arange(0, 2, ONE)[None, None, None, :]
    )
    word = gl.convert_layout(word, W, assert_trivial=True)[:, None, None, None] >> (2 * lane)
    return gl.where((word & bit) != 0, s, s + mask_value)


@gluon.jit
def attend_windows(
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS]
    out_desc,  # like q_desc
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    k_desc,
    v_desc,
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    region_bits,  # int32 [num_masks, REGION_WORDS], see ``pack_regions``
    num_windows,
    num_chunks,
    num_masks,
    centre,
    entry_stride,  # of a table's entries
    head_stride,  # of a table or bias
    scale,  # softmax_scale · log2(e)
    inverse,  # 1 / softmax_scale
    mask_value,  # divided by softmax_scale
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Forward. Grid: heads × chunks; heads of a window are neighbours."""
    config = OneTileConfig(NUM_HEADS, NUM_TOKENS, WIDTH, BIAS, STAGES, 4, 1, ROWS)
    O_LAYOUT: gl.constexpr = product_layout(WIDTH, 4)
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], v_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, WIDTH], out_desc.layout)
    descs = (q_desc, k_desc, v_desc)
    tiles = (q_tiles, k_tiles, v_tiles)
    ready = _make_barriers(config)
    head = gl.program_id(0) % NUM_HEADS
    chunk = gl.program_id(0) // NUM_HEADS
    for i in gl.static_range(STAGES):
        _load_windows(descs, tiles, ready, i, chunk + i * num_chunks, num_windows, head, config)
    added = _build_bias(bias, offsets, head, centre, entry_stride, head_stride, inverse, config)
    row = gl.arange(0, ROWS, ROW)
    if MASK:
        gdc_wait()  # for ``pack_regions``
    next_bits = _load_region_bits(region_bits, chunk, num_windows, num_masks, row, MASK)
    slot = 0
    phase = 0
    parity = 0
    for window in range(chunk, num_windows, num_chunks):
        now = next_bits
        next_bits = _load_region_bits(
            region_bits, window + num_chunks, num_windows, num_masks, row, MASK
        )
        mbarrier.wait(ready.index(slot), phase)
        q = rows_of(q_tiles.index(slot), 0, ROWS)
        k = rows_of(k_tiles.index(slot), 0, ROWS)
        v = rows_of(v_tiles.index(slot), 0, ROWS)
        s = start_scores(added, 0, q, k, gl.float32, config)
        s = _apply_mask(warpgroup_mma_wait(0, deps=(s,)), now, mask_value)
        m = gl.max(s, 1)
        m = gl.where(m == float("-inf"), 0.0, m * scale)
        p = gl.exp2(gl.fma(s, scale, -m[:, None]))
        total = gl.sum(p, 1)
        p_v = gl.convert_layout(
            p.to(dtype), gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True
        )
        acc = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        acc = warpgroup_mma(p_v, v, acc, use_acc=False, is_async=True)
        divisor = gl.where(total != 0, total, 1.0)
        row_lse = gl.where(total != 0, (m + gl.log2(divisor)) * LN_2, float("-inf"))
        inverse_sum = gl.convert_layout(
            1 / divisor, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True
        )
        acc = warpgroup_mma_wait(0, deps=(acc, p_v))[0]
        rows_of(out_tiles.index(parity), 0, ROWS).store((acc * inverse_sum[:, None]).to(dtype))
        fence_async_shared()
        tma.store_wait(0)  # the previous window's: the next one reuses its buffer
        barrier()
        tma.async_copy_shared_to_global(out_desc, [window, head, 0, 0], out_tiles.index(parity))
        _load_windows(
            descs, tiles, ready, slot, window + STAGES * num_chunks, num_windows, head, config
        )
        parity ^= 1
        gl.store(lse + _row_addresses(window, head, row, config), row_lse, row < NUM_TOKENS)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    tma.store_wait(0)


@gluon.jit
def window_gradients(
    dbias,  # float32, see ``auxiliary``
    lse,  # float32 [num_windows, NUM_HEADS, NUM_TOKENS], like dlse
    dlse,
    dq_desc,  # like q_desc
    dk_desc,
    dv_desc,
    q_desc,  # [num_windows, NUM_HEADS, NUM_TOKENS, HEAD_SIZE] in boxes of [1, 1, 64, WIDTH]
    k_desc,
    v_desc,
    dout_desc,
    bias,  # [table_size, NUM_HEADS] or [NUM_HEADS, NUM_TOKENS, NUM_TOKENS]
    offsets,  # int32 [NUM_TOKENS]
    region_bits,  # int32 [num_masks, REGION_WORDS], see ``pack_regions``
    num_windows,
    num_chunks,
    num_masks,
    centre,
    entry_stride,  # of a table's entries
    head_stride,  # of a table or bias
    scale,  # softmax_scale · log2(e)
    inverse,  # 1 / softmax_scale
    mask_value,  # divided by softmax_scale
    dq_scale,
    dk_scale,
    NUM_HEADS: gl.constexpr,
    NUM_TOKENS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BIAS: gl.constexpr,
    MASK: gl.constexpr,
    HAS_DLSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """All gradients. Grid: heads × chunks; heads of a window are neighbours."""
    config = OneTileConfig(NUM_HEADS, NUM_TOKENS, WIDTH, BIAS, STAGES, 4, 1, ROWS)
    O_LAYOUT: gl.constexpr = product_layout(WIDTH, 4)
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], v_desc.layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, WIDTH], dout_desc.layout)
    squares = gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], SQUARE)
    if 3 * WIDTH <= 2 * ROWS:  # results reuse the memory of weights and their gradients
        COPIES: gl.constexpr = 2 * ROWS // WIDTH
        results = squares._reinterpret(dtype, [COPIES, 1, 1, ROWS, WIDTH], dq_desc.layout)
    else:
        results = gl.allocate_shared_memory(dtype, [3, 1, 1, ROWS, WIDTH], dq_desc.layout)
    descs = (q_desc, k_desc, v_desc, dout_desc)
    tiles = (q_tiles, k_tiles, v_tiles, dout_tiles)
    ready = _make_barriers(config)
    head = gl.program_id(0) % NUM_HEADS
    chunk = gl.program_id(0) // NUM_HEADS
    for i in gl.static_range(STAGES):
        _load_windows(descs, tiles, ready, i, chunk + i * num_chunks, num_windows, head, config)
    added = _build_bias(bias, offsets, head, centre, entry_stride, head_stride, inverse, config)
    row = gl.arange(0, ROWS, ROW)
    if MASK:
        gdc_wait()  # for ``pack_regions``
    next_bits = _load_region_bits(region_bits, chunk, num_windows, num_masks, row, MASK)
    next_pivot = _load_row(lse, chunk, num_windows, head, row, config)
    next_dlse = _load_row(dlse, chunk, num_windows, head, row, config) if HAS_DLSE else 0.0
    sums = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    slot = 0
    phase = 0
    for window in range(chunk, num_windows, num_chunks):
        now = next_bits
        pivot = gl.where(next_pivot == float("-inf"), 0.0, next_pivot * LOG2_E)
        row_dlse = next_dlse
        after = window + num_chunks
        next_bits = _load_region_bits(region_bits, after, num_windows, num_masks, row, MASK)
        next_pivot = _load_row(lse, after, num_windows, head, row, config)
        if HAS_DLSE:
            next_dlse = _load_row(dlse, after, num_windows, head, row, config)
        mbarrier.wait(ready.index(slot), phase)
        q = rows_of(q_tiles.index(slot), 0, ROWS)
        k = rows_of(k_tiles.index(slot), 0, ROWS)
        v = rows_of(v_tiles.index(slot), 0, ROWS)
        dout = rows_of(dout_tiles.index(slot), 0, ROWS)
        s = start_scores(added, 0, q, k, gl.float32, config)
        zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
        dp = warpgroup_mma(dout, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        s = _apply_mask(s, now, mask_value)
        p = gl.exp2(gl.fma(s, scale, -pivot[:, None]))
        total = gl.sum(p, 1)
        # δ from the weights, not from the rounded output, so that a row of dS sums to 0.
        delta = gl.sum(p * dp, 1) / gl.where(total > 0, total, 1.0)
        if HAS_DLSE:
            delta -= row_dlse
        ds = p * (dp - delta[:, None])
        if BIAS != NO_BIAS:
            sums += ds
        tma.store_wait(0)  # the previous window's
        barrier()
        ds_k = ds.to(dtype)
        squares.index(0).store(p.to(dtype))
        squares.index(1).store(ds_k)
        fence_async_shared()
        barrier()
        p_t, ds_t = squares.index(0).permute((1, 0)), squares.index(1).permute((1, 0))
        ds_k = gl.convert_layout(ds_k, gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)
        nothing = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        dv = warpgroup_mma(p_t, dout, nothing, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds_k, k, nothing, use_acc=False, is_async=True)
        dk = warpgroup_mma(ds_t, q, nothing, use_acc=False, is_async=True)
        dv, dq, dk, ds_k = warpgroup_mma_wait(0, deps=(dv, dq, dk, ds_k))
        barrier()
        _load_windows(
            descs, tiles, ready, slot, window + STAGES * num_chunks, num_windows, head, config
        )
        rows_of(results.index(0), 0, ROWS).store((dq * dq_scale).to(dtype))
        rows_of(results.index(1), 0, ROWS).store((dk * dk_scale).to(dtype))
        rows_of(results.index(2), 0, ROWS).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        here = [window, head, 0, 0]
        tma.async_copy_shared_to_global(dq_desc, here, results.index(0))
        tma.async_copy_shared_to_global(dk_desc, here, results.index(1))
        tma.async_copy_shared_to_global(dv_desc, here, results.index(2))
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
    tma.store_wait(0)
    if BIAS != NO_BIAS:
        partials = sums.reshape([ROWS, 2, 32]).permute((0, 2, 1)).split()
        for i in gl.static_range(2):
            quarters = partials[i].reshape([ROWS, 2, 16]).permute((0, 2, 1)).split()
            for j in gl.static_range(2):
                store_bias_sums(dbias, quarters[j], chunk, head, 0, 2 * i + j, config)


@gluon.jit
def _load_row(numbers, window, num_windows, head, row, config):
    """Load a value for each row of a window; 0 past the end."""
    is_there = (row < config.NUM_TOKENS) & (window < num_windows)
    return gl.load(numbers + _row_addresses(window, head, row, config), is_there, 0.0)


@gluon.jit
def _row_addresses(window, head, row, config):
    """Offsets of a window's rows in ``lse`` and ``dlse``."""
    return (window.to(gl.int64) * config.NUM_HEADS + head) * config.NUM_TOKENS + row


# --- launches -------------------------------------------------------------------------------------


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """Launch one kernel; with regions, ``pack_regions`` runs before it."""
    plan, launcher = _plan_forward(problem, DeviceInfo.of(x.q.device), element_types(x)[0])
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    arguments = _OneTileArguments(problem, x)
    common = arguments.common(plan.chunks, arguments.factor)
    grid = (problem.num_heads * plan.chunks, 1, 1)
    launcher(grid, lse, out, arguments.q, arguments.k, arguments.v, *common)
    return AttentionOutput(out, lse)


def backward(
    problem: Problem, x: Operands, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Launch one kernel for all gradients, and one that sums the bias gradient over windows."""
    bias_type = element_types(x)[0]
    device = DeviceInfo.of(x.q.device)
    plan, launcher = _plan_gradients(problem, device, bias_type, dlse is not None)
    dq, dk, dv = (empty_like(x.q) for _ in range(3))
    bias = BiasGradient.of(problem, plan.chunks, lse)
    dout, dlse = align(dout), lse if dlse is None else dlse.contiguous()
    arguments = _OneTileArguments(problem, x)
    common = arguments.common(plan.chunks, arguments.factor)
    launcher((problem.num_heads * plan.chunks, 1, 1), bias.sums, lse, dlse, dq, dk, dv,
             arguments.q, arguments.k, arguments.v, dout, *common, x.softmax_scale,
             arguments.scale)  # fmt: skip
    if problem.has_bias:
        sizes = problem.num_heads, problem.num_tokens, plan.chunks
        bias.sum_windows(make_sums_launcher(*sizes, uses_pdl=False), arguments.offsets)
    return finish(x, dq, dk, dv, bias.dbias, tokens=bias.tokens)


class _OneTileArguments(KernelArguments):
    """Arguments of the one-tile kernels, with regions as bits."""

    def __init__(self, problem: Problem, x: Operands) -> None:
        super().__init__(problem, x)
        self.factor = self.scale * launch.LOG2_E
        self.masks = [self.q]  # not read
        if x.regions is not None:
            regions = x.regions.contiguous()
            bits = regions.new_empty(len(regions), constants.REGION_WORDS, dtype=torch.int32)
            packer = make_region_packer(POINTER_TYPES[regions.dtype], problem.num_tokens)
            packer((len(regions), 1, 1), bits, regions)  # the last launch before the kernel's
            self.masks = [bits]


@functools.lru_cache(maxsize=1024)
def _plan_forward(
    problem: Problem, device: DeviceInfo, bias: str
) -> tuple[OneTilePlan, GluonLauncher]:
    """The plan of the forward kernel, and its launcher."""
    plan = make_one_tile_plan(problem, device, is_backward=False)
    return plan, make_launcher(problem.of_one_window(), replace(plan, chunks=1), bias)


@functools.lru_cache(maxsize=1024)
def _plan_gradients(
    problem: Problem, device: DeviceInfo, bias: str, has_dlse: bool
) -> tuple[OneTilePlan, GluonLauncher]:
    """The plan of the gradient kernel, and its launcher."""
    plan = make_one_tile_plan(problem, device, is_backward=True)
    key = problem.of_one_window()
    return plan, make_gradients_launcher(key, replace(plan, chunks=1), bias, has_dlse)


@functools.lru_cache(maxsize=256)
def make_region_packer(regions: str, num_tokens: int) -> Launcher:
    """The launcher of ``pack_regions`` for one pointer type of regions."""
    types = {"region_bits": "*i32", "regions": regions}
    return Launcher(pack_regions, types, {"NUM_TOKENS": num_tokens}, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_launcher(problem: Problem, plan: OneTilePlan, bias: str) -> GluonLauncher:
    """The launcher of the forward kernel for a problem and the pointer type of its bias."""
    tokens = launch.token_descriptor(problem, constants.PIECE)
    types = {"lse": "*fp32"} | dict.fromkeys(("out_desc", "q_desc", "k_desc", "v_desc"), tokens)
    return _make(attend_windows, problem, plan, types | _common_types(bias), {})


@functools.lru_cache(maxsize=256)
def make_gradients_launcher(
    problem: Problem, plan: OneTilePlan, bias: str, has_dlse: bool
) -> GluonLauncher:
    """The launcher of the gradient kernel."""
    tokens = launch.token_descriptor(problem, constants.PIECE)
    types = {"dbias": "*fp32:16", "lse": "*fp32", "dlse": "*fp32"}
    types |= dict.fromkeys(("dq_desc", "dk_desc", "dv_desc"), tokens)
    types |= dict.fromkeys(("q_desc", "k_desc", "v_desc", "dout_desc"), tokens)
    types |= _common_types(bias) | {"dq_scale": "fp32", "dk_scale": "fp32"}
    return _make(window_gradients, problem, plan, types, {"HAS_DLSE": has_dlse})


def _make(
    kernel: Any, problem: Problem, plan: OneTilePlan, types: dict[str, str], extra: dict[str, Any]
) -> GluonLauncher:
    compile_time = launch.constants_of(problem) | extra | {"STAGES": plan.stages}
    return GluonLauncher(
        kernel, types, compile_time, num_warps=4, maxnreg=plan.registers,
        launch_pdl=problem.has_regions,
    )  # fmt: skip


def _common_types(bias: str) -> dict[str, str]:
    return launch.common_types(bias, {"region_bits": "*i32"})
