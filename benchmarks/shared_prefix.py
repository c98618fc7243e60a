"""Decode of sequences that share a prefix, against the plain call and FlashInfer's cascade.

The prefix's keys are read once for all sequences (``SharedPrefixes``); the plain call reads them
once for each.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pagetile import PagedBatch, SharedPrefixes, explain_paged_attention, paged_attention
from pagetile.analysis.timing import admit, ratio
from pagetile.tiles.state import AttentionOutput

from .case import Check, Measurement, Target
from .gate import check_rows, check_timed_call, chosen, expected_rows, judge_peers
from .gpu_timing import time_in_turns

_WORKSPACE = 256 << 20  # bytes, for each of FlashInfer's wrappers
CASCADE = "flashinfer cascade"

Calls = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class SharedPrefixCase:
    """One new token for each sequence, as one captured call.

    Metrics: ``x plain``, how many times as fast as the same call without ``SharedPrefixes``;
    ``x cascade``, against the fastest form of FlashInfer's cascade.
    """

    name: str
    num_seqs: int = 256
    prefix: int = 32768
    """Keys that all sequences share."""
    own: int = 256
    """Further keys of each sequence."""
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    targets: tuple[Target, ...] = ()
    device: str = "cuda"

    @property
    def about(self) -> str:
        """The problem in one line."""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"
        lengths = f"{self.num_seqs} x {self.own} over a prefix of {self.prefix}"
        return f"shared prefix: {lengths}, {heads}, blocks of {self.block_size}, bfloat16"

    def verify(self) -> list[Check]:
        """Rows of both timed calls at full size, against float64."""
        inputs = SharedPrefixInputs(self)
        rows, checks = inputs.rows(), []
        for name, batch in inputs.batches().items():
            call = functools.partial(inputs.attend, batch)
            if batch.shared_prefixes is None:
                found = check_timed_call(call, inputs.implementation(batch), rows, self.about)
            else:  # the two passes may run different implementations
                found = [check_rows(call, rows, f"auto: {self.about}")]
            checks += [check._replace(what=f"{name}, {check.what}") for check in found]
        return checks

    def measure(self, repeats: int | None) -> Measurement:
        """Time both calls and FlashInfer's cascade in turns, by graph replay, cache cold."""
        inputs = SharedPrefixInputs(self)
        made, unknown = inputs.find_cascades()
        found, absent = admit(made, judge_peers(inputs.rows(), lambda out: out))
        times = time_in_turns(inputs.calls() | found, self.device, repeats=repeats)
        own = times["pagetile"]
        metrics = {"microseconds": own.median * 1e6, "x plain": ratio(times["plain"], own)}
        if found:
            fastest = min((times[name] for name in found), key=lambda time: time.median)
            metrics["x cascade"] = ratio(fastest, own)
        return Measurement(times, metrics, unknown | absent)


