"""Attention backward on Hopper: what it supports, and the launches. See ``hopper_gradients``.

Supports float16 and bfloat16, dense batches, head sizes to 256 in steps of 8 (equal for values),
any group, causal or not, sliding windows, gradients of ``lse``. Everything else is for Triton's
kernels, and so are gradients that have to have the same bits on every run.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...device import DeviceInfo
from ...tiles.hopper.gluon_launcher import Described, GluonLauncher, align
from ...tiles.hopper.launch import refuse
from ...tiles.triton.launch import POINTERS, Launcher, window_of
from .hopper_gradients import finish_kernel, gradients_kernel
from .problem import Lengths, Options, Problem
from .triton_backward import prepare

_LOG2_E = 1 / math.log(2)
_ROWS = 64  # keys of a warpgroup


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    """Why this cannot run, or None if it can."""
    reason = refuse(device, problem.dtype, problem.head_size, problem.v_head_size)
    if reason is not None:
        return reason
    if problem.head_size != problem.v_head_size:
        sizes = f"head_size is {problem.head_size} and v_head_size {problem.v_head_size}"
        return f"{sizes}; equal sizes run"
    if problem.is_ragged:
        return "the batch is ragged; dense ones run"
    if problem.has_score_mods:
        return "scores are capped or biased; plain ones run"
    if problem.is_block_sparse:
        return "there is a block mask; dense ones run"
    if not problem.num_tokens or not problem.max_seq_len:
        return "there are no queries or no keys"
    return None


def run_backward(
    problem: Problem,
    d_out: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Three launches: delta and lse2, all gradients, and rounding of dQ.

    They allocate dQ in float32.
    """
    p = problem
    d_q, d_k, d_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    q, k, v, d_out = (align(t) for t in (q, k, v, d_out))
    has_window = options.sliding_window is not None
    has_end = not options.causal and p.max_seq_len % keys_of(p.head_size) != 0
    launch = make_launcher(p.dtype, p.head_size, p.group, options.causal, has_window, has_end)
    width, tile_m = launch.constants["WIDTH"], launch.constants["TILE_M"]
    pitch = -(-p.max_query_len // tile_m) * tile_m
    delta, lse2 = prepare(p, pitch, out, d_out, lse, d_lse)
    sums = torch.zeros(
        (p.num_heads, p.num_seqs, pitch, width), dtype=torch.float32, device=q.device
    )
    tiles = -(-p.max_seq_len // launch.constants["KEYS"])
    launch(
        (tiles * p.num_kv_heads * p.num_seqs, 1, 1),
        sums, d_k, d_v,
        *(_describe(t) for t in (k, v, q, d_out)), _in_a_row(lse2), _in_a_row(delta),
        p.num_seqs, p.num_kv_heads, p.max_query_len, pitch, p.max_seq_len, tiles,
        _section(tiles, DeviceInfo.of(q.device)),
        window_of(options.sliding_window),
        options.softmax_scale * _LOG2_E, options.softmax_scale,
    )  # fmt: skip
    finish = make_finish(p.dtype, p.head_size, width)
    finish(
        (-(-p.max_query_len // finish.constants["TILE_M"]) * p.num_heads * p.num_seqs, 1, 1),
        d_q, sums, p.num_seqs, p.num_heads, p.max_query_len, pitch, options.softmax_scale,
    )  # fmt: skip
    return d_q, d_k, d_v


def keys_of(head_size: int) -> int:
    """Keys of a program."""
    return 128 if head_size <= 128 else 64


def _section(tiles: int, device: DeviceInfo) -> int:
    """Pairs of sequence and KV head whose tiles of keys are neighbours in the grid.

    Enough to give every multiprocessor two tiles: then the long ones of a causal batch start
    together, and their queries and ``dQ`` stay in L2.
    """
    return max(1, round(2 * device.num_workers / tiles))


def _describe(x: Tensor) -> Described:
    """``[num_seqs, length, heads, head_size]``, heads before rows."""
    seq, token, head, _ = x.stride()
    num_seqs, length, heads, size = x.shape
    return Described(x, (num_seqs, heads, length, size), (seq, head, token, 1))


def _in_a_row(x: Tensor) -> Described:
    return Described(x, (1, x.numel()), (x.numel(), 1))


@functools.lru_cache(maxsize=256)
def make_launcher(
    dtype: torch.dtype, head_size: int, group: int, causal: bool, has_window: bool, has_end: bool
) -> GluonLauncher:
    """The launcher of ``gradients_kernel``."""
    name = POINTERS[dtype][1:]
    width = 64 if head_size <= 64 else 128 if head_size <= 128 else 256
    tile_m = max(64, 64 * 128 // width)
    keys, queries, numbers = _box(name, _ROWS, width), _box(name, tile_m, width), [1, tile_m]
    types = {"d_q": "*fp32:16", "d_k": f"*{name}:16", "d_v": f"*{name}:16"}
    types |= {"k_desc": keys, "v_desc": keys, "q_desc": queries, "d_out_desc": queries}
    types |= dict.fromkeys(("lse2_desc", "delta_desc"), f"tensordesc<fp32{numbers},{_NUMBERS!r}>")
    scalars = "num_seqs num_kv_heads query_len pitch seq_len key_tiles section window"
    types |= dict.fromkeys(scalars.split(), "i32")
    types |= {"scale": "fp32", "softmax_scale": "fp32"}
    constants = {
        "HEAD_SIZE": head_size,
        "WIDTH": width,
        "KEYS": keys_of(head_size),
        "TILE_M": tile_m,
        "GROUP": group,
        "CAUSAL": causal,
        "HAS_WINDOW": has_window,
        "HAS_END": has_end,
        "STAGES": 2,
        "REGISTERS": 240,
        "LOADING": 24,
    }
    return GluonLauncher(gradients_kernel, types, constants, num_warps=4)


@functools.lru_cache(maxsize=256)
def make_finish(dtype: torch.dtype, head_size: int, width: int) -> Launcher:
    """The launcher of ``finish_kernel``."""
    types = {"d_q": f"{POINTERS[dtype]}:16", "sums": "*fp32:16"}
    types |= dict.fromkeys(("num_seqs", "num_heads", "query_len", "pitch"), "i32")
    types |= {"softmax_scale": "fp32"}
    constants = {"HEAD_SIZE": head_size, "WIDTH": width, "TILE_M": 64}
    return Launcher(finish_kernel, types, constants, num_warps=8)


def _box(name: str, rows: int, width: int) -> str:
    return f"tensordesc<{name}{[1, 1, rows, width]},{_TOKENS!r}>"


_TOKENS = gl.NVMMASharedLayout(128, 16, rank=4)
_NUMBERS = gl.NVMMASharedLayout(0, 32, rank=2)
