"""What a chat answer's text is made of: reasoning, content and tool calls, as the deltas of OpenAI's chunks.

A whole message is the sum of the same deltas, so the two forms of an answer cannot differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sgray.serve.openai.choices import TokenEntry
from sgray.serve.openai.forms import Json
from sgray.serve.openai.tools import ToolUse
from sgray.text.channels import ChannelParser
from sgray.text.reasoning import ReasoningFormat, ReasoningParser, Split, goes_on_inside, starts_inside
from sgray.text.tools.calls import CallArguments, CallStart, Content, Event
from sgray.text.tools.parser import ToolCallParser

PROMPT_END_TOKENS = 16
"""So many tokens at the end of a prompt show whether its template opened or closed the reasoning."""


@dataclass(frozen=True)
class Reading:
    """How the answers of one call are read. As it stands, all text is content.

    `is_inside` as in `ReasoningParser`. Without `separates`, reasoning stays in the content, tags and all, and is only
    kept from being taken for tool calls. Without `streams`, it is sent in one piece.
    """

    reasoning: ReasoningFormat | None = None
    is_inside: bool | None = None
    separates: bool = True
    streams: bool = True
    tools: ToolUse = field(default_factory=ToolUse)

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self.reasoning is None and self.tools.format is None

    @property
    def has_special_tokens(self) -> bool:
        """Whether marks that are looked for are special tokens, which the text must then hold."""
        is_in_tools = self.tools.format is not None and self.tools.format.has_special_tokens
        return is_in_tools or (self.reasoning is not None and self.reasoning.has_channels)

    def reader(self) -> Reader:
        """For one choice."""
        return Reader(self)


class Reader:
    """Reads the text of one choice. `entries` are those of tokens whose text has not been given out."""

    def __init__(self, reading: Reading) -> None:
        self.entries: list[TokenEntry] = []
        self._reading = reading
        self._reasoning = _reasoning_parser(reading)
        tools = reading.tools
        self._calls = None if tools.format is None else ToolCallParser(tools.format, tools.schemas)
        self._thoughts = ""

    def read(self, text: str, *, is_last: bool) -> list[Json]:
        """The deltas that the next piece of text makes; with `is_last` also those of everything held back."""
        if self._reasoning is None:
            return self._answer(text, is_last=is_last)
        split = self._reasoning.push(text)
        rest = self._reasoning.finish() if is_last else Split()
        deltas = self._think(split.reasoning + rest.reasoning, is_over=is_last or bool(split.content))
        return deltas + self._answer(split.content + rest.content, is_last=is_last)

    def taken_entries(self) -> list[TokenEntry]:
        """The entries, for the next chunk."""
        entries, self.entries = self.entries, []
        return entries

    def finish_reason(self, reason: str) -> str:
        """Why the choice ended, in OpenAI's words. Arguments that are no JSON object are no calls to be made."""
        has_calls = self._calls is not None and self._calls.num_calls and self._calls.are_whole
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _think(self, text: str, *, is_over: bool) -> list[Json]:
        self._thoughts += text
        if not self._thoughts or not (self._reading.streams or is_over or not self._reading.separates):
            return []
        text, self._thoughts = self._thoughts, ""
        return [{"reasoning_content" if self._reading.separates else "content": text}]

    def _answer(self, text: str, *, is_last: bool) -> list[Json]:
        if self._calls is None:
            return [{"content": text}] if text else []
        events = self._calls.push(text) + (self._calls.finish() if is_last else [])
        return [self._delta(event) for event in events if self._is_wanted(event)]

    def _is_wanted(self, event: Event) -> bool:
        return isinstance(event, Content) or event.index == 0 or not self._reading.tools.has_one_call

    def _delta(self, event: Event) -> Json:
        match event:
            case Content(text):
                return {"content": text}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallStart(index, name, identity):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": identity or f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                return {"tool_calls": [call | {"function": function}]}


def message(deltas: Iterable[Json], reading: Reading) -> Json:
    """The whole message that deltas add up to."""
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    calls: list[Json] = []
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                _add_call(calls, value[0])
            else:
                texts[name].append(value)
    content = "".join(texts["content"])
    whole: Json = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
    if reading.reasoning is not None and reading.separates:
        whole["reasoning_content"] = "".join(texts["reasoning_content"]) or None
    if calls:
        whole["tool_calls"] = calls
    return whole


def is_inside(form: ReasoningFormat, prompt_end: str, continued: Mapping[str, Any] | None) -> bool | None:
    """Whether an answer, or the rest of the `continued` message, begins inside reasoning; None if its text tells."""
    if continued is None:
        return starts_inside(form, prompt_end)
    said = continued["content"]
    return goes_on_inside(form, said if isinstance(said, str) else "\n".join(part["text"] for part in said))


def _reasoning_parser(reading: Reading) -> ReasoningParser | ChannelParser | None:
    if reading.reasoning is None:
        return None
    if reading.reasoning.has_channels:
        return ChannelParser(is_inside=reading.is_inside, is_verbatim=not reading.separates)
    return ReasoningParser(reading.reasoning, is_inside=reading.is_inside, is_verbatim=not reading.separates)


def _add_call(calls: list[Json], part: Json) -> None:
    if "id" in part:
        calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
    else:
        calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
