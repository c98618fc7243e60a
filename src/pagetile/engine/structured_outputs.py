"""Output that follows a JSON schema, a regular expression, a list of choices or a grammar.

llguidance compiles a constraint (``form``) once; each sequence has its own copy of the matcher.
Before a token is sampled, the matcher writes a bit mask of allowed tokens, and the sampler excludes
the others.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from ..errors import GenerationError, NoTokenLeftError, RequestError, UnsupportedError
from .keywords import refuse_unknown_keywords
from .vllm_names import STRUCTURED_OPTIONS

MAX_BYTES = 64 << 10  # of a constraint
KEPT = 256  # compiled constraints

# White space allowed between the parts of JSON: a space, or a line break and an indentation. Small
# models may write nothing else if more is allowed.
_WHITE_SPACE = r"( |\n[ \t]{0,16})?"

# llguidance follows references by native recursion, where a stack overflow ends the process. The
# deepest chain that fits into MAX_BYTES needs less than this.
_STACK_BYTES = 256 << 20
_STACK_LOCK = threading.Lock()

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

T = TypeVar("T")


@refuse_unknown_keywords(STRUCTURED_OPTIONS)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    r"""A constraint on the output. Give one of the first five; names are vLLM's.

    Attributes:
        json: A JSON schema, as an object or as text. ``True`` allows any JSON.
        regex: A regular expression, which all of the output matches.
        choice: Texts, one of which is the output.
        grammar: In Lark's form, or in GBNF with a rule ``root ::=``.
        json_object: Any JSON object.
        disable_any_whitespace: JSON without white space between its parts. By default a space, or
            a line break and an indentation, may stand there.

    Raises:
        RequestError: None of the constraints is given, or several, or one has the wrong type.

    Examples:
        >>> StructuredOutputsParams(json={"type": "integer"}).json
        '{"type": "integer"}'
    """

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [
            name
            for name in ("json", "regex", "choice", "grammar", "json_object")
            if getattr(self, name) not in (None, False)
        ]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {', '.join(given) or 'no form'}, expected one of json, "
                "regex, choice, grammar and json_object"
            )
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _dump(self.json))
        if self.choice is not None:
            _check_choice(self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in ("regex", "grammar", "json"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"structured_outputs.{name} is {value!r}, expected text")
        texts = (self.json, self.regex, self.grammar, *(self.choice or ()))
        size = sum(len(text) for text in texts if isinstance(text, str))
        if size > MAX_BYTES:
            raise RequestError(
                f"structured_outputs has {size} characters, at most {MAX_BYTES} are compiled"
            )


class Grammar(Protocol):
    """Restricts the next token of one sequence; each sequence has its own."""

    def fill_mask(self, mask: Any) -> None:
        """Write the allowed tokens into ``mask``, int32 ``[ceil(vocab_size / 32)]``, as bits."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the sequence's next token."""
        ...

    def find_error(self) -> str:
        """Return why no further token can be allowed, or ""."""
        ...


