"""Text of one output sequence while it grows, and the search for stop strings in it.

Two things are held back: bytes of an incomplete character, and text that may turn out to be the
beginning of a stop string::

    tokens ──▶ whole characters ──▶ held back ──▶ consumer
                                    the longest tail that may begin a stop string

Each token costs a search in the new text and as many characters before it as the longest stop
string has. The tokens of a byte-level tokenizer (GPT-2, Llama 3, Qwen) are fixed bytes, which are
looked up; those of others are decoded with the tokens before them (``window_decoder``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from encodings import utf_8
from typing import Any

from .sampling_params import SamplingParams
from .text_decoder import TextDecoder
from .window_decoder import WindowDecoder


class Detokenizer:
    """Turns one sequence's tokens into text, piece by piece, and finds stop strings.

    The results of ``append`` and ``flush``, joined, are what all tokens add to the text of the
    prompt by ``tokenizer.decode`` without clean-up of spaces, cut at the stop string. (One
    exception: a byte-fallback tokenizer spells a run of bytes that are not all whole characters as
    one U+FFFD per byte; around a broken character, or a literal U+FFFD, their number may differ
    here and whole neighbours stay.)

    Of several stop strings the first to be complete counts, and of two that end on the same
    character the one that begins first. So the result does not depend on how the text is cut
    into tokens. A stop string completed before ``params.min_tokens`` tokens is ordinary text.

    Args:
        decoder: Decodes the tokens. ``None`` makes no text; so does ``params.detokenize=False``.
        params: Its ``stop``, ``min_tokens``, ``detokenize``, ``skip_special_tokens`` and
            ``include_stop_str_in_output`` are used.
        prompt_token_ids: The tokens that the first one follows.

    Attributes:
        stop_reason: The stop string that was found, else ``None``.
        num_tokens: Tokens taken in, the one that completed a stop string included.

    Examples:
        >>> class Letters:
        ...     def decode(self, token_ids, **options):
        ...         return "".join(map(chr, token_ids))
        >>> detokenizer = Detokenizer(TextDecoder(Letters()), SamplingParams(stop="END"))
        >>> [detokenizer.append([ord(c)]) for c in "to EaEND!"]
        ['t', 'o', ' ', '', 'Ea', '', '', '', '']
        >>> detokenizer.text, detokenizer.stop_reason
        ('to Ea', 'END')
    """

    def __init__(
        self,
        decoder: TextDecoder | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._params, self._stops = params, params.stop or ()
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._pieces: list[str] = []
        self._held = ""
        self._makes_text = decoder is not None and params.detokenize
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._window: WindowDecoder | None = None  # where tokens are not bytes
        if decoder is not None and params.detokenize:
            skips = params.skip_special_tokens
            self._bytes: Any = decoder.token_bytes[skips]
            if self._bytes is None:
                self._window = WindowDecoder(
                    decoder.decode, skips_special_tokens=skips, prompt_token_ids=prompt_token_ids
                )

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def append(self, token_ids: Iterable[int]) -> str:
        """Take in tokens and return the text that is now certain, often ``""``.

        Tokens after the one that completes a stop string are ignored.
        """
        start = len(self._pieces)
        for token_id in token_ids:
            if self.stop_reason is not None or not self._makes_text:
                break
            self.num_tokens += 1
            if self._window is not None:
                fresh = self._window.append(token_id)
            else:
                data = self._bytes[token_id]
                is_whole = data.isascii() and not self._utf8.buffer
                fresh = data.decode("ascii") if is_whole else self._utf8.decode(data)
            if self._held or not self._firsts.isdisjoint(fresh):
                self._release(fresh, is_last=False)
            elif fresh:
                self._pieces.append(fresh)
        return "".join(self._pieces[start:])

    def flush(self) -> str:
        """Return what was held back: the output ends here."""
        start = len(self._pieces)
        if self._makes_text and self.stop_reason is None:
            pending = self._utf8.decode(b"", final=True)
            if self._window is not None:
                pending = self._window.flush()
            self._release(pending, is_last=True)
        return "".join(self._pieces[start:])

    def _release(self, fresh: str, *, is_last: bool) -> None:
        """Return new text up to where a stop string begins, or might begin."""
        num_old = len(self._held)
        self._held += fresh
        stops = self._stops
        num_held = 0 if is_last else max((overlap(self._held, s) for s in stops), default=0)
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


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
