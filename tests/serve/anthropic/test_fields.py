"""Every field that the installed Anthropic client can send is honoured or refused by its name.

Honoured means that the engine's request or the answer differs from that of a call without the field. Fields that ask
for nothing of the answer are listed. What fields there are is read from the client's own types.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from anthropic.types import (
    ContentBlockParam,
    MessageCountTokensParams,
    OutputConfigParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUnionParam,
    ToolUseBlockParam,
)
from anthropic.types import message_create_params as params

from sgray.serve.anthropic.fields import UNSUPPORTED_MESSAGES

pytestmark = pytest.mark.anyio
PATH = "/v1/messages"
MODEL = "smollm2-135m-instruct"
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "hi"}
CACHE = {"type": "ephemeral"}

# A value that asks for something, and what must stand beside it.
FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cache_control": (CACHE, {}),
    "container": ("c", {}),
    "diagnostics": ({"previous_message_id": "msg_1"}, {}),
    "inference_geo": ("us", {}),
    "max_tokens": (2, {}),
    "messages": ([{"role": "user", "content": "another"}], {}),
    "metadata": ({"user_id": "u"}, {}),
    "model": ("another", {}),
    "output_config": ({"format": {"type": "json_schema", "schema": {"type": "object"}}}, {}),
    "service_tier": ("priority", {}),
    "speed": ("fast", {}),
    "stop_sequences": (["world"], {}),
    "stream": (True, {}),
    "system": ("Be short.", {}),
    "temperature": (0.25, {}),
    "thinking": ({"type": "between_tools"}, {}),
    "tool_choice": ({"type": "any"}, {"tools": [TOOL]}),
    "tools": ([TOOL], {"max_tokens": 40}),
    "top_k": (3, {}),
    "top_p": (0.5, {}),
    "user_profile_id": ("p", {}),
    "workspace_id": ("w", {}),
}
ASKS_FOR_NOTHING = {"cache_control", "metadata"}
OLDER = {"temperature", "top_k", "top_p"}  # fields of the API that this version of the client has no name for


async def seen(http: Any, backend: Any, path: str = PATH, **fields: Any) -> tuple[str | None, Any, Any]:
    """The error's message, or what the engine was asked and what was answered, without ids."""
    backend.requests.clear()
    start: dict[str, Any] = {"model": MODEL, "messages": [USER]}
    start |= {"max_tokens": 4} if path == PATH else {}
    response = await http.post(path, json=start | fields)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        return response.json()["error"]["message"], None, None
    asked = [dataclasses.replace(request, id="") for request in backend.requests]
    if response.headers["content-type"] != "application/json":
        return None, asked, response.text.count("event: ")
    return None, asked, {name: value for name, value in response.json().items() if name != "id"}


def fields_of(*forms: Any) -> set[str]:
    return {name for form in forms for name in typing.get_type_hints(form)}


async def test_the_table_has_every_field_of_the_client_and_no_other():
    forms = fields_of(params.MessageCreateParamsNonStreaming, params.MessageCreateParamsStreaming)
    assert forms | OLDER == set(FIELDS) and not forms & OLDER
    assert fields_of(MessageCountTokensParams) < set(FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS))
