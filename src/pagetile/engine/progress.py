"""What a sampled token does to its sequence: its text, and whether it was the last one."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from .request import Sequence
from .sampler import SampledToken

__all__ = ["Delta", "Progress"]


@dataclass(frozen=True)
class Delta:
    """What a step added to one sequence."""

    request_id: int
    index: int
    text: str
    """New text; ``""`` while it is uncertain, and for requests that neither stream nor have stop
    strings."""
    token_id: int | None
    finish_reason: str | None
    error: str | None = None
    """Why it failed, where ``finish_reason`` is ``"error"``."""


@dataclass(frozen=True)
class Progress:
    """Takes tokens into sequences; blocks are the scheduler's."""

    eos_token_ids: Collection[int]
    """Tokens with which the model itself ends."""
    max_model_len: int

    def advance(self, sequence: Sequence, token: SampledToken) -> Delta:
        """Take a sampled token in; a delta with a ``finish_reason`` is the sequence's last."""
        if token.error is not None:
            self.write_out(sequence)
            return _fail(sequence, token.error)
        sequence.token_ids.append(token.token_id)
        if token.logprob is not None:
            sequence.logprobs.append(((token.token_id, token.logprob), *token.top_logprobs))
        reason = self._stop_reason(sequence, token.token_id)
        try:
            text = self._append(sequence, token.token_id, is_last=reason is not None)
        except Exception as error:
            return _fail(sequence, f"the tokenizer failed: {type(error).__name__}: {error}")
        if sequence.detokenizer.finished:
            reason, sequence.stop_reason = "stop", sequence.detokenizer.stop_reason
        return Delta(sequence.request.request_id, sequence.index, text, token.token_id, reason)

    def write_out(self, sequence: Sequence) -> None:
        """Make what text there is of a sequence that ends here without a last token."""
        with suppress(Exception):
            self._append_all(sequence)

    def ends(self, sequence: Sequence) -> tuple[int, ...]:
        """The tokens that would end a sequence."""
        params = sequence.request.params
        ends = () if params.ignore_eos else self.eos_token_ids
        return (*ends, *(params.stop_token_ids or ()))

    def _stop_reason(self, sequence: Sequence, token_id: int) -> str | None:
        params = sequence.request.params
        if token_id in self.ends(sequence):
            if token_id in (params.stop_token_ids or ()):
                sequence.stop_reason = token_id
            return "stop"
        longest = math.inf if params.max_tokens is None else params.max_tokens
        if sequence.num_output_tokens >= longest or len(sequence.token_ids) >= self.max_model_len:
            return "length"
        return None

    def _append(self, sequence: Sequence, token_id: int, *, is_last: bool) -> str:
        """What a stream's new token makes certain; with the last one, all that was held back."""
        if not sequence.request.makes_text_early:
            if is_last:
                self._append_all(sequence)
            return ""
        is_text = token_id not in self.ends(sequence)
        text = sequence.detokenizer.append([token_id] if is_text else [])
        return text + sequence.detokenizer.flush() if is_last else text

    def _append_all(self, sequence: Sequence) -> None:
        """Of a sequence that ends here and made no text early: all of it; of others, the rest."""
        if not sequence.request.makes_text_early:
            token_ids = sequence.output_token_ids
            if token_ids and token_ids[-1] in self.ends(sequence):
                token_ids = token_ids[:-1]
            sequence.detokenizer.append(token_ids)
        sequence.detokenizer.flush()


def _fail(sequence: Sequence, error: str) -> Delta:
    sequence.error = error
    return Delta(sequence.request.request_id, sequence.index, "", None, "error", error)
