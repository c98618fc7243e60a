"""Incremental decoding for tokenizers whose tokens are not bytes, over a window of tokens.

Each token costs one decode of a window of at most ``WINDOW`` tokens. SentencePiece's tokenizers
need it: a token's text depends on those before it, and a character may be several byte tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW = 24
KEPT = 10  # three broken characters of three bytes, and one token more


class WindowDecoder:
    """Turns tokens into whole characters as they come.

    Args:
        decode: Returns the text of token ids, with or without special tokens.
        skips_special_tokens: Whether special tokens are left out.
        prompt_token_ids: The tokens before the first; their text is not returned.
    """

    def __init__(
        self,
        decode: Callable[[list[int], bool], str],
        *,
        skips_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode, self._skips = decode, skips_special_tokens
        self._window = last_characters(prompt_token_ids, self._text_of)
        self._text = self._text_of(self._window)
        self._num_pending = 0  # characters at its end that more bytes may still change
        self._num_whole = len(self._window)  # when nothing was last pending
        self._skipped: set[int] = set()  # special tokens that were met

    def append(self, token_id: int) -> str:
        """Add a token, and return the characters that it completes."""
        text = self._text_of([*self._window, token_id])
        if text and text == self._text and self._is_skipped(token_id):
            # In the window, a run of them would displace the text.
            return ""
        self._window.append(token_id)
        shown = self._text[: len(self._text) - self._num_pending]
        if not text.startswith(shown):
            # Byte fallback decodes a run of bytes as U+FFFD until all of it is complete.
            self._window = self._window[self._num_whole :]
            self._num_whole = 0
            shown, text = "", self._text_of(self._window)
        fresh = text[len(shown) :]
        num_pending = len(fresh) - len(fresh.rstrip(REPLACEMENT))
        # A character lacks at most three bytes: with more, only the last can still change.
        self._num_pending = num_pending if num_pending <= 3 else 1
        self._text = text
        if self._num_pending == 0:
            self._num_whole = len(self._window)
        if len(self._window) == WINDOW:
            # Keep some tokens, because a token's text can depend on those before it.
            del self._window[:-KEPT]
            self._num_whole = max(self._num_whole - (WINDOW - KEPT), 0)
            self._text = self._text_of(self._window)
        return fresh[: len(fresh) - self._num_pending]

    def flush(self) -> str:
        """Return the pending text as it is."""
        pending = self._text[len(self._text) - self._num_pending :]
        self._num_pending = 0
        return pending

    def _is_skipped(self, token_id: int) -> bool:
        """Return whether a token is special and has no text here; a lone byte has none either."""
        if token_id in self._skipped:
            return True
        if not self._skips or self._text_of([token_id]):
            return False
        is_skipped = bool(self._decode([token_id], False))
        if is_skipped:
            self._skipped.add(token_id)
        return is_skipped

    def _text_of(self, token_ids: list[int]) -> str:
        return self._decode(token_ids, self._skips)


def last_characters(
    prompt_token_ids: Sequence[int], decode: Callable[[list[int]], str]
) -> list[int]:
    """Return at most ``KEPT`` last tokens of a prompt that are whole characters.

    The list is empty if the prompt ends within a character, or if ``decode`` fails.
    """
    with suppress(Exception):
        for start in range(-KEPT, 0):
            token_ids = list(prompt_token_ids[start:])
            if REPLACEMENT not in decode(token_ids):
                return token_ids
    return []
