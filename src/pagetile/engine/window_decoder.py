"""Text of tokens that are not bytes, one token at a time: the last few are decoded together.

Each token costs one decode of a window of at most ``WINDOW`` tokens. SentencePiece's tokenizers
need it: a token's text depends on those before it, and a character may be several byte tokens.
"""

from __future__ import annotations

from collections.abc import Callable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW = 24
KEPT = 10  # three broken characters of three bytes, and one token more


class WindowDecoder:
    """Whole characters of tokens as they come.

    Args:
        decode: The text of token ids, with special ones left out or not.
        skips_special_tokens: Whether they are.
    """

    def __init__(
        self, decode: Callable[[list[int], bool], str], *, skips_special_tokens: bool
    ) -> None:
        self._decode, self._skips = decode, skips_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_pending = 0  # characters at its end that more bytes may still change
        self._num_whole = 0  # window tokens when nothing was last pending
        self._skipped: set[int] = set()  # special tokens that were met

    def append(self, token_id: int) -> str:
        """The whole characters that one more token completes."""
        text = self._text_of([*self._window, token_id])
        if text and text == self._text and self._is_skipped(token_id):
            # Kept, a run of them would push the text out of the window.
            return ""
        self._window.append(token_id)
        shown = self._text[: len(self._text) - self._num_pending]
        if not text.startswith(shown):
            # Byte fallback blanks a run of bytes until it is whole, characters before it included.
            self._window = self._window[self._num_whole :]
            self._num_whole = 0
            shown, text = "", self._text_of(self._window)
        fresh = text[len(shown) :]
        num_pending = len(fresh) - len(fresh.rstrip(REPLACEMENT))
        # No character lacks more than three bytes: after that only the last can still grow.
        self._num_pending = num_pending if num_pending <= 3 else 1
        self._text = text
        if self._num_pending == 0:
            self._num_whole = len(self._window)
        if len(self._window) == WINDOW:
            # Some must stay: the text of a token can depend on those before it.
            del self._window[:-KEPT]
            self._num_whole = max(self._num_whole - (WINDOW - KEPT), 0)
            self._text = self._text_of(self._window)
        return fresh[: len(fresh) - self._num_pending]

    def flush(self) -> str:
        """What is pending, as it stands."""
        pending = self._text[len(self._text) - self._num_pending :]
        self._num_pending = 0
        return pending

    def _is_skipped(self, token_id: int) -> bool:
        """Whether it is a special token that has no text here; a lone byte has none anywhere."""
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
