"""The experts of a mixture-of-experts layer on a GPU: always four launches.

A pair is a token and one of its ``top_k`` experts. Pairs are sorted by expert, so that each chosen
expert's weights are read once or twice, for ``TILE_M`` pairs at a time::

    _sort       order[i]       pairs by expert, and where each expert's begin
    _gate_up    inner[pair]    activation(gate . x[token], up . x[token])
    _down       made[pair]     weight of the pair * down . inner[pair], float32
    _sum        out[token]     sum of its pairs, in their order

The grid of the two products is (columns / TILE_N, pairs): program (n, i) computes a tile if pair
``order[i]`` is the first of one, and returns otherwise. So the grid does not depend on which
experts were chosen, and a CUDA graph can record it. Supports float32, float16 and bfloat16, weights
of any strides, up to ``MOST_PAIRS`` pairs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import DeviceInfo
from ...tiles.triton.launch import POINTERS, Launcher, refuse
from .problem import Expert, Problem

MOST_PAIRS = 4096
SORT_TILE = 64
SUM_TILE = 1024


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    if not problem.is_contiguous:
        return "x, experts and weights need rows without gaps"
    num_pairs = problem.num_tokens * problem.top_k
    if num_pairs > MOST_PAIRS:
        return f"{num_pairs} pairs of tokens and experts; {MOST_PAIRS} and fewer run"
    return refuse(device, x=problem.dtype, weights=problem.weight_dtype)


@triton.jit
def _sort(
    order,  # [num_pairs] int32
    starts,  # [NUM_EXPERTS + 1] int32
    experts,  # [num_pairs] int64
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mine = tl.load(experts + at, mask=at < num_pairs, other=0)
    rank = tl.zeros([TILE], tl.int32)
    fewer = tl.zeros([TILE], tl.int32)
    for first in range(0, num_pairs, TILE):
        other_at = first + tl.arange(0, TILE)
        other = tl.load(experts + other_at, mask=other_at < num_pairs, other=NUM_EXPERTS)
        is_before = other[None, :] < mine[:, None]
        is_before |= (other[None, :] == mine[:, None]) & (other_at[None, :] < at[:, None])
        rank += tl.sum(is_before.to(tl.int32), 1)
        fewer += tl.sum((other[None, :] < at[:, None]).to(tl.int32), 1)
    # Padding of the last tile counts as expert NUM_EXPERTS, which sorts behind all pairs.
    tl.store(order + rank, at, mask=at < num_pairs)
    tl.store(starts + at, fewer, mask=at <= NUM_EXPERTS)


@triton.jit
def _find_tile(order, starts, experts, TILE_M: tl.constexpr):
    """The expert of this program, its pairs, and whether there is a tile to compute."""
    first = tl.program_id(1)
    expert = tl.load(experts + tl.load(order + first))
    start = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    row = first + tl.arange(0, TILE_M)
    inside = row < end
    pair = tl.load(order + row, mask=inside, other=0)
    return expert, pair, inside, (first - start) % TILE_M == 0


@triton.jit
def _gate_up(
    inner,  # [num_pairs, INNER]
    x,  # [num_tokens, HIDDEN]
    gate,  # [num_experts, INNER, HIDDEN], by strides
    up,  # the same
    gate_bias,  # [num_experts, INNER], by strides; None without HAS_BIAS
    up_bias,
    order,
    starts,
    experts,
    expert_stride,
    bias_stride,
    top_k,
    alpha,
    limit,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    expert, pair, inside, is_first = _find_tile(order, starts, experts, TILE_M)
    if not is_first:
        return
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    x_at = x + (pair // top_k).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    w_at = expert * expert_stride + k[:, None] * STRIDE_K
    in_n = n < INNER

    if INTERLEAVED:  # columns of gate and up alternate: multiply both, then split the result
        both_n = tl.program_id(0) * 2 * TILE_N + tl.arange(0, 2 * TILE_N)
        both = tl.zeros([TILE_M, 2 * TILE_N], tl.float32)
        for first_k in range(0, HIDDEN, TILE_K):
            in_k = k < HIDDEN - first_k
            rows = tl.load(x_at + first_k, mask=inside[:, None] & in_k[None, :], other=0.0)
            in_w = in_k[:, None] & (both_n < 2 * INNER)[None, :]
            at = gate + w_at + both_n[None, :] + first_k * STRIDE_K
            both = tl.dot(rows, tl.load(at, mask=in_w, other=0.0), both, input_precision="ieee")
        g, u = tl.split(tl.reshape(both, [TILE_M, TILE_N, 2]))
    else:
        g = tl.zeros([TILE_M, TILE_N], tl.float32)
        u = tl.zeros([TILE_M, TILE_N], tl.float32)
        w_at += n[None, :] * STRIDE_N
        for first_k in range(0, HIDDEN, TILE_K):
            in_k = k < HIDDEN - first_k
            rows = tl.load(x_at + first_k, mask=inside[:, None] & in_k[None, :], other=0.0)
            in_w = in_k[:, None] & in_n[None, :]
            g_w = tl.load(gate + w_at + first_k * STRIDE_K, mask=in_w, other=0.0)
            u_w = tl.load(up + w_at + first_k * STRIDE_K, mask=in_w, other=0.0)
            g = tl.dot(rows, g_w, g, input_precision="ieee")
            u = tl.dot(rows, u_w, u, input_precision="ieee")

    if HAS_BIAS:
        bias_at = expert * bias_stride + n * BIAS_STRIDE_N
        g += tl.load(gate_bias + bias_at, mask=in_n, other=0.0).to(tl.float32)[None, :]
        u += tl.load(up_bias + bias_at, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "clamped":
        # Not tl.minimum, which drops NaN.
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        y = g * tl.sigmoid(alpha * g) * (u + 1.0)
    else:
        y = g * tl.sigmoid(g) * u
    at = inner + pair.to(tl.int64)[:, None] * INNER + n[None, :]
    tl.store(at, y.to(inner.dtype.element_ty), mask=inside[:, None] & in_n[None, :])


@triton.jit
def _down(
    made,  # [num_pairs, HIDDEN] float32
    inner,  # [num_pairs, INNER]
    down,  # [num_experts, HIDDEN, INNER], by strides
    down_bias,  # [num_experts, HIDDEN], by strides; None without HAS_BIAS
    weights,  # [num_pairs]
    order,
    starts,
    experts,
    expert_stride,
    bias_stride,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    BIAS_STRIDE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    expert, pair, inside, is_first = _find_tile(order, starts, experts, TILE_M)
    if not is_first:
        return
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    inner_at = inner + pair.to(tl.int64)[:, None] * INNER + k[None, :]
    w_at = expert * expert_stride + n[None, :] * STRIDE_N + k[:, None] * STRIDE_K
    in_n = n < HIDDEN

    y = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first_k in range(0, INNER, TILE_K):
        in_k = k < INNER - first_k
        rows = tl.load(inner_at + first_k, mask=inside[:, None] & in_k[None, :], other=0.0)
        w = tl.load(down + w_at + first_k * STRIDE_K, mask=in_k[:, None] & in_n[None, :], other=0.0)
        y = tl.dot(rows, w, y, input_precision="ieee")

    if HAS_BIAS:
        bias_at = expert * bias_stride + n * BIAS_STRIDE_N
        y += tl.load(down_bias + bias_at, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y *= tl.load(weights + pair, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = made + pair.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(at, y, mask=inside[:, None] & in_n[None, :])


@triton.jit
def _sum(
    out,  # [num_tokens, HIDDEN]
    made,  # [num_tokens, TOP_K, HIDDEN] float32
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    y = tl.zeros([TILE], tl.float32)
    for j in range(TOP_K):
        y += tl.load(made + (token * TOP_K + j) * HIDDEN + n, mask=n < HIDDEN, other=0.0)
    tl.store(out + token * HIDDEN + n, y.to(out.dtype.element_ty), mask=n < HIDDEN)


def run(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    expert: Expert,
    activation: str,
    alpha: float,
    limit: float,
) -> Tensor:
    """Allocate the intermediate results and launch the four kernels."""
    num_tokens, hidden_size = x.shape
    num_experts, inner_size, _ = expert.gate.shape
    top_k = experts.shape[1]
    num_pairs = num_tokens * top_k
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    inner = x.new_empty(num_pairs, inner_size)
    made = torch.empty(num_pairs, hidden_size, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)

    gate, up, down, gate_bias, up_bias, down_bias = expert
    tile_m = choose_tile_m(num_pairs, num_experts)
    sort, num_entries = make_sort(num_experts), max(num_pairs, num_experts + 1)
    sort((-(-num_entries // SORT_TILE), 1, 1), order, starts, experts, num_pairs)
    first = make_gate_up(
        x.dtype, hidden_size, inner_size, _are_aligned(x, gate, up), gate.stride(),
        _strides(gate_bias), up.data_ptr() == gate.data_ptr() + gate.element_size(), activation,
        tile_m,
    )  # fmt: skip
    first(
        (-(-inner_size // first.constants["TILE_N"]), num_pairs, 1),
        inner, x, gate, up, gate_bias, up_bias, order, starts, experts,
        gate.stride(0), _strides(gate_bias)[0], top_k, alpha, limit,
    )  # fmt: skip
    second = make_down(
        x.dtype, weights.dtype, hidden_size, inner_size, _are_aligned(down), down.stride(),
        _strides(down_bias), tile_m,
    )  # fmt: skip
    second(
        (-(-hidden_size // second.constants["TILE_N"]), num_pairs, 1),
        made, inner, down, down_bias, weights, order, starts, experts,
        down.stride(0), _strides(down_bias)[0],
    )  # fmt: skip
    last = make_sum(x.dtype, hidden_size, top_k)
    last((-(-hidden_size // SUM_TILE), num_tokens, 1), out, made)
    return out


def _are_aligned(*tensors: Tensor) -> tuple[bool, ...]:
    """Whether each tensor begins at a multiple of 16 bytes."""
    return tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _strides(bias: Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _pointer(dtype: torch.dtype, is_aligned: bool) -> str:
    return POINTERS[dtype] + ":16" * is_aligned


def choose_tile_m(num_pairs: int, num_experts: int) -> int:
    """Return about twice the mean number of pairs of an expert, so that most need one tile."""
    mean = num_pairs / num_experts
    return 16 if mean <= 8 else 32 if mean <= 24 else 64


def _tiles(dtype: torch.dtype, strides: tuple[int, ...], tile_m: int) -> dict[str, int]:
    """Rows and columns of a program's tile, and the step along K."""
    in_rows = strides[2] == 1
    is_large = tile_m > 16
    return {
        "TILE_M": tile_m,
        "TILE_N": 32 if in_rows and not is_large else 64,
        "TILE_K": (256 if in_rows and not is_large else 128) // dtype.itemsize,
    }


