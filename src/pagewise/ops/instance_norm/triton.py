"""Instance norm, residual and leaky ReLU on a GPU, a map of one channel cut into chunks.

::

    out = leaky(xn + rn)     xn = (x - mean(x)) / std(x)     rn = (r - mean(r)) / std(r), or r, or 0

A channel of a large map has a million numbers and there are 48 of them: torch gives each to one
block of threads, a third of the multiprocessors. Here a program has ``TILE`` numbers, and a
channel as many programs as it needs: they measure their chunks in a first launch, and add up all
chunks of their channel, in order, in a second. A channel of one chunk needs no first launch.

::

    channel  [ chunk 0 | chunk 1 | … | chunk n ]      grid (channels, chunks)

Backward reads ``out`` and not ``x``: the sign and the slope give back ``xn + rn``, so ``x`` can go
once ``out`` is there, and so can what the framework keeps between norm and activation.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import POINTERS, Launch, Launcher, refuse
from .problem import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TILE = 8192
MOST_CHUNKS = 65535  # of a grid's second axis
ONE_TILE = {"none": 16384, "plain": 16384, "norm": 8192}  # a channel of one chunk, by residual

# Rows of what is remembered of a channel.
MEAN_R, RATE_X, RATE_R = (tl.constexpr(i) for i in range(3))


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    for name, dtype in ("x", problem.dtype), ("residual", problem.residual_dtype):
        if dtype not in DTYPES:
            given = str(dtype).removeprefix("torch.")
            return f"{name} is {given}; float32, float16 and bfloat16 run"
    if problem.negative_slope <= 0:
        return "negative_slope is not positive: of the result no way leads back to the sum"
    if problem.size < 2 or problem.channels == 0:
        return "there is nothing to normalise"
    if problem.size > TILE * MOST_CHUNKS:
        return f"a channel has {problem.size} numbers; {TILE * MOST_CHUNKS} and fewer run"
    return refuse(device)


@triton.jit
def _chunk(size, TILE: tl.constexpr):
    """Where this program's numbers lie, which of them there are, and how many."""
    first = tl.program_id(1) * TILE
    at = first + tl.arange(0, TILE)
    channel = tl.program_id(0).to(tl.int64)
    return channel * size + at, at < size, tl.minimum(size - first, TILE).to(tl.float32)


@triton.jit
def _moments(x, inside, count):
    """The mean, and the sum of the squares of what is left."""
    mean = tl.sum(tl.where(inside, x, 0.0)) / count
    rest = tl.where(inside, x - mean, 0.0)
    return mean, tl.sum(rest * rest)


@triton.jit
def _merge_moments(parts, NUM: tl.constexpr, size, TILE: tl.constexpr):
    """Those of a channel from its chunks', which all have ``TILE`` numbers but for the last."""
    CHUNKS: tl.constexpr = triton.next_power_of_2(NUM)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < NUM
    count = tl.where(there, tl.minimum(size - chunk * TILE, TILE), 0).to(tl.float32)
    mean = tl.load(parts + chunk, mask=there, other=0.0)
    squares = tl.load(parts + NUM + chunk, mask=there, other=0.0)
    whole = tl.sum(mean * count) / size
    gap = mean - whole
    return whole, tl.sum(squares + count * gap * gap)


@triton.jit
def _sum_parts(parts, NUM: tl.constexpr):
    CHUNKS: tl.constexpr = triton.next_power_of_2(NUM)
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(parts + chunk, mask=chunk < NUM, other=0.0))


@triton.jit
def _leaky(x, slope):
    return tl.where(x >= 0, x, x * slope)


@triton.jit
def _measure(
    parts,  # float32 [channels, 2 or 4, NUM]: of x, then of the residual
    x,  # [channels, size]
    residual,
    size,
    RESIDUAL: tl.constexpr,
    NUM: tl.constexpr,
    TILE: tl.constexpr,
):
    at, inside, count = _chunk(size, TILE)
    WIDTH: tl.constexpr = 4 if RESIDUAL == "norm" else 2
    parts += tl.program_id(0) * WIDTH * NUM + tl.program_id(1)
    mean, squares = _moments(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), inside, count)
    tl.store(parts, mean)
    tl.store(parts + NUM, squares)
    if RESIDUAL == "norm":
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        mean, squares = _moments(r, inside, count)
        tl.store(parts + 2 * NUM, mean)
        tl.store(parts + 3 * NUM, squares)


