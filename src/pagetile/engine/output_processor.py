"""Appends sampled tokens to their sequences: text, stop conditions, deltas."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from ..errors import GenerationError
from .logprobs import TokenLogprobs
from .outputs import Delta
from .request import Sequence


def append_plain(
    sequences: SequenceOf[Sequence], token_ids: SequenceOf[int], deltas: list[Delta]
) -> list[int]:
    """Append tokens that need no text, no grammar and end nothing: in most steps all of them.

    Returns:
        The positions of the other tokens, for ``advance``.
    """
    others = []
    for at, sequence, token_id in zip(range(len(sequences)), sequences, token_ids, strict=True):
        if (
            sequence.only_appends
            and token_id not in sequence.end_token_ids
            and sequence.num_tokens < sequence.max_len
        ):
            sequence.token_ids.append(token_id)
            request_id = sequence.request.request_id
            deltas.append(Delta(request_id, sequence.index, "", token_id, None))
        else:
            others.append(at)
    return others


def advance(sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None = None) -> Delta:
    """Append a sampled token; a delta with a ``finish_reason`` is the sequence's last."""
    prompt_logprobs = None
    if logprobs is not None and sequence.logprobs is not None:
        sequence.logprobs.append(logprobs)
    sequence.token_ids.append(token_id)
    request, reason, text = sequence.request, _find_end(sequence, token_id), ""
    sequence.only_appends = sequence.detokenizer is None and sequence.grammar is None
    if request.metrics.first_token_time is None:
        request.record("first_token_time")
        prompt_logprobs = request.prompt_logprobs
    if reason is not None or sequence.detokenizer is not None:
        try:
            text = _make_text(sequence, [token_id], is_last=reason is not None)
        except Exception as error:
            return fail(sequence, f"the tokenizer failed: {type(error).__name__}: {error}")
        if sequence.detokenizer is not None and sequence.detokenizer.stop_reason is not None:
            reason, sequence.stop_reason = "stop", sequence.detokenizer.stop_reason
    if sequence.grammar is not None and reason is None:
        try:
            sequence.grammar.accept(token_id)
        except Exception as error:
            return fail(sequence, f"the grammar failed: {type(error).__name__}: {error}", text)
    return Delta(  # positional, since keywords take twice as long
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


def fail(sequence: Sequence, error: GenerationError | str, text: str = "") -> Delta:
    """Return the last delta of a sequence that has no next token, or cannot take it in."""
    text += detokenize_rest(sequence)
    sequence.error = GenerationError(error) if isinstance(error, str) else error
    return Delta(sequence.request.request_id, sequence.index, text, None, "error", str(error))


def detokenize_rest(sequence: Sequence) -> str:
    """Detokenize what is left of a sequence that ends without a last token."""
    with suppress(Exception):
        return _make_text(sequence, [], is_last=True)
    return ""


def _find_end(sequence: Sequence, token_id: int) -> str | None:
    """Return why a sequence ends with its newest token, stop strings aside, or ``None``."""
    if token_id in sequence.end_token_ids:
        if token_id in (sequence.request.params.stop_token_ids or ()):
            sequence.stop_reason = token_id
        return "stop"
    return "length" if len(sequence.token_ids) >= sequence.max_len else None


def _make_text(sequence: Sequence, new: list[int], *, is_last: bool) -> str:
    """Return the text that new tokens make certain, and at the end what was held back."""
    params, decoder, detokenizer = sequence.request.params, sequence.decoder, sequence.detokenizer
    ends = () if params.include_stop_str_in_output else sequence.end_token_ids
    if detokenizer is not None:
        text = detokenizer.append([token_id for token_id in new if token_id not in ends])
        return text + detokenizer.flush() if is_last else text
    if decoder is not None:  # the sequence has ended, and needed no text before
        token_ids = [token_id for token_id in sequence.output_token_ids if token_id not in ends]
        skips, prompt = params.skip_special_tokens, sequence.request.prompt_token_ids
        if decoder.token_bytes[skips] is not None:  # bytes do not depend on those before them
            sequence.text = decoder.decode(token_ids, skips)
        else:
            sequence.text = decoder.text_after(prompt, token_ids, skips)
    return ""
