"""From tensors to a launch of the forward kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.launch import POINTERS, Launcher
from .forward import forward_kernel

ROWS = COLUMNS = 64

LOG2_E = 1.4426950408889634
L2_BYTES = 36 << 20  # of keys and values that may be in use at a time


@dataclass(frozen=True)
class Tiling:
    """How the forward kernel is built for a head size."""

    width: int
    tile_n: int
    warpgroups: int
    q_stages: int
    stages: int
    take_turns: bool
    registers: int


TILINGS = (
    Tiling(64, 128, 3, 2, 2, False, 160),
    Tiling(128, 128, 2, 2, 2, True, 232),
    Tiling(256, 64, 2, 1, 2, False, 232),
)


def tiling_of(head_size: int) -> Tiling:
    return next(tiling for tiling in TILINGS if head_size <= tiling.width)


def attend(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    block_tables: Tensor | None,
    *,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    causal: bool,
    sliding_window: int | None,
    num_programs: int,
    pack: int = 1,
    tiling: Tiling | None = None,
    section: int | None = None,
) -> None:
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[-2]
    paged = block_tables is not None
    num_seqs = cu_seqlens_q.shape[0] - 1
    tiling = tiling or tiling_of(head_size)
    if not paged:
        k, v = k[None], v[None]
    block_size = k.shape[1] if paged else 0
    box = min(block_size & -block_size if paged else 256, tiling.tile_n)
    tokens = 64 * tiling.warpgroups // pack
    uniform = num_tokens == num_seqs * max_query_len
    seq_tiles = -(-max_query_len // tokens) if uniform else num_tokens // tokens + num_seqs
    heads = num_heads // pack
    num_tiles = seq_tiles * heads * (num_seqs if uniform else 1)
    kv_bytes = max(1, max_seq_len * head_size * 2 * q.element_size() * num_kv_heads // heads)
    pairs = num_seqs * heads
    fits = [n for n in (num_programs // 2, num_programs // 4) if n * kv_bytes < L2_BYTES]
    section = max(1, section or min([*fits, pairs]))
    if section == num_programs // 4 and fits[:1] == [num_programs // 2]:
        section = num_programs // 2
    atoms = paged and head_size % 64 == 0
    q_desc = TensorDescriptor.from_tensor(q, [64 // pack, pack, 64], _layout(3))
    k_desc, v_desc = (_describe(x, box, tiling.width, atoms) for x in (k, v))
    block_rows = k.stride(0) // k.stride(1) if paged else 0
    launcher = _launcher(
        q.dtype,
        head_size,
        block_size,
        causal,
        sliding_window is not None,
        uniform,
        tiling,
        pack,
        box,
        atoms,
    )
    launcher(
        (min(num_programs, num_tiles), 1, 1),
        out,
        lse,
        q_desc,
        k_desc,
        v_desc,
        cu_seqlens_q,
        lengths,
        block_tables if paged else lengths,
        num_seqs,
        block_rows,
        (k.shape[0] - 1) * block_rows + k.shape[1],
        num_heads,
        num_heads // num_kv_heads,
        num_tiles,
        seq_tiles,
        section,
        sliding_window or 0,
        softmax_scale * LOG2_E,
        block_tables.stride(0) if paged else 0,
        out.stride(0),
        out.stride(1),
    )


def _box(rows: int, width: int, head_size: int, atoms: bool) -> list[int]:
    if atoms:
        return [1, rows // 8, width // COLUMNS, 8, COLUMNS]
    return [1, width // COLUMNS if head_size % COLUMNS == 0 else 1, rows, COLUMNS]


def _describe(x: Tensor, rows: int, width: int, atoms: bool) -> TensorDescriptor:
    """Keys or values ``[blocks, rows, heads, size]`` as boxes of rows of one head."""
    num_blocks, block_size, num_heads, size = x.shape
    block, row, head, _ = x.stride()
    num_rows = (num_blocks - 1) * (block // row) + block_size
    box = _box(rows, width, size, atoms)
    chunks, columns = (size // COLUMNS, COLUMNS) if size % COLUMNS == 0 else (1, size)
    if atoms:
        shape = [num_heads, num_rows // 8, chunks, 8, columns]
        strides = [head, 8 * row, COLUMNS, row, 1]
    else:
        shape = [num_heads, chunks, num_rows, columns]
        strides = [head, COLUMNS, row, 1]
    return TensorDescriptor(x, shape, strides, box, _layout(len(box)))


class GluonLauncher(Launcher):
    """A launcher of a kernel in Gluon."""

    source = GluonASTSource


@functools.cache
def _launcher(
    dtype: torch.dtype,
    head_size: int,
    block_size: int,
    causal: bool,
    has_window: bool,
    uniform: bool,
    tiling: Tiling,
    pack: int,
    box: int,
    atoms: bool,
) -> GluonLauncher:
    """The forward kernel for one form of call."""
    name = POINTERS[dtype][1:]
    queries = f"tensordesc<{name}{[ROWS // pack, pack, COLUMNS]},{_layout(3)!r}>"
    boxes = _box(box, tiling.width, head_size, atoms)
    keys = f"tensordesc<{name}{boxes},{_layout(len(boxes))!r}>"
    types = {
        "out": f"*{name}:16",
        "lse": "*fp32",
        "q_desc": queries,
        "k_desc": keys,
        "v_desc": keys,
        "cu_seqlens_q": "*i32",
        "lengths": "*i32",
        "block_tables": "*i32",
        **dict.fromkeys(
            "num_seqs block_rows num_rows num_heads group num_tiles seq_tiles section window".split(), "i32"
        ),
        "scale": "fp32",
        "table_stride": "i32",
        "token_stride": "i64:8",
        "head_stride": "i64:8",
    }
    constants = {
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "CAUSAL": causal,
        "HAS_WINDOW": has_window,
        "UNIFORM": uniform,
        "WIDTH": tiling.width,
        "PACK": pack,
        "BOX": box,
        "ATOMS": atoms,
        "TILE_N": tiling.tile_n,
        "WARPGROUPS": tiling.warpgroups,
        "Q_STAGES": tiling.q_stages,
        "STAGES": tiling.stages,
        "TAKE_TURNS": tiling.take_turns,
        "REGISTERS": tiling.registers,
    }
    return GluonLauncher(forward_kernel, types, constants, num_warps=4)


def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 16, rank=rank)