@triton.jit
def _normalise(x, inside, parts, size, eps, NUM: tl.constexpr, TILE: tl.constexpr):
    """A chunk of a channel, normalised; the channel's mean, and one over its deviation."""
    if NUM == 1:
        mean, squares = _moments(x, inside, size.to(tl.float32))
    else:
        mean, squares = _merge_moments(parts, NUM, size, TILE)
    rate = tl.rsqrt(squares / size + eps)
    return (x - mean) * rate, mean, rate


@triton.jit
def _finish(
    out,  # [channels, size]
    kept,  # float32 [3, channels]
    parts,
    x,
    residual,
    size,
    channels,
    eps,
    eps_r,
    slope,
    RESIDUAL: tl.constexpr,
    NUM: tl.constexpr,
    TILE: tl.constexpr,
):
    at, inside, _ = _chunk(size, TILE)
    channel = tl.program_id(0)
    WIDTH: tl.constexpr = 4 if RESIDUAL == "norm" else 2
    parts += channel * WIDTH * NUM
    loaded = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y, _, rate = _normalise(loaded, inside, parts, size, eps, NUM, TILE)
    if tl.program_id(1) == 0:
        tl.store(kept + RATE_X * channels + channel, rate)
    if RESIDUAL != "none":
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL == "norm":
            r, mean, rate = _normalise(r, inside, parts + 2 * NUM, size, eps_r, NUM, TILE)
            if tl.program_id(1) == 0:
                tl.store(kept + MEAN_R * channels + channel, mean)
                tl.store(kept + RATE_R * channels + channel, rate)
        y += r
    tl.store(out + at, _leaky(y, slope).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _reload(grad, out, residual, kept, at, inside, channels, slope, RESIDUAL: tl.constexpr):
    """The gradient before the activation, and the two that were normalised and added."""
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    g = _leaky_gradient(g, y, slope)
    y = tl.where(y >= 0, y, y / slope)
    r = tl.zeros_like(y)
    if RESIDUAL != "none":
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL == "norm":
            channel = tl.program_id(0)
            mean = tl.load(kept + MEAN_R * channels + channel)
            r = (r - mean) * tl.load(kept + RATE_R * channels + channel)
            r = tl.where(inside, r, 0.0)
    return g, y - r, r


@triton.jit
def _leaky_gradient(g, y, slope):
    return tl.where(y >= 0, g, g * slope)


@triton.jit
def _measure_gradients(
    parts,  # float32 [channels, 2 or 3, NUM]: sums of g, g * xn, g * rn
    grad,  # [channels, size]
    out,
    residual,
    kept,
    size,
    channels,
    slope,
    RESIDUAL: tl.constexpr,
    NUM: tl.constexpr,
    TILE: tl.constexpr,
):
    at, inside, _ = _chunk(size, TILE)
    WIDTH: tl.constexpr = 3 if RESIDUAL == "norm" else 2
    parts += tl.program_id(0) * WIDTH * NUM + tl.program_id(1)
    g, y, r = _reload(grad, out, residual, kept, at, inside, channels, slope, RESIDUAL)
    tl.store(parts, tl.sum(g))
    tl.store(parts + NUM, tl.sum(g * y))
    if RESIDUAL == "norm":
        tl.store(parts + 2 * NUM, tl.sum(g * r))


@triton.jit
def _finish_gradients(
    grad_x,  # [channels, size]
    grad_residual,
    parts,
    grad,
    out,
    residual,
    kept,
    size,
    channels,
    slope,
    RESIDUAL: tl.constexpr,
    NUM: tl.constexpr,
    TILE: tl.constexpr,
):
    at, inside, _ = _chunk(size, TILE)
    channel = tl.program_id(0)
    WIDTH: tl.constexpr = 3 if RESIDUAL == "norm" else 2
    parts += channel * WIDTH * NUM
    g, y, r = _reload(grad, out, residual, kept, at, inside, channels, slope, RESIDUAL)
    if NUM == 1:
        mean, along = tl.sum(g) / size, tl.sum(g * y) / size
    else:
        mean, along = _sum_parts(parts, NUM) / size, _sum_parts(parts + NUM, NUM) / size
    rate = tl.load(kept + RATE_X * channels + channel)
    gx = rate * (g - mean - y * along)
    tl.store(grad_x + at, gx.to(grad_x.dtype.element_ty), mask=inside)
    if RESIDUAL != "none":
        if RESIDUAL == "norm":
            along = tl.sum(g * r) / size if NUM == 1 else _sum_parts(parts + 2 * NUM, NUM) / size
            g = tl.load(kept + RATE_R * channels + channel) * (g - mean - r * along)
        tl.store(grad_residual + at, g.to(grad_residual.dtype.element_ty), mask=inside)


class Launches(NamedTuple):
    """A problem's; the first of each pass is None where a channel is one chunk."""

    num_chunks: int
    measure: Launch | None
    finish: Launch
    measure_gradients: Launch | None
    finish_gradients: Launch


@functools.lru_cache(maxsize=256)
def make_launches(p: Problem) -> Launches:
    """Everything of a problem but its tensors."""
    tile = triton.next_power_of_2(p.size) if p.size <= ONE_TILE[p.residual] else TILE
    num_chunks = -(-p.size // tile)
    grid = p.channels, num_chunks, 1
    made = {}
    numbers: dict[str, tuple[float, ...]] = {
        "measure": (p.size,),
        "finish": (p.size, p.channels, p.eps, p.residual_eps, p.negative_slope),
        "measure_gradients": (p.size, p.channels, p.negative_slope),
        "finish_gradients": (p.size, p.channels, p.negative_slope),
    }
    factor = next(n for n in (16, 8, 4, 2, 1) if p.size % n == 0)
    for name, values in numbers.items():
        launcher = make_launcher(
            name, p.dtype, p.residual_dtype, p.residual, num_chunks, tile, factor
        )
        made[name] = launcher.bind(grid, *values)
    if num_chunks == 1:
        return Launches(1, None, made["finish"], None, made["finish_gradients"])
    return Launches(num_chunks, **made)


KERNELS = {
    "measure": _measure,
    "finish": _finish,
    "measure_gradients": _measure_gradients,
    "finish_gradients": _finish_gradients,
}


@functools.lru_cache(maxsize=256)
def make_launcher(
    name: str,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    residual: str,
    num_chunks: int,
    tile: int,
    factor: int,
) -> Launcher:
    """One of the four kernels; ``factor`` divides the size of a channel."""
    kernel: Any = KERNELS[name]
    x, r = f"{POINTERS[dtype]}:16", f"{POINTERS[residual_dtype]}:16"
    known = {
        "out": x, "grad": x, "x": x, "grad_x": x, "residual": r, "grad_residual": r,
        "kept": "*fp32:16", "parts": "*fp32:16", "size": f"i32:{factor}", "channels": "i32",
        "eps": "fp32", "eps_r": "fp32", "slope": "fp32",
    }  # fmt: skip
    types = {each: known[each] for each in kernel.arg_names if each in known}
    constants = {"RESIDUAL": residual, "NUM": num_chunks, "TILE": tile}
    num_warps = min(16, max(1, tile // 1024))
    return Launcher(kernel, types, constants, num_warps=num_warps)


def run(p: Problem, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """``out`` like ``x``, and what its gradient needs to know of each channel."""
    launches = make_launches(p)
    out = torch.empty_like(x)
    kept = x.new_empty((3, p.channels), dtype=torch.float32)
    parts = kept  # of one chunk none are read
    if launches.measure is not None:
        parts = _new_parts(x, p, 4 if p.residual == "norm" else 2, launches.num_chunks)
        launches.measure(parts, x, residual)
    launches.finish(out, kept, parts, x, residual)
    return out, kept


def run_gradients(
    p: Problem, grad: Tensor, out: Tensor, residual: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of ``x`` and of the residual."""
    launches = make_launches(p)
    grad_x = torch.empty_like(out)
    grad_residual = None if residual is None else torch.empty_like(residual)
    parts = kept
    if launches.measure_gradients is not None:
        parts = _new_parts(out, p, 3 if p.residual == "norm" else 2, launches.num_chunks)
        launches.measure_gradients(parts, grad, out, residual, kept)
    launches.finish_gradients(grad_x, grad_residual, parts, grad, out, residual, kept)
    return grad_x, grad_residual


def _new_parts(x: Tensor, p: Problem, width: int, num_chunks: int) -> Tensor:
    return x.new_empty((p.channels, width, num_chunks), dtype=torch.float32)
