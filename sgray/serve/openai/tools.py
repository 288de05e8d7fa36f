"""The tools of a chat call: checked, and what is asked to be done with them.

Calls are read out of what the model writes by itself. What needs its words to be constrained (a forced call, a strict
schema) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgray.errors import InvalidRequestError
from sgray.serve.openai.schemas import ChatBody
from sgray.serve.openai.validate import checked_text, missing, shown, unknown_name, wrong_type, wrong_value
from sgray.text.tools.parser import TOOL_FORMATS, ToolFormat

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_./:-]{1,128}")
_FIELDS = ["name", "description", "parameters", "strict"]
_CONSTRAINED = "the model cannot be held to it: constrained decoding is not available; leave it out"


@dataclass(frozen=True)
class ToolUse:
    """The tools that a call may use: as the chat template gets them, and the schemas of their parameters by name."""

    format: ToolFormat | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    has_one_call: bool = False

    @property
    def num_chars(self) -> int:
        """About how long the tools are in the prompt."""
        return sum(len(str(tool)) for tool in self.tools)


def tool_use(chat: ChatBody, parser: str | None) -> ToolUse:
    """The tools of a call; empty where there are none, or where the call says "none".

    `parser` is the configured one. Raises InvalidRequestError that names the first wrong place.
    """
    schemas = _schemas(chat.tools)
    _check_choice(chat.tool_choice, schemas)
    if not chat.tools or chat.tool_choice == "none":
        return ToolUse()
    if parser is None:
        raise InvalidRequestError(
            "'tools' is not available on this server: it was not told how its model writes tool calls. Set "
            f"api.tool_call_parser (--tool-call-parser) to one of {', '.join(TOOL_FORMATS)}.",
            param="tools",
            code="unsupported_parameter",
        )
    return ToolUse(TOOL_FORMATS[parser], chat.tools, schemas, has_one_call=not chat.parallel_tool_calls)


def _schemas(tools: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    if len(tools) > MAX_TOOLS:
        wrong_value("tools", "tools", f"{len(tools)} tools, at most {MAX_TOOLS} are allowed.")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        name, schema = _function(place, tool)
        if name in schemas:
            wrong_value("tools", f"{place}.function.name", f"two tools are called {shown(name)}.")
        schemas[name] = schema
    return schemas


def _function(place: str, tool: dict[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name and the parameters' schema of one tool."""
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
    if given.get("strict") not in (None, False):
        wrong_value("tools", f"{place}.strict", f"{_CONSTRAINED} or send false.")
    schema = given.get("parameters")
    if schema is None:
        return name, {}
    if not isinstance(schema, dict):
        wrong_type("tools", f"{place}.parameters", "an object (a JSON schema)", schema)
    return name, schema


def _check_choice(choice: object, schemas: Mapping[str, Any]) -> None:
    """Accept "auto" and "none"; refuse what forces a call, by the reason that applies."""
    if choice in (None, "none", "auto"):
        return
    place = "tool_choice"
    is_named = isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools", "custom")
    if choice != "required" and not is_named:
        wrong_value(
            place, place, f"{shown(choice)} is not 'auto', 'none', 'required' or an object that names a function."
        )
    if not schemas:
        wrong_value(place, place, f"{shown(choice)} needs tools, and none are given.")
    wrong_value(place, place, f"{shown(choice)} forces a call, and {_CONSTRAINED} or send 'auto'.")
