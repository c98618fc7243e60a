"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .token_text import TokenText

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

TokenLogprobs = tuple[tuple[int, float], ...]
"""A token with its log-probability, then the likeliest alternatives, best first."""

FLOOR = -9999.0  # JSON has no -inf


def completion_logprobs(
    words: TokenText,
    tokens: Sequence[TokenLogprobs | None],
    token_ids: Sequence[int],
    *,
    num_top: int,
    offset: int = 0,
) -> dict[str, Any]:
    """The ``logprobs`` of a completion.

    Args:
        words: What tokens are called.
        tokens: Of each token; ``None`` where nothing predicted it, as at a prompt's start.
        token_ids: The tokens.
        num_top: How many alternatives were asked for.
        offset: Where in the text the first token begins.
    """
    names, offsets = [], []
    for token_id in token_ids:
        names.append(words.text(token_id))
        offsets.append(offset)
        offset += len(words.bytes(token_id).decode("utf-8", "ignore"))
    return {
        "text_offset": offsets,
        "tokens": names,
        "token_logprobs": [None if t is None else _finite(t[0][1]) for t in tokens],
        "top_logprobs": [None if t is None else _top(words, t, num_top) for t in tokens],
    }


def _top(words: TokenText, token: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The alternatives by their names, the token itself among them."""
    pairs = [*token[1 : num_top + 1], token[0]]
    found: dict[str, float] = {}
    for token_id, logprob in pairs:
        found.setdefault(words.text(token_id), _finite(logprob))
    return found


def chat_logprobs(
    words: TokenText, tokens: Sequence[TokenLogprobs], *, num_top: int
) -> dict[str, Any]:
    """The ``logprobs`` of a chat completion's choice."""
    content = []
    for token in tokens:
        entry = _entry(words, *token[0])
        entry["top_logprobs"] = [_entry(words, *pair) for pair in token[1 : num_top + 1]]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(words: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    data = words.bytes(token_id)
    return {
        "token": words.text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


def prompt_logprobs(
    words: TokenText, tokens: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """The extension field ``prompt_logprobs``: for each token, a dictionary by token id."""
    found: list[dict[str, Any] | None] = []
    for token in tokens:
        if token is None:
            found.append(None)
            continue
        rank_of = {token_id: rank for rank, (token_id, _) in enumerate(token[1:], 1)}
        found.append(
            {
                str(token_id): {
                    "logprob": _finite(logprob),
                    "rank": rank_of.get(token_id),
                    "decoded_token": words.text(token_id),
                }
                for token_id, logprob in (token[0], *token[1:])
            }
        )
    return found


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
