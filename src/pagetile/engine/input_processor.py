"""Validates requests before they are queued."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..kv_cache.storage import KVCache
from .sampling_params import SamplingParams
from .structured_outputs import GrammarCompiler

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class InputProcessor:
    """Tokenizes prompts, and refuses requests that the engine could never serve."""

    tokenizer: Any
    vocab_size: int
    grammars: GrammarCompiler
    cache: KVCache
    max_num_seqs: int
    max_model_len: int

    def validate(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Check that a request can be served, and return the prompt's token ids.

        It compiles ``params.structured_outputs``, which may take a second.

        Raises:
            RequestError: ``encode`` raises; the prompt leaves no room for a token; ``n`` sequences
                cannot run together; or a stop token or a biased one is not in the vocabulary.
        """
        check_params(params)
        token_ids = self.encode(prompt)
        self._check_length(len(token_ids))
        if params.n > self.max_num_seqs:
            raise RequestError(
                f"n={params.n} is more than max_num_seqs={self.max_num_seqs}: "
                "ask for fewer samples, or raise max_num_seqs"
            )
        self._check_vocabulary("stop_token_ids", params.stop_token_ids or ())
        self._check_vocabulary("logit_bias", list(dict(params.logit_bias or ())))
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop and self.tokenizer is None:
            raise RequestError(
                f"stop={params.stop!r} but there is no tokenizer to make text with: give the "
                "engine a tokenizer or use stop_token_ids"
            )
        if params.bad_words and self.tokenizer is None:
            raise RequestError(
                f"bad_words={params.bad_words!r} but the model directory has no tokenizer: use "
                "logit_bias with -100"
            )
        if params.structured_outputs is not None:
            self.grammars.compile(params.structured_outputs)
        return token_ids

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, checked against the vocabulary.

        Raises:
            RequestError: The prompt is empty, has an id that the model does not know, or is text
                and there is no tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "the prompt is text but the model has no tokenizer: give a list of token ids, "
                    "or load it with LLM(tokenizer=...)"
                )
            # A tokenizer may return a special token for an empty text.
            token_ids = list(self.tokenizer.encode(_unicode(prompt))) if prompt else []
        else:
            token_ids = list(prompt) if is_list(prompt) else [None]
            if not all(map(_is_index, token_ids)):
                given = type(prompt).__name__
                raise RequestError(
                    f"the prompt is {given}, expected text or a list of token ids (int)"
                )
            token_ids = list(map(operator.index, token_ids))
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt has token id {token_id}, expected 0 to {self.vocab_size - 1}: "
                    "the model has no such token"
                )
        return token_ids

    def encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of ``bad_words``: each word alone, and after a space."""
        words = params.bad_words or ()
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        encoded = [tuple(self.tokenizer.encode(t, add_special_tokens=False)) for t in texts]
        return tuple(dict.fromkeys(filter(None, encoded)))

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens < self.max_model_len:
            return
        limit = "of the model or of this LLM: shorten it"
        if self.max_model_len >= self.cache.num_tokens:
            blocks = f"{self.cache.num_blocks} blocks of {self.cache.block_size}"
            limit = f"what {blocks} hold: shorten it, or use more blocks"
        raise RequestError(
            f"the prompt has {num_tokens} tokens, expected fewer than max_model_len="
            f"{self.max_model_len}, {limit}"
        )

    def _check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        if token_ids and max(token_ids) >= self.vocab_size:
            raise RequestError(f"{name} has {max(token_ids)}, expected 0 to {self.vocab_size - 1}")


def check_params(params: Any) -> None:
    """Raise RequestError unless ``params`` are ``SamplingParams``."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is {params!r}, expected SamplingParams(…)")


def list_prompts(prompts: Any) -> list[Prompt]:
    """Return prompts as a list; one prompt is text, or token ids of Python, NumPy or torch."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not is_list(prompts):
        raise RequestError(
            f"prompts is {type(prompts).__name__}, expected text, token ids, or a list of them"
        )
    listed = list(prompts)
    return [listed] if listed and _is_index(listed[0]) else listed


def parse_prompt(prompt: Any) -> tuple[Any, str | None]:
    """Split vLLM's dictionary form of a prompt into text or token ids, and its ``cache_salt``.

    A dictionary has ``prompt`` (text) or ``prompt_token_ids``, and may have ``cache_salt``.
    Anything else is returned as it is, without a salt.

    Raises:
        RequestError: The dictionary has other keys, or not exactly one prompt, or a value is of
            the wrong type.
    """
    if not isinstance(prompt, Mapping):
        return prompt, None
    unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
    if unknown:
        raise RequestError(
            f"the prompt has {', '.join(map(repr, unknown))}, expected 'prompt' or "
            "'prompt_token_ids', and optionally 'cache_salt'"
        )
    given = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
    if len(given) != 1:
        raise RequestError(
            f"the prompt has {' and '.join(map(repr, given)) or 'neither text nor token ids'}, "
            "expected one of 'prompt' and 'prompt_token_ids'"
        )
    cache_salt = prompt.get("cache_salt")
    if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
        raise RequestError(
            f"the prompt has cache_salt={cache_salt!r}, expected a non-empty string, or None"
        )
    [key] = given
    if (key == "prompt") != isinstance(prompt[key], str):
        expected = "text" if key == "prompt" else "a list of token ids"
        raise RequestError(
            f"the prompt's {key!r} is {type(prompt[key]).__name__}, expected {expected}"
        )
    return prompt[key], cache_salt


def _unicode(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has half a character at position {error.start} "
            f"({prompt[error.start]!r}), expected text: decode its bytes with errors='replace'"
        ) from None
    return prompt


def _is_index(value: object) -> bool:
    """Return whether a value is one whole number, of Python, NumPy or torch."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    # A tensor of one element counts as a list; one of torch.bool is a mistake.
    return getattr(value, "ndim", 0) == 0 and not str(getattr(value, "dtype", "")).endswith("bool")


def is_list(value: object) -> bool:
    """Return whether a value is a sequence, an iterator or an array, but not text."""
    is_iterable = isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0
    return is_iterable and not isinstance(value, (str, bytes, Mapping, Set))
