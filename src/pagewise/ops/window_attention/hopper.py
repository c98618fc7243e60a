"""Window attention on a Hopper GPU: what can run, and the launch; gradients are Triton's."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...device import DeviceInfo
from ...tiles.hopper.launch import GluonLauncher, refuse
from ...tiles.state import AttentionOutput
from .hopper_forward import attend
from .problem import Operands, Problem
from .triton import KINDS, backward, empty_like, find_mask

__all__ = ["backward", "forward", "make_launcher", "supports"]

_LOG2_E = 1 / math.log(2)
_ROWS, _BOX, _WIDTH = 64, 128, 16
_GROUPS, _TILES = 2, (128, 32, 16)
_MOST_TOKENS = _GROUPS * sum(_TILES)
_FEWEST_TOKENS = _MOST_TOKENS - 31
_PROGRAMS, _REGISTERS = 3, 168  # of a multiprocessor, of a thread
_LEAST_SCALE = 1 / 16


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can: what was measured, and faster than Triton's."""
    reason = refuse(device, problem.dtype, problem.head_size, problem.head_size)
    if reason is not None:
        return reason
    if problem.cosine:
        return "rows are to be normalised first, which is left to triton"
    if problem.table_size is None or torch.float64 in problem.learned_dtypes:
        return "without a float32 or half-precision bias table triton runs"
    if problem.mask_dtype is not None:
        return "a dense mask is left to triton"
    if problem.head_size != _WIDTH:
        return f"head_size is {problem.head_size}; {_WIDTH} is where this is faster than triton"
    if not _FEWEST_TOKENS <= problem.num_tokens <= _MOST_TOKENS:
        return (
            f"num_tokens is {problem.num_tokens}; {_FEWEST_TOKENS} to {_MOST_TOKENS} is where "
            "this is faster than triton"
        )
    return None


def forward(problem: Problem, x: Operands) -> AttentionOutput:
    """One launch, and a small one to find the windows that regions concern."""
    assert x.bias_table is not None
    assert x.rel_offsets is not None
    out = empty_like(x.q)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    q, scale = normal_scale(x.q, x.softmax_scale)
    regions, mixed = find_mask(x, is_one_tile=False)
    launcher = make_launcher(
        replace(problem, num_windows=1, num_masks=min(problem.num_masks, 1)),
        KINDS[x.bias_table.dtype],
        "*u8" if regions is None else KINDS[regions.dtype],
    )
    tiles = -(-problem.num_tokens // _ROWS) * problem.num_heads
    programs = _PROGRAMS * DeviceInfo.of(x.q.device).num_workers
    chunks = max(1, min(programs // tiles, problem.num_windows))
    launcher(
        (tiles * chunks if problem.num_windows else 0, 1, 1),
        out,
        lse,
        _describe(q, _ROWS),
        _describe(x.k, _BOX),
        _describe(x.v, _BOX),
        x.bias_table.contiguous(),
        x.rel_offsets.contiguous(),
        x.rel_offsets if mixed is None else mixed,
        x.rel_offsets if regions is None else regions,
        problem.num_windows,
        chunks,
        max(1, problem.num_masks),
        (x.bias_table.shape[0] - 1) // 2,
        scale * _LOG2_E,
        1 / scale,
        x.mask_value / scale,
    )
    return AttentionOutput(out, lse)


def normal_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a positive scale that is not tiny: bias and mask are divided by it.

    Powers of two leave q's digits as they are.

    Example:
        >>> normal_scale(torch.tensor([3.0]), -1.5)
        (tensor([-3.]), 1.5)
        >>> normal_scale(torch.tensor([3.0]), 0.0)
        (tensor([0.]), 1.0)
    """
    if not scale < _LEAST_SCALE:
        return q, scale
    if scale == 0:
        return torch.zeros_like(q), 1.0
    size = min(1.0, 2.0 ** math.floor(math.log2(abs(scale))))
    factor = math.copysign(size, scale)
    return q * factor, scale / factor


@functools.lru_cache(maxsize=256)
def make_launcher(problem: Problem, bias: str, regions: str) -> GluonLauncher:
    """The kernel for one kind of problem, and its table's and its regions' element types."""
    name, layout = KINDS[problem.dtype][1:], _layout()
    boxes = {"q_desc": _ROWS, "k_desc": _BOX, "v_desc": _BOX}
    types = {"out": f"*{name}:16", "lse": "*fp32"}
    types |= {
        desc: f"tensordesc<{name}{[1, 1, rows, _WIDTH]},{layout!r}>" for desc, rows in boxes.items()
    }
    types |= {"bias": bias, "offsets": "*i32", "mixed": "*i32", "regions": regions}
    types |= dict.fromkeys(("num_windows", "num_chunks", "num_masks", "centre"), "i32")
    types |= dict.fromkeys(("scale", "inverse", "mask_value"), "fp32")
    constants = {
        "NUM_HEADS": problem.num_heads,
        "NUM_TOKENS": problem.num_tokens,
        "HEAD_SIZE": problem.head_size,
        "WIDTH": _WIDTH,
        "MASK": problem.has_regions,
        "GROUPS": _GROUPS,
        "TILES": _TILES,
    }
    return GluonLauncher(attend, types, constants, num_warps=4, maxnreg=_REGISTERS)


def _describe(x: Tensor, rows: int) -> TensorDescriptor:
    """A window's head in boxes of so many tokens; a copy where tokens do not lie on 16 bytes."""
    unit = 16 // x.element_size()
    strides = x.stride()[:3]
    if x.data_ptr() % 16 or any(stride % unit or stride <= 0 for stride in strides):
        x = x.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, _WIDTH], _layout())


def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(2 * _WIDTH, 16, rank=4)
