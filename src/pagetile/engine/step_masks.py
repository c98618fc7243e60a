"""Tokens that are ruled out in one step only: by grammars, and by bad words of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..transfer import send, send_integers
from .sampling_rows import SamplingInput


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of ``bad_words``: each word alone, and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    encoded = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    return tuple(dict.fromkeys(filter(None, encoded)))


class StepMasks:
    """The last tokens of rows with bad words, and the masks that follow from them."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._words: dict[int, Sequence[Sequence[int]]] = {}
        self._tails: dict[int, Tensor] = {}

    def start(self, row: int, input_: SamplingInput) -> None:
        """Load a row that has bad words of several tokens."""
        longest = max(len(ids) - 1 for ids in input_.bad_words)
        tail = [-1] * longest + list(input_.output_token_ids[-longest:])
        self._words[row] = input_.bad_words
        self._tails[row] = send_integers(tail[-longest:], self._device)

    def find(
        self,
        host_rows: Sequence[int],
        with_words: Sequence[int],
        masks: Any,
        drafts: Sequence[Sequence[int]] | None,
    ) -> Tensor:
        """Return bits of the tokens that are allowed now, int32 ``[n, ceil(vocab_size / 32)]``.

        ``with_words`` are positions of rows that have bad words; masks and drafts are those
        of ``Sampler.sample``.
        """
        shape = len(host_rows), -(-self._vocab_size // 32)
        allowed = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        if masks:
            where = send_integers([i for i, _ in masks], self._device)
            words = send(np.stack([mask for _, mask in masks]), self._device)
            allowed.index_copy_(0, where, words)
        for i in with_words:
            self._rule_out_words(allowed[i], host_rows[i], () if drafts is None else drafts[i])
        return allowed

    def advance(self, tokens: Tensor, host_rows: Sequence[int], with_words: Sequence[int]) -> None:
        """Record the rows' new tokens, int64 ``[n]``."""
        for i in with_words:
            tail = self._tails[host_rows[i]]
            self._tails[host_rows[i]] = torch.cat([tail[1:], tokens[i : i + 1]])

    def _rule_out_words(self, allowed: Tensor, row: int, draft: Sequence[int]) -> None:
        """Clear the bits of tokens that would complete a bad word."""
        tail = self._tails[row]
        if draft:
            tail = torch.cat([tail, send_integers(draft, self._device)])
        for *before, last in self._words[row]:
            if before and 0 <= last < self._vocab_size:
                is_next = (tail[-len(before) :] == send_integers(before, self._device)).all()
                word = allowed[last >> 5 : (last >> 5) + 1]
                bit = np.array([1 << (last & 31)], np.uint32).view(np.int32)
                word &= torch.where(is_next, int(~bit[0]), -1).int()
