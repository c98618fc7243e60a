"""Launches steps: from the scheduler's choice to sampled tokens, with the state on the device.

A running sequence has a row on the device: its last token, its length, its block table and its
sampling parameters. A decode step is told which rows take part and each one's last block; all
else is on the device already, and on a GPU the whole step is one graph replay::

    host     rows and last blocks ──┐ one pinned copy                  ┌─► tokens, a step later
    device                          ▼                                  │ pinned copy, event
             begin: last token · position · slot · table  ─► model ─► draw ─► rows

Other steps bring their new tokens, and the blocks that are new, in one packed copy. On a GPU
their forward is a graph replay as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kv_cache.storage import KVCache
from ..models.forward_batch import ForwardBatch
from ..models.paged_model import PagedModel
from ..ops.paged_attention import PagedBatch, SharedPrefixes
from ..ops.paged_attention.shared_prefixes import GPU_BYTES
from ..transfer import pack, unpack
from .cuda_graphs import PromptBuffers, StepGraphs, padded_sizes, prompt_sizes
from .prefix_groups import MAX_GROUPS, PrefixGroups
from .request import Sequence as OneSequence
from .sampler import SampledTokens, Sampler, SamplingInput
from .scheduler import SchedulerOutput

__all__ = ["LaunchedStep", "Runner"]

_NUM_BUFFERS = 4
"""Pinned buffers in turn: at most two steps are in flight."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that the device computes, or has computed."""

    step: SchedulerOutput
    rows: list[int]
    """Of the sequences that get a token."""
    tensors: Sequence[Tensor | None]
    """What ``Sampler.sample`` returned, on the host once the event has happened."""
    event: torch.cuda.Event | None
    started: float

    def wait(self) -> None:
        """Return when the step is computed."""
        if self.event is not None:
            self.event.synchronize()


