"""Instance norm, residual and leaky ReLU on a GPU; a channel is split into chunks.

::

    out = leaky(xn + rn)     xn = (x - mean(x)) / std(x)     rn = (r - mean(r)) / std(r), or r, or 0

A large map has a million elements in each of some 48 channels. torch gives each channel to one
thread block, which leaves two thirds of the multiprocessors idle. Here a program takes a chunk of
``TILE`` elements of a channel. A first launch computes each chunk's mean and squared deviations; a
second one merges those of a channel in order and normalises. A channel of one chunk needs only the
second launch.

::

    channel  [ chunk 0 | chunk 1 | … | chunk n ]      grid (channels, chunks)

The backward pass recovers ``xn + rn`` from ``out`` by its sign and the slope, and reads the
residual if that is normalised too, so ``x`` and the intermediate results need not be saved. If the
residual is added without a norm it may be large, and subtracting it would lose digits: then ``x``
is saved instead.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import POINTERS, Launch, Launcher, refuse
from .problem import Problem

TILE = 8192
MOST_CHUNKS = 65535  # of a grid's second axis
ONE_TILE = {
    "none": 16384,
    "plain": 16384,
    "norm": 8192,
}  # elements of a channel of one chunk, by residual

LEAST_SLOPE = 1e-4  # a smaller one would turn small float16 results into subnormal numbers

PARTS = tl.constexpr(4)  # statistics stored for each chunk

# Rows of ``kept``: 1 / std of x and of the residual, and the mean of the saved tensor.
RATE_X, RATE_R, MEAN = (tl.constexpr(i) for i in range(3))


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Return why this cannot run, or None if it can."""
    if problem.negative_slope < LEAST_SLOPE:
        return (
            f"negative_slope is {problem.negative_slope}; from {LEAST_SLOPE} on the result leads "
            "back to the sum"
        )
    if problem.size < 2 or problem.channels == 0:
        return "there is nothing to normalise"
    if problem.size > TILE * MOST_CHUNKS:
        return f"a channel has {problem.size} numbers; {TILE * MOST_CHUNKS} and fewer run"
    return refuse(device, x=problem.dtype, residual=problem.residual_dtype)


@triton.jit
def _chunk(size, TILE: tl.constexpr):
    """Offsets of this program's elements, which of them exist, and how many."""
    first = tl.program_id(1) * TILE
    at = first + tl.arange(0, TILE)
    channel = tl.program_id(0).to(tl.int64)
    return channel * size + at, at < size, tl.minimum(size - first, TILE).to(tl.float32)


@triton.jit
def _moments(x, inside, count):
    """The mean, and the sum of squared differences from it."""
    mean = tl.sum(tl.where(inside, x, 0.0)) / count
    rest = tl.where(inside, x - mean, 0.0)
    return mean, tl.sum(rest * rest)


