"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.logprobs import LogprobDicts, TokenLogprobs
from ..engine.token_text import TokenText

FLOOR = -9999.0  # JSON has no -inf


def completion_logprobs(
    words: TokenText,
    tokens: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    *,
    num_top: int,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion.

    Args:
        words: Gives the text of tokens.
        tokens: Log-probabilities; ``None`` for a prompt's first token, which nothing predicts.
        token_ids: The tokens.
        num_top: How many alternatives were requested.
        offsets: Where each token begins in the text.
    """
    return {
        "text_offset": offsets,
        "tokens": [words.text(token_id) for token_id in token_ids],
        "token_logprobs": [None if t is None else _finite(t.logprob) for t in tokens],
        "top_logprobs": [None if t is None else _top(words, t, num_top) for t in tokens],
    }


def _top(words: TokenText, token: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Return the alternatives by their texts, the token itself among them."""
    pairs = [*token.top(num_top), (token.token_id, token.logprob)]
    found: dict[str, float] = {}
    for token_id, logprob in pairs:
        found.setdefault(words.text(token_id), _finite(logprob))
    return found


def chat_logprobs(
    words: TokenText, tokens: Sequence[TokenLogprobs], *, num_top: int
) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat completion's choice."""
    content = []
    for token in tokens:
        entry = _entry(words, token.token_id, token.logprob)
        entry["top_logprobs"] = [_entry(words, *pair) for pair in token.top(num_top)]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(words: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    data = words.bytes(token_id)
    return {"token": words.text(token_id), "logprob": _finite(logprob), "bytes": list(data)}


def prompt_logprobs(
    words: TokenText, tokens: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return the extension field ``prompt_logprobs``: for each token, a dictionary by token id."""
    return [
        None
        if token is None
        else {
            str(token_id): {
                "logprob": _finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in token.items()
        }
        for token in LogprobDicts(tokens, words.text)
    ]


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
