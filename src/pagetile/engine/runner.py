"""Launches steps: from the scheduler's choice to sampled tokens, with the state on the device.

A running sequence has a row on the device: its last token, its length, its block table and its
sampling parameters. For a decode step the host sends the rows that take part and each one's last
block; for any other step, new tokens and new blocks::

    host     rows, last blocks │ new tokens, new blocks            ┌─► tokens, a step later
    device                     ▼                                   │
             last token · position · slot · table  ─► model ─► sampler ─► rows

This file does it in torch code, on a GPU ``kernel_steps.py`` with kernels and CUDA graphs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kv_cache.storage import KVCache
from ..models.forward_batch import ForwardBatch
from ..models.paged_model import PagedModel
from ..ops.paged_attention import PagedBatch, SharedPrefixes
from ..transfer import send_all
from .kernel_steps import KernelSteps
from .ngram import find_assumed
from .sampler import Sampler
from .step import LaunchedStep, SampledTokens, SchedulerOutput, StepResults


class Runner:
    """Keeps the device's rows, and runs a model and the sampler over them.

    The arguments are those of ``Engine``; ``max_num_seqs`` is the number of rows.

    Attributes:
        kernels: Launches steps on a GPU; ``None`` on a CPU.
    """

    def __init__(
        self, model: PagedModel, cache: KVCache, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model, self.cache, self.device = model, cache, model.device
        self.max_model_len = max_model_len
        self.sampler = Sampler(max_num_seqs, model.vocab_size, model.device)
        width = -(-max_model_len // cache.block_size)
        self._tables = torch.zeros(max_num_seqs, width, dtype=torch.int32, device=model.device)
        self._owners: list[Any] = [None] * max_num_seqs
        self._num_sent = [0] * max_num_seqs  # blocks
        self.kernels: KernelSteps | None = None
        if model.device.type == "cuda":
            self.use_kernels()
        model.bind(cache)

    def use_kernels(self) -> KernelSteps:
        """Launch decode steps by kernels from now on."""
        self.kernels = KernelSteps(
            self.model, self.cache, self.sampler, self._tables, self.max_model_len
        )
        return self.kernels

    def run(self, step: SchedulerOutput, masks: Any = None) -> LaunchedStep:
        """Launch a step.

        Args:
            step: What the scheduler chose.
            masks: For sequences with a grammar: position in ``step.sampled``, allowed tokens as
                bits, int32 ``[ceil(vocab_size / 32)]``.
        """
        started, kernels = time.perf_counter(), self.kernels
        if step.copies:
            with torch.inference_mode():
                self.cache.copy(step.copies)
        if kernels is None:
            launch = self._decode if step.is_decode else self._compute
            return LaunchedStep(step, *launch(step, masks), None, started)
        with kernels.on_device:
            kernels.start(step)
            rows, results = (kernels.decode if step.is_decode else self._compute)(step, masks)
            return LaunchedStep(step, rows, results, kernels.record(), started)

    def wait(self) -> None:
        """Wait for all launched work, that of steps that failed half-way included.

        Its copies may still read host memory that later steps reuse.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def read(self, launched: LaunchedStep) -> SampledTokens:
        """Wait for a step and return the tokens of ``step.sampled``."""
        if launched.event is not None:
            launched.event.synchronize()
        if launched.results is None:
            return SampledTokens([], {}, {})
        return self.sampler.collect(launched.results, launched.rows)

    @torch.inference_mode()
    def _decode(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults]:
        """Launch a step whose rows are up to date except for new blocks."""
        rows = [sequence.row for sequence in step.sequences]
        blocks = [sequence.table.blocks[-1] for sequence in step.sequences]
        where, last = torch.tensor([rows, blocks], device=self.device)
        size, longest = self.cache.block_size, max(step.ends)
        lengths = self.sampler.lengths[where]
        positions = lengths.long() - 1
        self._tables[where, positions // size] = last.int()
        tables = self._tables[:, : -(-longest // size)].index_select(0, where)
        numbers, shared = torch.arange(len(rows) + 1, device=self.device), None
        if step.prefix_groups is not None:
            first_seqs, lens = map(torch.IntTensor, step.prefix_groups)
            shared = SharedPrefixes(first_seqs, lens)
        batch = ForwardBatch(
            token_ids=self.sampler.last_tokens[where],
            positions=positions,
            batch=PagedBatch(tables, lengths, numbers.int(), 1, longest, shared),
            slot_mapping=last * size + positions % size,
            logits_rows=numbers[:-1],
        )
        return rows, self.sampler.sample(self.model.forward(batch), where, rows, masks)

    @torch.inference_mode()
    def _compute(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults | None]:
        """Launch a step with prompts or new rows; the device fills in tokens that are unread."""
        self._load_rows(step)
        rows = [sequence.row for sequence in step.sampled]
        assumed = find_assumed(step) if step.drafts else None
        arrays, kernels = self._gather(step, rows, assumed), self.kernels
        size, results = None if kernels is None else kernels.find_size(arrays), None
        if kernels is not None and size is not None:
            results = kernels.replay(size, arrays, rows, masks, assumed)
        else:
            sent = send_all([*arrays.values()], self.device)
            tensors = dict(zip(arrays, sent, strict=True))
            logits, where = self.model.forward(self._place(tensors, step)), tensors["sampled_rows"]
            if rows:
                results = self.sampler.sample(logits, where, rows, masks, assumed)
        for sequence, at in zip(step.sampled, step.logits_rows, strict=True):
            # The host decides which drafts are accepted, so rows must be loaded again.
            sequence.is_decoding = step.sequences[at] is sequence and not step.drafts
        return rows, results

    def _load_rows(self, step: SchedulerOutput) -> None:
        """Load the sampling parameters of sequences that have a new row."""
        # Samples that fork in this step are sampled without being in its sequences.
        both = (*step.sequences, *step.sampled)
        new = [*{id(s): s for s in both if self._owners[s.row] is not s.table}.values()]
        if new:
            self.sampler.start([s.row for s in new], [s.sampling_input() for s in new])
        for sequence in new:
            self._owners[sequence.row] = sequence.table
            self._num_sent[sequence.row] = 0

    def _gather(
        self, step: SchedulerOutput, sampled_rows: list[int], assumed: list[list[int]] | None
    ) -> dict[str, Any]:
        """Return a step as arrays: the data that the device lacks, and where it goes."""
        token_ids: list[int] = []
        unread: list[int] = []  # sequences whose last token only the device has
        new_blocks: list[int] = []
        first_columns: list[int] = []  # of a sequence's new blocks in its table
        first_blocks: list[int] = []  # of a sequence's new blocks among all of them
        size, grown = self.cache.block_size, set(step.grown)
        chunks = zip(step.sequences, step.num_tokens, step.ends, strict=True)
        for at, (sequence, chunk, end) in enumerate(chunks):
            row, blocks = sequence.row, sequence.table.blocks
            known: list[int] = []
            if sequence.is_decoding and chunk == 1:
                first = len(blocks) - (sequence in grown)
            else:
                known = sequence.token_ids[end - chunk : end] + step.drafts.get(at, [])
                # The last block sent may have been replaced by copy-on-write, and blocks of
                # rejected draft tokens by others.
                first = min(max(0, self._num_sent[row] - 1), (end - chunk) // size)
                self._num_sent[row] = len(blocks)
            if len(known) < chunk:
                unread.append(at)
                known = [*known, 0]
            token_ids += known
            first_columns.append(first)
            first_blocks.append(len(new_blocks))
            new_blocks += blocks[first:]
        starts = np.zeros(len(step.sequences) + 1, np.int32)
        np.cumsum(np.array(step.num_tokens, np.int32), out=starts[1:])
        seq_lens, last_tokens = np.array(step.ends, np.int32), starts[1:].astype(np.int64) - 1
        logits_rows, sampled_lens = last_tokens[step.logits_rows], seq_lens[step.logits_rows]
        if assumed is not None:
            num_drafted = [len(step.drafts.get(at, ())) for at in step.logits_rows]
            sampled_lens -= np.array(num_drafted, np.int32)
            logits_rows += np.array([*map(len, assumed)], np.int64) - num_drafted
        rows = np.array([sequence.row for sequence in step.sequences], np.int64)
        return {
            "token_ids": np.array(token_ids, np.int64),
            "unread_at": last_tokens[unread],
            "unread_rows": rows[unread],
            "starts": starts,
            "seq_lens": seq_lens,
            "rows": rows,
            "block_ids": np.array(new_blocks, np.int32),
            "first_columns": np.array(first_columns, np.int64),
            "first_blocks": np.array(first_blocks, np.int64),
            "logits_rows": logits_rows,
            "sampled_rows": np.array(sampled_rows, np.int64),
            "sampled_lens": sampled_lens,
        }

    def _place(self, t: dict[str, Tensor], step: SchedulerOutput) -> ForwardBatch:
        """Update the rows and lay out the batch, in a few launches whatever the size."""
        size, sampler, rows, starts = self.cache.block_size, self.sampler, t["rows"], t["starts"]
        block_ids, first_blocks = t["block_ids"], t["first_blocks"]
        blocks = torch.arange(len(block_ids), device=self.device)
        owners = torch.searchsorted(first_blocks, blocks, right=True) - 1
        columns = blocks + (t["first_columns"] - first_blocks)[owners]
        self._tables[rows[owners], columns] = block_ids
        sampler.lengths[rows] = t["seq_lens"]
        sampler.lengths[t["sampled_rows"]] = t["sampled_lens"]  # forks have no tokens in the step
        token_ids, unread_at = t["token_ids"], t["unread_at"]
        tokens = torch.arange(len(token_ids), device=self.device)
        owners = torch.searchsorted(starts[1:], tokens.int(), right=True)
        positions = tokens + (t["seq_lens"] - starts[1:])[owners]
        if len(unread_at):
            token_ids[unread_at] = sampler.last_tokens[t["unread_rows"]]
        longest = max(step.ends)
        tables = self._tables[:, : -(-longest // size)].index_select(0, rows)
        slots = tables[owners, positions // size].long() * size + positions % size
        batch = PagedBatch(tables, t["seq_lens"], starts, max(step.num_tokens), longest)
        return ForwardBatch(token_ids, positions, batch, slots, t["logits_rows"])
