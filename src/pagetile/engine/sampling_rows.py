"""A row's sampling parameters, encoded as numbers on the device.

::

    ints     key  key  prompt length  top_k  min_tokens  logprobs
    floats   1 / T  T  1 - top_p  T * log(min_p)  r  1 / r  presence  frequency

T is the temperature, r the repetition penalty. Kernels and torch code read the same columns.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Collection, Sequence

from .sampling_params import SamplingParams

COLDEST = 1e-5
"""Below this temperature sampling is greedy: logits have too few digits for less."""
MAX_TOP = 20
"""The most alternatives that the kernels report; torch code reports more."""
KEYS, PROMPT_LEN, TOP_K, MIN_TOKENS, NUM_LOGPROBS = slice(0, 2), 2, 3, 4, 5
NUM_INTS = 6
INVERSE, TEMPERATURE, TAIL, MARGIN, REPETITION, INVERSE_REPETITION, PRESENCE, FREQUENCY = range(8)
NUM_FLOATS = 8


class Feature(enum.IntFlag):
    """Sampling features that a row uses beyond greedy choice."""

    RANDOM = 1
    CUT = 2
    """top_k, top_p or min_p"""
    PENALTY = 4
    BIAS = 8
    BAN = 16
    """Tokens that may not be chosen: always, or as long as min_tokens lasts."""
    WORDS = 32
    """Bad words of several tokens: the last one may not follow the others."""
    LOGPROBS = 64
    MANY_LOGPROBS = 128
    """More than ``MAX_TOP`` alternatives."""


BY_TORCH = Feature.WORDS | Feature.MANY_LOGPROBS
"""Features that torch code computes, outside of a step's CUDA graph."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingInput:
    """One row: a sequence about to get its next token.

    Token ids outside the vocabulary (a prompt's image placeholders, say) are ignored.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int  # params.seed, or the one that the engine drew
    index: int  # which of the request's n samples
    end_token_ids: Collection[int] = ()  # forbidden for params.min_tokens tokens
    bad_words: Sequence[Sequence[int]] = ()  # params.bad_words as tokens


def find_features(params: SamplingParams, bad_words: Sequence[Sequence[int]] = ()) -> Feature:
    """Return the features that these parameters use; ``bad_words`` are tokens."""
    features = Feature(0)
    if not params.is_greedy and params.temperature >= COLDEST:
        features |= Feature.RANDOM
        if params.top_k or params.top_p < 1.0 or params.min_p:
            features |= Feature.CUT
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
        features |= Feature.PENALTY
    if params.logit_bias:
        features |= Feature.BIAS
    if params.min_tokens or params.allowed_token_ids is not None:
        features |= Feature.BAN
    for ids in bad_words:
        features |= Feature.BAN if len(ids) == 1 else Feature.WORDS
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
        if params.logprobs > MAX_TOP:
            features |= Feature.MANY_LOGPROBS
    return features


def encode_row(
    input_: SamplingInput, features: Feature, vocab_size: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return a row of ``Sampler.ints`` and one of ``Sampler.floats``."""
    params = input_.params
    # Hexadecimal: Python refuses to print very long integers in decimal.
    digest = hashlib.blake2b(f"{input_.seed:x},{input_.index}".encode(), digest_size=8).digest()
    keys = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    # Large enough not to round to 0 in float32: times 0, an infinite logit would be NaN.
    inverse = max(1.0 / params.temperature, 1e-30) if features & Feature.RANDOM else -1.0
    top_k, tail, margin = vocab_size, 0.0, -math.inf
    if features & Feature.CUT:
        top_k = min(params.top_k or vocab_size, vocab_size)
        tail = 1.0 - params.top_p
        if params.min_p:
            margin = params.temperature * math.log(params.min_p)
    num_logprobs = -1 if params.logprobs is None else min(params.logprobs, vocab_size)
    min_tokens = min(params.min_tokens, 1 << 30)  # no sequence is longer, and sums fit 32 bits
    ints = (*keys, len(input_.prompt_token_ids), top_k, min_tokens, num_logprobs)
    return ints, (
        inverse,
        params.temperature,
        tail,
        margin,
        params.repetition_penalty,
        1.0 / params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
