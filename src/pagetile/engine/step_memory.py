"""Pinned memory through which the host and the device exchange steps.

A step needs at most one copy to the device, and one back. Both use pinned memory that is allocated
once, so a launch makes no tensor and allocates nothing::

    host     rows │ last blocks │ groups            token ids │ largest logits │ log-probabilities
                  │ where any has changed                     ▲
    device        ▼                                           │
                inbox ─────────── graph of the step ──────► packed
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .request import Sequence
from .step import SchedulerOutput, StepResults


class StepMemory:
    """Host memory of one step in flight, pinned for a GPU.

    Attributes:
        event: The event that ``record`` records; ``None`` on a CPU.
    """

    def __init__(self, inbox: Tensor, num_rows: int) -> None:
        from .triton_copy import copy_words
        from .triton_draw import count_words, unpack

        def zeros(num_words: int) -> Tensor:
            return torch.zeros(num_words, dtype=torch.int32, device="cpu", pin_memory=inbox.is_cuda)

        self._inbox, self._outbox = inbox, zeros(len(inbox))
        self._words, self._unpack = zeros(count_words(num_rows)), unpack
        self._copy_words, self._count_words = copy_words, count_words
        self._views: dict[int, tuple[Tensor, StepResults]] = {}  # by the number of rows
        self._numbers = self._outbox.numpy()
        self.event = torch.cuda.Event(blocking=True) if inbox.is_cuda else None  # type: ignore[no-untyped-call]

    def send(self, numbers: npt.NDArray[Any]) -> None:
        """Queue a copy of numbers to the inbox."""
        self._numbers[: len(numbers)] = numbers
        self._copy_words(self._inbox, self._outbox, len(numbers))

    def receive(self, packed: Tensor, size: int, *, has_logprobs: bool) -> StepResults:
        """Queue a copy of the results of a draw of ``size`` rows to the host."""
        if size not in self._views:
            words = self._words[: len(packed)]
            tokens, best, logprobs = self._unpack(words, size)
            self._views[size] = words, StepResults(tokens.numpy(), best.numpy(), logprobs)
        words, results = self._views[size]
        self._copy_words(words, packed, self._count_words(size, has_logprobs=has_logprobs))
        return results if has_logprobs else results._replace(logprobs=None)

    def record(self) -> torch.cuda.Event | None:
        """Record the event behind all launched work, and return it."""
        if self.event is not None:
            # Passing the device's number takes half the time of event.record() alone.
            self.event.record(torch.cuda.current_stream(self._inbox.get_device()))
        return self.event


class DecodeForm:
    """How to launch decode steps of the same sequences; computed once for all of them.

    Args:
        step: The first of them.
        size: Rows of the graph, padding included.
        has_masks: Whether tokens are ruled out by masks.
        samples: Whether the graph ends with tokens, not with logits.
        has_logprobs: Whether any sequence reports log-probabilities.

    Attributes:
        rows: The sequences' rows.
        groups: Their common prefixes: ``SchedulerOutput.prefix_groups``.
        numbers: The content of the inbox: rows, the last block of each, prefix groups.
    """

    def __init__(
        self,
        step: SchedulerOutput,
        size: int,
        *,
        has_masks: bool,
        samples: bool,
        has_logprobs: bool,
    ) -> None:
        self.groups, self.size = step.prefix_groups, size
        self.samples, self.has_logprobs = samples, has_logprobs
        self._sequences, self._has_masks = step.sequences, has_masks
        self.rows = [sequence.row for sequence in step.sequences]
        blocks = [sequence.table.blocks[-1] for sequence in step.sequences]
        unused = [-1] * (size - len(blocks))
        numbers = [*self.rows, *unused, *blocks, *unused]
        if self.groups is not None:
            numbers += [*self.groups.cu_group_seqs[:-1], size, *self.groups.prefix_lens]
        self.numbers: npt.NDArray[Any] = np.array(numbers, np.int32)
        self._block_at = {row: size + at for at, row in enumerate(self.rows)}

    def fits(self, step: SchedulerOutput, *, has_masks: bool) -> bool:
        """Return whether a step has the same sequences, in the same order and groups."""
        return (
            self._sequences == step.sequences
            and self.groups is step.prefix_groups
            and self._has_masks == has_masks
        )

    def update(self, grown: list[Sequence]) -> None:
        """Update the sequences' last blocks."""
        for sequence in grown:
            self.numbers[self._block_at[sequence.row]] = sequence.table.blocks[-1]
