"""Gather rows by an index on a GPU in one launch.

::

    program (b, i)  ->  out[b, rows of tile i, :] = x[b, index[rows of tile i], :]

Rows are copied as words, as wide as addresses, strides and sizes allow, so every element type runs.
Where the index is negative the row is ``filling``, or zeros.

``index_select`` gives each row a thread block: 75 µs for the 117 649 rows of 288 bytes in the first
layer of Swin UNETR on one H200, where this kernel takes 21 µs and a plain copy 19 µs.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....device import DeviceInfo
from ....tiles.triton.launch import POINTERS, Launcher, refuse

TILE_BYTES = 8192
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def supports(device: DeviceInfo) -> str | None:
    """Return why this cannot run, or None if it can."""
    return refuse(device)


@triton.jit
def _gather(
    out,  # [batch, num_rows, SIZE]
    x,  # [batch, any, SIZE]
    filling,  # [SIZE]
    index,  # int32 [num_rows]
    num_rows, num_tiles,
    x_batch, x_row,
    SIZE: tl.constexpr,
    FILLS: tl.constexpr,
    TILE_M: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = (tl.program_id(0) % num_tiles) * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, D)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]

    source = tl.load(index + row, mask=row < num_rows, other=-1)
    is_there = (source >= 0)[:, None]
    at = batch * x_batch + source.to(tl.int64) * x_row
    words = tl.load(x + at[:, None] + column[None, :], mask=inside & is_there, other=0)
    if FILLS:
        fill = tl.load(filling + column, mask=column < SIZE, other=0)
        words = tl.where(is_there, words, fill[None, :])

    at = (batch * num_rows + row) * SIZE
    tl.store(out + at[:, None] + column[None, :], words, mask=inside)


def gather_rows(x: Tensor, index: Tensor, filling: Tensor | None) -> Tensor:
    """Return ``x[:, index]`` with ``filling`` or zeros where the index is negative."""
    result = x.new_empty(len(x), len(index), *x.shape[2:])
    if not result.numel():
        return result
    out, rows = result.flatten(2), x.flatten(2)
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    filling = None if filling is None else filling.flatten()
    alignment = _alignment(out, rows, *([] if filling is None else [filling]))
    word = _WORDS[min(alignment, 8)]
    out, rows = out.view(word), rows.view(word)
    launcher = make_launcher(word, out.shape[2], filling is not None, alignment == 16)
    num_tiles = -(-len(index) // launcher.constants["TILE_M"])
    launcher(
        (len(x) * num_tiles, 1, 1),
        out, rows, rows if filling is None else filling.view(word), index,
        len(index), num_tiles, *rows.stride()[:2],
    )  # fmt: skip
    return result


def _alignment(*tensors: Tensor) -> int:
    """The largest power of two, up to 16, that divides every row's address and size in bytes."""
    width = tensors[0].element_size()
    numbers = (
        number
        for tensor in tensors
        for number in (tensor.data_ptr(), *(n * width for n in tensor.stride()[:-1]))
    )
    return math.gcd(16, tensors[0].shape[-1] * width, *numbers)


@functools.cache
def make_launcher(word: torch.dtype, size: int, fills: bool, is_wide: bool) -> Launcher:
    """The launcher for rows of ``size`` words; ``is_wide``: rows allow loads of 16 bytes."""
    pointer = POINTERS[word] + ":16" * is_wide
    stride = "i64" + ":2" * is_wide
    types = dict.fromkeys(("out", "x", "filling"), pointer) | {"index": "*i32"}
    types |= {"num_rows": "i32", "num_tiles": "i32", "x_batch": stride, "x_row": stride}
    d = triton.next_power_of_2(size)
    rows = max(1, TILE_BYTES // word.itemsize // d)
    constants = {"SIZE": size, "FILLS": fills, "TILE_M": rows, "D": d}
    return Launcher(_gather, types, constants, num_warps=4)
