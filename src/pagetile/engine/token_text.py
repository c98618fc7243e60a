"""Text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import Any

from .text_decoder import byte_of_letter

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Text and bytes of single tokens.

    A tokenizer decodes a single token without the space before it, or as U+FFFD if it is a part of
    a character; here the text of a token is what it adds to a text.

    Args:
        tokenizer: A Transformers tokenizer; ``None``: a token's text is its number.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = byte_of_letter()
        self._is_byte_level = _is_byte_level(tokenizer)
        self.special_ids = set(getattr(tokenizer, "all_special_ids", ()))
        self.bytes = lru_cache(1 << 16)(self._bytes)
        self.text = lru_cache(1 << 16)(self._text)

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest token."""
        vocabulary = self._tokenizer.get_vocab() if self._tokenizer is not None else {}
        return max(map(len, vocabulary), default=1)

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id not in self.special_ids:
            if self._is_byte_level and all(c in self._byte_of for c in token):
                return bytes(self._byte_of[c] for c in token)
            if found := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(found[1], 16)])
            if "\u2581" in token:  # SentencePiece's space
                return str(token).replace("\u2581", " ").encode()
        decoded = self._tokenizer.decode(
            [token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(decoded).encode()

    def _text(self, token_id: int) -> str:
        r"""Return the text of a token; ``bytes:\xe2\x82`` if it is not whole characters."""
        data = self.bytes(token_id)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in str(getattr(backend, "decoder", ""))