class Runner:
    """Keeps the device's rows, and runs a model and the sampler over them.

    Args:
        model: The model; its attention layers are bound to ``cache`` here.
        cache: Keys and values.
        max_num_seqs: Rows.
        max_num_batched_tokens: The most tokens of a step.
        max_model_len: The most tokens of a row.
        sampling_input: What a sequence asks of the sampler, when its row is loaded.
        enforce_eager: On a GPU, launch the kernels of steps one by one, not as graphs.

    Attributes:
        graphs: The recorded decode steps; ``None`` on a CPU, or if ``enforce_eager``.
        prompt_graphs: The recorded forwards of steps that compute prompts; ``None`` as ``graphs``.
        min_saved_tokens: Of a decode step, the keys that sharing prefixes must save to gain time;
            ``None`` on a CPU, where it is not used: sums are in another order then.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        sampling_input: Callable[[OneSequence], SamplingInput],
        enforce_eager: bool = False,
    ) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self.max_model_len = max_model_len
        self.sampler = Sampler(max_num_seqs, model.vocab_size, model.device)
        self._sampling_input = sampling_input
        width = -(-max_model_len // cache.block_size)
        self._tables = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=model.device)
        self._owners: list[Any] = [None] * max_num_seqs
        self._num_sent = [0] * max_num_seqs  # blocks
        self._begin: Any = None
        self.min_saved_tokens: int | None = None
        self.graphs: StepGraphs | None = None
        self.prompt_graphs: StepGraphs | None = None
        self._prompts: PromptBuffers | None = None
        if model.device.type == "cuda":
            from .triton import DecodeBuffers

            self._begin = DecodeBuffers(self._tables, self.sampler, cache.block_size)
            self.min_saved_tokens = -(-GPU_BYTES // _bytes_per_key(cache))
            shape = (_NUM_BUFFERS, len(self._begin.inbox))
            self._pinned = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
            self._turn = 0
            if not enforce_eager:
                self._make_graphs(max_num_seqs, max_num_batched_tokens)
        model.bind(cache)

    @torch.inference_mode()
    def run(self, step: SchedulerOutput, masks: Any = None) -> LaunchedStep:
        """Launch a step.

        Args:
            step: What the scheduler chose.
            masks: For sequences with a grammar: position in ``step.sampled``, allowed tokens as
                bits, int32 ``[ceil(vocab_size / 32)]``.
        """
        started = time.perf_counter()
        if step.copies:
            self.cache.copy(step.copies)
        self._load_rows(step)
        rows = [sequence.row for sequence in step.sampled]
        found: Sequence[Tensor | None]
        if step.is_decode:
            found = self._decode(step, rows, masks)
        else:
            found = self._compute(step, rows, masks)
            for sequence, at in zip(step.sampled, step.logits_rows, strict=True):
                # What is accepted of drafts the host finds out: rows have to be told.
                sequence.is_decoding = step.sequences[at] is sequence and not step.drafts
        return self._send_back(step, rows, found, started)

    def read(self, launched: LaunchedStep) -> SampledTokens:
        """Wait for a step and return the tokens of ``step.sampled``."""
        launched.wait()
        if not launched.rows:
            return SampledTokens([], {})
        tokens, best, logprobs = launched.tensors
        assert tokens is not None
        assert best is not None
        return self.sampler.collect(tokens, best, logprobs, launched.rows)

    @torch.inference_mode()
    def accept(self, launched: LaunchedStep, tokens: SampledTokens, kept: list[int]) -> None:
        """Tell the sampler which tokens of a step with drafts count."""
        self.sampler.accept(
            [launched.rows[at] for at in kept], [tokens.token_ids[at] for at in kept]
        )

    def warm_up(self, show: Callable[[Any], Any] = iter) -> None:
        """Record the steps of every size.

        Args:
            show: Wraps the list of recordings, for a progress bar.
        """
        self.sampler.compiles_masks = True
        if self.graphs is None or self.prompt_graphs is None:
            return
        decode = [(self.graphs, size, True, False) for size in self.graphs.sizes]
        decode += [(self.graphs, size, True, True) for size in self._shared_sizes()]
        prompts = [(self.prompt_graphs, size) for size in self.prompt_graphs.sizes]
        with torch.inference_mode():
            for graphs, *form in show([*reversed(prompts), *reversed(decode)]):
                graphs.ensure(*form)

    def _make_graphs(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.graphs = StepGraphs(self._record_step, self._begin.clear, padded_sizes(max_num_seqs))
        sizes = prompt_sizes(max_num_batched_tokens)
        self._prompts = prompts = PromptBuffers(
            sizes[-1], max_num_seqs, self.cache.block_size, self.max_model_len, self.device
        )
        self.prompt_graphs = StepGraphs(
            lambda size: self.model.forward(prompts.batch(size)),
            prompts.clear,
            sizes,
            self.graphs.pool,
        )

    # --- rows ------------------------------------------------------------------------------

    def _load_rows(self, step: SchedulerOutput) -> None:
        """Load the sampling parameters of sequences that have got a row."""
        if step.is_decode:
            return
        owners = self._owners
        new = [s for s in step.sequences if owners[s.row] is not s.table]
        if len(step.sampled) > len(step.sequences) or new:
            new += [s for s in step.sampled if owners[s.row] is not s.table and s not in new]
        if not new:
            return
        self.sampler.start([s.row for s in new], [self._sampling_input(s) for s in new])
        for sequence in new:
            owners[sequence.row] = sequence.table
            self._num_sent[sequence.row] = 0

    # --- decode ----------------------------------------------------------------------------

    def _decode(self, step: SchedulerOutput, rows: list[int], masks: Any) -> Any:
        blocks = [sequence.table.blocks[-1] for sequence in step.sequences]
        longest = max(step.ends)
        groups = step.prefix_groups
        if self._begin is None:
            batch, where = self._begin_on_host(rows, blocks, longest, groups)
            return self.sampler.sample(self.model.forward(batch), where, rows, masks)
        n = len(rows)
        samples = not masks and not self.sampler.needs_torch(rows)
        size, form = n, (samples, groups is not None)
        if self.graphs is not None:
            # A step that shares is recorded for few sizes: reading less gains more than they lose.
            size = self.graphs.fit(n if groups is None else self._round_up(n))
            if not self.graphs.ensure(size, *form):
                size = n
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        packet = self._pinned[self._turn]
        numbers = packet.numpy()
        numbers[:n], numbers[n:size] = rows, -1
        numbers[size : size + n] = blocks
        num_sent = 2 * size
        if groups is not None:
            cu_group_seqs = [*groups.cu_group_seqs[:-1], size]
            num_sent += 2 * MAX_GROUPS + 1
            numbers[2 * size : num_sent] = cu_group_seqs + groups.prefix_lens
        self._begin.inbox[:num_sent].copy_(packet[:num_sent], non_blocking=True)
        if self.graphs is not None and self.graphs.reason is None:
            found = self.graphs.replay(size, *form)
        else:
            found = self._step(size, *form, longest)
        if samples:
            return found, None, None
        return self.sampler.sample(found[:n], self._begin.rows(size)[:n].long(), rows, masks)

    def _round_up(self, size: int) -> int:
        assert self.graphs is not None
        return min(1 << (size - 1).bit_length(), self.graphs.sizes[-1])

    def _shared_sizes(self) -> list[int]:
        """The sizes of steps that can save enough by sharing."""
        assert self.graphs is not None
        assert self.min_saved_tokens is not None
        least = 2 + (self.min_saved_tokens - 1) // self.max_model_len
        sizes = self.graphs.sizes
        return [size for size in sizes if size == self._round_up(size) and size >= least]

    def _record_step(self, size: int, samples: bool, shares: bool) -> Tensor:
        return self._step(size, samples, shares, self.max_model_len)

    def _step(self, size: int, samples: bool, shares: bool, max_seq_len: int) -> Tensor:
        """A decode step of the rows in the inbox: packed tokens, or logits."""
        batch = self._begin(size, max_seq_len, shares=shares)
        logits = self.model.forward(batch)
        if not samples:
            return self._begin.keep(logits) if self.graphs is not None else logits
        packed: Tensor = self._begin.draw(logits, self._begin.rows(size))
        return packed

    def _begin_on_host(
        self, rows: list[int], blocks: list[int], longest: int, groups: PrefixGroups | None
    ) -> tuple[ForwardBatch, Tensor]:
        """What ``begin`` does on a GPU, in torch."""
        where, last = torch.tensor([rows, blocks])
        size = self.cache.block_size
        lengths = self.sampler.lengths[where]
        positions = lengths.long() - 1
        column = positions // size
        self._tables[where, column] = last.int()
        num_seqs = len(rows)
        numbers = torch.arange(num_seqs + 1)
        tables = self._tables[:, : -(-longest // size)].index_select(0, where)
        shared = None
        if groups is not None:
            starts, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in groups)
            shared = SharedPrefixes(starts, lens)
        return ForwardBatch(
            token_ids=self.sampler.last_tokens[where],
            positions=positions,
            batch=PagedBatch(tables, lengths, numbers.int(), 1, longest, shared),
            slot_mapping=last * size + positions % size,
            logits_rows=numbers[:num_seqs],
        ), where

    # --- any other step --------------------------------------------------------------------

    def _compute(self, step: SchedulerOutput, rows: list[int], masks: Any) -> Any:
        """Launch a step whose tokens the host knows, but for those that are still unread."""
        assumed = step.find_assumed() if step.drafts else None
        arrays = self._gather(step, rows, assumed)
        if self.device.type == "cuda":
            packed = pack(list(arrays.values()), self.device).to(self.device, non_blocking=True)
            tensors = dict(zip(arrays, unpack(packed, list(arrays.values())), strict=True))
        else:
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch = self._place(tensors, max(step.num_tokens), max(step.ends))
        logits = self._forward(batch)
        if not rows:
            return None, None, None
        return self.sampler.sample(logits, tensors["sampled_rows"], rows, masks, assumed)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Logits of a step that is no decode step, valid until the next launch."""
        graphs, buffers = self.prompt_graphs, self._prompts
        if graphs is None or buffers is None or not buffers.takes(batch):
            return self.model.forward(batch)
        size = graphs.fit(len(batch.token_ids))
        if not graphs.ensure(size):
            return self.model.forward(batch)
        buffers.fill(batch, size)
        return graphs.replay(size)[: len(batch.logits_rows)]

    def _gather(
        self, step: SchedulerOutput, sampled_rows: list[int], assumed: list[list[int]] | None
    ) -> dict[str, Any]:
        token_ids: list[int] = []
        unread: list[tuple[int, int]] = []
        new_blocks: list[tuple[int, int, int]] = []
        rows = [sequence.row for sequence in step.sequences]
        for at, (sequence, chunk, end) in enumerate(
            zip(step.sequences, step.num_tokens, step.ends, strict=True)
        ):
            known = sequence.token_ids[end - chunk : end] + step.drafts.get(at, [])
            token_ids += known
            if len(known) < chunk:
                unread.append((len(token_ids), sequence.row))
                token_ids.append(0)
            row, blocks = sequence.row, sequence.table.blocks
            # The last block known may have been replaced by a copy of its own, and those past the
            # tokens that were there by others, when a draft was not accepted.
            first = min(max(0, self._num_sent[row] - 1), (end - chunk) // self.cache.block_size)
            new_blocks += [(row, column, blocks[column]) for column in range(first, len(blocks))]
            self._num_sent[row] = len(blocks)
        query_lens = np.array(step.num_tokens, np.int32)
        seq_lens = np.array(step.ends, np.int32)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query_lens, out=starts[1:])
        shifts = np.repeat(seq_lens - starts[1:], query_lens)
        logits_rows = starts[1:][step.logits_rows].astype(np.int64) - 1
        sampled_lens = seq_lens[step.logits_rows]
        if assumed is not None:
            num_drafted = [len(step.drafts.get(at, ())) for at in step.logits_rows]
            sampled_lens -= np.array(num_drafted, np.int32)
            logits_rows += np.array([*map(len, assumed)], np.int64) - num_drafted
        unread_at, unread_rows = np.array(unread, np.int64).reshape(-1, 2).T
        block_rows, block_columns, block_ids = np.array(new_blocks, np.int64).reshape(-1, 3).T
        return {
            "token_ids": np.array(token_ids, np.int64),
            "positions": np.arange(starts[-1], dtype=np.int64) + shifts,
            "seq_of_token": np.repeat(np.arange(len(rows)), query_lens),
            "logits_rows": logits_rows,
            "seq_lens": seq_lens,
            "starts": starts,
            "rows": np.array(rows, np.int64),
            "sampled_rows": np.array(sampled_rows, np.int64),
            "sampled_lens": sampled_lens,
            "unread_at": unread_at.copy(),
            "unread_rows": unread_rows.copy(),
            "block_rows": block_rows.copy(),
            "block_columns": block_columns.copy(),
            "block_ids": block_ids.astype(np.int32),
        }

    def _place(self, t: dict[str, Tensor], max_query_len: int, max_seq_len: int) -> ForwardBatch:
        """Bring the rows up to date, and lay the step out: a few launches, whatever the size."""
        size, sampler = self.cache.block_size, self.sampler
        self._tables[t["block_rows"], t["block_columns"]] = t["block_ids"]
        sampler.lengths[t["rows"]] = t["seq_lens"]
        sampler.lengths[t["sampled_rows"]] = t["sampled_lens"]  # forks have no tokens in the step
        token_ids, positions = t["token_ids"], t["positions"]
        if len(t["unread_at"]):
            token_ids[t["unread_at"]] = sampler.last_tokens[t["unread_rows"]]
        tables = self._tables[:, : -(-max_seq_len // size)].index_select(0, t["rows"])
        blocks = tables[t["seq_of_token"], positions // size].long()
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            batch=PagedBatch(tables, t["seq_lens"], t["starts"], max_query_len, max_seq_len),
            slot_mapping=blocks * size + positions % size,
            logits_rows=t["logits_rows"],
        )

    def _send_back(
        self, step: SchedulerOutput, rows: list[int], found: Any, started: float
    ) -> LaunchedStep:
        """Copy the results to the host behind the step, so that nothing waits for them here."""
        if self.device.type != "cuda":
            return LaunchedStep(step, rows, found, None, started)
        tokens, best, logprobs = found
        if rows and best is None:  # packed by a graph
            n = len(rows)
            size = self._begin.size_of(tokens)
            has_logprobs = self.sampler.has_logprobs(rows)
            packed = self._to_host(tokens if has_logprobs else tokens[: 3 * size])
            tokens, best, logprobs = (part[:n] for part in self._begin.unpack(packed, size))
            logprobs = logprobs if has_logprobs else None
        elif rows:
            tokens, best = self._to_host(tokens), self._to_host(best)
            logprobs = None if logprobs is None else self._to_host(logprobs)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return LaunchedStep(step, rows, (tokens, best, logprobs), event, started)

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _bytes_per_key(cache: KVCache) -> int:
    """Bytes of a token's keys and values in one layer; of several kinds of layers, their mean."""
    each = [layer.bytes_per_token(cache.dtype) for layer in cache.layers]
    return max(1, sum(each) // len(each))
