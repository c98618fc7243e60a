"""Steps on a GPU: kernels lay them out and sample, and CUDA graphs launch them.

For a decode step the host sends the rows that take part and each one's last block, if any has
changed; all else is on the device already, and the whole step is one graph replay::

    host     rows and last blocks ──┐ one pinned copy                  ┌─► tokens, a step later
    device                          ▼                                  │ pinned copy, event
             begin: last token · position · slot · table  ─► model ─► draw ─► rows

A step with prompts brings its new tokens and blocks in one copy, and is a graph replay as well
(``triton_prompts.py``). Sampling is part of the graph, unless some of it needs torch code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from ..ops.paged_attention.shared_prefixes import GPU_BYTES
from .cuda_graphs import StepGraphs, padded_sizes, prompt_sizes
from .sampler import Sampler
from .sampling_rows import BY_TORCH, Feature
from .step import SchedulerOutput, StepResults
from .step_memory import DecodeForm, StepMemory

_NUM_MEMORIES = 4
"""Number of host buffers, used alternately: at most two steps are in flight."""


class KernelSteps:
    """Launches the steps of a ``Runner`` by kernels that read and write its rows.

    Attributes:
        graphs: CUDA graphs of decode steps; ``None`` before ``make_graphs``.
        prompt_graphs: CUDA graphs of steps that compute prompts, sampling included; likewise.
        prompt_buffers: The static inputs of these.
        min_saved_tokens: Fewest keys that sharing prefixes must save in a step to be faster.
        on_device: Within it the model's GPU is the current one, where Triton launches kernels.
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
        self.on_device: AbstractContextManager[None] = (
            torch.cuda.device(tables.device) if tables.is_cuda else nullcontext()
        )
        with torch.inference_mode(False):  # so that replays need not enter inference mode
            self._begin = DecodeBuffers(tables, sampler, cache.block_size)
            inbox, num_rows = self._begin.inbox, len(tables)
            self._memories = deque(StepMemory(inbox, num_rows) for _ in range(_NUM_MEMORIES))
        self._form: DecodeForm | None = None  # whose rows are in the inbox
        self.graphs: StepGraphs | None = None
        self.prompt_graphs: StepGraphs | None = None
        self.prompt_buffers: Any = None

    def make_graphs(self, max_num_batched_tokens: int) -> None:
        """Use CUDA graphs from now on, captured by ``warm_up`` or when a step needs one."""
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
        """Capture graphs of every size, and compile the kernels for grammars."""
        if self.graphs is None or self.prompt_graphs is None:
            return
        decode = [(self.graphs, size, True, False) for size in self.graphs.sizes]
        decode += [(self.graphs, size, True, True) for size in self._shared_sizes()]
        prompts = [(self.prompt_graphs, size) for size in self.prompt_graphs.sizes]
        with torch.inference_mode(), self.on_device:
            for graphs, *form in show([*reversed(prompts), *reversed(decode)]):
                graphs.ensure(*form)
            from .triton_draw import FEWEST_ROWS, compile_masks

            # With so many rows a program scores several tiles.
            size = self.prompt_graphs.fit(min(FEWEST_ROWS, self.prompt_graphs.sizes[-1]))
            self.prompt_buffers.clear(size)
            compile_masks(self._record_prompts(size)[0], self.sampler)

    def start(self, step: SchedulerOutput) -> None:
        """Switch to the other step's buffers; call it before anything of a step is launched."""
        self._memories.rotate()
        if not step.is_decode:
            self._form = None

    def record(self) -> torch.cuda.Event | None:
        """Record an event behind what is launched; ``None`` on a CPU."""
        return self._memories[0].record()

    # --- decode ----------------------------------------------------------------------------

    def decode(self, step: SchedulerOutput, masks: Any) -> tuple[list[int], StepResults]:
        """Launch a step whose rows are up to date except for new blocks."""
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
        """Return how to launch a step whose sequences have changed; a missing graph is captured."""
        rows, groups = [sequence.row for sequence in step.sequences], step.prefix_groups
        size = n = len(rows)
        samples = self._graphs_sample(rows, has_masks)
        if self.graphs is not None:
            # Graphs with shared prefixes have few sizes: sharing gains more than padding costs.
            size = self.graphs.fit(n if groups is None else self._round_up(n))
            if not self.graphs.ensure(size, samples, groups is not None):
                size = n
        return DecodeForm(
            step,
            size,
            has_masks=has_masks,
            samples=samples,
            has_logprobs=self.sampler.uses(rows, Feature.LOGPROBS),
        )

    @torch.inference_mode()
    def _sample(self, logits: Tensor, form: DecodeForm, masks: Any) -> StepResults:
        """Sample outside of the graph: with masks, and what torch code computes."""
        n = len(form.rows)
        where = self._begin.rows(form.size)[:n].long()
        return self.sampler.sample(logits[:n], where, form.rows, masks)

    @torch.inference_mode()
    def _step(
        self, size: int, samples: bool, shares: bool, max_seq_len: int | None = None
    ) -> Tensor:
        """Compute a decode step of the rows in the inbox; return packed tokens, or logits."""
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
        """Return the sizes of steps in which sharing can save enough."""
        assert self.graphs is not None
        least = 2 + (self.min_saved_tokens - 1) // self.max_model_len
        sizes = self.graphs.sizes
        return [size for size in sizes if size == self._round_up(size) and size >= least]

    def _graphs_sample(self, rows: list[int], masks: Any) -> bool:
        """Return whether the graph samples these rows: none needs masks or torch code."""
        return not masks and not self.sampler.uses(rows, BY_TORCH)

    # --- prompts ---------------------------------------------------------------------------

    def find_size(self, arrays: dict[str, Any]) -> int | None:
        """Return the size of the graph for a step with prompts; ``None`` if there is none."""
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
        """Launch a step with prompts, and sample from its logits if the graph does not.

        The masks, and the assumed drafts, are those of ``Sampler.sample``.
        """
        assert self.prompt_graphs is not None
        draws = assumed is None and self._graphs_sample(rows, masks)
        self.prompt_buffers.fill(arrays, size, draws=draws)
        logits, packed = self.prompt_graphs.replay(size)
        if not rows:
            return None
        if draws:
            has_logprobs = self.sampler.uses(rows, Feature.LOGPROBS)
            return self._memories[0].receive(packed, len(logits), has_logprobs=has_logprobs)
        where = self.prompt_buffers.sampled_rows(size, len(rows))
        return self.sampler.sample(logits[: len(rows)], where, rows, masks, assumed)

    def _record_prompts(self, size: int) -> tuple[Tensor, Tensor]:
        """Compute the step with prompts in the inbox; return logits and packed tokens."""
        logits = self.model.forward(self.prompt_buffers(size))
        rows = self.prompt_buffers.drawn_rows(size)  # with a few prompts most are padding
        return logits, self._begin.draw(logits, rows, leaves_out=True)


def _bytes_per_key(cache: KVCache) -> int:
    """Return the bytes of a token's keys and values in one layer, averaged over layers."""
    each = [layer.bytes_per_token(cache.dtype) for layer in cache.layers]
    return max(1, sum(each) // len(each))
