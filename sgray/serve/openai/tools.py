"""The tools of a chat call: checked, and what is asked to be done with them.

A call that is demanded, a strict schema, a choice of some tools and the limit to one call are kept by a grammar; else
calls are read out of what the model writes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sgray.errors import InvalidRequestError
from sgray.serve.openai.schemas import ChatBody
from sgray.serve.openai.validate import checked_text, missing, shown, unknown_name, wrong_type, wrong_value
from sgray.text.grammar.expressions import Expression
from sgray.text.grammar.rules import Rules
from sgray.text.tools.grammars import CallableTool, calls_expression, free_or_calls
from sgray.text.tools.parser import TOOL_FORMATS, ToolFormat

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_./:-]{1,128}")
_FIELDS = ["name", "description", "parameters", "strict"]
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})
_FALLBACK = "hermes"
"""The notation of calls that are demanded where none is configured: a grammar needs no habit of the model."""


@dataclass(frozen=True)
class ToolUse:
    """The tools that a call may use: as the chat template gets them, and the schemas of their parameters by name.

    `is_demanded`: the answer must be calls. `is_held`: calls must be as a grammar of the `callable` ones says.
    """

    format: ToolFormat | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_one_call: bool = False
    is_demanded: bool = False
    is_held: bool = False
    callable: tuple[CallableTool, ...] = ()

    @property
    def num_chars(self) -> int:
        """About how long the tools are in the prompt."""
        return sum(len(str(tool)) for tool in self.tools)

    def calls(self, rules: Rules) -> Expression:
        """The calls that the answer may have, as an expression. Raises GrammarFault."""
        assert self.format is not None, "without a format there are no calls"
        return calls_expression(self.format.notation, self.callable, rules, is_single=self.has_one_call)

    def free_or_calls(self, rules: Rules) -> Expression:
        """The same behind any text, or that alone."""
        assert self.format is not None, "without a format there are no calls"
        return free_or_calls(self.format.notation, self.calls(rules), rules)


def tool_use(chat: ChatBody, parser: str | None) -> ToolUse:
    """The tools of a call; empty where there are none, or where the call says "none".

    `parser` is the configured one. Raises InvalidRequestError that names the first wrong place.
    """
    tools = _checked_tools(chat.tools)
    choice = _choice(chat.tool_choice, [tool.name for tool in tools])
    if not tools or choice.mode == "none":
        return ToolUse()
    if parser is None and choice.mode != "required":
        raise InvalidRequestError(
            "'tools' is not available on this server: it was not told how its model writes tool calls. Set "
            f"api.tool_call_parser (--tool-call-parser) to one of {', '.join(TOOL_FORMATS)}.",
            param="tools",
            code="unsupported_parameter",
        )
    named = tuple(tool for tool in tools if choice.names is None or tool.name in choice.names)
    # a small model that must call its only tool tends to go on doing so
    is_alone = choice.mode == "required" and len(named) == 1 and "parallel_tool_calls" not in chat.model_fields_set
    has_one_call = choice.is_single or is_alone or not chat.parallel_tool_calls
    return ToolUse(
        TOOL_FORMATS[parser or _FALLBACK],
        chat.tools,
        {tool.name: tool.schema for tool in named},
        has_one_call=has_one_call,
        is_demanded=choice.mode == "required",
        is_held=has_one_call or choice.names is not None or any(tool.is_strict for tool in named),
        callable=named,
    )


def _checked_tools(tools: list[dict[str, Any]]) -> list[CallableTool]:
    if len(tools) > MAX_TOOLS:
        wrong_value("tools", "tools", f"{len(tools)} tools, at most {MAX_TOOLS} are allowed.")
    found: dict[str, CallableTool] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        name, schema, is_strict = _function(place, tool)
        if name in found:
            wrong_value("tools", f"{place}.function.name", f"two tools are called {shown(name)}.")
        found[name] = CallableTool(name, schema, f"{place}.function.parameters", is_strict)
    return list(found.values())


def _function(place: str, tool: dict[str, Any]) -> tuple[str, Mapping[str, Any], bool]:
    """The name and the parameters' schema of one tool, and whether it is strict."""
    if tool.get("type") != "function":
        wrong_value(
            "tools", f"{place}.type", f"{shown(tool.get('type'))} is not 'function', the only type of tools here."
        )
    for key in tool:
        if key not in ("type", "function"):
            raise unknown_name("tools", f"{place}.{key}", ["type", "function"])
    place = f"{place}.function"
    given = tool.get("function")
    if not isinstance(given, dict):
        wrong_type("tools", place, "an object", given)
    for key in given:
        if key not in _FIELDS:
            raise unknown_name("tools", f"{place}.{key}", _FIELDS)
    if "name" not in given:
        missing("tools", f"{place}.name")
    name = checked_text("tools", f"{place}.name", given["name"])
    if not _NAME.fullmatch(name):
        wrong_value("tools", f"{place}.name", f"{shown(name)} is not 1 to 128 letters, digits and any of _ - . / :")
    if given.get("description") is not None:
        checked_text("tools", f"{place}.description", given["description"])
    is_strict = given.get("strict")
    if not isinstance(is_strict, bool | None):
        wrong_type("tools", f"{place}.strict", "a boolean", is_strict)
    schema = given.get("parameters")
    if schema is None:
        return name, _NO_ARGUMENTS, bool(is_strict)
    if not isinstance(schema, dict):
        wrong_type("tools", f"{place}.parameters", "an object (a JSON schema)", schema)
    return name, schema, bool(is_strict)


