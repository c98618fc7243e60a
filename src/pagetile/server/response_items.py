"""The output items of a response, and their streaming events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..engine.logprobs import TokenLogprobs
from .tool_parsers import Call

Event = tuple[str, dict[str, Any]]
"""An event's type, without ``response.``, and its fields."""


class ResponseItems:
    """One message and any number of function calls, built from pieces.

    A message holds all the text and the log-probabilities of all tokens; it begins with the first
    text. A call ends when the next one begins. All end with ``finish``.

    Args:
        new_id: Makes an id with a prefix.
        describe: Encodes log-probabilities for the API; ``None``: they were not requested.

    Attributes:
        output: The items so far, as the response lists them.
    """

    def __init__(
        self,
        new_id: Callable[[str], str],
        describe: Callable[[Sequence[TokenLogprobs]], list[dict[str, Any]]] | None,
    ) -> None:
        self.output: list[dict[str, Any]] = []
        self._new_id, self._describe = new_id, describe
        self._message: dict[str, Any] | None = None
        self._call: dict[str, Any] | None = None
        self._held: list[dict[str, Any]] = []  # log-probabilities not sent yet

    def open_message(self) -> list[Event]:
        """Begin the message, if it has not begun."""
        if self._message is not None:
            return []
        item: dict[str, Any] = {
            "id": self._new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        self._message = item
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        # The event is encoded later, so it needs its own empty list: the item's list grows.
        shown = {**part, "logprobs": []}
        events = [
            self._begin(item),
            ("content_part.added", {**self._place(item), "content_index": 0, "part": shown}),
        ]
        item["content"] = [part]
        return events

    def add(self, text: str, tokens: Sequence[TokenLogprobs], calls: Sequence[Call]) -> list[Event]:
        """Add new text, new tokens and pieces of calls; return the events."""
        if self._describe is not None:
            self._held += self._describe(tokens)
        events = self._add_text(text) if text else []
        for call in calls:
            events += self._add_call(call)
        return events

    def finish(self, status: str) -> list[Event]:
        """End all items: ``completed``, or ``incomplete`` if the answer was cut off."""
        events = [] if self.output else self.open_message()
        if self._message is not None:
            if self._held:  # of tokens without text, at the end of the answer
                events += self._add_text("")
            item = self._message
            [part] = item["content"]
            item["status"] = status
            place = {**self._place(item), "content_index": 0}
            shown = {"text": part["text"], "logprobs": part["logprobs"]}
            events += [
                ("output_text.done", {**place, **shown}),
                ("content_part.done", {**place, "part": part}),
                self._end(item),
            ]
        return events + self._end_call(status)

    def _add_text(self, text: str) -> list[Event]:
        events = self.open_message()
        item = self._message
        assert item is not None
        [part] = item["content"]
        logprobs, self._held = self._held, []
        part["text"] += text
        part["logprobs"] += logprobs
        place = {**self._place(item), "content_index": 0}
        fields = {**place, "delta": text, "logprobs": logprobs}
        return [*events, ("output_text.delta", fields)]

    def _add_call(self, call: Call) -> list[Event]:
        events: list[Event] = []
        if call.name is not None:
            events = self._end_call("completed")
            self._call = {
                "id": self._new_id("fc"),
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            events.append(self._begin(self._call))
        if call.arguments:
            assert self._call is not None
            self._call["arguments"] += call.arguments
            fields = {**self._place(self._call), "delta": call.arguments}
            events.append(("function_call_arguments.delta", fields))
        return events

    def _end_call(self, status: str) -> list[Event]:
        if self._call is None:
            return []
        item, self._call = self._call, None
        item["status"] = status
        done = {**self._place(item), "name": item["name"], "arguments": item["arguments"]}
        return [("function_call_arguments.done", done), self._end(item)]

    def _begin(self, item: dict[str, Any]) -> Event:
        self.output.append(item)
        return "output_item.added", {"output_index": len(self.output) - 1, "item": dict(item)}

    def _end(self, item: dict[str, Any]) -> Event:
        return "output_item.done", {"output_index": self.output.index(item), "item": dict(item)}

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self.output.index(item)}
