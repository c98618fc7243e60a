"""Steps as CUDA graphs: a step is captured once and replayed as one launch.

A graph reads its inputs from static memory, which the host fills before each replay. It has a
size: a number of sequences for decode steps, a number of tokens for steps that compute prompts. A
step is padded to the next size, decode steps by rows of number -1, which see no key, write none and
get no token::

    decode     rows 3, 0, 7:   [3 0 7]  ->  [3 0 7 -1]  ->  graph of 4  ->  tokens [0:3]
    prompts    21 tokens       ->  32 tokens            ->  graph of 32 ->  logits, tokens
"""

from __future__ import annotations

import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..device import refusing_to_wait

_STEP = 16
_MOST_TOKENS = 8192
"""Launching a step of 8192 tokens kernel by kernel takes the host 17 ms for the 28 layers of
Qwen3-0.6B, longer than an H200 takes to compute it."""


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences to capture: few, with little padding between them.

    Examples:
        >>> padded_sizes(40)
        [1, 2, 4, 8, 16, 24, 32, 40]
        >>> padded_sizes(100)[-4:]
        [64, 80, 96, 100]
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, _STEP)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def prompt_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture steps with prompts for.

    Examples:
        >>> prompt_sizes(200)
        [16, 24, 32, 48, 64, 96, 128, 192, 200]
    """
    most = min(_MOST_TOKENS, max_num_batched_tokens)
    sizes = [n for power in range(4, 13) for n in (2**power, 3 * 2 ** (power - 1))]
    return [size for size in sizes if size < most] + [most]


class StepGraphs:
    """Captures steps, each size once, and replays them.

    A size that cannot be captured is tried once; its steps are launched kernel by kernel.

    Args:
        step: Runs a step of a size on its static inputs. Further arguments select variants, each
            of which is captured separately.
        clear: Empties the static inputs before a capture, since they may still hold a step of
            another size.
        sizes: The sizes that steps are padded to, ascending.
        pool: Memory pool of other graphs to share; ``None``: its own.

    Attributes:
        reasons: Why a size and variant is not captured: the host would wait for the device, as in
            the routing of some mixtures of experts.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        clear: Callable[[int], object],
        sizes: list[int],
        pool: Any = None,
    ) -> None:
        self._step, self._clear, self.sizes = step, clear, sizes
        self._recorded: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.reasons: dict[tuple[int, ...], str] = {}

    @property
    def recorded_sizes(self) -> list[int]:
        """The sizes that have a graph."""
        return sorted({size for size, *_ in self._recorded})

    def fit(self, size: int) -> int:
        """Return the size of the graph for a step."""
        return self.sizes[bisect_left(self.sizes, size)]

    def ensure(self, size: int, *form: bool) -> bool:
        """Capture a step unless it has been; return False if it cannot be captured.

        Call it before the step's data is written to the static inputs.
        """
        key = size, *form
        if key not in self._recorded and key not in self.reasons:
            self._record(size, *form)
        return key in self._recorded

    def has(self, size: int, *form: bool) -> bool:
        """Return whether a step has been captured."""
        return (size, *form) in self._recorded

    def replay(self, size: int, *form: bool) -> Any:
        """Launch a captured step; its result is valid until the next launch of any step."""
        graph, result = self._recorded[(size, *form)]
        graph.replay()
        return result

    def _record(self, size: int, *form: bool) -> None:
        self._clear(size)
        self._step(size, *form)  # compiles kernels and takes workspaces
        try:
            with refusing_to_wait():
                self._step(size, *form)
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self.reasons[(size, *form)] = f"its forward waits for the device: {error}"
            return
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
        with (
            torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"),
            _without_garbage_collection(),
        ):
            result = self._step(size, *form)
        self._recorded[(size, *form)] = graph, result


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return a GPU's stream for captures; torch's own is of the GPU that captured first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: freeing another engine's graphs would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
