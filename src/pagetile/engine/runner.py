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
from ..transfer import pack, unpack
from .kernel_steps import KernelSteps
from .ngram import find_assumed
from .sampler import Sampler, send_back
from .step import LaunchedStep, SampledTokens, SchedulerOutput, StepResults


class Runner:
    """Keeps the device's rows, and runs a model and the sampler over them.

    Args:
        model: The model; its attention layers are bound to ``cache`` here.
        cache: Keys and values.
        max_num_seqs: Number of rows.
        max_num_batched_tokens: The most tokens of a step.
        max_model_len: The most tokens of a row.
        enforce_eager: On a GPU, launch the kernels of steps one by one, not as graphs.

    Attributes:
        kernels: Launches steps on a GPU; ``None`` on a CPU.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enforce_eager: bool = False,
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
            kernels = self.use_kernels()
            if not enforce_eager:
                kernels.make_graphs(max_num_batched_tokens)
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
            return SampledTokens([], {})
        rows, (tokens, best, logprobs) = launched.rows, launched.results
        n = len(rows)
        logprobs = None if logprobs is None else logprobs[:n]
        return self.sampler.collect(tokens[:n], best[:n], logprobs, rows)

    @torch.inference_mode()
    def accept(self, launched: LaunchedStep, tokens: SampledTokens, kept: list[int]) -> None:
        """Tell the sampler which tokens of a step with drafts were accepted."""
        self.sampler.accept(
            [launched.rows[at] for at in kept], [tokens.token_ids[at] for at in kept]
        )

    # --- decode ----------------------------------------------------------------------------

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
        numbers = torch.arange(len(rows) + 1, device=self.device)
        shared = None
        if step.prefix_groups is not None:
            starts, lens = (torch.from_numpy(np.array(n, np.int32)) for n in step.prefix_groups)
            shared = SharedPrefixes(starts, lens)
        batch = ForwardBatch(
            token_ids=self.sampler.last_tokens[where],
            positions=positions,
            batch=PagedBatch(tables, lengths, numbers.int(), 1, longest, shared),
            slot_mapping=last * size + positions % size,
            logits_rows=numbers[:-1],
        )
        logits = self.model.forward(batch)
        return rows, send_back(self.sampler.sample(logits, where, rows, masks))

    # --- any other step --------------------------------------------------------------------

    def _compute(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults | None]:
        """Launch a step with prompts or new rows; the device fills in tokens that are unread."""
        self._load_rows(step)
        rows = [sequence.row for sequence in step.sampled]
        assumed = find_assumed(step) if step.drafts else None
        arrays, kernels = self._gather(step, rows, assumed), self.kernels
        with torch.inference_mode():
            size = None if kernels is None else kernels.find_size(arrays)
            if kernels is not None and size is not None:
                results = kernels.replay(size, arrays, rows, masks, assumed)
            else:
                tensors = self._send(self._expand(arrays))
                batch = self._place(tensors, max(step.num_tokens), max(step.ends))
                logits, where = self.model.forward(batch), tensors["sampled_rows"]
                results = None
                if rows:
                    found = self.sampler.sample(logits, where, rows, masks, assumed)
                    results = send_back(found)
        for sequence, at in zip(step.sampled, step.logits_rows, strict=True):
            # The host decides which drafts are accepted, so rows must be loaded again.
            sequence.is_decoding = step.sequences[at] is sequence and not step.drafts
        return rows, results

    def _load_rows(self, step: SchedulerOutput) -> None:
        """Load the sampling parameters of sequences that have a new row."""
        owners = self._owners
        # Samples that fork in this step are sampled without being in its sequences.
        both = (*step.sequences, *step.sampled)
        new = [*{id(s): s for s in both if owners[s.row] is not s.table}.values()]
        if not new:
            return
        self.sampler.start([s.row for s in new], [s.sampling_input() for s in new])
        for sequence in new:
            owners[sequence.row] = sequence.table
            self._num_sent[sequence.row] = 0

    def _send(self, arrays: dict[str, Any]) -> dict[str, Tensor]:
        """Copy a step's arrays to the device in one copy."""
        if self.device.type != "cuda":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        listed = list(arrays.values())
        packed = pack(listed, self.device).to(self.device, non_blocking=True)
        return dict(zip(arrays, unpack(packed, listed), strict=True))

    def _gather(
        self, step: SchedulerOutput, sampled_rows: list[int], assumed: list[list[int]] | None
    ) -> dict[str, Any]:
        """Return a step as arrays: the data that the device lacks, and where it goes."""
        new, unread = self._gather_new(step)
        starts = np.zeros(len(step.sequences) + 1, np.int32)
        np.cumsum(np.array(step.num_tokens, np.int32), out=starts[1:])
        seq_lens, last_tokens = np.array(step.ends, np.int32), starts[1:].astype(np.int64) - 1
        logits_rows, sampled_lens = last_tokens[step.logits_rows], seq_lens[step.logits_rows]
        if assumed is not None:
            num_drafted = [len(step.drafts.get(at, ())) for at in step.logits_rows]
            sampled_lens -= np.array(num_drafted, np.int32)
            logits_rows += np.array([*map(len, assumed)], np.int64) - num_drafted
        return new | {
            "logits_rows": logits_rows,
            "seq_lens": seq_lens,
            "starts": starts,
            "rows": np.array([sequence.row for sequence in step.sequences], np.int64),
            "sampled_rows": np.array(sampled_rows, np.int64),
            "sampled_lens": sampled_lens,
            "unread_at": last_tokens[unread],
        }

    def _gather_new(self, step: SchedulerOutput) -> tuple[dict[str, Any], list[int]]:
        """Return new tokens and blocks, and the sequences whose last token only the device has."""
        token_ids: list[int] = []
        unread: list[int] = []
        new_blocks: list[int] = []
        first_columns: list[int] = []  # of a sequence's new blocks in its table
        first_blocks = [0]  # of a sequence's new blocks among all of them
        size, grown = self.cache.block_size, set(step.grown)
        for at, (sequence, chunk, end) in enumerate(
            zip(step.sequences, step.num_tokens, step.ends, strict=True)
        ):
            row, blocks, first = sequence.row, sequence.table.blocks, 0
            if sequence.is_decoding and chunk == 1:
                known, first = [], len(blocks) - (sequence in grown)
            else:
                known = sequence.token_ids[end - chunk : end] + step.drafts.get(at, [])
                # The last block sent may have been replaced by copy-on-write, and blocks of
                # rejected draft tokens by others.
                first = min(max(0, self._num_sent[row] - 1), (end - chunk) // size)
                self._num_sent[row] = len(blocks)
            token_ids += known
            if len(known) < chunk:
                unread.append(at)
                token_ids.append(0)
            new_blocks += blocks[first:]
            first_columns.append(first)
            first_blocks.append(len(new_blocks))
        return {
            "token_ids": np.array(token_ids, np.int64),
            "first_columns": np.array(first_columns, np.int64),
            "first_blocks": np.array(first_blocks[:-1], np.int64),
            "block_ids": np.array(new_blocks, np.int32),
        }, unread

    @staticmethod
    def _expand(step: dict[str, Any]) -> dict[str, Any]:
        """Return further arrays for ``_place``: one entry per token and per new block."""
        rows, starts, columns = step["rows"], step["starts"], step["first_columns"]
        first_blocks, num_blocks = step["first_blocks"], len(step["block_ids"])
        query_lens, counts = np.diff(starts), np.diff(first_blocks, append=num_blocks)
        shifts = np.repeat(step["seq_lens"] - starts[1:], query_lens)
        seq_of_token = np.repeat(np.arange(len(rows)), query_lens)
        return step | {
            "positions": np.arange(starts[-1], dtype=np.int64) + shifts,
            "seq_of_token": seq_of_token,
            "unread_rows": rows[seq_of_token[step["unread_at"]]],
            "block_rows": np.repeat(rows, counts),
            "block_columns": np.arange(num_blocks) + np.repeat(columns - first_blocks, counts),
        }

    def _place(self, t: dict[str, Tensor], max_query_len: int, max_seq_len: int) -> ForwardBatch:
        """Update the rows and lay out the batch, in a few launches whatever the size."""
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
