"""The body of POST /v1/responses, and the chat call that it stands for.

Fields that OpenAI defines and sgray cannot honour are in `UNSUPPORTED_RESPONSES`, as for chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import Field

from sgray.errors import InvalidRequestError
from sgray.serve.openai.forms import Json
from sgray.serve.openai.responses_input import chat_messages
from sgray.serve.openai.schemas import INT64, MAX_TOP_LOGPROBS, UNSUPPORTED, Body, Sampling, StreamOptions
from sgray.serve.openai.sse import encode_json
from sgray.serve.openai.translation import Names
from sgray.serve.openai.validate import (
    Unsupported,
    check_texts,
    checked_text,
    missing,
    parse_body,
    shown,
    unknown_name,
    without_unsupported,
    wrong_type,
    wrong_value,
)

NOT_STORED = "answers are not stored: send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class Reasoning(Body):
    """`reasoning` of a call."""

    effort: Any = Field(None, description="As reasoning_effort of chat.")
    summary: str | None = Field(None, description='Only "auto": reasoning is given in full, and never summarised.')
    generate_summary: str | None = Field(None, description="The older name of summary.")
    context: str | None = Field(None, description='Only "auto": the chat template decides which thoughts it reads.')
    mode: str | None = Field(None, description='Only "standard".')


class TextConfig(Body):
    """`text` of a call."""

    format: Any = Field(None, description="As response_format of chat, in this API's flat form.")
    verbosity: Any = Field(None, description="As of chat.")


class ResponsesBody(Sampling):
    """POST /v1/responses. What it has beside OpenAI's fields is as of chat."""

    model: str
    input: Any = Field(None, description="A string, or an array of items. Nothing of earlier calls is known.")
    instructions: str | None = Field(None, description="The system message, before everything else.")
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1, description="Nothing to do: it counts tools that run on the server.")
    min_tokens: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list, description="Functions. Needs api.tool_call_parser.")
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    include: list[str] = Field(default_factory=list, description=f"Honoured: {LOGPROBS}. See INCLUDED.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="More than 0 asks for logprobs.")
    metadata: dict[str, str] = Field(default_factory=dict, description="Comes back in the answer.")
    user: str | None = Field(None, description="Ignored, as of chat; comes back, as do the next two.")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)

    @property
    def has_logprobs(self) -> bool:
        """Whether logprobs of the text are wanted."""
        return LOGPROBS in self.include or bool(self.top_logprobs)


UNSUPPORTED_RESPONSES: Unsupported = {
    **{
        name: UNSUPPORTED[name]
        for name in ("moderation", "prompt_cache_options", "prompt_cache_retention", "service_tier", "store")
    },
    "access_programs": ((), "there are no programs of access"),
    "background": ((False,), "an answer is given to whoever waits for it"),
    "background_options": (({},), "an answer is given to whoever waits for it"),
    "context_management": (([],), "nothing of the input is left out"),
    "conversation": ((), NOT_STORED),
    "image": (({},), "the models served here read text alone"),
    "previous_response_id": ((), NOT_STORED),
    "prompt": ((), "prompts are not stored; send the text"),
    "truncation": (("disabled",), "nothing of the input is left out"),
}
"""Known fields that cannot be honoured: the values that ask for nothing, and the reason for refusing the others."""

INCLUDED = {LOGPROBS: "", ENCRYPTED: "reasoning comes as readable text, which can be sent back as it is"}
"""What `include` may name. The second asks for nothing more than what is there."""

CHAT_NAMES: Names = (
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"verbosity", "text.verbosity"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"max_tokens|max_completion_tokens", "max_output_tokens"),
    (r"messages", "input"),
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice"),
)

_PASSED = (
    *Sampling.model_fields,
    *("min_tokens", "seed", "stream", "stream_options", "parallel_tool_calls", "cache_salt", "priority"),
    "chat_template_kwargs",
)
_HARMLESS = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
_ECHOED = {"metadata", "prompt_cache_key", "reasoning", "safety_identifier", "text", "tool_choice", "tools", "user"}
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_TOOL_UNSUPPORTED: Unsupported = {
    "async": ((False,), "calls are returned in the answer, and waited for"),
    "allowed_callers": ((["direct"],), "the model alone calls tools"),
    "defer_loading": ((False,), "there is no search for tools; all of them are in the prompt"),
    "output_schema": ((), "what tools return is not checked"),
}


