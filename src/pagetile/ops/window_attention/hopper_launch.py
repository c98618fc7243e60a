"""Launchers of window attention's kernels on Hopper, and tensors as the copy engine knows them.

Kernels that follow one another begin early (programmatic dependent launch): they make their tiles
of bias, or take the multiprocessors that their predecessor leaves first, and wait where they need
what it wrote::

    marks ─▶ forward                       its loading warp waits for the marks
    marks ─▶ deltas ─▶ by rows             deltas need no marks, and end after them;
                                           rows wait for deltas, and then let columns begin
    by rows ─▶ by columns ─▶ sums          columns need nothing of rows, and end after them;
                                           then they let sums begin, which need rows only

Whatever else they read has to be there before the first of them is launched, and so has what they
write: memory that is allocated later may be another's, whose kernel still runs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import GluonLauncher
from ...tiles.triton.launch import Launcher
from .hopper_columns import column_gradients
from .hopper_deltas import make_deltas
from .hopper_forward import attend
from .hopper_marks import mark_regions
from .hopper_plan import (
    DENSE,
    MARKS,
    NO_BIAS,
    PIECE,
    SUM_KEYS,
    SUM_OFFSETS,
    TABLE,
    Plan,
    RowsPlan,
    find_width,
    make_columns_plan,
    make_plan,
    make_rows_plan,
)
from .hopper_rows import row_gradients
from .hopper_sums import sum_tiles
from .problem import Problem
from .triton import KINDS, count_tokens

__all__ = [
    "BiasGradient",
    "GradientKernels",
    "describe_tokens",
    "find_forward",
    "find_gradients",
    "known_of",
    "make_columns_launcher",
    "make_deltas_launcher",
    "make_launcher",
    "make_marker",
    "make_rows_launcher",
    "make_sums_launcher",
    "types_of_others",
]

_DELTAS, _SUMS = 4096, 4096  # numbers of a tile


class GradientKernels(NamedTuple):
    """The gradients' plans, and the kernels that go by them."""

    rows_plan: RowsPlan
    columns_plan: Plan
    make_deltas: Launcher
    walk_rows: GluonLauncher
    walk_columns: GluonLauncher
    add_sums: Launcher