def _stride_type(stride: int) -> str:
    return "i64:16" if stride % 16 == 0 else "i64"


_INDICES = {"order": "*i32:16", "starts": "*i32:16", "experts": "*i64"}


@functools.lru_cache(maxsize=64)
def make_sort(num_experts: int) -> Launcher:
    """The launcher of ``_sort``."""
    types = {**_INDICES, "num_pairs": "i32"}
    return Launcher(_sort, types, {"NUM_EXPERTS": num_experts, "TILE": SORT_TILE}, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_gate_up(
    dtype: torch.dtype,
    hidden_size: int,
    inner_size: int,
    are_aligned: tuple[bool, ...],
    strides: tuple[int, ...],
    bias_strides: tuple[int, int],
    are_neighbours: bool,
    activation: str,
    tile_m: int,
) -> Launcher:
    """The launcher of ``_gate_up`` for experts whose weights have these strides.

    ``bias_strides`` are ``(0, 0)`` without biases. ``are_neighbours``: ``up`` begins one element
    after ``gate``.
    """
    x, gate, up = (_pointer(dtype, is_aligned) for is_aligned in are_aligned)
    types = {
        "inner": _pointer(dtype, True), "x": x, "gate": gate, "up": up,
        "gate_bias": POINTERS[dtype], "up_bias": POINTERS[dtype], **_INDICES,
        "expert_stride": _stride_type(strides[0]), "bias_stride": "i64",
        "top_k": "i32", "alpha": "fp32", "limit": "fp32",
    }  # fmt: skip
    constants = {
        "HIDDEN": hidden_size, "INNER": inner_size, "STRIDE_N": strides[1], "STRIDE_K": strides[2],
        "BIAS_STRIDE_N": bias_strides[1], "HAS_BIAS": bias_strides != (0, 0),
        "INTERLEAVED": are_neighbours and strides[1] == 2, "ACTIVATION": activation,
        **_tiles(dtype, strides, tile_m),
    }  # fmt: skip
    return Launcher(_gate_up, types, constants, num_warps=4, num_stages=3)


@functools.lru_cache(maxsize=256)
def make_down(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    hidden_size: int,
    inner_size: int,
    are_aligned: tuple[bool, ...],
    strides: tuple[int, ...],
    bias_strides: tuple[int, int],
    tile_m: int,
) -> Launcher:
    """The launcher of ``_down``; arguments as of ``make_gate_up``."""
    types = {
        "made": "*fp32:16", "inner": _pointer(dtype, True), "down": _pointer(dtype, *are_aligned),
        "down_bias": POINTERS[dtype], "weights": POINTERS[weight_dtype], **_INDICES,
        "expert_stride": _stride_type(strides[0]), "bias_stride": "i64",
    }  # fmt: skip
    constants = {
        "HIDDEN": hidden_size, "INNER": inner_size, "STRIDE_N": strides[1], "STRIDE_K": strides[2],
        "BIAS_STRIDE_N": bias_strides[1], "HAS_BIAS": bias_strides != (0, 0),
        **_tiles(dtype, strides, tile_m),
    }  # fmt: skip
    return Launcher(_down, types, constants, num_warps=4, num_stages=4)


@functools.lru_cache(maxsize=256)
def make_sum(dtype: torch.dtype, hidden_size: int, top_k: int) -> Launcher:
    """The launcher of ``_sum``."""
    types = {"out": _pointer(dtype, True), "made": "*fp32:16"}
    constants = {"HIDDEN": hidden_size, "TOP_K": top_k, "TILE": SUM_TILE}
    return Launcher(_sum, types, constants, num_warps=4)
