"""Checks of numbers and sampling parameters that users give."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import GenerationError, NoTokenLeftError, RequestError
from .structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from .sampling_params import SamplingParams


def check(fits: bool, name: str, value: object, allowed: str) -> None:
    """Raise RequestError for ``name=value`` unless it ``fits``."""
    if not fits:
        raise RequestError(f"{name}={value!r}: expected {allowed}")


def number(
    name: str, value: object, allowed: str, low: float, high: float, open_low: bool = False
) -> float:
    """Return ``value`` as a finite number from ``low`` to ``high``.

    Args:
        name: Name of the argument, for the message.
        value: The value given.
        allowed: What is expected, for the message.
        low: The least; with ``open_low`` it is excluded.
        high: The greatest.
        open_low: See ``low``.

    Raises:
        RequestError: It is no such number.
    """
    # A bool is an int to Python, but a mistake where a number is expected.
    check(isinstance(value, numbers.Real) and not isinstance(value, bool), name, value, allowed)
    try:
        found = float(value)  # type: ignore[arg-type]
    except OverflowError:
        found = math.inf
    fits = math.isfinite(found) and low <= found <= high and not (open_low and found == low)
    check(fits, name, value, allowed)
    return found


def integer(
    name: str, value: object, allowed: str, least: int | None = None, most: int | None = None
) -> int:
    """Return ``value`` as an integer from ``least`` to ``most``, where these are given.

    Raises:
        RequestError: It is no such integer.
    """
    check(isinstance(value, numbers.Integral) and not isinstance(value, bool), name, value, allowed)
    found: int = int(value)  # type: ignore[call-overload]
    check(least is None or found >= least, name, value, allowed)
    check(most is None or found <= most, name, value, allowed)
    return found


def normalize(params: SamplingParams) -> dict[str, Any]:
    """Validate the fields, and return those that are stored in another form than given.

    Raises:
        RequestError: A field is of the wrong type, out of range, or contradicts another.
    """
    fields: dict[str, Any] = {}
    for name, (allowed, low, high, open_low) in _NUMBERS.items():
        fields[name] = number(name, getattr(params, name), allowed, low, high, open_low)
    for name, (allowed, least, optional) in _INTEGERS.items():
        value = getattr(params, name)
        fields[name] = value
        if value is not None or not optional:
            fields[name] = integer(name, value, allowed, least)
    for name in _SWITCHES:
        value = getattr(params, name)
        check(isinstance(value, bool), name, value, "True or False")
    fields["top_k"] = max(fields["top_k"], 0)
    fields["seed"] = None if fields["seed"] == -1 else fields["seed"]
    for name in ("stop", "bad_words"):
        fields[name] = _strings(name, getattr(params, name))
    fields["stop_token_ids"] = _token_ids("stop_token_ids", params.stop_token_ids) or ()
    fields["allowed_token_ids"] = _token_ids("allowed_token_ids", params.allowed_token_ids)
    fields["logit_bias"] = _logit_bias(params.logit_bias)
    _check_structured_outputs(params, fields["min_tokens"])
    if fields["max_tokens"] is not None and fields["min_tokens"] > fields["max_tokens"]:
        raise RequestError(
            f"min_tokens={fields['min_tokens']} is more than max_tokens={fields['max_tokens']}: "
            "lower one or raise the other"
        )
    if fields["stop"] and not params.detokenize:
        raise RequestError(
            f"stop={fields['stop']!r} with detokenize=False: stop strings are looked for in the "
            "text; leave detokenize on or use stop_token_ids"
        )
    return fields


def explain_no_token(params: SamplingParams, best: float) -> GenerationError:
    """Return the error of a row whose largest logit ``best`` is not finite.

    It is a ``NoTokenLeftError`` if the request's own parameters caused it.
    """
    restricts = params.structured_outputs or params.allowed_token_ids or params.bad_words
    if best == -math.inf and restricts:
        return NoTokenLeftError(
            "the request's parameters leave no token: structured_outputs, allowed_token_ids, "
            "bad_words and min_tokens together forbid every token"
        )
    if best == math.inf and params.repetition_penalty != 1.0:
        return NoTokenLeftError(
            f"the request's parameters leave no token: "
            f"repetition_penalty={params.repetition_penalty} makes logits infinite"
        )
    return GenerationError(
        f"the largest logit is {best}, expected a finite one: -inf means that every token is "
        "forbidden; otherwise check the weights and the dtype (float16 overflows at 65504)"
    )


# name: (what is allowed, least, greatest, whether the least itself is refused)
_NUMBERS = {
    "temperature": ("a finite number >= 0; 0.0 is greedy", 0.0, math.inf, False),
    "top_p": ("a number in (0, 1]; 1.0 keeps every token", 0.0, 1.0, True),
    "min_p": ("a number in [0, 1]; 0.0 keeps every token", 0.0, 1.0, False),
    "presence_penalty": ("a number in [-2, 2]; 0.0 is none", -2.0, 2.0, False),
    "frequency_penalty": ("a number in [-2, 2]; 0.0 is none", -2.0, 2.0, False),
    "repetition_penalty": ("a finite number > 0; 1.0 is none", 0.0, math.inf, True),
}

# name: (what is allowed, least or None, whether None is a value)
_INTEGERS: dict[str, tuple[str, int | None, bool]] = {
    "n": ("an integer >= 1", 1, False),
    "top_k": ("an integer >= 1, or 0 or -1 to keep every token", -1, False),
    "seed": ("an integer, or None to let the engine choose", None, True),
    "max_tokens": ("an integer >= 1, or None for the model's limit", 1, True),
    "min_tokens": ("an integer >= 0", 0, False),
    "logprobs": ("an integer >= 0, or None to report nothing", 0, True),
    "prompt_logprobs": ("an integer >= 0, or None to report nothing", 0, True),
}

_SWITCHES = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    fits = isinstance(strings, (list, tuple)) and all(isinstance(s, str) and s for s in strings)
    check(fits, name, value, "a string or a list of strings, none of them empty")
    return tuple(strings)  # type: ignore[arg-type]


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    allowed = "a list of token ids, integers >= 0"
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name}={value!r}: expected {allowed}")
    check(all(map(_is_token_id, value)), name, value, allowed)
    check(name != "allowed_token_ids" or len(value) > 0, name, value, "at least one token id")
    return tuple(int(token_id) for token_id in value)


def _is_token_id(value: object) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and value >= 0  # type: ignore[operator]


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    allowed = "a dictionary from token ids, integers >= 0, to numbers in [-100, 100]"
    try:
        biases = dict(value or ())  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias={value!r}: expected {allowed}") from None
    for token_id, bias in biases.items():
        is_bias = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        fits = _is_token_id(token_id) and is_bias and -100 <= bias <= 100
        check(fits, "logit_bias", value, allowed)
    return tuple(sorted((int(token_id), float(bias)) for token_id, bias in biases.items()))


def _check_structured_outputs(params: SamplingParams, min_tokens: int) -> None:
    form = params.structured_outputs
    is_form = form is None or isinstance(form, StructuredOutputsParams)
    check(is_form, "structured_outputs", form, "StructuredOutputsParams(...), or None")
    if form is not None and (min_tokens or params.ignore_eos):
        raise RequestError(
            "structured_outputs with min_tokens or ignore_eos: an output that is complete can "
            "only end; leave them out"
        )
