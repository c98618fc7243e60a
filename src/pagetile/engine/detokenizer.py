"""Text of one output sequence while it grows, and the search for stop strings in it.

Two things are held back: bytes of an incomplete character, and text that may turn out to be the
beginning of a stop string::

    tokens ──▶ whole characters ──▶ held back ──▶ consumer
                                    the longest tail that may begin a stop string

Each token costs a search in the new text and as many characters before it as the longest stop
string has. The tokens of a byte-level tokenizer (GPT-2, Llama 3, Qwen) are fixed bytes, which cost
a lookup of 0.1 µs; those of others are decoded with the tokens before them (``window_decoder``).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from encodings import utf_8
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import RequestError
from .sampling_params import SamplingParams
from .window_decoder import WindowDecoder

TokenBytes = Callable[[int], bytes]
_found: WeakKeyDictionary[Any, dict[bool, TokenBytes | None]] = WeakKeyDictionary()


class Detokenizer:
    """Turns one sequence's tokens into text, piece by piece, and finds stop strings.

    The results of ``append`` and ``flush``, joined, are ``tokenizer.decode`` of all tokens without
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

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        if tokenizer is None and params.stop:
            raise RequestError(
                f"stop={params.stop!r} but there is no tokenizer to make text with: give the "
                "engine a tokenizer or use stop_token_ids"
            )
        self.stop_reason: str | None = None
        self.num_tokens = 0
        self._params, self._stops = params, params.stop or ()
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._pieces: list[str] = []
        self._held = ""
        self._makes_text = tokenizer is not None and params.detokenize
        self._utf8 = utf_8.IncrementalDecoder("replace")
        self._window: WindowDecoder | None = None  # where tokens are not bytes
        if self._makes_text:
            self._decode, skips = find_decode(tokenizer), params.skip_special_tokens
            self._bytes: Any = find_token_bytes(tokenizer, skips)
            if self._bytes is None:
                self._window = WindowDecoder(self._decode, skips_special_tokens=skips)

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
                data = self._bytes(token_id)
                is_whole = data.isascii() and not self._utf8.buffer
                fresh = data.decode("ascii") if is_whole else self._utf8.decode(data)
            if self._held or not self._firsts.isdisjoint(fresh):
                self._release(fresh, is_last=False)
            elif fresh:
                self._pieces.append(fresh)
        return "".join(self._pieces[start:])

    def decode(self, token_ids: list[int]) -> None:
        """Take in a whole output at once, without looking for stop strings."""
        if self._makes_text and token_ids:
            self.num_tokens += len(token_ids)
            self._pieces.append(self._decode(token_ids, self._params.skip_special_tokens))

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


def find_decode(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """Return the function that decodes token ids, with or without special ones, not cleaned up."""
    backend = _find_backend(tokenizer)
    if backend is not None:
        decode: Callable[[list[int], bool], str] = backend.decode
        return decode

    def call(token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            # Clean-up would drop spaces that may have been returned already.
            clean_up_tokenization_spaces=False,
        )
        return text

    return call


def find_token_bytes(tokenizer: Any, skip_special_tokens: bool) -> TokenBytes | None:
    """Return the bytes of each token if a text is the bytes of its tokens, joined; else ``None``.

    That is so for tokenizers with a byte-level decoder, and is checked on random tokens.
    """
    if _find_backend(tokenizer) is None:
        return None
    ways = _found.setdefault(tokenizer, {})
    if skip_special_tokens not in ways:
        ways[skip_special_tokens] = _try_bytes(tokenizer, skip_special_tokens)
    return ways[skip_special_tokens]


def _find_backend(tokenizer: Any) -> Any:
    """Return the ``tokenizers.Tokenizer`` that decodes for a Transformers tokenizer."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    from transformers import PreTrainedTokenizerFast as Base

    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, Base) and kind.decode is Base.decode
    return tokenizer.backend_tokenizer if is_plain and kind._decode is Base._decode else None


def _try_bytes(tokenizer: Any, skip_special_tokens: bool) -> TokenBytes | None:
    from tokenizers.decoders import ByteLevel

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.decoder, ByteLevel):
        return None
    specials = {
        token_id: token
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token.special
    }

    @functools.cache
    def spell(token_id: int) -> bytes:
        if skip_special_tokens and token_id in specials:
            return b""
        token = backend.id_to_token(token_id)
        if token is None:
            return b""
        letters = byte_of_letter()
        try:
            return bytes([letters[letter] for letter in token])
        except KeyError:  # an added token stands for its own text
            return bytes(token.encode())

    rng, size = random.Random(0), backend.get_vocab_size()
    for _ in range(20):
        token_ids = [rng.randrange(size) for _ in range(20)]
        spelt = b"".join(map(spell, token_ids)).decode(errors="replace")
        if spelt != backend.decode(token_ids, skip_special_tokens):
            return None
    return spell


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """Return GPT-2's map of letters to bytes: printable ones are themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}
