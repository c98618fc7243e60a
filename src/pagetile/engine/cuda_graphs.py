"""Decode steps as CUDA graphs: a forward is recorded once and replayed as one launch.

Between two decode steps only numbers change: tokens, positions, lengths, block tables. A graph
reads them where they lay when it was recorded; the next step's are copied there. It is recorded
for a number of sequences, so a step is filled up with empty ones to the next such number::

    3 sequences:   [a b c]  ->  [a b c ·]  ->  graph of 4  ->  logits [0:3]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import refusing_to_wait
from ..models.forward_batch import ForwardBatch
from ..transfer import pack, unpack
from .step_inputs import StepInputs, make_batch

__all__ = ["DecodeGraphs", "padded_sizes"]

_STEP = 16


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences that graphs are recorded for: few, and not much too large.

    Example:
        >>> padded_sizes(40)
        [1, 2, 4, 8, 16, 32, 40]
    """
    sizes = [1, 2, 4, 8, *range(_STEP, max_num_seqs, _STEP)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, eq=False)
class _Recording:
    graph: torch.cuda.CUDAGraph
    memory: Tensor
    """The packed inputs that the graph reads."""
    logits: Tensor
    """``[size, vocab_size]``, which the next replay of any graph may overwrite."""


class DecodeGraphs:
    """Records decode steps when a number of sequences is met for the first time, and replays.

    Args:
        forward: From a batch on the device to logits ``[num_seqs, vocab_size]``.
        device: A CUDA device.
        max_num_seqs: The most sequences of a step.
        max_model_len: The most keys of a sequence; graphs are valid up to it.
        width: Columns of the block tables that ``max_model_len`` keys take.

    Attributes:
        reason: Why nothing is recorded: the forward makes the host wait for the device, as some
            models' routing of experts does. ``None`` as long as nothing speaks against it.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        width: int,
    ) -> None:
        self._forward, self._device = forward, device
        self._sizes = padded_sizes(max_num_seqs)
        self._max_model_len, self._width = max_model_len, width
        self._recordings: dict[int, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.reason: str | None = None

    @property
    def recorded_sizes(self) -> list[int]:
        """The numbers of sequences that have a graph by now."""
        return sorted(self._recordings)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Compute a decode step.

        Returns:
            Logits ``[num_seqs, vocab_size]``, valid until the next step; ``None`` if the model
            cannot be recorded.
        """
        if self.reason is not None:
            return None
        size = next(size for size in self._sizes if size >= inputs.num_seqs)
        padded = inputs.pad(size, self._width)
        packed = pack(padded.arrays, self._device)
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._record(padded, packed)
            if recording is None:
                return None
            self._recordings[size] = recording
        recording.memory.copy_(packed, non_blocking=True)
        recording.graph.replay()
        return recording.logits[: inputs.num_seqs]

    def _record(self, padded: StepInputs, packed: Tensor) -> _Recording | None:
        """Run a step twice and record it; what it writes to the cache is the same each time."""
        memory = packed.to(self._device, non_blocking=True)
        tensors = unpack(memory, padded.arrays)
        batch = make_batch(tensors, max_query_len=1, max_seq_len=self._max_model_len)
        self._forward(batch)  # compiles kernels and takes workspaces
        try:
            with refusing_to_wait():
                self._forward(batch)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self.reason = f"its forward waits for the device: {error}"
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(batch)
        return _Recording(graph, memory, logits)
