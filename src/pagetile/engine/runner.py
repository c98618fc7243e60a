"""Launches steps: from the scheduler's choice to sampled tokens, with the state on the device.

A running sequence has a row on the device: its last token, its length, its block table and its
sampling parameters. A decode step is told which rows take part and each one's last block, if any
has changed; all else is on the device already, and on a GPU the whole step is one graph replay::

    host     rows and last blocks ──┐ one pinned copy                  ┌─► tokens, a step later
    device                          ▼                                  │ pinned copy, event
             begin: last token · position · slot · table  ─► model ─► draw ─► rows

Other steps bring their new tokens, and the blocks that are new, in one packed copy. On a GPU they
are a graph replay as well (``triton_prompts.py``), and so is sampling, unless torch code has a part
in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
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
from .cuda_graphs import StepGraphs, padded_sizes, prompt_sizes
from .prefix_groups import PrefixGroups
from .request import Sequence as OneSequence
from .sampler import SampledTokens, Sampler, SamplingInput
from .scheduler import SchedulerOutput
from .step_memory import DecodeForm, StepMemory, StepResults

__all__ = ["LaunchedStep", "Runner"]

_NUM_MEMORIES = 4
"""Used in turn: at most two steps are in flight."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that the device computes, or has computed."""

    step: SchedulerOutput
    rows: list[int]
    """Of the sequences that get a token."""
    results: StepResults | None
    """Of these rows, then perhaps of rows without a sequence; ``None`` if there are none."""
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
        prompt_graphs: The recorded steps that compute prompts, with their draws; ``None`` as
            ``graphs``.
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
        self._memories: deque[StepMemory] = deque()
        self._form: DecodeForm | None = None  # whose rows are in the inbox
        self.min_saved_tokens: int | None = None
        self.graphs: StepGraphs | None = None
        self.prompt_graphs: StepGraphs | None = None
        self._prompts: Any = None
        if model.device.type == "cuda":
            self._decode_by_kernels()
            self.min_saved_tokens = -(-GPU_BYTES // _bytes_per_key(cache))
            if not enforce_eager:
                self._make_graphs(max_num_seqs, max_num_batched_tokens)
        model.bind(cache)

    def run(self, step: SchedulerOutput, masks: Any = None) -> LaunchedStep:
        """Launch a step.

        Args:
            step: What the scheduler chose.
            masks: For sequences with a grammar: position in ``step.sampled``, allowed tokens as
                bits, int32 ``[ceil(vocab_size / 32)]``.
        """
        started = time.perf_counter()
        if step.copies:
            with torch.inference_mode():
                self.cache.copy(step.copies)
        self._memories.rotate()
        launch = self._decode if step.is_decode else self._compute
        rows, results = launch(step, masks)
        event = None
        if self._memories:
            self._memories[0].record()
            event = self._memories[0].event
        return LaunchedStep(step, rows, results, event, started)

    def wait(self) -> None:
        """Return when all is computed that was launched, of steps that failed half-way, too.

        Their copies may still read host memory that is used in turn.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def read(self, launched: LaunchedStep) -> SampledTokens:
        """Wait for a step and return the tokens of ``step.sampled``."""
        launched.wait()
        if launched.results is None:
            return SampledTokens([], {})
        rows, (tokens, best, logprobs) = launched.rows, launched.results
        n = len(rows)
        logprobs = None if logprobs is None else logprobs[:n]
        return self.sampler.collect(tokens[:n], best[:n], logprobs, rows)

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
            from .triton_draw import FEWEST_ROWS  # with which a program scores several tiles

            size = self.prompt_graphs.fit(min(FEWEST_ROWS, self.prompt_graphs.sizes[-1]))
            if self.prompt_graphs.has(size):
                self._prompts.clear(size)
                self.sampler.compile_masks(self.prompt_graphs.replay(size)[0])

    def _decode_by_kernels(self) -> None:
        """Have kernels lay out decode steps and sample them, from an inbox on the device."""
        from .triton import DecodeBuffers

        with torch.inference_mode(False):  # a replay and its copies are not worth entering it
            self._begin = DecodeBuffers(self._tables, self.sampler, self.cache.block_size)
            inbox, num_rows = self._begin.inbox, len(self._tables)
            self._memories.extend(StepMemory(inbox, num_rows) for _ in range(_NUM_MEMORIES))

    def _clear_inbox(self, size: int) -> None:
        self._form = None
        self._begin.clear(size)

    def _make_graphs(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.graphs = StepGraphs(self._record_step, self._clear_inbox, padded_sizes(max_num_seqs))
        from .triton_prompts import PromptBuffers

        sizes = prompt_sizes(max_num_batched_tokens)
        with torch.inference_mode(False):
            self._prompts = PromptBuffers(
                self._tables, self.sampler, sizes[-1], self.cache.block_size
            )
        self.prompt_graphs = StepGraphs(
            self._record_prompts, self._prompts.clear, sizes, self.graphs.pool
        )

    def _record_prompts(self, size: int) -> tuple[Tensor, Tensor]:
        """A step with prompts of what is in the inbox: logits, and packed tokens."""
        logits = self.model.forward(self._prompts(size))
        rows = self._prompts.drawn_rows(size)  # of a few prompts most are of no sequence
        return logits, self._begin.draw(logits, rows, leaves_out=True)

    # --- rows ------------------------------------------------------------------------------

    def _load_rows(self, step: SchedulerOutput) -> None:
        """Load the sampling parameters of sequences that have got a row."""
        owners = self._owners
        # Samples that fork in this step are sampled without being in its sequences.
        both = (*step.sequences, *step.sampled)
        new = [*{id(s): s for s in both if owners[s.row] is not s.table}.values()]
        if not new:
            return
        self.sampler.start([s.row for s in new], [self._sampling_input(s) for s in new])
        for sequence in new:
            owners[sequence.row] = sequence.table
            self._num_sent[sequence.row] = 0

    # --- decode ----------------------------------------------------------------------------

    def _decode(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults | None]:
        """Launch a step of rows that lack nothing but their new blocks."""
        if self._begin is None:
            return self._decode_on_host(step, masks)
        memory, form = self._memories[0], self._form
        if form is None or not form.fits(step, has_masks=bool(masks)):
            form = self._find_form(step, has_masks=bool(masks))
            memory.send(form.numbers)
        elif step.grown:
            form.update(step.grown)
            memory.send(form.numbers)
        self._form = form
        kind = form.size, form.samples, form.groups is not None
        if self.graphs is not None and self.graphs.has(*kind):
            found = self.graphs.replay(*kind)
        else:
            found = self._step(*kind, max(step.ends))
        if form.samples:
            return form.rows, memory.receive(found, form.size, has_logprobs=form.has_logprobs)
        return form.rows, self._sample(found, form, masks)

    @torch.inference_mode()
    def _sample(self, logits: Tensor, form: DecodeForm, masks: Any) -> StepResults:
        """Sample by what a recorded step leaves to others: masks, and what is torch code."""
        n = len(form.rows)
        where = self._begin.rows(form.size)[:n].long()
        return self._send_back(self.sampler.sample(logits[:n], where, form.rows, masks))

    @torch.inference_mode()
    def _find_form(self, step: SchedulerOutput, *, has_masks: bool) -> DecodeForm:
        """How to launch a step of other sequences than the last; a graph is recorded if missing."""
        rows, groups = [sequence.row for sequence in step.sequences], step.prefix_groups
        size = n = len(rows)
        samples = not has_masks and not self.sampler.needs_torch(rows)
        if self.graphs is not None:
            # A step that shares is recorded for few sizes: reading less gains more than they lose.
            size = self.graphs.fit(n if groups is None else self._round_up(n))
            if not self.graphs.ensure(size, samples, groups is not None):
                size = n
        return DecodeForm(
            step,
            size,
            has_masks=has_masks,
            samples=samples,
            has_logprobs=self.sampler.has_logprobs(rows),
        )

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

    @torch.inference_mode()
    def _step(self, size: int, samples: bool, shares: bool, max_seq_len: int) -> Tensor:
        """A decode step of the rows in the inbox: packed tokens, or logits."""
        batch = self._begin(size, max_seq_len, shares=shares)
        logits = self.model.forward(batch)
        if not samples:
            return self._begin.keep(logits) if self.graphs is not None else logits
        packed: Tensor = self._begin.draw(logits, self._begin.rows(size))
        return packed

    @torch.inference_mode()
    def _decode_on_host(
        self, step: SchedulerOutput, masks: Any
    ) -> tuple[list[int], StepResults | None]:
        """What ``_decode`` does on a GPU, in torch."""
        rows = [sequence.row for sequence in step.sequences]
        blocks = [sequence.table.blocks[-1] for sequence in step.sequences]
        batch, where = self._begin_on_host(rows, blocks, max(step.ends), step.prefix_groups)
        logits = self.model.forward(batch)
        return rows, self._send_back(self.sampler.sample(logits, where, rows, masks))

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

    def _compute(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults | None]:
        """Launch a step whose tokens the host knows, but for those that are still unread."""
        self._form = None
        self._load_rows(step)
        rows = [sequence.row for sequence in step.sampled]
        assumed = step.find_assumed() if step.drafts else None
        arrays = self._gather(step, rows, assumed)
        graphs = self.prompt_graphs
        with torch.inference_mode():
            if (
                graphs is not None
                and self._prompts.takes(arrays)
                and graphs.ensure(size := graphs.fit(self._prompts.least(arrays)))
            ):
                results = self._replay(size, arrays, rows, masks, assumed)
            else:
                results = self._launch_kernels(step, arrays, rows, masks, assumed)
        for sequence, at in zip(step.sampled, step.logits_rows, strict=True):
            # What is accepted of drafts the host finds out: rows have to be told.
            sequence.is_decoding = step.sequences[at] is sequence and not step.drafts
        return rows, results

    def _replay(
        self,
        size: int,
        arrays: dict[str, Any],
        rows: list[int],
        masks: Any,
        assumed: list[list[int]] | None,
    ) -> StepResults | None:
        """Launch a recorded step, and sample from its logits what it does not draw."""
        assert self.prompt_graphs is not None
        draws = not masks and assumed is None and not self.sampler.needs_torch(rows)
        self._prompts.fill(arrays, size, draws=draws)
        logits, packed = self.prompt_graphs.replay(size)
        if not rows:
            return None
        if draws:
            has_logprobs = self.sampler.has_logprobs(rows)
            return self._memories[0].receive(packed, len(logits), has_logprobs=has_logprobs)
        where = self._prompts.sampled_rows(size, len(rows))
        return self._send_back(
            self.sampler.sample(logits[: len(rows)], where, rows, masks, assumed)
        )

    def _launch_kernels(
        self,
        step: SchedulerOutput,
        arrays: dict[str, Any],
        rows: list[int],
        masks: Any,
        assumed: list[list[int]] | None,
    ) -> StepResults | None:
        """Launch a step's kernels one by one."""
        arrays = self._expand(arrays)
        if self.device.type == "cuda":
            packed = pack(list(arrays.values()), self.device).to(self.device, non_blocking=True)
            tensors = dict(zip(arrays, unpack(packed, list(arrays.values())), strict=True))
        else:
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch = self._place(tensors, max(step.num_tokens), max(step.ends))
        logits = self.model.forward(batch)
        if not rows:
            return None
        found = self.sampler.sample(logits, tensors["sampled_rows"], rows, masks, assumed)
        return self._send_back(found)

    def _gather(
        self, step: SchedulerOutput, sampled_rows: list[int], assumed: list[list[int]] | None
    ) -> dict[str, Any]:
        token_ids: list[int] = []
        unread: list[int] = []  # sequences whose last token the device has
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
                # The last block known may have been replaced by a copy of its own, and those past
                # the tokens that were there by others, when a draft was not accepted.
                first = min(max(0, self._num_sent[row] - 1), (end - chunk) // size)
                self._num_sent[row] = len(blocks)
            token_ids += known
            if len(known) < chunk:
                unread.append(at)
                token_ids.append(0)
            new_blocks += blocks[first:]
            first_columns.append(first)
            first_blocks.append(len(new_blocks))
        rows = np.array([sequence.row for sequence in step.sequences], np.int64)
        query_lens = np.array(step.num_tokens, np.int32)
        seq_lens = np.array(step.ends, np.int32)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query_lens, out=starts[1:])
        last_tokens = starts[1:].astype(np.int64) - 1
        logits_rows = last_tokens[step.logits_rows]
        sampled_lens = seq_lens[step.logits_rows]
        if assumed is not None:
            num_drafted = [len(step.drafts.get(at, ())) for at in step.logits_rows]
            sampled_lens -= np.array(num_drafted, np.int32)
            logits_rows += np.array([*map(len, assumed)], np.int64) - num_drafted
        return {
            "token_ids": np.array(token_ids, np.int64),
            "logits_rows": logits_rows,
            "seq_lens": seq_lens,
            "starts": starts,
            "rows": rows,
            "sampled_rows": np.array(sampled_rows, np.int64),
            "sampled_lens": sampled_lens,
            "unread_at": last_tokens[unread],
            "first_columns": np.array(first_columns, np.int64),
            "first_blocks": np.array(first_blocks[:-1], np.int64),
            "block_ids": np.array(new_blocks, np.int32),
        }

    @staticmethod
    def _expand(step: dict[str, Any]) -> dict[str, Any]:
        """What ``_place`` needs besides: numbers of each token and of each new block."""
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

    def _send_back(self, found: tuple[Tensor, Tensor, Tensor | None]) -> StepResults:
        """Copy what was sampled to the host behind the step, so that nothing waits for it here."""
        tokens, best, logprobs = (None if each is None else self._to_host(each) for each in found)
        assert tokens is not None
        assert best is not None
        return StepResults(tokens.numpy(), best.numpy(), logprobs)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _bytes_per_key(cache: KVCache) -> int:
    """Bytes of a token's keys and values in one layer; of several kinds of layers, their mean."""
    each = [layer.bytes_per_token(cache.dtype) for layer in cache.layers]
    return max(1, sum(each) // len(each))
