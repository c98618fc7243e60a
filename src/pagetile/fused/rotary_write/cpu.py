"""Head norms, rotary embedding and cache write on a CPU, in one pass over the heads of a token.

::

    row of qkv   [ q heads | k heads | v heads ]
    q head       norm, rotate     -> q_out[token, head]
    k head       norm, rotate     -> k_cache[slot]
    v head                        -> v_cache[slot]

Keys and values for a cache of another type go to memory of their own, and ``write_kv`` rounds them.
"""

from __future__ import annotations

import functools
from collections import namedtuple

import numpy as np
import torch
from torch import Tensor

from ...device import DeviceInfo
from ...ops.write_kv import write_kv
from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry, inner
from ...tiles.cpu.norms import KINDS, NONE, normalise
from ...tiles.cpu.simd import add, array_at, load_first, mul, store_first, sub, take_number
from ...tiles.cpu.threads import no_scratch, on_team, run_together
from ..rows import MOST_ROWS
from . import reference
from .problem import Heads, Problem

_SMALL = 1 << 15
"""Elements that take as long as waking another thread."""

_Call = namedtuple(
    "_Call",
    "q k v x cos sin slots q_weight q_eps q_kind k_weight k_eps k_kind num_tokens num_heads "
    "num_kv_heads size v_size half apart block_size x_stride cos_stride sin_stride k_strides "
    "v_strides counter",
)
"""``half``: elements of ``first``, 0 without angles. ``apart``: from its angles to ``second``'s."""


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = problem.rows.refuse(MOST_ROWS, "the last dimension of a tensor is not contiguous")
    return reason or refuse(device, qkv=problem.rows.dtype)


def run(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: Heads,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """The queries."""
    k, v, slots, num_tokens = k_cache, v_cache, slot_mapping, len(qkv)
    is_direct = k_cache.dtype == qkv.dtype and k_scale is None and v_scale is None
    if not is_direct:
        k, v = (qkv.new_empty(1, num_tokens, *cache.shape[2:]) for cache in (k_cache, v_cache))
        slots = torch.arange(num_tokens, dtype=torch.int64, device=qkv.device)
    q = qkv.new_empty(num_tokens, heads.num_heads, heads.head_size)
    norms = heads.q_norm, heads.k_norm
    kinds = tuple(NONE if norm is None else KINDS[norm.kind] for norm in norms)
    angles = None if cos is None or sin is None else (cos.shape[2], cos.stride(1), sin.stride(1))
    like, sizes = _describe(
        qkv.dtype, num_tokens, qkv.stride(0), heads[:4], heads.is_shared, angles, kinds,
        k.shape[:2], k.stride(), v.stride(),
    )  # fmt: skip
    counter = np.zeros(2, np.int64)
    run_together(
        _rotate_and_write, DeviceInfo.of(qkv.device).num_workers if qkv.numel() > _SMALL else 1,
        *(0 if t is None else t.data_ptr() for t in (q, k, v, qkv, cos, sin, slots)),
        *(0 if norm is None else norm.weight.data_ptr() for norm in norms),
        *(0.0 if norm is None else norm.eps for norm in norms),
        like, sizes, counter,
    )  # fmt: skip
    if counter[1]:  # a slot lies outside the cache: raises the error
        reference.run(qkv, cos, sin, heads, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if not is_direct:
        write_kv(k[0], v[0], k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q


@functools.lru_cache(maxsize=4096)
def _describe(
    dtype: torch.dtype,
    num_tokens: int,
    x_stride: int,
    heads: tuple[int, ...],
    is_shared: bool,
    angles: tuple[int, int, int] | None,
    kinds: tuple[int, ...],
    blocks: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Return an empty array of the type of ``qkv``, and the sizes."""
    width, *angle_strides = angles or (0, 0, 0)
    half = width if is_shared else width // 2
    sizes = [num_tokens, *heads, half, 0 if is_shared else half, *blocks, x_stride, *angle_strides,
             *k_strides[:3], *v_strides[:3], *kinds]  # fmt: skip
    return flat(torch.empty(0, dtype=dtype, device="cpu")), np.array(sizes, np.int64)


@entry()
def _rotate_and_write(
    parallel, num_threads, q, k, v, x, cos, sin, slots, q_weight, k_weight, q_eps, k_eps, like,
    sizes, counter,
):  # fmt: skip
    """Tensors are passed as addresses, with ``like``'s type: arrays take longer to pass.

    If a slot lies outside the cache, nothing is written but ``counter[1]``.
    """
    n = sizes
    call = _Call(
        array_at(q, like.dtype), array_at(k, like.dtype), array_at(v, like.dtype),
        array_at(x, like.dtype), array_at(cos, like.dtype), array_at(sin, like.dtype),
        array_at(slots, sizes.dtype),
        array_at(q_weight, like.dtype), q_eps, n[18], array_at(k_weight, like.dtype), k_eps, n[19],
        n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[8], n[9], n[10], n[11],
        (n[12], n[13], n[14]), (n[15], n[16], n[17]), counter,
    )  # fmt: skip
    for token in range(call.num_tokens):
        if not -1 <= call.slots[token] < n[7] * n[8]:
            counter[1] = 1
            return
    on_team(parallel, num_threads, no_scratch, _take_tokens, (call,))


@inner()
def _take_tokens(call, scratch):
    """Compute tokens until all are taken."""
    size, v_size = call.size, call.v_size
    while True:
        token = take_number(call.counter)
        if token >= call.num_tokens:
            return
        at = token * call.x_stride
        for head in range(token * call.num_heads, (token + 1) * call.num_heads):
            _rotate(call, token, call.q, head * size, at, call.q_weight, call.q_eps, call.q_kind)
            at += size
        slot = call.slots[token]
        if slot < 0:
            continue
        block, offset = slot // call.block_size, slot % call.block_size
        to = block * call.k_strides[0] + offset * call.k_strides[1]
        for _ in range(call.num_kv_heads):
            _rotate(call, token, call.k, to, at, call.k_weight, call.k_eps, call.k_kind)
            at, to = at + size, to + call.k_strides[2]
        to = block * call.v_strides[0] + offset * call.v_strides[1]
        for _ in range(call.num_kv_heads):
            _copy(call.v, to, call.x, at, v_size)
            at, to = at + v_size, to + call.v_strides[2]


@inner()
def _rotate(call, token, out, to, at, weight, eps, kind):
    """Norm and rotate the head at ``x[at]``."""
    x, half = call.x, call.half
    cos, sin = token * call.cos_stride, token * call.sin_stride
    if kind != NONE:
        normalise(out, to, x, at, weight, call.size, eps, kind)
        x, at = out, to
    for d in range(0, half, 16):
        n = half - d
        first, second = load_first(x, at + d, n), load_first(x, at + half + d, n)
        c, s = load_first(call.cos, cos + d, n), load_first(call.sin, sin + d, n)
        store_first(out, to + d, sub(mul(first, c), mul(second, s)), n)
        c = load_first(call.cos, cos + call.apart + d, n)
        s = load_first(call.sin, sin + call.apart + d, n)
        store_first(out, to + half + d, add(mul(second, c), mul(first, s)), n)
    if kind == NONE:
        _copy(out, to + 2 * half, x, at + 2 * half, call.size - 2 * half)


@inner()
def _copy(out, to, x, at, size):
    for d in range(0, size, 16):
        store_first(out, to + d, load_first(x, at + d, size - d), size - d)
