"""Finding calls of tools in what a model writes.

Three forms::

    Hermes, Qwen     text <tool_call>{"name": "f", "arguments": {…}}</tool_call> …
    Llama 3          {"name": "f", "parameters": {…}}; {"name": "g", "parameters": {…}}
    forced           by a grammar: [{"name": …, "parameters": {…}}], or one call's arguments

A parser takes text piece by piece. Text that may be the beginning of a call is held back; what
turns out to be none comes as text after all.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call of a function, or a further piece of one's arguments.

    Attributes:
        index: Which of the answer's calls it is.
        name: Of the function; ``None`` in a further piece.
        arguments: JSON text, whole or a piece.
        id: What the tool's answer refers to.
    """

    index: int
    name: str | None
    arguments: str
    id: str | None = None


@dataclass
class Parsed:
    """What a piece of text turned out to be."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)


class TextOnly:
    """No calls: everything is text."""

    def feed(self, text: str) -> Parsed:
        """Pass it on."""
        return Parsed(text)

    def finish(self) -> Parsed:
        """Nothing was held back."""
        return Parsed()


class HermesParser:
    r"""Calls between ``<tool_call>`` and ``</tool_call>``.

    Example:
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
        """The end: a call that was cut off is text, unless it is whole but for its end tag."""
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
            # White space before a call is dropped with it, so it waits as a tag's beginning does.
            body = self._held[: len(self._held) - _overlap(self._held, tag)]
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

    Example:
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
        """The end: calls, if all of it is."""
        held, self._held = self._held, None
        if not held:
            return Parsed()
        calls: list[Call] = []
        rest = held.strip().removeprefix(self.TAG).strip()
        decoder = json.JSONDecoder()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return Parsed(held)
            found = _call(value, self._names, "parameters", len(calls))
            if found is None:
                return Parsed(held)
            calls.append(found)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
        return Parsed("", calls)


class ForcedCalls:
    """A JSON list of calls, which a grammar has enforced."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = names, ""

    def feed(self, text: str) -> Parsed:
        """Keep it until the list is whole."""
        self._held += text
        return Parsed()

    def finish(self) -> Parsed:
        """The calls; of a list that was cut off by a length limit, those that are whole."""
        calls: list[Call] = []
        decoder, rest = json.JSONDecoder(), self._held.strip().removeprefix("[").lstrip()
        while rest and rest[0] == "{":
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                break
            if found := _call(value, self._names, "parameters", len(calls)):
                calls.append(found)
            rest = rest[end:].lstrip().removeprefix(",").lstrip()
        return Parsed("", calls)


class NamedCall:
    """The arguments of one call whose name is known, which a grammar has enforced."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> Parsed:
        """A piece of the arguments."""
        if self._has_begun:
            return Parsed("", [Call(0, None, text)] if text else [])
        self._has_begun = True
        return Parsed("", [Call(0, self._name, text, _new_id())])

    def finish(self) -> Parsed:
        """Nothing was held back."""
        return Parsed() if self._has_begun else self.feed("")


ToolParser = TextOnly | HermesParser | Llama3JsonParser | ForcedCalls | NamedCall
"""Takes one sample's text piece by piece by ``feed``, and its end by ``finish``."""


def choose_parser(
    choice: str, template: str | None
) -> type[HermesParser | Llama3JsonParser] | None:
    """The parser of a checkpoint's calls; ``None`` if it has none that is known.

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
    """A call from its JSON; ``None`` if it is none, or of no function that was offered."""
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get(key, value.get("arguments", value.get("parameters", {})))
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(index, value["name"], json.dumps(arguments, ensure_ascii=False), _new_id())


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` are a beginning of ``tag``."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