_RETURNED = ("metadata", "prompt_cache_key", "reasoning", "safety_identifier", "text", "tool_choice", "tools", "user")
"""Fields that come back in the response; instructions and input are checked as they are read."""


def parse_responses(body: object) -> ResponsesBody:
    """A checked body; raises InvalidRequestError that names the first wrong place, but for what chat checks."""
    given = parse_body(ResponsesBody, without_unsupported(body, UNSUPPORTED_RESPONSES))
    for name in _ECHOED & given.model_fields_set:
        _check_text(name, given.model_dump(include={name}))
    if given.n != 1:
        wrong_value("n", "n", "a response is one answer; call again for another.")
    for name in _RETURNED:
        check_texts(name, name, body[name] if isinstance(body, Mapping) and name in body else None)
    for index, name in enumerate(given.include):
        if name not in INCLUDED:
            reason = f"{shown(name)} is not made here; {', '.join(INCLUDED)} may stand here."
            wrong_value("include", f"include[{index}]", reason)
    for name, value in _HARMLESS.items():
        asked = None if given.reasoning is None else getattr(given.reasoning, name)
        if asked not in (None, value):
            _unsupported(f"reasoning.{name}", f"only {value!r} is, for thoughts are given as the model writes them")
    return given


def chat_body(given: ResponsesBody) -> Json:
    """The body of the chat call that the call stands for."""
    chat = {name: getattr(given, name) for name in _PASSED if name in given.model_fields_set}
    chat |= {
        "model": given.model,
        "messages": chat_messages(given.input, given.instructions),
        "max_completion_tokens": given.max_output_tokens,
        "tools": [_tool(f"tools[{index}]", tool) for index, tool in enumerate(given.tools)],
        "tool_choice": _tool_choice(given.tool_choice),
    }
    if given.stream_options is not None:
        chat["stream_options"] = given.stream_options.model_dump(exclude_unset=True)
    if given.has_logprobs:
        chat |= {"logprobs": True, "top_logprobs": given.top_logprobs}
    if given.reasoning is not None:
        chat["reasoning_effort"] = given.reasoning.effort
    if given.text is not None:
        chat |= {"response_format": _response_format(given.text.format), "verbosity": given.text.verbosity}
    return chat


def _response_format(value: object) -> object:
    """Chat's form of `text.format`, where the name and the schema stand one level deeper."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {name: one for name, one in value.items() if name != "type"}}


def _tool(place: str, tool: Json) -> Json:
    """Chat's form of one tool."""
    kind = tool.get("type")
    if kind is None:
        missing("tools", f"{place}.type")
    if kind != "function":
        wrong_value("tools", f"{place}.type", f"{shown(kind)} is not 'function', the only type of tools here.")
    kept = without_unsupported(tool, _TOOL_UNSUPPORTED, within=place)
    assert isinstance(kept, dict)
    function = {name: value for name, value in kept.items() if value is not None and name != "type"}
    for name in function:
        if name not in _TOOL_FIELDS:
            raise unknown_name("tools", f"{place}.{name}", list(_TOOL_FIELDS))
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> object:
    """Chat's form of the choice; a word stays a word."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        name = checked_text("tool_choice", "tool_choice.name", choice.get("name"))
        return {"type": "function", "function": {"name": name}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list):
            wrong_type("tool_choice", "tool_choice.tools", "an array", tools)
        named = [_tool_choice(tool) for tool in tools]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    wrong_value("tool_choice", "tool_choice.type", f"{shown(kind)} is no choice here: tools are functions alone.")


def _check_text(name: str, value: object) -> None:
    """Raise where a field that comes back in the answer holds what an answer cannot."""
    try:
        encode_json(value)
    except UnicodeEncodeError:
        wrong_value(name, name, "it holds half of a surrogate pair, which is not text.")


def _unsupported(place: str, reason: str) -> NoReturn:
    message = f"'{place}' is not supported: {reason}."
    raise InvalidRequestError(message, param=place, code="unsupported_parameter")