async def test_a_field_changes_the_call_or_is_refused_by_its_name_with_a_reason(http, backend, says, name):
    value, beside = FIELDS[name]
    if name == "tools":
        says('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    before = await seen(http, backend, **beside)
    error, asked, answer = await seen(http, backend, **beside, **{name: value})
    assert before[0] is None or name == "tool_choice"
    if error is not None:
        assert name in error or name == "model"
        assert len(error) > len(name) + 20
        assert not backend.requests
    elif name in ASKS_FOR_NOTHING:
        assert (asked, answer) == before[1:]
    else:
        assert (asked, answer) != before[1:], f"{name} is lost"


@pytest.mark.parametrize("name", sorted(fields_of(MessageCountTokensParams) - {"model", "messages"}))
async def test_what_counts_tokens_reads_the_same_fields(http, backend, name):
    value, beside = FIELDS[name]
    beside = {other: given for other, given in beside.items() if other != "max_tokens"}
    error, _, _ = await seen(http, backend, **beside, **{name: value})
    counted, _, answer = await seen(http, backend, f"{PATH}/count_tokens", **beside, **{name: value})
    assert counted == error
    assert error is not None or answer["input_tokens"] > 0


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_MESSAGES))
async def test_what_asks_for_nothing_is_accepted(http, backend, name):
    before = await seen(http, backend)
    for harmless in (*UNSUPPORTED_MESSAGES[name][0], None):
        assert await seen(http, backend, **{name: harmless}) == before
    error, _, _ = await seen(http, backend, **{name: {"some": "thing"}})
    assert error is not None and name in error


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"user": "u"}}, "metadata.user"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"temprature": 1}, "'temperature'"),
        ({"n": 2}, "Unrecognized"),
        ({"cache_control": {"type": "forever"}}, "'cache_control.type'"),
        ({"cache_control": 5}, "'cache_control'"),
        ({"system": 5}, "'system'"),
        ({"system": [{"type": "image"}]}, "no images"),
        ({"system": [{"type": "text"}]}, "'system[0].text'"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "x"}}]}, "system[0].cache_control.type"),
        ({"output_config": {"effort": "max"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}, "name": "x"}}},
            "output_config.format.name",
        ),
        ({"tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
        ({"tool_choice": {"type": "auto", "name": "x"}}, "'tool_choice.name'"),
        ({"tool_choice": {"type": "required"}}, "'tool_choice.type'"),
        ({"tool_choice": "auto"}, "'tool_choice'"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [TOOL | {"name": "a b"}]}, "'tools[0].name'"),
        ({"tools": [TOOL, TOOL]}, "'tools[1].name'"),
        ({"tools": [TOOL | {"input_schema": 5}]}, "'tools[0].input_schema'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [TOOL | {"parameters": {}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'tools[0].type'"),
    ],
)
async def test_a_wrong_value_is_refused_by_its_place(http, backend, fields, word):
    error, _, _ = await seen(http, backend, **fields)
    assert error is not None and word in error
    assert not backend.requests


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "name": "n"}, "messages[0].name"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}, "content[0].citations"),
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "no images"),
        ({"role": "user", "content": [{"type": "document", "source": {}}]}, "no documents"),
        ({"role": "user", "content": [{"type": "search_result"}]}, "no search results"),
        ({"role": "user", "content": [USE]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [RESULT]}, "messages[0].content[0].tool_use_id"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [RESULT]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "server_tool_use", "id": "x"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[0].content[0].thinking"),
        ({"role": "assistant", "content": [USE | {"input": "{}"}]}, "messages[0].content[0].input"),
        ({"role": "assistant", "content": [USE | {"name": None}]}, "messages[0].content[0].name"),
        ({"role": "assistant", "content": [USE | {"caller": {"type": "code"}}]}, "messages[0].content[0].caller"),
        ({"role": "assistant", "content": [USE | {"toolset_name": "x"}]}, "messages[0].content[0].toolset_name"),
        ({"role": "assistant", "content": [USE]}, "tool_result"),
    ],
)
async def test_a_wrong_message_is_refused_by_its_place(http, backend, message, place):
    error, _, _ = await seen(http, backend, messages=[message])
    assert error is not None and place in error
    assert not backend.requests


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"is_error": "yes"}, "is_error"),
        ({"content": 5}, "content"),
        ({"content": [{"type": "image", "source": {}}]}, "no images"),
        ({"toolset_name": "x"}, "toolset_name"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_a_wrong_result_is_refused_by_its_place(http, backend, changes, place):
    messages = [USER, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT | changes]}]
    error, _, _ = await seen(http, backend, messages=messages)
    assert error is not None and "messages[2].content[0]" in error and place in error


async def test_every_inner_field_of_the_client_is_known_or_refused_by_its_place(http, backend):
    """Accepted with its usual value, or refused in a message with its name."""
    usual: dict[str, Any] = {
        "allowed_callers": ["direct"],
        "cache_control": CACHE,
        "caller": {"type": "direct"},
        "citations": None,
        "defer_loading": False,
        "description": "x",
        "eager_input_streaming": True,
        "input_examples": [],
        "strict": False,
        "toolset_name": None,
        "type": "custom",
    }
    before = await seen(http, backend, tools=[TOOL])
    for name in fields_of(ToolParam) - {"name", "input_schema"}:
        got = await seen(http, backend, tools=[TOOL | {name: usual[name]}])
        assert got == before or name == "description"
    blocks: list[tuple[Any, dict[str, Any]]] = [
        (TextBlockParam, {"type": "text", "text": "x"}),
        (ThinkingBlockParam, {"type": "thinking", "thinking": "x", "signature": "x"}),
        (ToolUseBlockParam, USE),
        (ToolResultBlockParam, RESULT | {"is_error": False}),
    ]
    for form, block in blocks:
        whole = block | {name: usual[name] for name in fields_of(form) - set(block)}
        first = {"role": "assistant", "content": [USE if form is ToolResultBlockParam else whole]}
        other = {"role": "user", "content": [whole if form is ToolResultBlockParam else RESULT]}
        messages = [USER, first, other if form in (ToolUseBlockParam, ToolResultBlockParam) else USER]
        error, _, _ = await seen(http, backend, messages=messages)
        assert error is None, (form, error)
    assert fields_of(OutputConfigParam) == {"effort", "format"}
    assert (await seen(http, backend, output_config={"effort": "high", "format": None}))[1:] == (
        await seen(http, backend)
    )[1:]


async def test_every_type_of_block_and_tool_is_read_or_refused_by_its_name(http, backend):
    read = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}
    kinds = {kind for form in typing.get_args(ContentBlockParam) for kind in _kinds(form)}
    assert read < kinds
    for kind in kinds - read:
        for role in ("user", "assistant"):
            error, _, _ = await seen(http, backend, messages=[USER, {"role": role, "content": [{"type": kind}]}])
            assert error is not None and "messages[1].content[0]" in error
    for kind in {kind for form in typing.get_args(ToolUnionParam) for kind in _kinds(form)} - {"custom", None}:
        error, _, _ = await seen(http, backend, tools=[{"type": kind, "name": "x"}])
        assert error is not None and kind in error


def _kinds(form: Any) -> set[Any]:
    hint = typing.get_type_hints(form).get("type")
    inner = [one for one in typing.get_args(hint) if typing.get_origin(one) is typing.Literal] or [hint]
    return {value for one in inner for value in typing.get_args(one) if isinstance(value, str)}