class SharedPrefixInputs:
    """A case's tensors: blocks in random order, with the prefix's blocks the same for all."""

    def __init__(self, case: SharedPrefixCase) -> None:
        self.case, device = case, case.device
        generator = torch.Generator(device).manual_seed(0)
        shared, each = case.prefix // case.block_size, -(-case.own // case.block_size)
        num_blocks = shared + case.num_seqs * each
        kept = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
        self.k_cache, self.v_cache = (
            torch.randn(kept, generator=generator, device=device).bfloat16() for _ in range(2)
        )
        order = torch.randperm(num_blocks, generator=generator, device=device).int()
        self.prefix_blocks = order[:shared]
        self.own_blocks = order[shared:].view(case.num_seqs, each)
        tables = torch.cat([order[:shared].expand(case.num_seqs, -1), self.own_blocks], dim=1)
        length = case.prefix + case.own
        lengths = torch.full((case.num_seqs,), length, dtype=torch.int32, device=device)
        self.starts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=device)
        groups = SharedPrefixes(
            self._integers(0, case.num_seqs), self._integers(case.prefix), case.num_seqs,
            case.prefix,
        )  # fmt: skip
        self.batch = PagedBatch(tables, lengths, self.starts, 1, length, groups)
        size = (case.num_seqs, case.num_heads, case.head_size)
        self.q = torch.randn(size, generator=generator, device=device).bfloat16()
        self.out = torch.empty_like(self.q)

    def _integers(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.case.device)

    def batches(self) -> dict[str, PagedBatch]:
        """The batches with the shared prefix and without."""
        return {"pagetile": self.batch, "plain": replace(self.batch, shared_prefixes=None)}

    def attend(self, batch: PagedBatch, **options: Any) -> AttentionOutput:
        """Run the call on a batch."""
        return paged_attention(self.q, self.k_cache, self.v_cache, batch, **options)

    def implementation(self, batch: PagedBatch) -> str:
        """The implementation that is chosen for a call."""
        return chosen(explain_paged_attention(self.q, self.k_cache, self.v_cache, batch))

    def calls(self) -> Calls:
        """The timed calls: with the shared prefix, and plain."""

        def timed(batch: PagedBatch) -> Callable[[], Tensor]:
            return lambda: self.attend(batch, out=self.out).out

        return {name: timed(batch) for name, batch in self.batches().items()}

    def rows(self) -> Any:
        """Random rows of the result in float64."""
        return expected_rows(self.q, self.k_cache, self.v_cache, self.batch)

    def find_cascades(self) -> tuple[Calls, dict[str, str]]:
        """FlashInfer's cascade, its parts called one by one, and why a variant is left out.

        The cascade runs its prefill kernel over each sequence's own keys as well. By parts, its
        decode kernel does it; the prefix is read by the kernel that FlashInfer chooses, or by the
        one that splits keys (``fa2``).
        """
        if find_spec("flashinfer") is None:
            return {}, {CASCADE: "not installed"}
        library = importlib.import_module("flashinfer")
        makers: dict[str, Callable[[], Callable[[], Tensor]]] = {
            CASCADE: lambda: self._cascade(library),
            f"{CASCADE} parts": lambda: self._parts(library, "auto"),
            f"{CASCADE} fa2": lambda: self._parts(library, "fa2"),
        }
        found: Calls = {}
        absent: dict[str, str] = {}
        for name, make in makers.items():
            try:
                found[name] = make()
            except Exception as error:  # whatever a library raises about a problem
                lines = str(error).strip().splitlines()
                absent[name] = f"unsupported: {lines[0] if lines else repr(error)}"
        return found, absent

    def _levels(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For prefix and own keys: where queries and pages begin, pages, and last lengths."""
        case = self.case
        each = self.own_blocks.shape[1]
        last = case.own - (each - 1) * case.block_size
        prefix = (
            self._integers(0, case.num_seqs), self._integers(0, len(self.prefix_blocks)),
            self.prefix_blocks, self._integers(case.block_size),
        )  # fmt: skip
        lasts = torch.full_like(self.starts[1:], last)
        return [prefix, (self.starts, self.starts * each, self.own_blocks.flatten(), lasts)]

    def _workspace(self) -> Tensor:
        return torch.empty(_WORKSPACE, dtype=torch.uint8, device=self.case.device)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        case = self.case
        return case.num_heads, case.num_kv_heads, case.head_size, case.block_size

    @property
    def _types(self) -> dict[str, Any]:
        return {"q_data_type": self.q.dtype, "kv_data_type": self.k_cache.dtype}

    def _cascade(self, library: Any) -> Callable[[], Tensor]:
        wrapper = library.MultiLevelCascadeAttentionWrapper(2, self._workspace(), "NHD")
        arrays = [list(of) for of in zip(*self._levels(), strict=True)]
        wrapper.plan(*arrays, *self._sizes, causal=False, **self._types)
        return lambda: wrapper.run(self.q, (self.k_cache, self.v_cache))

    def _parts(self, library: Any, backend: str) -> Callable[[], Tensor]:
        shared, own = self._levels()
        prefill = library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace(), "NHD", backend=backend
        )
        prefill.plan(*shared, *self._sizes, causal=False, **self._types)
        decode = library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace(), "NHD", use_tensor_cores=True
        )
        decode.plan(*own[1:], *self._sizes, **self._types)
        caches = (self.k_cache, self.v_cache)

        out, other = torch.empty_like(self.q), torch.empty_like(self.q)  # else it allocates them
        lse, other_lse = (
            torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.q.device)
            for _ in range(2)
        )

        def call() -> Tensor:
            decode.run(self.q, caches, out=out, lse=lse, return_lse=True)
            prefill.run(self.q, caches, out=other, lse=other_lse, return_lse=True)
            library.merge_state_in_place(out, lse, other, other_lse)
            return out

        return call
