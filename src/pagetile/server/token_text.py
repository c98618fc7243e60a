"""What single tokens are called in log-probabilities: their text and their bytes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

__all__ = ["TokenText"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Text and bytes of single tokens.

    A tokenizer decodes a token alone without the space before it, or as U+FFFD where it is part of
    a character; here a token is what it adds to a text.

    Args:
        tokenizer: Of Transformers; ``None``: tokens are called by their number.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet()
        self._is_byte_level = _is_byte_level(tokenizer)
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
        self.longest = max(map(len, vocabulary), default=1)
        """Characters of the longest token."""
        self.bytes = lru_cache(1 << 16)(self._bytes)
        self.text = lru_cache(1 << 16)(self._text)

    def _bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id not in self._special:
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
        r"""The text of a token; of one that is no whole characters, ``bytes:\xe2\x82``."""
        data = self.bytes(token_id)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "ByteLevel" in str(getattr(backend, "decoder", ""))


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level tokenizers write bytes, as GPT-2 has laid down."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table