class BiasGradient(NamedTuple):
    """A bias's gradient, and what it is added up from; all of it nothing without a bias."""

    dbias: Tensor
    """float32 ``[1, num_heads, num_tokens, num_tokens]``."""
    tokens: Tensor
    """int32: whose offsets a table's are, see ``invert_offsets``; nothing without a table."""
    sums: Tensor
    """float32 ``[chunks, numbers that a chunk's programs leave]``, see ``hopper_sums``."""

    @classmethod
    def of(cls, problem: Problem, chunks: int, lse: Tensor) -> BiasGradient:
        """Nothing in it yet; on the device of ``lse``."""
        num_heads, num_tokens = problem.num_heads * problem.has_bias, problem.num_tokens
        tiles = -(-num_tokens // PIECE) * -(-num_tokens // SUM_KEYS)
        return cls(
            lse.new_empty((1, num_heads, num_tokens, num_tokens)),
            lse.new_empty(count_tokens(problem.table_size), dtype=torch.int32),
            lse.new_empty((chunks, num_heads * tiles * PIECE * SUM_KEYS)),
        )

    def add_up(self, launcher: Launcher, offsets: Tensor) -> None:
        """Fill ``dbias`` and, for a table, ``tokens``."""
        chunks, size = self.sums.shape
        num_tokens = len(self.tokens)
        programs = size // launcher.constants["TILE"] + -(-num_tokens // SUM_OFFSETS)
        launcher((programs, 1, 1), self.dbias, self.tokens, self.sums, offsets, chunks,
                 num_tokens - 1)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def find_forward(
    problem: Problem, device: DeviceInfo, types: tuple[str, str]
) -> tuple[Plan, GluonLauncher]:
    """The plan of a problem that can run, and its kernel; ``types``: of bias and regions."""
    plan = make_plan(problem, device)
    assert plan is not None
    return plan, make_launcher(problem.of_one_window(), replace(plan, chunks=1), *types)


@functools.lru_cache(maxsize=1024)
def find_gradients(
    problem: Problem, device: DeviceInfo, types: tuple[str, str], has_dlse: bool
) -> GradientKernels | None:
    """The same of the gradients; None if they cannot run."""
    rows, columns = make_rows_plan(problem, device), make_columns_plan(problem, device)
    if rows is None or columns is None:
        return None
    kind = problem.of_one_window()
    is_early = rows.launches == 1
    return GradientKernels(
        rows,
        columns,
        make_deltas_launcher(kind, has_dlse),
        make_rows_launcher(kind, replace(rows, chunks=1), *types),
        make_columns_launcher(kind, replace(columns, chunks=1), *types, is_early),
        make_sums_launcher(problem.num_heads, problem.num_tokens, rows.chunks, is_early=True),
    )


@functools.lru_cache(maxsize=256)
def make_marker(regions: str, num_tokens: int) -> Launcher:
    """The kernel that marks regions of an element type."""
    types = {"kinds": "*i32", "marks": "*fp16:16", "regions": regions}
    types |= {"factor": "fp32", "limit": "i32"}
    constants = {"NUM_TOKENS": num_tokens, "TILE": 1 << (num_tokens - 1).bit_length()}
    return Launcher(mark_regions, types, constants, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_deltas_launcher(problem: Problem, has_dlse: bool) -> Launcher:
    """The kernel of pivots and deltas, of what came back in whole 16 bytes."""
    kind, width = KINDS[problem.dtype], find_width(problem.head_size)
    types = {"pivot": "*fp32:16", "delta": "*fp32:16", "out": f"{kind}:16", "dout": f"{kind}:16"}
    types |= {"lse": "*fp32", "dlse": "*fp32"}
    types |= dict.fromkeys(("dout_window", "dout_head", "dout_token"), "i64:8")
    types["pivot_scale"] = "fp32"
    constants = {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "PADDED": -(-problem.num_tokens // PIECE) * PIECE,
        "HEAD_SIZE": problem.head_size,
        "HAS_DLSE": has_dlse,
        "TILE": _DELTAS // width,
        "D": width,
    }
    return Launcher(make_deltas, types, constants, num_warps=4, launch_pdl=problem.has_regions)


@functools.lru_cache(maxsize=256)
def make_launcher(problem: Problem, plan: Plan, bias: str, regions: str) -> GluonLauncher:
    """The forward kernel for one kind of problem, its bias' and its regions' element types."""
    name = KINDS[problem.dtype][1:]
    rows, piece = describe_tokens(problem, plan.rows), describe_tokens(problem, plan.piece)
    types = {"out": f"*{name}:16", "lse": "*fp32"}
    types |= {"q_desc": rows, "k_desc": piece, "v_desc": piece}
    types |= {"row_marks_desc": _marks(plan.rows), "marks_desc": _marks(plan.piece)}
    types |= _others(bias, regions)
    constants = known_of(problem) | _columns(plan) | {"KEYS": plan.piece} | _streams(plan)
    return GluonLauncher(
        attend, types, constants, num_warps=plan.warps, launch_pdl=problem.has_regions
    )


@functools.lru_cache(maxsize=256)
def make_columns_launcher(
    problem: Problem, plan: Plan, bias: str, regions: str, is_early: bool
) -> GluonLauncher:
    """The kernel of keys' and values' gradients; ``is_early`` after a single launch by rows."""
    name = KINDS[problem.dtype][1:]
    rows, piece, numbers = (
        describe_tokens(problem, plan.rows),
        describe_tokens(problem, PIECE),
        _numbers(),
    )
    types = {"dk": f"*{name}:16", "dv": f"*{name}:16"}
    types |= {"k_desc": rows, "v_desc": rows, "row_marks_desc": _marks(plan.rows)}
    types |= {"q_desc": piece, "dout_desc": piece, "marks_desc": _marks(PIECE)}
    types |= {"pivot_desc": numbers, "delta_desc": numbers}
    types |= _others(bias, regions) | {"dk_scale": "fp32"}
    constants = known_of(problem) | _columns(plan) | _streams(plan)
    return GluonLauncher(
        column_gradients, types, constants, num_warps=plan.warps, launch_pdl=is_early
    )


def make_sums_launcher(
    num_heads: int, num_tokens: int, num_chunks: int, is_early: bool
) -> Launcher:
    """The kernel that adds up what programs leave of a bias's gradient.

    ``is_early`` if the one before it lets it begin, and wrote nothing that it reads.
    """
    return _make_sums(num_heads, num_tokens, min(32, 1 << (num_chunks - 1).bit_length()), is_early)


@functools.lru_cache(maxsize=256)
def _make_sums(num_heads: int, num_tokens: int, most: int, is_early: bool) -> Launcher:
    types = {"dbias": "*fp32", "tokens": "*i32", "sums": "*fp32:16", "offsets": "*i32"}
    types |= {"num_chunks": "i32", "size": "i32"}
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_TOKENS": num_tokens,
        "MOST": most,
        "TILE": min(PIECE * SUM_KEYS, _SUMS // most),
        "WIDTH": 1 << (num_tokens - 1).bit_length(),
    }
    return Launcher(sum_tiles, types, constants, num_warps=4, launch_pdl=is_early)


@functools.lru_cache(maxsize=256)
def make_rows_launcher(problem: Problem, plan: RowsPlan, bias: str, regions: str) -> GluonLauncher:
    """The kernel of queries' and the bias's gradients."""
    name = KINDS[problem.dtype][1:]
    rows, keys, numbers = (
        describe_tokens(problem, PIECE),
        describe_tokens(problem, plan.box),
        _numbers(),
    )
    types = {"dq": f"*{name}:16", "dq_so_far": "*fp32:16", "dbias": "*fp32:16"}
    types |= {"q_desc": rows, "dout_desc": rows, "row_marks_desc": _marks(PIECE)}
    types |= {"pivot_desc": numbers, "delta_desc": numbers}
    types |= {"k_desc": keys, "v_desc": keys, "marks_desc": _marks(plan.box)}
    types |= _others(bias, regions) | {"dq_scale": "fp32", "first_key": "i32"}
    constants = known_of(problem) | {
        "SHARES": plan.shares,
        "KEYS": plan.keys,
        "BOX": plan.box,
        "STAGES": plan.stages,
        "BUFFERS": plan.buffers,
        "REGISTERS": plan.registers,
        "LOADING": plan.loading_registers,
    }
    is_early = plan.shares * plan.keys >= problem.num_tokens
    return GluonLauncher(row_gradients, types, constants, num_warps=4, launch_pdl=is_early)


def _others(bias: str, regions: str) -> dict[str, str]:
    """Types of what all three kernels take after their tokens."""
    return types_of_others(bias, {"kinds": "*i32", "regions": regions})


def types_of_others(bias: str, masks: dict[str, str]) -> dict[str, str]:
    """Types of a ``Call``'s others."""
    types = {"bias": bias, "offsets": "*i32"} | masks
    types |= dict.fromkeys(
        ("num_windows", "num_chunks", "num_masks", "centre", "entry_stride", "head_stride"), "i32"
    )
    return types | dict.fromkeys(("scale", "inverse", "mask_value"), "fp32")


def known_of(problem: Problem) -> dict[str, Any]:
    """What kernels of a problem are compiled for."""
    kind = DENSE if problem.num_biases else NO_BIAS
    return {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "HEAD_SIZE": problem.head_size,
        "WIDTH": find_width(problem.head_size),
        "BIAS": kind if problem.table_size is None else TABLE,
        "MASK": problem.has_regions,
    }


def _columns(plan: Plan) -> dict[str, int]:
    return {"GROUPS": plan.groups, "REST": plan.rest}


def _streams(plan: Plan) -> dict[str, int]:
    return {
        "STREAMS": plan.streams,
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "Q_STAGES": plan.q_stages,
        "REGISTERS": plan.registers,
        "LOADING": plan.loading_registers,
        "TILE": plan.tile,
    }


def describe_tokens(problem: Problem, rows: int) -> str:
    """The type of a descriptor whose boxes have some rows of a window and head."""
    width = find_width(problem.head_size)
    box = [1, 1, rows, width]
    return f"tensordesc<{KINDS[problem.dtype][1:]}{box},{_layout(width, 4)!r}>"


def _marks(rows: int) -> str:
    return f"tensordesc<fp16{[1, rows, MARKS]},{_layout(MARKS, 3)!r}>"


def _numbers() -> str:
    return f"tensordesc<fp32{[1, PIECE]},{_NUMBERS!r}>"


@functools.cache
def _layout(width: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(2 * width, 16, rank=rank)


_NUMBERS = gl.NVMMASharedLayout(0, 32, rank=2)