@triton.jit
def _merge_moments(parts, num, size, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Combine mean and squares of a channel's chunks, all of ``TILE`` elements but the last."""
    chunk = tl.arange(0, CHUNKS)
    exists = chunk < num
    count = tl.where(exists, tl.minimum(size - chunk * TILE, TILE), 0).to(tl.float32)
    mean = tl.load(parts + chunk, mask=exists, other=0.0)
    squares = tl.load(parts + num + chunk, mask=exists, other=0.0)
    whole = tl.sum(mean * count) / size
    gap = mean - whole
    return whole, tl.sum(squares + count * gap * gap)


@triton.jit
def _sum_parts(parts, num, CHUNKS: tl.constexpr):
    chunk = tl.arange(0, CHUNKS)
    return tl.sum(tl.load(parts + chunk, mask=chunk < num, other=0.0))


@triton.jit
def _measure(
    parts,  # float32 [channels, PARTS, num]: mean and squares of x, then of the residual
    x,  # [channels, size]
    residual,
    size,
    num,  # chunks of a channel
    RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    at, inside, count = _chunk(size, TILE)
    parts += tl.program_id(0) * PARTS * num + tl.program_id(1)
    mean, squares = _moments(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), inside, count)
    tl.store(parts, mean)
    tl.store(parts + num, squares)
    if RESIDUAL == "norm":
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        mean, squares = _moments(r, inside, count)
        tl.store(parts + 2 * num, mean)
        tl.store(parts + 3 * num, squares)


@triton.jit
def _normalise(x, inside, parts, num, size, eps, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Return a normalised chunk, and the channel's mean and 1 / standard deviation."""
    if CHUNKS == 1:
        mean, squares = _moments(x, inside, size.to(tl.float32))
    else:
        mean, squares = _merge_moments(parts, num, size, CHUNKS, TILE)
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
    num,
    channels,
    eps,
    eps_r,
    slope,
    RESIDUAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    at, inside, _ = _chunk(size, TILE)
    channel = tl.program_id(0)
    parts += channel * PARTS * num
    numbers = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y, mean, rate = _normalise(numbers, inside, parts, num, size, eps, CHUNKS, TILE)
    rate_r = rate
    if RESIDUAL != "none":
        r = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL == "norm":
            r, mean, rate_r = _normalise(r, inside, parts + 2 * num, num, size, eps_r, CHUNKS, TILE)
        y += r
    tl.store(out + at, tl.where(y >= 0, y, y * slope).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(kept + RATE_X * channels + channel, rate)
        tl.store(kept + RATE_R * channels + channel, rate_r)
        tl.store(kept + MEAN * channels + channel, mean)


@triton.jit
def _reload(grad, out, source, kept, size, channels, slope, RESIDUAL: tl.constexpr, TILE):
    """The gradient before the activation, and the normalised x and residual."""
    at, inside, _ = _chunk(size, TILE)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(y > 0, g, g * slope)  # at zero as torch does
    y = tl.where(y >= 0, y, y / slope)
    r = tl.zeros_like(y)
    if RESIDUAL != "none":
        RATE: tl.constexpr = RATE_R if RESIDUAL == "norm" else RATE_X
        mean = tl.load(kept + MEAN * channels + tl.program_id(0))
        rate = tl.load(kept + RATE * channels + tl.program_id(0))
        numbers = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (numbers - mean) * rate, 0.0)
        if RESIDUAL == "norm":
            r = normal
            y -= r
        else:
            y = normal
    return at, inside, g, y, r


@triton.jit
def _measure_gradients(
    parts,  # float32 [channels, PARTS, num]: sums of g, g * xn, g * rn
    grad,  # [channels, size]
    out,
    source,  # the residual if that was normalised, else x
    kept,
    size,
    num,
    channels,
    slope,
    RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    parts += tl.program_id(0) * PARTS * num + tl.program_id(1)
    _, _, g, xn, rn = _reload(grad, out, source, kept, size, channels, slope, RESIDUAL, TILE)
    tl.store(parts, tl.sum(g))
    tl.store(parts + num, tl.sum(g * xn))
    if RESIDUAL == "norm":
        tl.store(parts + 2 * num, tl.sum(g * rn))


@triton.jit
def _mean(x, parts, num, size, CHUNKS: tl.constexpr):
    """The mean over a channel, from its elements or from the sums of its chunks."""
    total = tl.sum(x) if CHUNKS == 1 else _sum_parts(parts, num, CHUNKS)
    return total / size


@triton.jit
def _finish_gradients(
    grad_x,  # [channels, size]
    grad_residual,
    parts,
    grad,
    out,
    source,
    kept,
    size,
    num,
    channels,
    slope,
    RESIDUAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    channel = tl.program_id(0)
    parts += channel * PARTS * num
    at, inside, g, xn, rn = _reload(grad, out, source, kept, size, channels, slope, RESIDUAL, TILE)
    mean = _mean(g, parts, num, size, CHUNKS)
    along = _mean(g * xn, parts + num, num, size, CHUNKS)
    gx = tl.load(kept + RATE_X * channels + channel) * (g - mean - xn * along)
    tl.store(grad_x + at, gx.to(grad_x.dtype.element_ty), mask=inside)
    if RESIDUAL != "none":
        if RESIDUAL == "norm":
            along = _mean(g * rn, parts + 2 * num, num, size, CHUNKS)
            g = tl.load(kept + RATE_R * channels + channel) * (g - mean - rn * along)
        tl.store(grad_residual + at, g.to(grad_residual.dtype.element_ty), mask=inside)


class Launches(NamedTuple):
    """The launches of a problem; the first of each pass is None for channels of one chunk."""

    num_chunks: int
    finish: Launch
    finish_gradients: Launch
    measure: Launch | None = None
    measure_gradients: Launch | None = None


@functools.lru_cache(maxsize=256)
def make_launches(p: Problem) -> Launches:
    """Build the launches of a problem."""
    tile = triton.next_power_of_2(p.size) if p.size <= ONE_TILE[p.residual] else TILE
    num = -(-p.size // tile)
    factor = math.gcd(16, p.size)
    numbers: dict[str, tuple[float, ...]] = {
        "measure": (p.size, num),
        "finish": (p.size, num, p.channels, p.eps, p.residual_eps, p.negative_slope),
        "measure_gradients": (p.size, num, p.channels, p.negative_slope),
        "finish_gradients": (p.size, num, p.channels, p.negative_slope),
    }
    dtypes, chunks = (p.dtype, p.residual_dtype), triton.next_power_of_2(num)
    made = {
        name: make_launcher(name, dtypes, p.residual, chunks, tile, factor).bind(
            (p.channels, num, 1), *values
        )
        for name, values in numbers.items()
        if num > 1 or "measure" not in name
    }
    return Launches(num, **made)


KERNELS = {
    "measure": _measure,
    "finish": _finish,
    "measure_gradients": _measure_gradients,
    "finish_gradients": _finish_gradients,
}


@functools.lru_cache(maxsize=256)
def make_launcher(
    name: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    residual: str,
    chunks: int,
    tile: int,
    factor: int,
) -> Launcher:
    """The launcher of one of the four kernels, for x and a residual of ``dtypes``.

    ``chunks``: how many a channel may have; ``factor`` divides its size.
    """
    kernel: Any = KERNELS[name]
    x, r = (f"{POINTERS[dtype]}:16" for dtype in dtypes)
    kinds = {
        "out": x, "grad": x, "x": x, "grad_x": x, "residual": r, "grad_residual": r,
        "source": r if residual == "norm" else x, "kept": "*fp32:16", "parts": "*fp32:16",
        "size": f"i32:{factor}", "num": "i32", "channels": "i32",
        "eps": "fp32", "eps_r": "fp32", "slope": "fp32",
    }  # fmt: skip
    types = {each: kinds[each] for each in kernel.arg_names if each in kinds}
    known = {"RESIDUAL": residual, "CHUNKS": chunks, "TILE": tile}
    constants = {each: known[each] for each in kernel.arg_names if each in known}
    return Launcher(kernel, types, constants, num_warps=min(16, max(1, tile // 1024)))


def run(p: Problem, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return ``out``, the input that its gradient needs if any, and each channel's statistics."""
    launches = make_launches(p)
    out = torch.empty_like(x)
    kept = x.new_empty((3, p.channels), dtype=torch.float32)
    parts = kept  # not read for channels of one chunk
    if launches.measure is not None:
        parts = _new_parts(x, p, launches.num_chunks)
        launches.measure(parts, x, residual)
    launches.finish(out, kept, parts, x, residual)
    return out, x if p.residual == "plain" else residual, kept


def run_gradients(
    p: Problem, grad: Tensor, out: Tensor, source: Tensor | None, kept: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of ``x`` and of the residual."""
    launches = make_launches(p)
    grad_x = torch.empty_like(out)
    grad_residual = None
    if p.residual != "none":
        grad_residual = torch.empty_like(out, dtype=p.residual_dtype)
    parts = kept
    if launches.measure_gradients is not None:
        parts = _new_parts(out, p, launches.num_chunks)
        launches.measure_gradients(parts, grad, out, source, kept)
    launches.finish_gradients(grad_x, grad_residual, parts, grad, out, source, kept)
    return grad_x, grad_residual


def _new_parts(x: Tensor, p: Problem, num_chunks: int) -> Tensor:
    return x.new_empty((p.channels, PARTS.value, num_chunks), dtype=torch.float32)
