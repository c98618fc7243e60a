"""A swept shape's tensors, its expected result, and the libraries that compute the same."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pagetile import PagedBatch, attention, paged_attention
from pagetile.analysis.timing import admit
from pagetile.tiles.state import AttentionOutput

from .gate import PEER_ERROR, Rows, expected_rows
from .gpu_inputs import Shape
from .libraries import COMPILED_WHEN_PLANNED, find_libraries
from .sweep_shapes import SweepShape

_SCALE = 0.02


class SweepInputs:
    """Random numbers in a paged cache (blocks in random order) and the same numbers dense.

    The attributes are those that ``libraries`` reads from its inputs.

    Args:
        shape: Lengths, sizes and types.
        device: ``"cpu"`` or ``"cuda"``.
        seed: Seed of the numbers.
        pages: Pages of the cache, if not one for each block: blocks share them, which runs the same
            kernels with little memory.
    """

    causal = True

    def __init__(
        self, shape: SweepShape, device: str, seed: int = 0, pages: int | None = None
    ) -> None:
        self.sweep, self.pages = shape, pages
        self.device, self.is_8_bit = device, shape.kv_dtype.itemsize == 1
        block_size = shape.block_size or 16
        generator = torch.Generator(device).manual_seed(seed)
        counts = [-(-length // block_size) for length in shape.seq_lens]
        num_blocks = pages or sum(counts) + 1
        dtype = torch.bfloat16 if self.is_8_bit else shape.kv_dtype

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

        self.q = draw(sum(shape.query_lens), shape.num_heads, shape.head_size)
        kept = (num_blocks, block_size, shape.num_kv_heads)
        self.k_cache, self.v_cache = (
            draw(*kept, size) for size in (shape.head_size, shape.v_head_size)
        )
        self.scales: dict[str, Any] = {}
        if self.is_8_bit:
            self.k_cache, self.v_cache = (
                (cache * 30).to(shape.kv_dtype) for cache in (self.k_cache, self.v_cache)
            )
            one = torch.full((shape.num_kv_heads,), _SCALE, device=device)
            self.scales = {"k_scale": one, "v_scale": one}
        order = torch.randperm(num_blocks, generator=generator, device=device).int()
        order = order.repeat(-(-sum(counts) // num_blocks))
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
        starts = [0, *itertools.accumulate(counts)]
        for seq, count in enumerate(counts):
            self.tables[seq, :count] = order[starts[seq] : starts[seq + 1]]
        lengths = torch.tensor(shape.seq_lens, dtype=torch.int32, device=device)
        queries = torch.tensor([0, *itertools.accumulate(shape.query_lens)], dtype=torch.int32)
        self.batch = PagedBatch(
            self.tables, lengths, queries.to(device), max(shape.query_lens), max(shape.seq_lens)
        )
        self.shape = Shape(
            shape.num_heads, shape.num_kv_heads, shape.head_size, block_size, shape.kv_dtype,
            "head" if self.is_8_bit else None,
        )  # fmt: skip

    def attend(self) -> AttentionOutput:
        """The timed call."""
        if not self.sweep.block_size:
            return attention(*self._dense_batch(), causal=True)
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, **self.scales)

    def _dense_batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """``[batch, seq_len, heads, size]`` of sequences of one length, made once."""
        if not hasattr(self, "_made"):
            count = len(self.sweep.seq_lens)
            keys, values = zip(*(self.dense(seq) for seq in range(count)), strict=True)
            self._made = (
                self.q.view(count, -1, *self.q.shape[1:]), torch.stack(keys), torch.stack(values)
            )  # fmt: skip
        return self._made

    def dense(self, seq: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[length, num_kv_heads, size]`` of a sequence, as the cache has them."""
        length = self.sweep.seq_lens[seq]
        blocks = self.tables[seq, : -(-length // self.k_cache.shape[1])].long()
        keys, values = (c[blocks].flatten(0, 1)[:length] for c in (self.k_cache, self.v_cache))
        return keys, values

    def error(self, out: Tensor) -> float:
        """The largest relative error of some rows of some sequences, against float64."""
        return self._rows.error(out.reshape(-1, *out.shape[-2:]))

    @functools.cached_property
    def _rows(self) -> Rows:
        return expected_rows(self.q, self.k_cache, self.v_cache, self.batch, **self.scales)

    def judge(self, name: str, out: Tensor) -> str | None:
        """What is wrong with a peer's result; libraries leave out the scales of 8 bits."""
        out = out.reshape(-1, *out.shape[-2:])
        error = self.error(out * _SCALE if self.is_8_bit and name != "sdpa" else out)
        return None if error <= PEER_ERROR else f"wrong: {error:.2g} off float64"


class OwnCall(NamedTuple):
    """A call that needs no other library, and the part of the shape's bytes that it reads."""

    call: Callable[[], Any]
    share: float = 1.0
    """The part of the shape's work that it does."""


def find_own_calls(against: str, inputs: SweepInputs) -> dict[str, OwnCall]:
    """The calls for a shape that need no other library.

    ``"pagetile"``, and in classes that are not compared with libraries: the same call over a
    bfloat16 cache, or kernels that only read the pages.
    """
    calls = {"pagetile": OwnCall(inputs.attend)}
    if against == "bf16":
        wide = replace(inputs.sweep, kv_dtype=torch.bfloat16)
        calls["bfloat16 cache"] = OwnCall(
            SweepInputs(wide, inputs.device, pages=inputs.pages).attend
        )
    elif against == "bandwidth" and inputs.device != "cpu":
        from .reading import make_readers  # Triton's

        found = make_readers(inputs.k_cache, inputs.v_cache, inputs.batch)
        num_bytes = inputs.sweep.kv_bytes
        calls |= {name: OwnCall(call, read / num_bytes) for name, (call, read) in found.items()}
    return calls


def import_libraries() -> None:
    """Import the libraries, which takes seconds, before the first shape needs them."""
    for name in ("flashinfer", "vllm.vllm_flash_attn"):
        with contextlib.suppress(Exception):  # find_peers says why a library is left out
            importlib.import_module(name)


def plan_library(inputs: SweepInputs, name: str) -> None:
    """Plan a library's call, which compiles its module if there is none.

    Raises:
        RuntimeError: It is left out; the message says why.
    """
    without = {other: "" for other in COMPILED_WHEN_PLANNED if other != name}
    _, absent = find_libraries(inputs, without)  # type: ignore[arg-type]
    if name in absent:
        raise RuntimeError(absent[name])


def find_peers(
    inputs: SweepInputs, without: Mapping[str, str] | None = None
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Calls that compute the same, each checked against float64, and why others are left out.

    SDPA over gathered keys and values, a sequence at a time, is always a peer. FlashInfer,
    flash-attn and FlashAttention-3 (also of vLLM's wheel) are where they are installed, except
    those in ``without``, which has a reason for each.
    """
    peers: dict[str, Callable[[], Any]] = {"sdpa": _sdpa(inputs)}
    shape = inputs.sweep
    unknown: dict[str, str] = {}
    if inputs.device != "cpu":
        if shape.block_size:
            found, unknown = find_libraries(inputs, without)  # type: ignore[arg-type]
        else:
            found, unknown = _dense_flash_attn_3(inputs)
            unknown["flashinfer"] = "unsupported: no pages"
        peers |= found
    right, absent = admit(peers, inputs.judge)
    return right, unknown | absent


def _sdpa(inputs: SweepInputs) -> Callable[[], Tensor]:
    """Keys are gathered before, untimed; in decode a group's heads are rows of one head."""
    starts = inputs.batch.cu_seqlens_q.tolist()
    calls: list[Callable[[], Tensor]] = []
    for seq, (new, length) in enumerate(
        zip(inputs.sweep.query_lens, inputs.sweep.seq_lens, strict=True)
    ):
        k, v = (x.to(inputs.q.dtype) for x in inputs.dense(seq))
        if inputs.is_8_bit:
            k, v = k * _SCALE, v * _SCALE
        k, v = (x.transpose(0, 1)[None].contiguous() for x in (k, v))
        q = inputs.q[starts[seq] : starts[seq + 1]]
        calls.append(_one_sdpa(q, k, v, new, length))

    def call() -> Tensor:
        return torch.cat([one() for one in calls])

    return call


def _one_sdpa(q: Tensor, k: Tensor, v: Tensor, new: int, length: int) -> Callable[[], Tensor]:
    if new == 1:
        rows = q.view(1, k.shape[1], -1, q.shape[-1])
        return lambda: sdpa(rows, k, v).reshape(1, q.shape[1], -1)
    heads = q.transpose(0, 1)[None]
    grouped = q.shape[1] > k.shape[1]
    if new == length:
        return lambda: sdpa(heads, k, v, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)
    if grouped:  # an attention bias cannot be combined with enable_gqa
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    bias: Any = causal_lower_right(new, length)
    return lambda: sdpa(heads, k, v, attn_mask=bias)[0].transpose(0, 1)


def _dense_flash_attn_3(
    inputs: SweepInputs,
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """FlashAttention-3 as vLLM ships it, over ragged keys without pages."""
    name = "vllm flash_attn 3"
    if find_spec("vllm") is None:
        return {}, {name: "not installed"}
    try:
        library = importlib.import_module("vllm.vllm_flash_attn")
    except Exception as error:  # whatever a library raises
        return {}, {name: f"unsupported: {error}"}
    batch = inputs.batch
    _, k, v = inputs._dense_batch()
    starts = pad(batch.seq_lens.cumsum(0).int(), (1, 0))

    def call() -> Tensor:
        result: Tensor = library.flash_attn_varlen_func(
            inputs.q, k.flatten(0, 1), v.flatten(0, 1), max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_k=batch.max_seq_len, cu_seqlens_k=starts,
            softmax_scale=inputs.q.shape[-1] ** -0.5, causal=True, fa_version=3,
        )  # fmt: skip
        return result

    return {name: call}, {}
