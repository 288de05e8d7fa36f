"""Tool calls out of a stream of text: one incremental parser, driven by a table of notations.

The names are those of SGLang's parsers. What is no call of a tool that the request has is content; a call whose name is
known is a call from then on, and what its arguments lack to be JSON is the model's doing, which `are_whole` tells. The
result does not depend on how the text was cut into pieces. Knows neither tokens nor requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sgray.text.source import Source, Waiting
from sgray.text.tools.calls import Calls, Event, Notation
from sgray.text.tools.channel_calls import ChannelCalls
from sgray.text.tools.json_calls import JsonCalls
from sgray.text.tools.marked_calls import MarkedCalls
from sgray.text.tools.python_calls import PythonCalls
from sgray.text.tools.tagged_calls import TaggedCalls


@dataclass(frozen=True, slots=True)
class Either:
    """Two notations behind the same marks; the first that fits is taken."""

    first: Notation
    second: Notation
    bare: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """See `Notation`."""
        return self.first.marks

    def read(self, source: Source, calls: Calls) -> Waiting[bool]:
        """See `Notation`."""
        begin = source.position
        if (yield from self.first.read(source, calls)):
            return True
        source.position = begin
        return (yield from self.second.read(source, calls))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation. `has_special_tokens`: its marks are special tokens, which must not be left out of the text."""

    notation: Notation
    has_special_tokens: bool = False


_HERMES = ToolFormat(JsonCalls(("<tool_call>",), "</tool_call>"))


def _deepseek(name: str) -> str:
    """A special token of DeepSeek, which writes wide bars for bars and a low block for a blank."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_DEEPSEEK_CALL = (_deepseek("tool call begin"), _deepseek("tool sep"), _deepseek("tool call end"))
_DEEPSEEK_SECTION = (_deepseek("tool calls begin"), _deepseek("tool calls end"))

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": _HERMES,
        "qwen": _HERMES,
        "qwen25": _HERMES,
        "llama3": ToolFormat(JsonCalls(("<|python_tag|>",), bare="{"), has_special_tokens=True),
        "mistral": ToolFormat(
            Either(JsonCalls(("[TOOL_CALLS]",)), MarkedCalls("[TOOL_CALLS]", "[ARGS]")), has_special_tokens=True
        ),
        "pythonic": ToolFormat(PythonCalls(), has_special_tokens=True),
        "qwen3_coder": ToolFormat(
            TaggedCalls(
                open="<tool_call>",
                close="</tool_call>",
                name_open="<function=",
                name_ends=(">",),
                key_open="<parameter=",
                key_close=">",
                value_close="</parameter>",
                end="</function>",
                has_own_lines=True,
            )
        ),
        "deepseekv3": ToolFormat(
            MarkedCalls(
                _DEEPSEEK_CALL[0],
                "\n",
                _DEEPSEEK_CALL[2],
                lead="function" + _DEEPSEEK_CALL[1],
                fence=("```json", "```"),
                section=_DEEPSEEK_SECTION,
            ),
            has_special_tokens=True,
        ),
        "deepseekv31": ToolFormat(MarkedCalls(*_DEEPSEEK_CALL, section=_DEEPSEEK_SECTION), has_special_tokens=True),
        "glm45": ToolFormat(
            TaggedCalls(
                open="<tool_call>",
                close="</tool_call>",
                name_ends=("\n", "<arg_key>", "</tool_call>"),
                key_open="<arg_key>",
                key_close="</arg_key>",
                value_open="<arg_value>",
                value_close="</arg_value>",
            )
        ),
        "gpt-oss": ToolFormat(ChannelCalls(), has_special_tokens=True),
        "kimi_k2": ToolFormat(
            MarkedCalls(
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                named=re.compile(r"(?P<id>(?:functions\.)?(?P<name>.+):\d+)", re.DOTALL),
            ),
            has_special_tokens=True,
        ),
    }
)


class ToolCallParser:
    """Reads one stream of text. Use `push` for each piece, then `finish` once.

    `tools` are the parameters' JSON schemas by the names of the tools.
    """

    def __init__(self, form: ToolFormat, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._notation = form.notation
        self._source = Source()
        self._calls = Calls(tools)
        self._reader = self._read()

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return self._calls.count

    @property
    def are_whole(self) -> bool:
        """Whether the arguments of all calls that have ended are JSON objects; known after `finish`."""
        return self._calls.are_whole

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text; returns what is certain."""
        self._source.text += text
        next(self._reader, None)
        return self._calls.taken()

    def finish(self) -> list[Event]:
        """The text has ended; returns what was held back."""
        self._source.is_ended = True
        next(self._reader, None)
        self._calls.finish()
        return self._calls.taken()

    def _read(self) -> Waiting[None]:
        source, calls, notation = self._source, self._calls, self._notation
        if notation.bare:
            source.is_pinned = True
            calls.content((yield from source.blanks()))
            begin, char = source.position, (yield from source.peek())
            if not char or char not in notation.bare or not (yield from notation.read(source, calls)):
                source.position = begin
            source.is_pinned = False
        while mark := (yield from source.pass_until(notation.marks, calls.content)):
            source.is_pinned = True
            begin = source.position
            if not (yield from notation.read(source, calls)):
                source.position = begin + len(mark)
                source.is_pinned = False
                calls.content(mark)
