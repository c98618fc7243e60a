"""Decodes the tokens of one tokenizer: what the detokenizers of all sequences share."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from .window_decoder import last_characters


class TextDecoder:
    """Decodes token ids as a whole, or each token to the bytes that it adds to a text.

    Args:
        tokenizer: A Hugging Face tokenizer.
        vocab_size: Width of the logits; ids that are no tokens have no text.

    Attributes:
        decode: Returns the text of token ids, with or without special tokens, not cleaned up.
        token_bytes: The bytes of each token by its id, with special tokens (``False``) and with
            none for them (``True``); ``None`` unless a text is the bytes of its tokens, joined.
            That is so for tokenizers with a byte-level decoder, and is checked on random tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int = 0) -> None:
        backend = _find_backend(tokenizer)
        self.decode: Callable[[list[int], bool], str] = functools.partial(_decode, tokenizer)
        self.token_bytes: dict[bool, list[bytes] | None] = {False: None, True: None}
        if backend is not None:
            self.decode = backend.decode
            for skips, spelt in _spell(backend, vocab_size).items():
                if _is_text(spelt, skips, backend):
                    self.token_bytes[skips] = spelt

    def text_after(self, prompt: Sequence[int], token_ids: list[int], skips: bool) -> str:
        """Return the text that tokens add to their prompt's.

        Decoded alone, SentencePiece's first word loses the space before it.
        """
        context = last_characters(prompt, lambda ids: self.decode(ids, skips))
        before, text = self.decode(context, skips), self.decode([*context, *token_ids], skips)
        if text.startswith(before):
            return text[len(before) :]
        return self.decode(token_ids, skips)  # broken bytes after whole ones break them all


def _decode(tokenizer: Any, token_ids: list[int], skip_special_tokens: bool) -> str:
    text: str = tokenizer.decode(
        token_ids,
        skip_special_tokens=skip_special_tokens,
        # Clean-up would drop spaces that may have been returned already.
        clean_up_tokenization_spaces=False,
    )
    return text


def _find_backend(tokenizer: Any) -> Any:
    """Return the ``tokenizers.Tokenizer`` that decodes for a Transformers tokenizer."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    from transformers import PreTrainedTokenizerFast as Base

    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, Base) and kind.decode is Base.decode
    return tokenizer.backend_tokenizer if is_plain and kind._decode is Base._decode else None


def _spell(backend: Any, vocab_size: int) -> dict[bool, list[bytes]]:
    """Return each token's bytes, with special tokens and without, for a byte-level decoder."""
    from tokenizers.decoders import ByteLevel

    if not isinstance(backend.decoder, ByteLevel):
        return {}
    added, letters = backend.get_added_tokens_decoder(), byte_of_letter()
    tokens = {token_id: token for token, token_id in backend.get_vocab().items()}
    tokens |= {token_id: token.content for token_id, token in added.items()}
    spelt = [b""] * max(vocab_size, max(tokens, default=-1) + 1)
    for token_id, token in tokens.items():
        try:
            spelt[token_id] = bytes(map(letters.__getitem__, token))
        except KeyError:  # an added token stands for its own text
            spelt[token_id] = token.encode()
    specials = {token_id for token_id, token in added.items() if token.special}
    return {False: spelt, True: [b"" if i in specials else data for i, data in enumerate(spelt)]}


def _is_text(spelt: list[bytes], skips: bool, backend: Any) -> bool:
    """Return whether the bytes of random tokens, joined, are their text."""
    rng = random.Random(0)
    drawn = [[rng.randrange(len(spelt)) for _ in range(20)] for _ in range(20)]
    return all(
        b"".join([spelt[i] for i in ids]).decode(errors="replace") == backend.decode(ids, skips)
        for ids in drawn
    )


@functools.cache
def byte_of_letter() -> dict[str, int]:
    """Return GPT-2's map of letters to bytes: printable ones are themselves, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}
