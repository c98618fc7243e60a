"""Parsers of tool calls in a model's output.

Three formats::

    Hermes, Qwen     text <tool_call>{"name": "f", "arguments": {…}}</tool_call> …
    Llama 3          {"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}
    forced           by a grammar: [{"name": …, "parameters": {…}}], or one call's arguments

A parser takes text piece by piece. It holds back text that may be the beginning of a call, and
returns it as text if it turns out not to be one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ..engine.detokenizer import overlap


@dataclass(frozen=True)
class Call:
    """A call of a function, or a further piece of its arguments.

    Attributes:
        index: Which of the answer's calls it is.
        name: The function's name; ``None`` in a further piece.
        arguments: JSON text, whole or a piece.
        id: The id that the tool's result refers to.
    """

    index: int
    name: str | None
    arguments: str
    id: str | None = None


@dataclass
class Parsed:
    """Text and calls found in a piece of output."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)


class TextOnly:
    """No calls: everything is text."""

    def feed(self, text: str) -> Parsed:
        """Return the text."""
        return Parsed(text)

    def finish(self) -> Parsed:
        """Nothing was held back."""
        return Parsed()


class HermesParser:
    r"""Calls between ``<tool_call>`` and ``</tool_call>``.

    Examples:
        >>> parser = HermesParser(["add"])
        >>> parser.feed('Yes. <tool_').text
        'Yes.'
        >>> parsed = parser.feed('call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n')
        >>> parsed.calls[0].name, parsed.calls[0].arguments, parser.finish().text
        ('add', '{"a": 1}', '')
    """

    START, END = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._is_inside = False
        self._num_calls = 0

    def feed(self, text: str) -> Parsed:
        """Take in more text."""
        self._held += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Parse the end: an incomplete call is text, unless only its end tag is missing."""
        parsed = Parsed()
        if self._is_inside:
            self._close(self._held, parsed, tail="")
        elif self._num_calls == 0 or self._held.strip():
            parsed.text = self._held
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        tag = self.END if self._is_inside else self.START
        before, found, after = self._held.partition(tag)
        if found:
            self._held = after
            if self._is_inside:
                self._close(before, parsed, tail=self.END)
            else:
                if before.strip():
                    parsed.text += before.rstrip()
                self._is_inside = True
            return True
        if not self._is_inside:
            # White space before a call is dropped, so it is held back like the beginning of a tag.
            body = self._held[: len(self._held) - overlap(self._held, tag)]
            keep = len(body.rstrip())
            if self._num_calls == 0 or keep:
                parsed.text += self._held[:keep]
                self._held = self._held[keep:]
        return False

    def _close(self, body: str, parsed: Parsed, *, tail: str) -> None:
        self._is_inside = False
        found = _call(_parse(body), self._names, "arguments", self._num_calls)
        if found is None:
            parsed.text += self.START + body + tail
        else:
            parsed.calls.append(found)
            self._num_calls += 1


class Llama3JsonParser:
    """An answer that is JSON from its first character: calls, with semicolons between them.

    Examples:
        >>> parser = Llama3JsonParser(["add"])
        >>> parser.feed('{"name": "add", "parameters": {"a": 1}}').calls
        []
        >>> [call.name for call in parser.finish().calls]
        ['add']
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: str | None = ""  # None: it is text

    def feed(self, text: str) -> Parsed:
        """Take in more text."""
        if self._held is None:
            return Parsed(text)
        self._held += text
        start = self._held.lstrip()
        if start and not (start[0] == "{" or self.TAG.startswith(start[: len(self.TAG)])):
            held, self._held = self._held, None
            return Parsed(held)
        return Parsed()

    def finish(self) -> Parsed:
        """Parse the end: calls, if all of the text is calls."""
        held, self._held = self._held, None
        if not held:
            return Parsed()
        values, rest = _read_values(held.strip().removeprefix(self.TAG), ";")
        calls = [_call(value, self._names, "parameters", at) for at, value in enumerate(values)]
        known = [call for call in calls if call is not None]
        return Parsed(held) if rest or len(known) < len(calls) else Parsed("", known)


class ForcedCalls:
    """A JSON list of calls, which a grammar has enforced."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""

    def feed(self, text: str) -> Parsed:
        """Hold the text back until the list is complete."""
        self._held += text
        return Parsed()

    def finish(self) -> Parsed:
        """Return the calls; of a list that was cut off by a length limit, the complete ones."""
        calls: list[Call] = []
        for value in _read_values(self._held.strip().removeprefix("["), ",")[0]:
            if found := _call(value, self._names, "parameters", len(calls)):
                calls.append(found)
        return Parsed("", calls)


class NamedCall:
    """The arguments of one call whose name is known, which a grammar has enforced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> Parsed:
        """Return a piece of the arguments."""
        if self._has_begun:
            return Parsed("", [Call(0, None, text)] if text else [])
        self._has_begun = True
        return Parsed("", [Call(0, self._name, text, _new_id())])

    def finish(self) -> Parsed:
        """Nothing was held back."""
        return Parsed() if self._has_begun else self.feed("")


ToolParser = TextOnly | HermesParser | Llama3JsonParser | ForcedCalls | NamedCall
"""A parser gets one sample's text piece by piece by ``feed``, and its end by ``finish``."""


def choose_parser(
    choice: str, template: str | None
) -> type[HermesParser | Llama3JsonParser] | None:
    """Return the parser class of a checkpoint's calls; ``None`` if its format is not known.

    Args:
        choice: ``"hermes"``, ``"llama3_json"``, ``"none"``, or ``"auto"``: by the template.
        template: The checkpoint's chat template.
    """
    if choice == "hermes":
        return HermesParser
    if choice == "llama3_json":
        return Llama3JsonParser
    if choice == "auto" and template is not None:
        if "<tool_call>" in template:
            return HermesParser
        if "<|python_tag|>" in template or '"parameters"' in template:
            return Llama3JsonParser
    return None


def _call(value: Any, names: Collection[str], key: str, index: int) -> Call | None:
    """Return a call from its JSON; ``None`` if it is not a call of an offered function."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(index, value["name"], json.dumps(arguments, ensure_ascii=False), _new_id())


def _read_values(text: str, separator: str) -> tuple[list[Any], str]:
    """Return the JSON values at the beginning of a text, and what follows the last of them."""
    values, decoder, rest = [], json.JSONDecoder(), text.lstrip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        values.append(value)
        rest = rest[end:].lstrip().removeprefix(separator).lstrip()
    return values, rest


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
