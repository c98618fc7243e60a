"""Launch the forward kernel: validation, descriptors, grid and scratch memory."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...device import DeviceInfo
from ..triton.launch import POINTERS, as_floats, is_aligned, window_of
from ..triton.launch import refuse as refuse_triton
from ..triton.workspace import borrow, borrow_counter
from .dividing import MOST_DRAWN_SEQS, SLOTS, pack_of, tokens_of
from .forward import forward_kernel
from .gluon_launcher import Described, GluonLauncher, align
from .tiling import PACKED_FORMATS, TILINGS, UNIT, ForwardConfig, width_of

_Lent = TypeVar("_Lent")

_LOG2_E = 1 / math.log(2)
_ROWS = _COLUMNS = 64  # rows of a warpgroup, columns of an atom

_STRIDES = tuple(f"{cache}_{which}" for cache in "kv" for which in ("block", "slot", "head"))
_SCALES = ("k_scale", "v_scale")
_SCALE_STRIDES = tuple(f"{cache}s_{which}" for cache in "kv" for which in ("block", "slot", "head"))
_SCRATCH = {"accs": "*fp32:16", "sums": "*fp32:16", "arrivals": "*i32"}
_OPTIONAL = (*_STRIDES, *_SCALES, *_SCALE_STRIDES, *_SCRATCH)
"""The kernel's last parameters before its constants."""


def refuse_device(device: DeviceInfo) -> str | None:
    """Return why kernels for Hopper cannot run on a device, or None if they can."""
    reason = refuse_triton(device)
    if reason is None and device.capability != (9, 0):
        reason = f"{device.name or device.kind} is not a Hopper GPU"
    return reason


