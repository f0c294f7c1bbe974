"""Tool calls as Hermes and Qwen models write them: <tool_call>{"name": "f", "arguments": {}}</tool_call>."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field

from featcache.server.protocol import FunctionCall, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def understands_tools(chat_template: str | None) -> bool:
    """Whether a chat template shows tools to the model and has it answer in the form read here."""
    return chat_template is not None and "tools" in chat_template and _OPEN in chat_template


@dataclass(slots=True)
class ToolCallReader:
    """Takes an answer's text as it comes; tells plain text and tool calls apart.

    A block that turns out not to be a call (broken JSON, no name) is text after all. max_calls: more are left
    out.
    """

    max_calls: int | None = None
    calls: list[ToolCall] = field(default_factory=list)
    _held: str = ""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """(text that is surely no tool call, calls that are complete now)."""
        self._held += text
        plain, found = "", list[ToolCall]()
        while True:
            before, opened, rest = self._held.partition(_OPEN)
            if not opened:
                keep = _overlap(before, _OPEN)
                plain += before[: len(before) - keep]
                self._held = before[len(before) - keep :]
                return plain, found
            body, closed, after = rest.partition(_CLOSE)
            plain += before
            if not closed:
                self._held = opened + rest
                return plain, found
            call = _parsed(body, len(self.calls))
            if call is None:
                plain += opened + body + closed
            elif self.max_calls is None or len(self.calls) < self.max_calls:
                self.calls.append(call)
                found.append(call)
            self._held = after

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end: an unclosed call counts if its JSON is whole."""
        held, self._held = self._held, ""
        call = _parsed(held.removeprefix(_OPEN), len(self.calls)) if held.startswith(_OPEN) else None
        if call is None:
            return held, []
        self.calls.append(call)
        return "", [call]


def _parsed(body: str, index: int) -> ToolCall | None:
    try:
        doc = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(doc, dict) or not isinstance(doc.get("name"), str) or not doc["name"]:
        return None
    arguments = doc.get("arguments", doc.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = FunctionCall(name=doc["name"], arguments=text)
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", function=function, index=index)


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-size:]):
            return size
    return 0
