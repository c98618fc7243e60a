"""Launchers of the window kernels on Hopper, and their arguments.

Kernels of one call overlap through programmatic dependent launch (PDL): a kernel builds its bias
tile, or takes the multiprocessors that its predecessor frees first, and waits only where it reads
what an earlier kernel wrote::

    encode regions ─▶ forward              the loading warp waits for the one-hot columns
    encode regions ─▶ deltas ─▶ rows       deltas read no regions, but end after them;
                                           rows wait for deltas, then let columns start
    rows ─▶ columns ─▶ sums                columns read nothing of rows, but end after them;
                                           they let sums start, which read rows' results only

Everything else that they read, and all that they write, has to exist before the first launch:
memory allocated later may belong to a kernel that still runs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ....device import DeviceInfo
from ....shapes import power_of_2
from ....tiles.hopper.gluon_launcher import GluonLauncher, align, is_described
from ....tiles.triton.launch import Launcher
from ..problem import Operands, Problem
from ..triton import count_tokens
from ..triton.launchers import POINTER_TYPES
from .auxiliary import encode_regions, make_deltas, pad_rows, sum_tiles
from .columns import column_gradients
from .constants import DENSE, NO_BIAS, ONE_HOT_COLUMNS, PIECE, SUM_KEYS, SUM_OFFSETS, TABLE
from .forward_kernel import attend
from .plan import Plan, RowsPlan, make_columns_plan, make_plan, make_rows_plan, padded_head_size
from .rows import row_gradients

LOG2_E = 1 / math.log(2)
_LEAST_SCALE = 1 / 16
_DELTA_ELEMENTS, _SUM_ELEMENTS, _PADDED_ELEMENTS = 4096, 4096, 4096  # of a program's tile


# --- arguments ------------------------------------------------------------------------------------


class KernelArguments:
    """Arguments that the kernels on Hopper share: aligned tokens, and a bias over the scale."""

    masks: list[Tensor]
    """Encoded regions; the subclass launches their kernel last (module docstring)."""

    def __init__(self, problem: Problem, x: Operands, transposes_table: bool = False) -> None:
        self.problem, self.x = problem, x
        q, self.scale = normalise_scale(x.q, x.softmax_scale)
        self.q, self.k, self.v = (align_tokens(tokens) for tokens in (q, x.k, x.v))
        unused = self.q
        self.offsets = unused if x.rel_offsets is None else x.rel_offsets.contiguous()
        self.bias = unused if x.bias is None else x.bias.contiguous()
        self.strides = [0, problem.num_tokens**2]  # of a table's entries, and of heads
        if x.bias_table is not None:
            # A gather touches fewer cache lines where a head's entries are contiguous; in the
            # forward pass few programs gather, and a transposing launch would cost more.
            table = x.bias_table.t().contiguous().t() if transposes_table else x.bias_table
            self.bias, self.strides = table, [*table.stride()]

    def common(self, chunks: int, factor: float) -> list[Any]:
        """The arguments after the tokens; the kernels multiply scores by ``factor``."""
        problem, table_size = self.problem, self.problem.table_size
        return [
            self.bias,
            self.offsets,
            *self.masks,
            problem.num_windows,
            chunks,
            max(1, problem.num_masks),
            0 if table_size is None else (table_size - 1) // 2,
            *self.strides,
            factor,
            1 / self.scale,
            self.x.mask_value / self.scale,
        ]


class BiasGradient(NamedTuple):
    """The gradient of a bias and its partial sums; empty without a bias."""

    dbias: Tensor
    """float32 ``[1, num_heads, num_tokens, num_tokens]``."""
    tokens: Tensor
    """int32: the inverse of a table's offsets (``invert_offsets``); empty without a table."""
    sums: Tensor
    """float32 ``[chunks, elements]``: the sums of each chunk's programs (``sum_tiles``)."""

    @classmethod
    def of(cls, problem: Problem, chunks: int, lse: Tensor) -> BiasGradient:
        """Allocate it, uninitialised, on the device of ``lse``."""
        num_heads, num_tokens = problem.num_heads * problem.has_bias, problem.num_tokens
        tiles = -(-num_tokens // PIECE) * -(-num_tokens // SUM_KEYS)
        return cls(
            lse.new_empty((1, num_heads, num_tokens, num_tokens)),
            lse.new_empty(count_tokens(problem.table_size), dtype=torch.int32),
            lse.new_empty((chunks, num_heads * tiles * PIECE * SUM_KEYS)),
        )

    def sum_windows(self, launcher: Launcher, offsets: Tensor) -> None:
        """Fill ``dbias`` and, for a table, ``tokens``."""
        chunks, size = self.sums.shape
        num_tokens = len(self.tokens)
        programs = size // launcher.constants["TILE"] + -(-num_tokens // SUM_OFFSETS)
        launcher((programs, 1, 1), self.dbias, self.tokens, self.sums, offsets, chunks,
                 num_tokens - 1)  # fmt: skip


def align_tokens(x: Tensor) -> Tensor:
    """Return tokens ``[num_windows, num_heads, num_tokens, head_size]`` that TMA can read.

    TMA fills columns past a row's end with zeros, so a head size that is not a multiple of 8 only
    needs a padded row stride.
    """
    *sizes, head_size = x.shape
    if is_described(x) or head_size % 8 == 0:
        return align(x)
    padder = make_padder(x.dtype, *sizes[1:], head_size)
    padded = x.new_empty(*sizes, padder.constants["PITCH"])
    num_rows = math.prod(sizes)
    programs = -(-num_rows // padder.constants["TILE"])
    padder((programs, 1, 1), padded, x, *x.stride()[:3], num_rows)
    return padded[..., :head_size]


def element_types(x: Operands) -> tuple[str, str]:
    """Pointer types of bias and regions, as Triton names them."""
    bias = x.bias_table if x.bias is None else x.bias
    return (
        "*fp32" if bias is None else POINTER_TYPES[bias.dtype],
        "*i32" if x.regions is None else POINTER_TYPES[x.regions.dtype],
    )


def normalise_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a scale of at least 1/16 with the same scores: bias and mask are divided by it.

    q is multiplied by a power of two, which is exact except for float16's subnormals.

    Examples:
        >>> normalise_scale(torch.tensor([3.0]), -1.5)
        (tensor([-3.]), 1.5)
        >>> normalise_scale(torch.tensor([3.0]), 1 / 64)
        (tensor([0.7500]), 0.0625)
        >>> normalise_scale(torch.tensor([3.0]), 0.0)
        (tensor([0.]), 0.6931471805599453)
    """
    if not scale < _LEAST_SCALE:
        return q, scale
    if scale == 0:
        return torch.zeros_like(q), 1 / LOG2_E  # any scale would do; this one makes the factor 1
    size = min(1.0, 2.0 ** math.floor(math.log2(abs(scale) / _LEAST_SCALE)))
    factor = math.copysign(size, scale)
    return q * factor, scale / factor


# --- plans with their launchers ---------------------------------------------------------------


class GradientKernels(NamedTuple):
    """The plans of the gradients, and the launchers of their kernels."""

    rows_plan: RowsPlan
    columns_plan: Plan
    delta_kernel: Launcher
    row_kernel: GluonLauncher
    column_kernel: GluonLauncher
    sum_kernel: Launcher


@functools.lru_cache(maxsize=1024)
def plan_forward(
    problem: Problem, device: DeviceInfo, types: tuple[str, str]
) -> tuple[Plan, GluonLauncher]:
    """The plan of a supported problem, and its launcher; ``types``: see ``element_types``."""
    plan = make_plan(problem, device)
    assert plan is not None
    return plan, make_launcher(problem.of_one_window(), replace(plan, chunks=1), *types)


@functools.lru_cache(maxsize=1024)
def plan_gradients(
    problem: Problem, device: DeviceInfo, types: tuple[str, str], has_dlse: bool
) -> GradientKernels | None:
    """The plans of the gradients, and their launchers; None if one of them does not fit."""
    rows, columns = make_rows_plan(problem, device), make_columns_plan(problem, device)
    if rows is None or columns is None:
        return None
    key = problem.of_one_window()
    uses_pdl = rows.launches == 1
    return GradientKernels(
        rows,
        columns,
        make_deltas_launcher(key, has_dlse),
        make_rows_launcher(key, replace(rows, chunks=1), *types),
        make_columns_launcher(key, replace(columns, chunks=1), *types, uses_pdl),
        make_sums_launcher(problem.num_heads, problem.num_tokens, rows.chunks, uses_pdl=True),
    )


# --- launchers --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def make_region_encoder(regions: str, num_tokens: int) -> Launcher:
    """The launcher of ``encode_regions`` for one pointer type of regions."""
    types = {"mask_classes": "*i32", "one_hot": "*fp16:16", "regions": regions}
    types |= {"factor": "fp32", "limit": "i32"}
    constants = {"NUM_TOKENS": num_tokens, "TILE": power_of_2(num_tokens)}
    return Launcher(encode_regions, types, constants, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_padder(dtype: torch.dtype, num_heads: int, num_tokens: int, head_size: int) -> Launcher:
    """The launcher of ``pad_rows``."""
    pointer, width = POINTER_TYPES[dtype], padded_head_size(head_size)
    types = {"padded": f"{pointer}:16", "x": pointer}
    types |= dict.fromkeys(("x_window", "x_head", "x_token", "num_rows"), "i64")
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_TOKENS": num_tokens,
        "HEAD_SIZE": head_size,
        "PITCH": -(-head_size // 8) * 8,
        "TILE": _PADDED_ELEMENTS // width,
        "D": width,
    }
    return Launcher(pad_rows, types, constants, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_deltas_launcher(problem: Problem, has_dlse: bool) -> Launcher:
    """The launcher of ``make_deltas``; rows of ``dout`` are read 16 bytes at a time."""
    pointer, width = POINTER_TYPES[problem.dtype], padded_head_size(problem.head_size)
    types = {"pivot": "*fp32:16", "delta": "*fp32:16"}
    types |= {"out": f"{pointer}:16", "dout": f"{pointer}:16", "lse": "*fp32", "dlse": "*fp32"}
    types |= dict.fromkeys(("dout_window", "dout_head", "dout_token"), "i64:8")
    types["pivot_scale"] = "fp32"
    constants = {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "PADDED": -(-problem.num_tokens // PIECE) * PIECE,
        "HEAD_SIZE": problem.head_size,
        "HAS_DLSE": has_dlse,
        "TILE": _DELTA_ELEMENTS // width,
        "D": width,
    }
    return Launcher(make_deltas, types, constants, num_warps=4, launch_pdl=problem.has_regions)


@functools.lru_cache(maxsize=256)
def make_launcher(problem: Problem, plan: Plan, bias: str, regions: str) -> GluonLauncher:
    """The launcher of the forward kernel for a problem and pointer types of bias and regions."""
    element = POINTER_TYPES[problem.dtype][1:]
    rows, piece = token_descriptor(problem, plan.rows), token_descriptor(problem, plan.piece)
    types = {"out": f"*{element}:16", "lse": "*fp32"}
    types |= {"q_desc": rows, "k_desc": piece, "v_desc": piece}
    types |= {"row_one_hot_desc": _one_hot_descriptor(plan.rows)}
    types |= {"one_hot_desc": _one_hot_descriptor(plan.piece)}
    types |= _mask_and_bias_types(bias, regions)
    constants = constants_of(problem) | {"KEYS": plan.piece} | _stream_constants(plan)
    return GluonLauncher(
        attend, types, constants, num_warps=plan.warps, launch_pdl=problem.has_regions
    )


@functools.lru_cache(maxsize=256)
def make_columns_launcher(
    problem: Problem, plan: Plan, bias: str, regions: str, uses_pdl: bool
) -> GluonLauncher:
    """The launcher of dK and dV; ``uses_pdl`` after a row kernel of a single launch."""
    element = POINTER_TYPES[problem.dtype][1:]
    rows, piece = token_descriptor(problem, plan.rows), token_descriptor(problem, PIECE)
    types = {"dk": f"*{element}:16", "dv": f"*{element}:16", "k_desc": rows, "v_desc": rows}
    types |= {"row_one_hot_desc": _one_hot_descriptor(plan.rows)}
    types |= {"q_desc": piece, "dout_desc": piece, "one_hot_desc": _one_hot_descriptor(PIECE)}
    types |= {"pivot_desc": _row_descriptor(), "delta_desc": _row_descriptor()}
    types |= _mask_and_bias_types(bias, regions) | {"dk_scale": "fp32"}
    constants = constants_of(problem) | _stream_constants(plan)
    return GluonLauncher(
        column_gradients, types, constants, num_warps=plan.warps, launch_pdl=uses_pdl
    )


@functools.lru_cache(maxsize=256)
def make_rows_launcher(problem: Problem, plan: RowsPlan, bias: str, regions: str) -> GluonLauncher:
    """The launcher of dQ and of the bias gradient's sums."""
    element = POINTER_TYPES[problem.dtype][1:]
    rows, keys = token_descriptor(problem, PIECE), token_descriptor(problem, plan.box)
    types = {"dq": f"*{element}:16", "dq_partial": "*fp32:16", "dbias": "*fp32:16"}
    types |= {"q_desc": rows, "dout_desc": rows, "row_one_hot_desc": _one_hot_descriptor(PIECE)}
    types |= {"pivot_desc": _row_descriptor(), "delta_desc": _row_descriptor()}
    types |= {"k_desc": keys, "v_desc": keys, "one_hot_desc": _one_hot_descriptor(plan.box)}
    types |= _mask_and_bias_types(bias, regions) | {"dq_scale": "fp32", "first_key": "i32"}
    constants = constants_of(problem) | {
        "SPLITS": plan.splits,
        "KEYS": plan.keys,
        "BOX": plan.box,
        "STAGES": plan.stages,
        "BUFFERS": plan.buffers,
        "REGISTERS": plan.registers,
        "LOADING": plan.loading_registers,
    }
    uses_pdl = plan.splits * plan.keys >= problem.num_tokens
    return GluonLauncher(row_gradients, types, constants, num_warps=4, launch_pdl=uses_pdl)


def make_sums_launcher(
    num_heads: int, num_tokens: int, num_chunks: int, uses_pdl: bool
) -> Launcher:
    """The launcher of ``sum_tiles``.

    ``uses_pdl``: the kernel before it triggers its launch, and writes nothing that it reads.
    """
    return _make_sums(num_heads, num_tokens, min(32, power_of_2(num_chunks)), uses_pdl)


@functools.lru_cache(maxsize=256)
def _make_sums(num_heads: int, num_tokens: int, most: int, uses_pdl: bool) -> Launcher:
    types = {"dbias": "*fp32", "tokens": "*i32", "sums": "*fp32:16", "offsets": "*i32"}
    types |= {"num_chunks": "i32", "size": "i32"}
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_TOKENS": num_tokens,
        "CHUNKS": most,
        "TILE": min(PIECE * SUM_KEYS, _SUM_ELEMENTS // most),
        "WIDTH": power_of_2(num_tokens),
    }
    return Launcher(sum_tiles, types, constants, num_warps=4, launch_pdl=uses_pdl)


# --- types and constants ----------------------------------------------------------------------


def _mask_and_bias_types(bias: str, regions: str) -> dict[str, str]:
    return common_types(bias, {"mask_classes": "*i32", "regions": regions})


def common_types(bias: str, masks: dict[str, str]) -> dict[str, str]:
    """Types of ``KernelArguments.common``."""
    types = {"bias": bias, "offsets": "*i32"} | masks
    types |= dict.fromkeys(
        ("num_windows", "num_chunks", "num_masks", "centre", "entry_stride", "head_stride"), "i32"
    )
    return types | dict.fromkeys(("scale", "inverse", "mask_value"), "fp32")


def constants_of(problem: Problem) -> dict[str, Any]:
    """Compile-time constants that follow from the problem."""
    bias = DENSE if problem.num_biases else NO_BIAS
    return {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "HEAD_SIZE": problem.head_size,
        "WIDTH": padded_head_size(problem.head_size),
        "BIAS": bias if problem.table_size is None else TABLE,
        "MASK": problem.has_regions,
    }


def _stream_constants(plan: Plan) -> dict[str, int]:
    return {
        "FULL_PIECES": plan.full_pieces,
        "LAST_PIECE": plan.last_piece,
        "STREAMS": plan.streams,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "Q_STAGES": plan.q_stages,
        "REGISTERS": plan.registers,
        "LOADING": plan.loading_registers,
        "TILE": plan.tile,
    }


def token_descriptor(problem: Problem, rows: int) -> str:
    """The type of a tensor descriptor whose boxes are ``rows`` tokens of a window and head."""
    width = padded_head_size(problem.head_size)
    box = [1, 1, rows, width]
    return f"tensordesc<{POINTER_TYPES[problem.dtype][1:]}{box},{_layout(width, 4)!r}>"


def _one_hot_descriptor(rows: int) -> str:
    return f"tensordesc<fp16{[1, rows, ONE_HOT_COLUMNS]},{_layout(ONE_HOT_COLUMNS, 3)!r}>"


def _row_descriptor() -> str:
    return f"tensordesc<fp32{[1, PIECE]},{gl.NVMMASharedLayout(0, 32, rank=2)!r}>"


@functools.cache
def _layout(width: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(2 * width, 16, rank=rank)
