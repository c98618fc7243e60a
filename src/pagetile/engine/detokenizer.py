"""Text of one output sequence while it grows, and the search for stop strings in it.

Two things must wait before a consumer may see them: bytes of a character whose rest has not come,
and text that may turn out to be the beginning of a stop string::

    tokens ──▶ window ──▶ whole characters ──▶ held back ──▶ consumer
               the last few tokens,            the longest tail that
               decoded together                may begin a stop string

Each token costs one decode of a window of at most ``WINDOW`` tokens, and a search in the new text
and as many characters before it as the longest stop string has. Where tokens are bytes
(``token_bytes``), a lookup and an incremental UTF-8 decoder take the place of the window.
"""

from __future__ import annotations

from collections.abc import Iterable
from encodings import utf_8
from typing import Any, Protocol

from ..errors import RequestError
from .sampling_params import SamplingParams
from .token_bytes import find_decode, find_token_bytes

__all__ = ["Detokenizer", "Tokenizer"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW = 24
KEPT = 10  # three broken characters of three bytes, and one token more


class Tokenizer(Protocol):
    """What is needed of a tokenizer; any of Hugging Face's has it."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> Any:
        """The text of some token ids."""
        ...


class Detokenizer:
    """Turns one sequence's tokens into text, piece by piece, and finds its end.

    What ``append`` and ``flush`` returned, joined, is ``tokenizer.decode`` of all tokens without
    clean-up of spaces, cut at the stop string. (One exception: a byte-fallback tokenizer spells a
    run of bytes that are not all whole characters as one U+FFFD per byte; around a broken
    character, or a literal U+FFFD, their number may differ here and whole neighbours stay.)

    Of several stop strings the first to be complete counts, and of two that end on the same
    character the one that begins first. So the result does not depend on how the text is cut
    into tokens. A stop string completed before ``params.min_tokens`` tokens is ordinary text.

    Args:
        tokenizer: A Hugging Face tokenizer. ``None`` makes no text; so does
            ``params.detokenize=False``.
        params: Its ``stop``, ``min_tokens``, ``detokenize``, ``skip_special_tokens`` and
            ``include_stop_str_in_output`` are used.

    Attributes:
        stop_reason: The stop string that was found, else ``None``.
        num_tokens: Tokens taken in, the one that completed a stop string included.

    Raises:
        RequestError: Stop strings without a tokenizer: they could never be found.

    Example:
        >>> class Letters:
        ...     def decode(self, token_ids, **options):
        ...         return "".join(map(chr, token_ids))
        >>> detokenizer = Detokenizer(Letters(), SamplingParams(stop="END"))
        >>> [detokenizer.append([ord(c)]) for c in "to EaEND!"]
        ['t', 'o', ' ', '', 'Ea', '', '', '', '']
        >>> detokenizer.text, detokenizer.stop_reason
        ('to Ea', 'END')
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise RequestError(
                f"stop={params.stop!r} but there is no tokenizer to make text with: give the "
                "engine a tokenizer or use stop_token_ids"
            )
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer if params.detokenize else None
        self._params = params
        self._stops = params.stop or ()
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._raw_decode = None if self._tokenizer is None else find_decode(self._tokenizer)
        self._bytes = (
            None
            if self._tokenizer is None
            else find_token_bytes(self._tokenizer, params.skip_special_tokens)
        )
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._pieces: list[str] = []
        self._held = ""
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_pending = 0  # characters at its end that more bytes may still change
        self._num_whole = 0  # window tokens when nothing was last pending
        self._skipped: set[int] = set()  # special tokens that were met

    @property
    def text(self) -> str:
        """All text handed out so far."""
        return "".join(self._pieces)

    @property
    def finished(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_reason is not None

    def append(self, token_ids: Iterable[int]) -> str:
        """Take in tokens and return the text that is now certain, often ``""``.

        Tokens after the one that completes a stop string are ignored.
        """
        start = len(self._pieces)
        for token_id in token_ids:
            if self.stop_reason is not None or self._tokenizer is None:
                break
            self.num_tokens += 1
            if self._bytes is None:
                fresh = self._decode(token_id)
            else:
                data = self._bytes(token_id)
                is_whole = data.isascii() and not self._utf8.buffer
                fresh = data.decode("ascii") if is_whole else self._utf8.decode(data)
            if self._held or not self._firsts.isdisjoint(fresh):
                self._release(fresh, is_last=False)
            elif fresh:
                self._pieces.append(fresh)
        return "".join(self._pieces[start:])

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a whole output at once, which has no stop strings to look for."""
        if self._tokenizer is not None and not self.finished:
            self.num_tokens += len(token_ids)
            self._pieces.append(self._text_of(token_ids) if token_ids else "")
        return self.text

    def flush(self) -> str:
        """Return what was held back: the output ends here."""
        start = len(self._pieces)
        if not self.finished and self._tokenizer is not None:
            if self._bytes is None:
                pending = self._text[len(self._text) - self._num_pending :]
                self._num_pending = 0
            else:
                pending = self._utf8.decode(b"", final=True)
            self._release(pending, is_last=True)
        return "".join(self._pieces[start:])

    def _decode(self, token_id: int) -> str:
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

    def _is_skipped(self, token_id: int) -> bool:
        """Whether it is a special token that has no text here; a lone byte has none anywhere."""
        if token_id in self._skipped:
            return True
        if not self._params.skip_special_tokens or self._text_of([token_id]):
            return False
        is_skipped = bool(self._text_of([token_id], skip_special_tokens=False))
        if is_skipped:
            self._skipped.add(token_id)
        return is_skipped

    def _text_of(self, token_ids: list[int], skip_special_tokens: bool | None = None) -> str:
        assert self._raw_decode is not None
        if skip_special_tokens is None:
            skip_special_tokens = self._params.skip_special_tokens
        return self._raw_decode(token_ids, skip_special_tokens)

    def _release(self, fresh: str, *, is_last: bool) -> None:
        """Hand out new text as far as no stop string can begin in it, or up to one that did."""
        num_old = len(self._held)
        self._held += fresh
        stops = self._stops
        num_held = 0 if is_last else max((_overlap(self._held, s) for s in stops), default=0)
        keep = len(self._held) - num_held
        if self.num_tokens >= self._params.min_tokens:
            hits = [(self._held.find(s, max(num_old - len(s) + 1, 0)), s) for s in stops]
            hits = [(start, s) for start, s in hits if start >= 0]
            if hits:
                start, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
                self.stop_reason = stop
                keep = start + len(stop) if self._params.include_stop_str_in_output else start
        if keep:
            self._pieces.append(self._held[:keep])
        self._held = self._held[keep:]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``stop``, but not all."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
