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
        self._check_vocabulary("logit_bias", [*dict(params.logit_bias or ())])
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.stop:
            self._require_tokenizer(f"stop={params.stop!r}", "use stop_token_ids")
        if params.bad_words:
            self._require_tokenizer(f"bad_words={params.bad_words!r}", "use logit_bias with -100")
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
            self._require_tokenizer("the prompt is text", "give a list of token ids")
            # A tokenizer may return a special token for an empty text.
            token_ids = list(self.tokenizer.encode(_unicode(prompt))) if prompt else []
        elif is_list(prompt) and all(map(_is_index, token_ids := list(prompt))):
            token_ids = list(map(operator.index, token_ids))
        else:
            given = type(prompt).__name__
            raise RequestError(f"the prompt is {given}, expected text or a list of token ids (int)")
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        self._check_vocabulary("the prompt", token_ids)
        return token_ids

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
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{name} has token id {token_id}, expected 0 to {self.vocab_size - 1}: "
                    "the model has no such token"
                )

    def _require_tokenizer(self, given: str, instead: str) -> None:
        if self.tokenizer is None:
            raise RequestError(
                f"{given} but there is no tokenizer: {instead}, or load one with LLM(tokenizer=...)"
            )


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