class GrammarCompiler:
    """Compiles constraints for one tokenizer.

    Args:
        tokenizer: A fast Transformers tokenizer; ``None``: nothing can be compiled.
        vocab_size: Width of the logits.
        eos_token_ids: Tokens that may end an output once the constraint is satisfied.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        self._compiled: OrderedDict[StructuredOutputsParams, _Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._words: Any = None

    def compile(self, form: StructuredOutputsParams) -> Callable[[], _Grammar]:
        """Return a function that makes the grammar of each sequence.

        Slow the first time: call it off the event loop. Thread-safe.

        Raises:
            RequestError: The constraint is wrong, or too complex.
            UnsupportedError: llguidance is not installed, or does not support the tokenizer.
        """
        with self._lock:
            grammar = self._compiled.get(form)
            if grammar is not None:
                self._compiled.move_to_end(form)
                return grammar.copy
        grammar = self._compile(form)
        with self._lock:
            self._compiled[form] = grammar
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return grammar.copy

    def _compile(self, form: StructuredOutputsParams) -> _Grammar:
        words = self._load()
        from llguidance import LLMatcher, LLParserLimits

        # Limits in steps of the compiler, which take 0.1 to 1 s.
        limits = LLParserLimits(initial_lexer_fuel=2_000_000, step_lexer_fuel=500_000)
        _check_schemas(form)
        try:
            matcher = _on_a_large_stack(
                lambda: LLMatcher(words, _source(form), log_level=0, limits=limits)
            )
            grammar = _Grammar(matcher, self._vocab_size)
            error = matcher.get_error() or grammar.copy().find_no_beginning()
        except Exception as reason:
            # A bare Exception is llguidance's, for example for a rule that the grammar lacks.
            if type(reason) is not Exception and not isinstance(
                reason, (ValueError, RecursionError)
            ):
                raise
            error = str(reason)
        if error:
            line = " ".join(error.split())[:500]
            raise RequestError(f"structured_outputs cannot be compiled: {line}")
        return grammar

    def _load(self) -> Any:
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs text, and the model has no tokenizer")
        with self._lock:
            if self._words is None:
                try:
                    from llguidance.hf import from_tokenizer
                except ModuleNotFoundError:
                    raise UnsupportedError(
                        "structured_outputs needs llguidance: pip install '.[serve]'"
                    ) from None
                try:
                    self._words = from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos or None
                    )
                except ValueError as error:
                    raise UnsupportedError(
                        f"structured_outputs cannot use this tokenizer: {error}"
                    ) from error
            return self._words


class _Grammar:
    """The matcher of one sequence."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def copy(self) -> _Grammar:
        """Return a copy in the same state."""
        return _Grammar(self._matcher.deep_copy(), self._vocab_size)

    def find_no_beginning(self) -> str:
        """Return why no output can begin, as for a schema that only refers to itself; else ""."""
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        self.fill_mask(mask)
        return "" if mask.any() else self._matcher.get_error() or "no output has this form"

    def fill_mask(self, mask: Any) -> None:
        """Write the allowed tokens as bits; none, once the constraint has become too complex."""
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            mask[:] = 0  # the sampler fails only this row, since it has no token left

    def accept(self, token_id: int) -> None:
        """Advance by a token.

        Raises:
            RequestError: The token is not allowed, or the constraint has become too complex.
        """
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"structured output failed: {self.find_error()}")

    def find_error(self) -> str:
        """Return why no further token can be allowed, or ""."""
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        return str(error).partition("\n")[0]  # the state of the parser follows


def explain_failure(grammar: Grammar | None, error: GenerationError) -> GenerationError:
    """Return why a sequence has no token: the limit that its grammar reached, else ``error``."""
    if grammar is None or not (reason := grammar.find_error()):
        return error
    return NoTokenLeftError(
        f"structured_outputs is too complex ({reason}): shorten its repetitions"
    )


