"""Steps on a GPU: kernels lay them out and sample, and graphs launch them.

A decode step is told which rows take part and each one's last block, if any has changed; all else
is on the device already, and the whole step is one graph replay::

    host     rows and last blocks ──┐ one pinned copy                  ┌─► tokens, a step later
    device                          ▼                                  │ pinned copy, event
             begin: last token · position · slot · table  ─► model ─► draw ─► rows

A step with prompts brings its new tokens and blocks in one copy, and is a graph replay as well
(``triton_prompts.py``). Sampling is within the graph, unless torch code has a part in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from ..ops.paged_attention.shared_prefixes import GPU_BYTES
from .cuda_graphs import StepGraphs, padded_sizes, prompt_sizes
from .sampler import Sampler, StepResults, send_back
from .scheduler import SchedulerOutput
from .step_memory import DecodeForm, StepMemory

_NUM_MEMORIES = 4
"""Used in turn: at most two steps are in flight."""


class KernelSteps:
    """Launches the steps of a ``Runner`` by kernels that read and write its rows.

    Args:
        model: The model.
        cache: Keys and values.
        sampler: The rows' parameters, lengths and last tokens.
        tables: int32 ``[num_rows, width]``: the rows' blocks.
        max_model_len: The most tokens of a row.

    Attributes:
        graphs: The recorded decode steps; ``None`` before ``make_graphs``.
        prompt_graphs: The recorded steps that compute prompts, with their draws; likewise.
        prompt_buffers: The memory that these read.
        min_saved_tokens: Of a decode step, the keys that sharing prefixes must save to gain time.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        sampler: Sampler,
        tables: Tensor,
        max_model_len: int,
    ) -> None:
        from .triton import DecodeBuffers

        self.model, self.sampler, self.max_model_len = model, sampler, max_model_len
        self.min_saved_tokens = -(-GPU_BYTES // _bytes_per_key(cache))
        self._tables, self._block_size = tables, cache.block_size
        with torch.inference_mode(False):  # a replay and its copies are not worth entering it
            self._begin = DecodeBuffers(tables, sampler, cache.block_size)
            inbox, num_rows = self._begin.inbox, len(tables)
            self._memories = deque(StepMemory(inbox, num_rows) for _ in range(_NUM_MEMORIES))
        self._form: DecodeForm | None = None  # whose rows are in the inbox
        self.graphs: StepGraphs | None = None
        self.prompt_graphs: StepGraphs | None = None
        self.prompt_buffers: Any = None

    def make_graphs(self, max_num_batched_tokens: int) -> None:
        """Replay steps from now on, which are recorded when ``warm_up`` or a step asks for them."""
        from .triton_prompts import PromptBuffers

        self.graphs = StepGraphs(self._step, self._clear_inbox, padded_sizes(len(self._tables)))
        sizes = prompt_sizes(max_num_batched_tokens)
        with torch.inference_mode(False):
            self.prompt_buffers = PromptBuffers(
                self._tables, self.sampler, sizes[-1], self._block_size
            )
        self.prompt_graphs = StepGraphs(
            self._record_prompts, self.prompt_buffers.clear, sizes, self.graphs.pool
        )

    def warm_up(self, show: Callable[[Any], Any]) -> None:
        """Record the steps of every size, and compile the kernels for grammars.

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
                self.prompt_buffers.clear(size)
                self.sampler.compile_masks(self.prompt_graphs.replay(size)[0])

    def start(self, step: SchedulerOutput) -> None:
        """Take the memory of another step in flight; to be called before any is launched."""
        self._memories.rotate()
        if not step.is_decode:
            self._form = None

    def record(self) -> torch.cuda.Event | None:
        """Record an event behind what is launched; ``None`` on a CPU."""
        return self._memories[0].record()

    # --- decode ----------------------------------------------------------------------------

    def decode(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults]:
        """Launch a step of rows that lack nothing but their new blocks."""
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
    def _find_form(self, step: SchedulerOutput, *, has_masks: bool) -> DecodeForm:
        """How to launch a step of other sequences than the last; a graph is recorded if missing."""
        rows, groups = [sequence.row for sequence in step.sequences], step.prefix_groups
        size = n = len(rows)
        samples = self._graphs_sample(rows, has_masks)
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

    @torch.inference_mode()
    def _sample(self, logits: Tensor, form: DecodeForm, masks: Any) -> StepResults:
        """Sample by what a recorded step leaves to others: masks, and what is torch code."""
        n = len(form.rows)
        where = self._begin.rows(form.size)[:n].long()
        return send_back(self.sampler.sample(logits[:n], where, form.rows, masks))

    @torch.inference_mode()
    def _step(
        self, size: int, samples: bool, shares: bool, max_seq_len: int | None = None
    ) -> Tensor:
        """A decode step of the rows in the inbox: packed tokens, or logits."""
        batch = self._begin(size, max_seq_len or self.max_model_len, shares=shares)
        logits = self.model.forward(batch)
        if not samples:
            return self._begin.keep(logits) if self.graphs is not None else logits
        return self._begin.draw(logits, self._begin.rows(size))

    def _clear_inbox(self, size: int) -> None:
        self._form = None
        self._begin.clear(size)

    def _round_up(self, size: int) -> int:
        assert self.graphs is not None
        return min(1 << (size - 1).bit_length(), self.graphs.sizes[-1])

    def _shared_sizes(self) -> list[int]:
        """The sizes of steps that can save enough by sharing."""
        assert self.graphs is not None
        least = 2 + (self.min_saved_tokens - 1) // self.max_model_len
        sizes = self.graphs.sizes
        return [size for size in sizes if size == self._round_up(size) and size >= least]

    def _graphs_sample(self, rows: list[int], masks: Any) -> bool:
        """Whether a recorded step draws for these rows: nothing asks for torch code beside it."""
        return not masks and not self.sampler.needs_torch(rows)

    # --- prompts ---------------------------------------------------------------------------

    def find_size(self, arrays: dict[str, Any]) -> int | None:
        """The size of the graph that computes a step with prompts; ``None``: none does.

        Args:
            arrays: The step, as ``Runner`` gathers it.
        """
        if self.prompt_graphs is None or not self.prompt_buffers.takes(arrays):
            return None
        size = self.prompt_graphs.fit(self.prompt_buffers.least(arrays))
        return size if self.prompt_graphs.ensure(size) else None

    def replay(
        self,
        size: int,
        arrays: dict[str, Any],
        rows: list[int],
        masks: Any,
        assumed: list[list[int]] | None,
    ) -> StepResults | None:
        """Launch a step with prompts, and sample from its logits what it does not draw.

        Args:
            size: What ``find_size`` returned.
            arrays: The step.
            rows: That are sampled.
            masks: As for ``Sampler.sample``.
            assumed: Likewise its ``drafts``.
        """
        assert self.prompt_graphs is not None
        draws = assumed is None and self._graphs_sample(rows, masks)
        self.prompt_buffers.fill(arrays, size, draws=draws)
        logits, packed = self.prompt_graphs.replay(size)
        if not rows:
            return None
        if draws:
            has_logprobs = self.sampler.has_logprobs(rows)
            return self._memories[0].receive(packed, len(logits), has_logprobs=has_logprobs)
        where = self.prompt_buffers.sampled_rows(size, len(rows))
        return send_back(self.sampler.sample(logits[: len(rows)], where, rows, masks, assumed))

    def _record_prompts(self, size: int) -> tuple[Tensor, Tensor]:
        """A step with prompts of what is in the inbox: logits, and packed tokens."""
        logits = self.model.forward(self.prompt_buffers(size))
        rows = self.prompt_buffers.drawn_rows(size)  # of a few prompts most are of no sequence
        return logits, self._begin.draw(logits, rows, leaves_out=True)


def _bytes_per_key(cache: KVCache) -> int:
    """Bytes of a token's keys and values in one layer; of several kinds of layers, their mean."""
    each = [layer.bytes_per_token(cache.dtype) for layer in cache.layers]
    return max(1, sum(each) // len(each))
