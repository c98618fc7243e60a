"""Sampling parameters of a request, validated when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NoReturn

from .checks import normalize
from .keywords import refuse_unknown_keywords
from .structured_outputs import StructuredOutputsParams
from .vllm_names import SAMPLING_OPTIONS


@refuse_unknown_keywords(SAMPLING_OPTIONS)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    r"""How to choose tokens, when to stop and what to report.

    Names and defaults are vLLM's. Bad values raise here and not in the middle of a batch. Numbers
    are stored as ``int`` and ``float``, lists as tuples, ``top_k=-1`` as 0, ``seed=-1`` as None.

    Attributes:
        n: How many samples to draw from one prompt. Those of a greedy request are equal.
        temperature: Divides the logits. 0.0 is greedy: always the most likely token.
        top_p: Keep the fewest tokens whose probabilities sum to at least this; 1.0 keeps all.
        top_k: Keep this many tokens; 0 or -1 keeps all, 1 is greedy.
        min_p: Keep tokens at least this fraction as likely as the most likely one; 0.0 keeps all.
        presence_penalty: Subtracted from the logit of every token already in the output.
        frequency_penalty: The same, once per occurrence in the output.
        repetition_penalty: Above 1.0 makes tokens of the prompt and the output less likely:
            divides their positive logits, multiplies their negative ones.
        seed: Makes the request reproducible, whatever else is in the batch and after preemption,
            up to the rounding of logits, which depends on the batch and is coarse with an 8-bit
            cache. ``None`` or -1: the engine draws one.
        stop: Text ends before the first of these strings. A string or a list of strings.
        stop_token_ids: The output ends at any of these tokens.
        ignore_eos: Do not end at the model's end-of-sequence token.
        max_tokens: Longest output; ``None`` is as far as the model's context reaches.
        min_tokens: Nothing ends the output before it has this many tokens.
        logit_bias: Added to the logits of tokens, before everything else: a number from -100 to
            100 for each token id. Stored as pairs in the order of the ids.
        logprobs: Report each token's log-probability and this many of the likeliest
            alternatives; 0 reports the token's alone, ``None`` nothing.
        prompt_logprobs: The same for each token of the prompt but the first, by one more forward
            pass over the prompt.
        allowed_token_ids: Choose among these tokens only; ``None`` allows all.
        bad_words: Texts that are not generated: the token that would complete one is ruled out.
        structured_outputs: A constraint on the output, such as a JSON schema.
        detokenize: Turn tokens into text.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Let the text end after the stop string or token, not before it.

    Raises:
        RequestError: A value is of the wrong type, out of range, or contradicts another; the
            message names the field, what was given and what is allowed.
        TypeError: An option does not exist; the message names the nearest one that does.

    Examples:
        >>> params = SamplingParams(temperature=0.7, top_p=0.9, stop="\n", max_tokens=64)
        >>> params.stop, params.is_greedy
        (('\n',), False)
        >>> SamplingParams(top_p=1.5)
        Traceback (most recent call last):
        ...
        pagetile.errors.RequestError: top_p=1.5: expected a number in (0, 1]; 1.0 keeps every token
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, value in normalize(self).items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether every step takes the most likely token: ``temperature`` 0 or ``top_k`` 1."""
        return self.temperature == 0.0 or self.top_k == 1


def _refuse_change(self: SamplingParams, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(
        "SamplingParams cannot be changed: make others by "
        f"dataclasses.replace(params, {name}={value!r})"
    )


SamplingParams.__setattr__ = _refuse_change  # type: ignore[method-assign,assignment]
