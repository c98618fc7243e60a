"""Per-row tables over the vocabulary: counts, biases and allowed tokens.

A table is allocated when a row that needs it starts. Kernels read its address from the row, so a
captured graph always reads the row's current tables. A freed table may be reused at once, because
the device uses memory in stream order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..transfer import send, send_integers
from .sampling_rows import Feature, SamplingInput

NUM_TABLES = 3
HAS_TABLES = Feature.PENALTY | Feature.BIAS | Feature.BAN


class TokenTables(NamedTuple):
    """The tables of one row; ``None`` where it needs none."""

    counts: Tensor | None = None
    """int32 ``[vocab_size]``: twice the occurrences in the output, plus 1 if in the prompt."""
    bias: Tensor | None = None
    """float32 ``[vocab_size]``"""
    allowed: Tensor | None = None
    """int32 ``[2, ceil(vocab_size / 32)]``: bits of the allowed tokens, within ``min_tokens`` and
    after them."""

    @property
    def addresses(self) -> list[int]:
        """The tables' addresses; 0 for those that are missing."""
        return [0 if table is None else table.data_ptr() for table in self]

    def add(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the output, if they are counted."""
        if self.counts is not None:
            _add(self.counts, token_ids)

    def after(self, draft: Sequence[int]) -> TokenTables:
        """Return the tables as they are after drafted tokens."""
        if self.counts is None:
            return self
        return self._replace(counts=_add(self.counts.clone(), draft))


def make_tables(
    input_: SamplingInput, features: Feature, vocab_size: int, device: torch.device
) -> TokenTables:
    """Return the tables of a row that starts."""
    return TokenTables(
        _count(input_, vocab_size, device) if features & Feature.PENALTY else None,
        _lay_out_bias(input_, vocab_size, device) if features & Feature.BIAS else None,
        _lay_out_allowed(input_, vocab_size, device) if features & Feature.BAN else None,
    )


def _count(input_: SamplingInput, vocab_size: int, device: torch.device) -> Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
    in_prompt = _known({*input_.prompt_token_ids}, vocab_size)
    counts.index_fill_(0, send_integers(in_prompt, device), 1)
    return _add(counts, input_.output_token_ids)


def _add(counts: Tensor, token_ids: Sequence[int]) -> Tensor:
    occurrences = Counter(_known(token_ids, len(counts)))
    if occurrences:  # unique tokens, so no element is written twice
        pairs = [[*occurrences], [*occurrences.values()]]
        where, times = send_integers(pairs, counts.device)
        counts[where] += 2 * times.int()
    return counts


def _lay_out_bias(input_: SamplingInput, vocab_size: int, device: torch.device) -> Tensor:
    biases = dict(input_.params.logit_bias or ())
    known = _known(biases, vocab_size)
    bias = np.zeros(vocab_size, np.float32)
    bias[known] = [biases[token_id] for token_id in known]
    return send(bias, device)


def _lay_out_allowed(input_: SamplingInput, vocab_size: int, device: torch.device) -> Tensor:
    allowed = np.ones(vocab_size, bool)
    if input_.params.allowed_token_ids is not None:
        allowed[:] = False
        allowed[_known(input_.params.allowed_token_ids, vocab_size)] = True
    allowed[_known([ids[0] for ids in input_.bad_words if len(ids) == 1], vocab_size)] = False
    early = allowed.copy()
    if input_.params.min_tokens:
        early[_known(input_.end_token_ids, vocab_size)] = False
    return send(np.stack([pack_bits(early), pack_bits(allowed)]), device)


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if 0 <= token_id < vocab_size]


def pack_bits(allowed: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pack booleans ``[vocab_size]`` into an int32 mask ``[ceil(vocab_size / 32)]``."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