def refuse(device: DeviceInfo, dtype: torch.dtype, head_size: int, v_head_size: int) -> str | None:
    """Return why the forward kernel cannot run, or None if it can."""
    reason = refuse_device(device)
    if reason is not None:
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return f"q is {str(dtype).removeprefix('torch.')}; float16 and bfloat16 run"
    for name, size in {"head_size": head_size, "v_head_size": v_head_size}.items():
        if size % 8 or size > TILINGS[-1].width:
            return f"{name} is {size}; multiples of 8 up to {TILINGS[-1].width} run"
    return None


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
    softmax_scale: float,
    causal: bool,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    short: int = 0,
    lists: Tensor | None = None,
    splits: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    is_unpacked: bool = False,
) -> None:
    """Fill ``out`` and ``lse``.

    Args:
        out: ``[num_tokens, num_heads, v_head_size]``, last dimension contiguous, here and below.
        lse: ``[num_tokens, num_heads]`` float32, contiguous.
        q: ``[num_tokens, num_heads, head_size]``.
        k: ``[num_blocks, block_size, num_kv_heads, head_size]``, every row beginning at a
            multiple of 16 bytes; of ``q``'s type, or of 8 bits. Or, without ``block_tables``,
            ragged ``[num_keys, num_kv_heads, head_size]``, any rows.
        v: As ``k``, of ``v_head_size``; of float16 where both are unpacked.
        cu_seqlens_q: int32 ``[num_seqs + 1]``.
        lengths: int32 ``[num_seqs]``, keys of each sequence; of ragged ones ``cu_seqlens_k``,
            int32 ``[num_seqs + 1]``.
        block_tables: int32 ``[num_seqs, max_blocks_per_seq]``.
        max_query_len: Upper bound of a sequence's queries.
        softmax_scale: Multiplies ``q · k``.
        causal: Whether a query sees only keys at or before its own.
        sliding_window: How many keys a query sees; ``None``: all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``; ``None``: no cap.
        alibi_slopes: ``[num_heads]``, floating, or ``None``; multiplies the distance of a key.
        sinks: ``[num_heads]``, floating, or ``None``: one more logit in each head's softmax.
        short: Sequences with up to this many queries are left to another launch.
        lists: The tiles to visit, as ``schedule.TileLists`` says; ``None``: all that are visible.
            For ragged keys of sequences of one length, whose tiles have
            ``64 * tiling.warpgroups`` queries and ``tiling.tile_n`` keys.
        splits: Whether programs may share a tile's keys (``dividing.divides_keys``): of paged keys.
        k_scale: float32 ``[num_kv_heads]`` or ``[num_blocks, block_size, num_kv_heads]``, any
            strides, where ``k`` is of 8 bits; ``[num_kv_heads]`` where it is unpacked.
        v_scale: Like ``k_scale``.
        is_unpacked: Whether the previous launch unpacks ``k`` and ``v`` from 8 bits. That one must
            wait for all launches before it; this one starts as soon as it has, and waits for it.
    """
    if not q.numel():
        return
    if not k.numel():
        out.zero_()
        lse.copy_(lse.new_tensor(-math.inf) if sinks is None else sinks)
        return
    if softmax_scale <= 0:  # the kernel takes the maximum of unscaled products
        q, softmax_scale = (-q, -softmax_scale) if softmax_scale < 0 else (q * 0, 1.0)
    q, written = align(q), align(out)  # keeps the short sequences' results of another launch
    if block_tables is None:
        k, v = k[None], v[None]
    num_heads, group = q.shape[1], q.shape[1] // k.shape[2]
    num_seqs = cu_seqlens_q.shape[0] - 1
    is_uniform = not splits and q.shape[0] == num_seqs * max_query_len
    config = ForwardConfig(
        dtype=q.dtype,
        head_size=q.shape[2],
        block_size=k.shape[1] if block_tables is not None else 0,
        causal=causal,
        has_window=sliding_window is not None,
        uniform=is_uniform,
        pack=1,
        v_head_size=None if v.shape[-1] == q.shape[2] else v.shape[-1],
        is_sparse=lists is not None,
        has_cap=logits_soft_cap is not None,
        has_alibi=alibi_slopes is not None,
        has_sinks=sinks is not None,
        splits=splits,
        packed=PACKED_FORMATS.get(k.dtype, "none"),
        has_token_scales=k_scale is not None and k_scale.dim() == 3,
        is_unpacked=is_unpacked,
    )
    if lists is None:
        pack = pack_of(group, max_query_len, config.tiling)
        config = dataclasses.replace(config, pack=pack)
    if block_tables is not None and (_is_far(config, k, v) or _are_far(k_scale, v_scale)):
        config = dataclasses.replace(config, is_far=True)
    num_programs = DeviceInfo.of(q.device).num_workers
    tiles, seq_tiles = _count_tiles(config, q, num_seqs, max_query_len)
    sources, block_rows, strides = (_gathered if config.gathers else _boxed)(k, v, config)
    # With splits, whole waves of tiles are drawn from the counter: see ``splits.LastWave``.
    # Warps that convert 8-bit rows have no registers left to find the longest sequence.
    can_draw = 2 * tiles >= 3 * num_programs if splits else config.packed == "none"
    if can_draw and not is_uniform and num_seqs <= MOST_DRAWN_SEQS:
        config = dataclasses.replace(config, few_seqs=True)
    scratch = _borrow(config, q) if splits else ()
    # Decode, which may overlap with this launch, has other counters.
    drawn = _on_its_device(q, borrow_counter) if splits or config.draws else lengths
    scales: tuple[Any, ...] = ()
    if k_scale is not None and v_scale is not None:
        scales = k_scale, v_scale, *_scale_strides(k_scale), *_scale_strides(v_scale)
    make_launcher(config)(
        (num_programs if splits else min(num_programs, tiles), 1, 1),
        written,
        written,
        lse,
        q,
        *sources,
        as_floats(alibi_slopes),
        as_floats(sinks),
        cu_seqlens_q,
        lengths,
        lengths if block_tables is None else block_tables,
        lengths if lists is None else lists,
        drawn,
        num_seqs,
        block_rows,
        num_heads,
        group,
        tiles,
        seq_tiles,
        short,
        window_of(sliding_window),
        (softmax_scale if logits_soft_cap is None else logits_soft_cap) * _LOG2_E,
        0.0 if logits_soft_cap is None else softmax_scale / logits_soft_cap,
        *((0, 0, 0) if lists is None else _list_strides(lists)),
        0 if block_tables is None else block_tables.stride(0),
        written.stride(0),
        written.stride(1),
        *(strides or (0,) * 6 if splits or scales else strides),
        *(scales or (None, None, *(0,) * 6) if splits else scales),
        *scratch,
    )
    if written is not out:
        out.copy_(written)


def _scale_strides(scale: Tensor) -> tuple[int, ...]:
    """Return strides of blocks, slots and heads; 0 where all have the same scale."""
    return (0, 0, *scale.stride())[-3:]


def _list_strides(lists: Tensor) -> tuple[int, int, int]:
    """Return a record's size, and strides of sequences and heads in records; 0: shared by all."""
    num_seqs, num_heads, tiles, pitch = lists.shape
    assert lists.is_contiguous()
    return pitch, num_heads * tiles if num_seqs > 1 else 0, tiles if num_heads > 1 else 0


