"""Records of a step, from the choice of its tokens to those that it samples.

::

    Scheduler ─► SchedulerOutput ─► Runner ─► LaunchedStep ─► SampledTokens ─► sequences
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GenerationError
from .logprobs import TokenLogprobs
from .request import Sequence

if TYPE_CHECKING:
    from .prefix_groups import PrefixGroups


@dataclass
class SchedulerOutput:
    """The sequences and tokens of the next forward pass."""

    number: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    """New tokens of each sequence."""
    ends: list[int] = field(default_factory=list)
    """Tokens of each sequence that are computed after the step."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before anything is written."""
    sampled: list[Sequence] = field(default_factory=list)
    """The sequences that get a token, forks included."""
    logits_rows: list[int] = field(default_factory=list)
    """For each of ``sampled``, the position in ``sequences`` of the one whose logits it uses."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Drafted tokens computed after a sequence's last one, by its position in ``sequences``. The
    sequence is in ``sampled`` once more for each, in their order."""
    is_decode: bool = True
    """Whether every sequence computes one token, known to the device, and samples the next."""
    prefix_groups: PrefixGroups | None = None
    """Groups of a decode step's sequences that share first blocks; ``None`` if reading these once
    would not save time."""
    grown: list[Sequence] = field(default_factory=list)
    """The sequences whose last block may have changed since the step before."""


class StepResults(NamedTuple):
    """Results of ``Sampler.sample`` in host memory, valid once the step is computed."""

    tokens: npt.NDArray[Any]
    best: npt.NDArray[Any]
    logprobs: Tensor | None


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step that was launched; the device may have computed it already."""

    step: SchedulerOutput
    rows: list[int]
    """Of the sequences that get a token."""
    results: StepResults | None
    """Of these rows, then perhaps of rows without a sequence; ``None`` if there are none."""
    event: torch.cuda.Event | None
    started: float


class SampledTokens(NamedTuple):
    """The next tokens of a step's rows."""

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    """Of rows that report them: the model's, before penalties, temperature and cuts."""
    errors: dict[int, GenerationError]
    """Why rows have no token; their token id is 0."""
