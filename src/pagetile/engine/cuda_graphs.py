"""Decode steps as CUDA graphs: a step is recorded once and replayed as one launch.

Between two decode steps only numbers change, and a graph reads them where they lay when it was
recorded. It is recorded for a number of sequences, so a step is filled up with rows of number -1,
which see no key, write none and get no token, to the next such number::

    rows 3, 0, 7:   [3 0 7]  ->  [3 0 7 -1]  ->  graph of 4  ->  tokens [0:3]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from ..device import refusing_to_wait

__all__ = ["DecodeGraphs", "padded_sizes"]

_STEP = 16


def padded_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences that graphs are recorded for: few, and not much too large.

    Example:
        >>> padded_sizes(40)
        [1, 2, 4, 8, 16, 24, 32, 40]
        >>> padded_sizes(100)[-4:]
        [64, 80, 96, 100]
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, _STEP)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Records decode steps, each size once, and replays them.

    Args:
        step: Runs a decode step of a size, with or without the draw, on what lies in its static
            inputs. It is recorded when these hold no sequence at all.
        max_num_seqs: The most sequences of a step.

    Attributes:
        reason: Why nothing is recorded: the step makes the host wait for the device, as some
            models' routing of experts does. ``None`` as long as nothing speaks against it.
    """

    def __init__(self, step: Callable[[int, bool], Tensor], max_num_seqs: int) -> None:
        self._step = step
        self.sizes = padded_sizes(max_num_seqs)
        self._recorded: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.reason: str | None = None

    @property
    def recorded_sizes(self) -> list[int]:
        """The numbers of sequences that have a graph by now."""
        return sorted({size for size, _ in self._recorded})

    def fit(self, num_seqs: int) -> int:
        """The size of the graph that serves a number of sequences."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def ensure(self, size: int, samples: bool) -> bool:
        """Record a step unless it has been; False if the model cannot be recorded.

        To be called before the step's numbers are written to the static inputs.
        """
        if self.reason is None and (size, samples) not in self._recorded:
            self._record(size, samples)
        return self.reason is None

    def replay(self, size: int, samples: bool) -> Tensor:
        """Launch a recorded step; its result is valid until the next launch of any step."""
        graph, result = self._recorded[size, samples]
        graph.replay()
        return result

    def _record(self, size: int, samples: bool) -> None:
        self._step(size, samples)  # compiles kernels and takes workspaces
        try:
            with refusing_to_wait():
                self._step(size, samples)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self.reason = f"its forward waits for the device: {error}"
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._step(size, samples)
        self._recorded[size, samples] = graph, result
