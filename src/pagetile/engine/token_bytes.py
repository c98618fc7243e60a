"""Fast ways through a tokenizer, for tokens that become text one at a time.

Transformers' ``decode`` takes 5 µs for a few tokens; the tokenizer behind it 1.5. A byte-level one
(GPT-2, Llama 3, Qwen) spells every token as fixed bytes: a lookup of 0.1 µs.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["byte_of_letter", "find_decode", "find_token_bytes"]

TokenBytes = Callable[[int], bytes]
_found: WeakKeyDictionary[Any, dict[bool, TokenBytes | None]] = WeakKeyDictionary()


def find_decode(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """From token ids, and whether special ones are left out, to their text, not cleaned up."""
    backend = _find_backend(tokenizer)
    if backend is not None:
        decode: Callable[[list[int], bool], str] = backend.decode
        return decode

    def call(token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            # Clean-up drops spaces that may have been handed out already.
            clean_up_tokenization_spaces=False,
        )
        return text

    return call


def find_token_bytes(tokenizer: Any, skip_special_tokens: bool) -> TokenBytes | None:
    """The bytes of each token, if text is what the bytes of its tokens spell; else ``None``.

    That is true of tokenizers with a byte-level decoder, and is tried on random tokens.
    """
    if _find_backend(tokenizer) is None:
        return None
    ways = _found.setdefault(tokenizer, {})
    if skip_special_tokens not in ways:
        ways[skip_special_tokens] = _try_bytes(tokenizer, skip_special_tokens)
    return ways[skip_special_tokens]


def _find_backend(tokenizer: Any) -> Any:
    """The ``tokenizers.Tokenizer`` that does all the decoding of one of Transformers'."""
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
        except KeyError:  # an added token is spelt as it stands
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
    """GPT-2's letters for the 256 bytes: printable ones for themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}