def _borrow(config: ForwardConfig, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scratch for partial results: see ``splits.SplitSchedule``."""
    places = SLOTS * config.tiling.warpgroups
    rows = places * _ROWS
    sizes = rows * width_of(config.sizes[1]), 2 * rows, places
    return _on_its_device(q, lambda device: borrow(device, sizes))


def _on_its_device(q: Tensor, lend: Callable[[int], _Lent]) -> _Lent:
    """Call ``lend`` with a tensor's device as the current one."""
    device = q.get_device()
    if device < 0 or device == torch.cuda.current_device():
        return lend(device)
    with torch.cuda.device(device):
        return lend(device)


def _count_tiles(
    config: ForwardConfig, q: Tensor, num_seqs: int, max_query_len: int
) -> tuple[int, int]:
    """Return upper bounds of all tiles, and of a sequence's (of all, if lengths are unequal)."""
    tokens = tokens_of(config.tiling, config.pack)
    heads = q.shape[1] // config.pack
    if config.uniform:
        seq_tiles = -(-max_query_len // tokens)
        return num_seqs * heads * seq_tiles, seq_tiles
    seq_tiles = q.shape[0] // tokens + num_seqs
    return seq_tiles * heads, seq_tiles


_Sources = tuple[tuple[Any, Any], int, tuple[int, ...]]
"""Keys and values, the distance of blocks in rows or groups of rows, and strides."""


def _boxed(k: Tensor, v: Tensor, config: ForwardConfig) -> _Sources:
    """Return keys and values as TMA descriptors."""
    k, v = _line_up(k, v)
    # With a single block the stride has no meaning.
    block_rows = k.stride(0) // k.stride(1) if k.shape[0] > 1 else k.shape[1]
    num_rows = (k.shape[0] - 1) * block_rows + k.shape[1]
    sources = _describe(k, num_rows, config), _describe(v, num_rows, config)
    return sources, block_rows // UNIT if config.has_atoms else block_rows, ()


def _gathered(k: Tensor, v: Tensor, config: ForwardConfig) -> _Sources:
    """Return keys and values whose rows are gathered one by one."""
    assert all(map(is_aligned, (k, v))), "every row begins at a multiple of 16 bytes"
    unit = 16 // k.element_size()
    units = (stride // unit for x in (k, v) for stride in x.stride()[:3])
    # 32-bit offsets and strides may wrap around.
    return (k, v), 0, tuple(n if config.is_far else ctypes.c_int32(n).value for n in units)


def _is_far(config: ForwardConfig, *caches: Tensor) -> bool:
    """Return whether 32 bits do not count the rows of boxes, or 16-byte units between other rows.

    Of caches whose heads come before their slots, a descriptor's rows are those of all heads.
    """
    if not config.gathers:
        return any(x.shape[0] * (x.stride(0) // max(1, x.stride(1))) >= 1 << 31 for x in caches)
    return _reach(*caches) >= 16 // caches[0].element_size() << 32


def _are_far(*scales: Tensor | None) -> bool:
    """Return whether 32 bits do not count the scales of tokens, or what lies between them."""
    return any(x is not None and x.dim() == 3 and _reach(x) >= 1 << 31 for x in scales)


def _reach(*tensors: Tensor) -> int:
    """Return the largest offset of a row of a cache or of a token's scale."""
    return max(
        sum((n - 1) * stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
        for x in tensors
    )


def _line_up(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cache whose blocks are a multiple of eight rows apart, as descriptors need.

    All usual caches are, also with keys and values interleaved in one tensor; a cache with
    dimensions in another order is copied.
    """
    k, v = align(k), align(v)
    if k.shape[0] > 1:
        strides = [(x.stride(0), x.stride(1)) for x in (k, v)]
        is_line = all(
            block % (8 * row) == 0 and block >= k.shape[1] * row for block, row in strides
        )
        if not is_line or len({block // row for block, row in strides}) > 1:
            k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
    return k, v


def _describe(x: Tensor, num_rows: int, config: ForwardConfig) -> Described:
    """Describe keys or values ``[num_blocks, block_size, num_kv_heads, head_size]`` in boxes."""
    _, row, head, _ = x.stride()
    size = x.shape[3]
    chunks, columns = (size // _COLUMNS, _COLUMNS) if config.chunks(size) > 1 else (1, size)
    if config.has_atoms:
        shape = [x.shape[2], num_rows // 8, chunks, 8, columns]
        strides = [head, 8 * row, _COLUMNS, row, 1]
    else:
        shape = [x.shape[2], chunks, num_rows, columns]
        strides = [head, _COLUMNS, row, 1]
    return Described(x, shape, strides)


@functools.cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 16, rank=rank)


@functools.cache
def make_launcher(config: ForwardConfig) -> GluonLauncher:
    """Return the launcher of the forward kernel for one configuration."""
    types = _list_types(config)
    # Parameters that a configuration does not read are constants, which come last.
    unread = dict.fromkeys((name for name in _OPTIONAL if name not in types), 0)
    options = {"launch_pdl": True} if config.is_unpacked else {}
    box = [_ROWS // config.pack, config.pack, _COLUMNS]
    boxes = {name: box for name in types if types[name] == types["q_desc"]}
    constants = unread | _list_constants(config)
    return GluonLauncher(forward_kernel, types, constants, boxes=boxes, num_warps=4, **options)


def _list_types(config: ForwardConfig) -> dict[str, str]:
    """Return the types of the parameters that the kernel reads, in its order."""
    name = POINTERS[config.dtype][1:]
    # Triton's types need powers of two. A box of fewer rows fills the first rows of such a type.
    is_power = _ROWS % config.pack == 0
    box = [_ROWS // config.pack, config.pack, _COLUMNS] if is_power else [_ROWS, 1, _COLUMNS]
    rows = f"tensordesc<{name}{box},{_layout(3)!r}>"
    k_source, v_source = _list_source_types(config, name)
    types = {
        "out": f"*{name}:16",
        "out_desc": rows if config.staged else f"*{name}:16",
        "lse": "*fp32",
        "q_desc": rows,
        "k": k_source,
        "v": v_source,
        "slopes": "*fp32",
        "sinks": "*fp32",
        "cu_seqlens_q": "*i32",
        "lengths": "*i32",
        "block_tables": "*i32",
        "lists": "*i32",
        "drawn": "*i32",
    }
    scalars = "num_seqs block_rows num_heads group num_tiles seq_tiles short window"
    types |= dict.fromkeys(scalars.split(), "i32")
    types |= {"scale": "fp32", "inner": "fp32"}
    types |= dict.fromkeys(("list_pitch", "list_seq", "list_head", "table_stride"), "i32")
    types |= {"token_stride": "i64:8", "head_stride": "i64:8"}
    stride = "i64" if config.is_far else "i32"
    takes_scales = _has_scales(config) or config.splits
    if config.gathers or takes_scales:
        types |= dict.fromkeys(_STRIDES, stride)
    if takes_scales:
        types |= dict.fromkeys(_SCALES, "*fp32")
        types |= dict.fromkeys(_SCALE_STRIDES, stride if config.has_token_scales else "i32")
    if config.splits:
        types |= _SCRATCH
    return types


def _list_source_types(config: ForwardConfig, name: str) -> list[str]:
    """Return the types of keys and values: pointers, or descriptors of boxes."""
    if config.gathers:
        element = "i32" if config.packed != "none" else name  # words of four 8-bit values
        return [f"*{element}:16"] * 2
    names = name, "fp16" if config.is_unpacked else name
    return [
        f"tensordesc<{kind}{boxes},{_layout(len(boxes))!r}>"
        for kind, boxes in zip(names, map(config.boxes, config.sizes), strict=True)
    ]


def _has_scales(config: ForwardConfig) -> bool:
    return config.packed != "none" or config.is_unpacked


def _list_constants(config: ForwardConfig) -> dict[str, Any]:
    """Return the kernel's constants, in its order."""
    tiling = config.tiling
    return {
        "HEAD_SIZE": config.head_size,
        "V_SIZE": config.sizes[1],
        "BLOCK_SIZE": config.block_size,
        "CAUSAL": config.causal,
        "HAS_WINDOW": config.has_window,
        "HAS_CAP": config.has_cap,
        "HAS_ALIBI": config.has_alibi,
        "HAS_SINKS": config.has_sinks,
        "UNIFORM": config.uniform,
        "WIDTH": _COLUMNS if config.key_tiles > 1 else width_of(config.head_size),
        "V_WIDTH": width_of(config.sizes[1]),
        "KEY_TILES": config.key_tiles,
        "PACK": config.pack,
        "BOX": config.box,
        "ATOMS": config.has_atoms,
        "GATHER": config.gathers,
        "TILE_N": tiling.tile_n,
        "WARPGROUPS": tiling.warpgroups,
        "Q_STAGES": tiling.q_stages,
        "STAGES": tiling.stages,
        "STAGED": config.staged,
        "PINGPONG": tiling.pingpong,
        "REGISTERS": tiling.registers,
        "SPARSE": config.is_sparse,
        "SPLITS": config.splits,
        "DRAWS": config.draws,
        "EARLY": tiling.q_stages == 1,
        "HOLDS_Q": tiling.holds_queries,
        "PACKED": config.packed,
        "SCALES": "token" if config.has_token_scales else "head" if _has_scales(config) else "none",
        "WAITS": config.is_unpacked,
    }
