"""The bodies of Anthropic's routes, and the chat call that they stand for.

Fields that Anthropic defines and sgray cannot honour are in `UNSUPPORTED_MESSAGES` with the values that ask for
nothing; other names are unknown. A null field counts as left out.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import Field

from sgray.serve.anthropic.messages import chat_messages, check_cache_control
from sgray.serve.anthropic.thinking import Thinking, template_variables
from sgray.serve.openai.forms import Json
from sgray.serve.openai.schemas import INT64, Body
from sgray.serve.openai.translation import Names
from sgray.serve.openai.validate import (
    Unsupported,
    checked_text,
    missing,
    parse_body,
    shown,
    unknown_name,
    without_unsupported,
    wrong_type,
    wrong_value,
)


class ToolChoice(Body):
    """`tool_choice` of a call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Of type tool.")
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    """`output_config` of a call."""

    effort: str | None = Field(None, description='As reasoning_effort of chat; "high" is what holds without it.')
    format: Any = Field(None, description="A JSON schema, as response_format of chat.")


class Metadata(Body):
    """`metadata` of a call."""

    user_id: str | None = Field(None, description="Ignored: names the end user for the provider's abuse watch.")


class PromptBody(Body):
    """POST /v1/messages/count_tokens: everything that has a part in the prompt."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: Any = Field(None, description="A string, or blocks of text.")
    tools: list[dict[str, Any]] = Field(default_factory=list, description="Custom tools. Needs api.tool_call_parser.")
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = Field(None, description="Nothing to do, here and in blocks: the prefix cache is automatic.")
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict, description="As of chat.")


class MessagesBody(PromptBody):
    """POST /v1/messages. What it has beside Anthropic's fields is as of chat."""

    max_tokens: int = Field(ge=1, description="More than the context leaves is no error.")
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=1)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    metadata: Metadata | None = None
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)


PromptT = TypeVar("PromptT", bound=PromptBody)

NO_SERVER_TOOLS = "the server runs no tools"

UNSUPPORTED_MESSAGES: Unsupported = {
    "container": ((), NO_SERVER_TOOLS),
    "context_management": (({}, {"edits": []}), "nothing of the conversation is left out"),
    "diagnostics": (({},), "calls are not kept, so none can be compared"),
    "inference_geo": ((), "the server computes where it stands"),
    "mcp_servers": (([],), NO_SERVER_TOOLS),
    "service_tier": (("auto", "standard_only"), "there is one tier"),
    "speed": (("standard",), "there is one speed"),
    "user_profile_id": ((), "there are no profiles"),
    "workspace_id": ((), "there are no workspaces"),
}
"""Known fields that cannot be honoured: the values that ask for nothing, and the reason for refusing the others."""

CHAT_NAMES: Names = (
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"max_completion_tokens", "max_tokens"),
    (r"stop", "stop_sequences"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)

_PASSED = ("stream", "temperature", "top_p", "top_k", "seed", "cache_salt", "priority")
_TOOL_FIELDS = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
_TOOL_UNSUPPORTED: Unsupported = {
    "allowed_callers": ((["direct"],), "the model alone calls tools"),
    "defer_loading": ((False,), "there is no search for tools; all of them are in the prompt"),
    "eager_input_streaming": ((True, False), "input is always streamed as the model writes it"),
    "input_examples": (([],), "chat templates know no examples; write them into the description"),
}


def parse_messages(body: object) -> MessagesBody:
    """A checked body; raises InvalidRequestError that names the first wrong place, but for what chat checks."""
    return _checked(parse_body(MessagesBody, without_unsupported(body, UNSUPPORTED_MESSAGES)))


def parse_count(body: object) -> PromptBody:
    """The same where tokens are only counted."""
    return _checked(parse_body(PromptBody, without_unsupported(body, UNSUPPORTED_MESSAGES)))


def chat_body(given: PromptBody, reasoning_parser: str | None) -> Json:
    """The body of the chat call that the call stands for, on a server with this parser of reasoning, if any."""
    messages, goes_on = chat_messages(given.messages, given.system)
    choice = given.tool_choice or ToolChoice(type="auto")
    chat: Json = {
        "model": given.model,
        "messages": messages,
        "continue_final_message": goes_on,
        "tools": [_tool(f"tools[{index}]", tool) for index, tool in enumerate(given.tools)],
        "tool_choice": _tool_choice(choice) if given.tool_choice else None,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "chat_template_kwargs": template_variables(given.thinking, reasoning_parser) | given.chat_template_kwargs,
    }
    if given.output_config is not None:
        effort = given.output_config.effort
        chat["reasoning_effort"] = None if effort == "high" else effort
        chat["response_format"] = _response_format(given.output_config.format)
    if isinstance(given, MessagesBody):
        chat |= {name: getattr(given, name) for name in _PASSED if name in given.model_fields_set}
        chat |= {"max_tokens": given.max_tokens, "stop": given.stop_sequences or None}
    return chat


def _checked(given: PromptT) -> PromptT:
    """What types alone do not say."""
    check_cache_control("cache_control", "cache_control", given.cache_control)
    if given.thinking is not None and isinstance(given, MessagesBody):
        given.thinking.check(given.max_tokens)
    return given


def _response_format(value: object) -> object:
    """Chat's form of an output's format: always strict, as Anthropic's is."""
    if value is None:
        return None
    place = "output_config.format"
    if not isinstance(value, dict):
        wrong_type(place, place, "an object", value)
    if value.get("type") != "json_schema":
        wrong_value(place, f"{place}.type", f"{shown(value.get('type'))} is not 'json_schema'.")
    for name in value:
        if name not in ("type", "schema"):
            raise unknown_name(place, f"{place}.{name}", ["type", "schema"])
    schema = {"name": "output", "strict": True, "schema": value.get("schema")}
    return {"type": "json_schema", "json_schema": schema}


def _tool(place: str, tool: Json) -> Json:
    """Chat's form of a custom tool."""
    kind = tool.get("type")
    if kind not in (None, "custom"):
        wrong_value("tools", f"{place}.type", f"{shown(kind)} is not 'custom': {NO_SERVER_TOOLS}.")
    check_cache_control("tools", f"{place}.cache_control", tool.get("cache_control"))
    kept = without_unsupported(tool, _TOOL_UNSUPPORTED, within=place)
    assert isinstance(kept, dict)
    given = {name: value for name, value in kept.items() if value is not None and name not in ("type", "cache_control")}
    for name in given:
        if name not in _TOOL_FIELDS:
            raise unknown_name("tools", f"{place}.{name}", [*_TOOL_FIELDS, *_TOOL_UNSUPPORTED, "type", "cache_control"])
    if "input_schema" not in given:
        missing("tools", f"{place}.input_schema")
    return {"type": "function", "function": {_TOOL_FIELDS[name]: value for name, value in given.items()}}


def _tool_choice(choice: ToolChoice) -> object:
    """Chat's form of the choice."""
    if choice.type == "tool":
        name = checked_text("tool_choice", "tool_choice.name", choice.name)
        return {"type": "function", "function": {"name": name}}
    if choice.name is not None:
        wrong_value("tool_choice", "tool_choice.name", "it belongs to type 'tool' alone.")
    return "required" if choice.type == "any" else choice.type