def fill_masks(grammars: Sequence[Any], vocab_size: int) -> list[tuple[int, npt.NDArray[np.int32]]]:
    """Return position and allowed tokens as bits of each grammar that is not ``None``."""
    masks = []
    for at, grammar in enumerate(grammars):
        if grammar is not None:
            mask = np.full(-(-vocab_size // 32), -1, np.int32)
            grammar.fill_mask(mask)
            masks.append((at, mask))
    return masks


def _source(form: StructuredOutputsParams) -> str:
    """Return a constraint in llguidance's own language."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if form.regex is not None:
        return str(LLMatcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        return "start: " + " | ".join(json_module.dumps(text) for text in form.choice)
    if form.grammar is not None:
        text = form.grammar
        return str(LLMatcher.grammar_from_lark(gbnf_to_lark(text) if "::=" in text else text))
    schema = '{"type": "object"}' if form.json_object else str(form.json)
    options = {"whitespace_flexible": not form.disable_any_whitespace}
    if not form.disable_any_whitespace:
        options["whitespace_pattern"] = _WHITE_SPACE  # type: ignore[assignment]
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=options))


def _on_a_large_stack(work: Callable[[], T]) -> T:
    """Return the result of ``work`` on a thread with a stack of ``_STACK_BYTES``."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="compile-form", daemon=True)
    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result.result()


def _check_schemas(form: StructuredOutputsParams) -> None:
    """Refuse schemas that llguidance compiles wrongly, or that end the process.

    Raises:
        RequestError: There is one, as the constraint or inside of a Lark grammar.
    """
    schemas = []
    try:
        if form.json is not None:
            schemas.append(json_module.loads(str(form.json)))
        for found in re.finditer(r"%json\s*", form.grammar or ""):
            schemas.append(json_module.JSONDecoder().raw_decode(str(form.grammar), found.end())[0])
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs has a schema that is not JSON: {error}") from None
    for schema in schemas:
        parts = [schema]
        while parts:
            part = parts.pop()
            if isinstance(part, list):
                parts += part
            elif isinstance(part, dict):
                parts += part.values()
                _check_bounds(part)
                _check_constants(part)
                _check_reference(schema, part)


def _check_bounds(part: dict[str, Any]) -> None:
    """Refuse bounds of numbers that llguidance gets wrong.

    It keeps them as doubles. Bounds of integers at or below -2**63 make it recurse until the
    process dies. It treats an exclusive bound as inclusive if all allowed numbers have its integer
    part, such as 0 < x <= 0.25.
    """
    bounds = {name: part[name] for name in _BOUNDS if isinstance(part.get(name), (int, float))}
    for name, bound in bounds.items():
        if not _is_bound(bound):
            raise RequestError(
                f"structured_outputs has a schema with {name}={bound}: expected a number "
                "between -2**63 and 2**63 that a double holds exactly; leave it out"
            )
    for sign, name, others in (
        (1, "exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        (-1, "exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = bounds.get(name, 0.5)
        width = min((sign * (bounds[other] - bound) for other in others if other in bounds),
                    default=1)  # fmt: skip
        if bound == int(bound) and sign * bound >= 0 and width < 1:
            raise RequestError(
                f"structured_outputs has a schema with {name}={bound} of a range less than 1 wide, "
                "which is not supported: give a bound that is included"
            )


def _check_constants(part: dict[str, Any]) -> None:
    """Refuse numbers that llguidance rounds to a double, or to the largest integer of 64 bits."""
    for name in ("const", "enum"):
        values = [part.get(name)]
        while values:
            value = values.pop()
            if isinstance(value, (list, dict)):
                values += value.values() if isinstance(value, dict) else value
            elif isinstance(value, (int, float)) and (value == 2**63 - 1 or not _is_bound(value)):
                raise RequestError(
                    f"structured_outputs has a schema with {value} in {name}: expected a number "
                    "between -2**63 and 2**63 that a double holds exactly"
                )


def _is_bound(value: float) -> bool:
    if value == 2**63 - 1:  # it becomes 2**63, and then the largest integer of 64 bits again
        return True
    return -(2**63) < value < 2**63 and int(value) == int(float(value))


def _check_reference(schema: Any, part: Any) -> None:
    """Refuse a reference that only leads to itself."""
    seen = []
    while isinstance(part, dict) and isinstance(reference := part.get("$ref"), str):
        if reference in seen:
            raise RequestError(
                f"structured_outputs has a schema whose {reference!r} only refers to itself"
            )
        seen.append(reference)
        part = _find(schema, reference)


def _find(schema: Any, reference: str) -> Any:
    """Return the target of a reference within a schema; ``None`` if there is none."""
    for key in reference.removeprefix("#").split("/")[1:]:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, dict) else None
    return schema if reference.startswith("#") else None


def _dump(value: Any) -> str:
    try:
        return json_module.dumps({} if value is True else value)
    except (TypeError, ValueError, RecursionError) as error:
        hint = ". Give its model_json_schema()" if hasattr(value, "model_json_schema") else ""
        raise RequestError(f"structured_outputs.json is not JSON: {error}{hint}") from None


def _check_choice(choice: Any) -> None:
    if isinstance(choice, str) or not choice or not all(isinstance(c, str) and c for c in choice):
        raise RequestError(
            f"structured_outputs.choice is {choice!r}, expected a list of texts, none of them empty"
        )
