"""What a sampled token does to its sequence: its text, and whether it was the last one."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .logprobs import LogprobDicts, TokenLogprobs
from .request import Sequence
from .sampler import SampledToken

__all__ = ["Delta", "OutputProcessor"]


@dataclass(slots=True)
class Delta:
    """What a step added to one sequence."""

    request_id: Any
    index: int
    text: str
    """New text; ``""`` while it is uncertain, and for requests that neither stream nor have stop
    strings."""
    token_id: int | None
    finish_reason: str | None
    error: str | None = None
    """Why it failed, where ``finish_reason`` is ``"error"``."""
    logprobs: TokenLogprobs | None = None
    """The token's log-probability and the likeliest alternatives, if asked for."""
    prompt_logprobs: LogprobDicts | None = None
    """Those of the prompt's tokens, if asked for: in the request's first delta with a token."""
    stop_reason: str | int | None = None
    """With a ``finish_reason``: the stop string or token that ended the sequence, if one did."""


class OutputProcessor:
    """Takes tokens into sequences; blocks are the scheduler's."""

    def append_quiet(
        self, sequences: SequenceOf[Sequence], token_ids: SequenceOf[int], deltas: list[Delta]
    ) -> list[int]:
        """Append the tokens that do nothing else: in most steps all of them.

        Args:
            sequences: Those that get a token, each once.
            token_ids: Their tokens.
            deltas: Takes what was added.

        Returns:
            The positions of the others, for ``advance``.
        """
        others = []
        numbered = zip(range(len(sequences)), sequences, token_ids, strict=True)
        for at, sequence, token_id in numbered:
            if (
                sequence.is_quiet
                and token_id not in sequence.end_token_ids
                and sequence.num_tokens < sequence.max_len
            ):
                sequence.token_ids.append(token_id)
                request_id = sequence.request.request_id
                deltas.append(Delta(request_id, sequence.index, "", token_id, None))
            else:
                others.append(at)
        return others

    def advance(self, sequence: Sequence, token_id: int, token: SampledToken | None) -> Delta:
        """Take a sampled token in; a delta with a ``finish_reason`` is the sequence's last.

        Args:
            sequence: Whose token it is.
            token_id: The token.
            token: Its log-probabilities or error, if it has any.
        """
        logprobs = prompt_logprobs = None
        if token is not None:
            if token.error is not None:
                self.write_out(sequence)
                sequence.error_type = token.error_type
                return _fail(sequence, token.error)
            logprobs = token.logprobs
            if logprobs is not None and sequence.logprobs is not None:
                sequence.logprobs.append(logprobs)
        sequence.token_ids.append(token_id)
        reason, text = None, ""
        if token_id in sequence.end_token_ids:
            reason = "stop"
            if token_id in (sequence.request.params.stop_token_ids or ()):
                sequence.stop_reason = token_id
        elif len(sequence.token_ids) >= sequence.max_len:
            reason = "length"
        request = sequence.request
        sequence.is_quiet = not request.makes_text_early and sequence.grammar is None
        if request.first_token_time is None:
            request.first_token_time = time.perf_counter()
            prompt_logprobs = request.prompt_logprob_dicts
        if reason is not None or request.makes_text_early:
            try:
                text = self._append(sequence, token_id, is_last=reason is not None)
            except Exception as error:
                return _fail(sequence, f"the tokenizer failed: {type(error).__name__}: {error}")
            if sequence.detokenizer.finished:
                reason, sequence.stop_reason = "stop", sequence.detokenizer.stop_reason
        if sequence.grammar is not None and reason is None:
            try:
                sequence.grammar.accept(token_id)
            except Exception as error:
                return _fail(sequence, f"the grammar failed: {type(error).__name__}: {error}")
        return Delta(  # by position: keywords take twice as long
            request.request_id,
            sequence.index,
            text,
            token_id,
            reason,
            None,
            logprobs,
            prompt_logprobs,
            sequence.stop_reason,
        )

    def write_out(self, sequence: Sequence) -> None:
        """Make what text there is of a sequence that ends here without a last token."""
        with suppress(Exception):
            self._append_all(sequence)

    def _append(self, sequence: Sequence, token_id: int, *, is_last: bool) -> str:
        """What a stream's new token makes certain; with the last one, all that was held back."""
        if not sequence.request.makes_text_early:
            self._append_all(sequence)
            return ""
        is_text = token_id not in sequence.end_token_ids
        text = sequence.detokenizer.append([token_id] if is_text else [])
        return text + sequence.detokenizer.flush() if is_last else text

    def _append_all(self, sequence: Sequence) -> None:
        """Of a sequence that ends here and made no text early: all of it; of others, the rest."""
        if sequence.request.makes_text_early:
            sequence.detokenizer.flush()
            return
        token_ids = sequence.output_token_ids
        if token_ids and token_ids[-1] in sequence.end_token_ids:
            token_ids = token_ids[:-1]
        sequence.detokenizer.decode(token_ids)


def _fail(sequence: Sequence, error: str) -> Delta:
    sequence.error = error
    return Delta(sequence.request.request_id, sequence.index, "", None, "error", error)