@dataclass(frozen=True)
class _Choice:
    """`mode` is "auto", "none" or "required"; `names` are the tools that may be called, None for all of them."""

    mode: str = "auto"
    names: tuple[str, ...] | None = None
    is_single: bool = False


def _choice(choice: object, names: Sequence[str]) -> _Choice:
    """What `tool_choice` asks for, checked against the names of the tools."""
    place = "tool_choice"
    if choice is None or choice in ("none", "auto"):
        return _Choice(str(choice or "auto"))
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice != "required" and kind not in ("function", "allowed_tools"):
        wrong_value(
            place, place, f"{shown(choice)} is not 'auto', 'none', 'required' or an object that names a function."
        )
    if not names:
        wrong_value(place, place, f"{shown(choice)} needs tools, and none are given.")
    if not isinstance(choice, dict):
        return _Choice("required")
    if kind == "function":
        return _Choice("required", (_named(choice, place, names),), is_single=True)
    given = choice.get("allowed_tools", choice)  # the Responses API has no object around mode and tools
    if not isinstance(given, dict):
        wrong_type(place, f"{place}.allowed_tools", "an object", given)
    if given.get("mode") not in ("auto", "required"):
        wrong_value(place, f"{place}.allowed_tools.mode", f"{shown(given.get('mode'))} is not 'auto' or 'required'.")
    tools = given.get("tools")
    if not isinstance(tools, list) or not tools:
        wrong_value(place, f"{place}.allowed_tools.tools", "it is an array of one tool or more.")
    where = f"{place}.allowed_tools.tools"
    return _Choice(given["mode"], tuple(_named(tool, f"{where}[{at}]", names) for at, tool in enumerate(tools)))


def _named(given: object, place: str, names: Sequence[str]) -> str:
    """The name in {"type": "function", "function": {"name"}}, which must be that of a tool."""
    function = given.get("function", given) if isinstance(given, dict) else given
    if not isinstance(function, dict):
        wrong_type("tool_choice", f"{place}.function", "an object", function)
    name = checked_text("tool_choice", f"{place}.function.name", function.get("name"))
    if name not in names:
        wrong_value("tool_choice", f"{place}.function.name", f"no tool is called {shown(name)}.")
    return name
