"""Per-row tables over the vocabulary: counts, biases and allowed tokens.

A table is allocated when a row that needs it starts. Kernels read its address from the row, so a
captured graph always reads the row's current tables. A freed table may be reused at once, because
the device uses memory in stream order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..transfer import send, send_integers
from .sampling_rows import Feature, SamplingInput

NUM_TABLES = 3


class TokenTables(NamedTuple):
    """The tables of one row; ``None`` where it needs none."""

    counts: Tensor | None = None
    """int32 ``[vocab_size]``: twice the occurrences in the output, plus 1 if in the prompt."""
    bias: Tensor | None = None
    """float32 ``[vocab_size]``"""
    allowed: Tensor | None = None
    """int32 ``[2, ceil(vocab_size / 32)]``: bits of the allowed tokens, within ``min_tokens`` and
    after them."""

    def addresses(self) -> list[int]:
        """Return the tables' addresses; 0 for those that are missing."""
        return [0 if table is None else table.data_ptr() for table in self]


class RowTables:
    """The tables of every row.

    Attributes:
        addresses: int64 ``[num_rows, NUM_TABLES]``, on the device.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rows: dict[int, TokenTables] = {}
        self.addresses = torch.zeros(num_rows, NUM_TABLES, dtype=torch.int64, device=device)

    def load(
        self, rows: Sequence[int], inputs: Sequence[SamplingInput], features: Sequence[Feature]
    ) -> npt.NDArray[Any]:
        """Make the tables of rows that start, and return their rows of ``addresses``."""
        for row, input_, asked in zip(rows, inputs, features, strict=True):
            self._rows[row] = TokenTables(
                self._count(input_) if asked & Feature.PENALTY else None,
                self._lay_out_bias(input_) if asked & Feature.BIAS else None,
                self._lay_out_allowed(input_) if asked & Feature.BAN else None,
            )
        return np.array([self._rows[row].addresses() for row in rows], np.int64)

    def of(
        self, rows: Sequence[int], drafts: Sequence[Sequence[int]] | None = None
    ) -> list[TokenTables]:
        """Return the tables of rows; with drafts, as after each entry's drafted tokens."""
        found = [self._rows[row] for row in rows]
        if drafts is None:
            return found
        return [
            tables
            if tables.counts is None
            else tables._replace(counts=self._add(tables.counts.clone(), draft))
            for tables, draft in zip(found, drafts, strict=True)
        ]

    def add(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Count one more token of each row; a row may come several times."""
        drawn: dict[int, list[int]] = {}
        for row, token_id in zip(rows, token_ids, strict=True):
            drawn.setdefault(row, []).append(token_id)
        for row, ids in drawn.items():
            counts = self._rows[row].counts
            if counts is not None:
                self._add(counts, ids)

    def _count(self, input_: SamplingInput) -> Tensor:
        counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        in_prompt = self._known({*input_.prompt_token_ids})
        counts.index_fill_(0, send_integers(in_prompt, self._device), 1)
        return self._add(counts, input_.output_token_ids)

    def _add(self, counts: Tensor, token_ids: Sequence[int]) -> Tensor:
        occurrences = Counter(self._known(token_ids))
        if occurrences:  # unique tokens, so no element is written twice
            pairs = [[*occurrences], [*occurrences.values()]]
            where, times = send_integers(pairs, self._device)
            counts[where] += 2 * times.int()
        return counts

    def _lay_out_bias(self, input_: SamplingInput) -> Tensor:
        biases = dict(input_.params.logit_bias or ())
        known = self._known(biases)
        values = np.array([biases[token_id] for token_id in known], np.float32)
        bias = torch.zeros(self._vocab_size, dtype=torch.float32, device=self._device)
        bias[send_integers(known, self._device)] = send(values, self._device)
        return bias

    def _lay_out_allowed(self, input_: SamplingInput) -> Tensor:
        allowed = np.ones(self._vocab_size, bool)
        if input_.params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[self._known(input_.params.allowed_token_ids)] = True
        allowed[self._known([ids[0] for ids in input_.bad_words if len(ids) == 1])] = False
        early = allowed.copy()
        if input_.params.min_tokens:
            early[self._known(input_.end_token_ids)] = False
        return send(np.stack([pack_bits(early), pack_bits(allowed)]), self._device)

    def _known(self, token_ids: Any) -> list[int]:
        return [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]


def pack_bits(allowed: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pack booleans ``[vocab_size]`` into an int32 mask ``[ceil(vocab_size / 32)]``."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
