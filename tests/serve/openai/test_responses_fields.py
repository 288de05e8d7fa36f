"""Every field of a response's call that the installed OpenAI client can send is honoured or refused by its name.

As for chat: honoured means that the engine's request or the answer differs; what comes back in the answer does.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from openai.types.responses import (
    FunctionToolParam,
    ResponseIncludable,
    ResponseTextConfigParam,
    response_input_item_param,
)
from openai.types.responses import response_create_params as params
from openai.types.shared_params import Reasoning

from sgray.serve.openai.responses_fields import UNSUPPORTED_RESPONSES

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
MODEL = "smollm2-135m-instruct"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}

# A value that asks for something, and what must stand beside it.
FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "access_programs": ({"cyber": "standard"}, {}),
    "background": (True, {}),
    "background_options": ({"completion_window": "2h"}, {}),
    "context_management": ([{"type": "compaction"}], {}),
    "conversation": ("conv_1", {}),
    "image": ({"context_compression": "auto"}, {}),
    "include": (["message.output_text.logprobs"], {}),
    "input": ("another", {}),
    "instructions": ("Be short.", {}),
    "max_output_tokens": (2, {}),
    "max_tool_calls": (2, {}),
    "metadata": ({"a": "b"}, {}),
    "model": ("another", {}),
    "moderation": ({"model": "m"}, {}),
    "parallel_tool_calls": (False, {}),
    "previous_response_id": ("resp_1", {}),
    "prompt": ({"id": "p"}, {}),
    "prompt_cache_key": ("k", {}),
    "prompt_cache_options": ({"mode": "explicit"}, {}),
    "prompt_cache_retention": ("24h", {}),
    "reasoning": ({"effort": "high"}, {}),
    "safety_identifier": ("s", {}),
    "service_tier": ("flex", {}),
    "store": (True, {}),
    "stream": (True, {}),
    "stream_options": ({"include_obfuscation": True}, {"stream": True}),
    "temperature": (0.25, {}),
    "text": ({"format": {"type": "json_object"}}, {}),
    "tool_choice": ("required", {}),
    "tools": ([FUNCTION], {}),
    "top_logprobs": (2, {}),
    "top_p": (0.5, {}),
    "truncation": ("auto", {}),
    "user": ("somebody", {}),
}


async def seen(http: Any, backend: Any, **fields: Any) -> tuple[Any, Any, Any]:
    """The error, or what the engine was asked and what was answered, without ids and times."""
    backend.requests.clear()
    response = await http.post(PATH, json={"model": MODEL, "input": "hi", "max_output_tokens": 4, **fields})
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        return response.json()["error"], None, None
    asked = [dataclasses.replace(request, id="") for request in backend.requests]
    if response.headers["content-type"] != "application/json":
        return None, asked, response.text.count("event: ")
    answer = response.json()
    for item in answer["output"]:
        del item["id"]
    gone = ("id", "created_at", "completed_at")
    return None, asked, {name: value for name, value in answer.items() if name not in gone}


async def test_the_table_has_every_field_of_the_client_and_no_other():
    forms = (params.ResponseCreateParamsNonStreaming, params.ResponseCreateParamsStreaming)
    assert {name for form in forms for name in typing.get_type_hints(form)} == set(FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS))
async def test_a_field_changes_the_call_or_is_refused_by_its_name_with_a_reason(http, backend, name):
    value, beside = FIELDS[name]
    before = await seen(http, backend, **beside)
    assert before[0] is None
    error, asked, answer = await seen(http, backend, **beside, **{name: value})
    if error is None:
        assert (asked, answer) != before[1:], f"{name} is lost"
        return
    assert error["param"].partition(".")[0] == name
    assert name in error["message"] and len(error["message"]) > len(name) + 20
    assert not backend.requests


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_RESPONSES))
async def test_what_asks_for_nothing_is_accepted(http, backend, name):
    before = await seen(http, backend)
    for harmless in (*UNSUPPORTED_RESPONSES[name][0], None):
        assert await seen(http, backend, **{name: harmless}) == before


async def test_every_inner_field_comes_back_or_is_refused_by_its_place(http, backend):
    told = {"generate_summary": "concise", "summary": "concise", "context": "all_turns", "mode": "pro", "effort": "low"}
    assert set(typing.get_type_hints(Reasoning)) == set(told)
    for name, value in told.items():
        error, _, answer = await seen(http, backend, reasoning={name: value})
        assert answer["reasoning"][name] == value if error is None else error["param"] == f"reasoning.{name}"
    told = {"format": {"type": "json_object"}, "verbosity": "low"}
    assert set(typing.get_type_hints(ResponseTextConfigParam)) == set(told)
    for name, value in told.items():
        error, _, answer = await seen(http, backend, text={name: value})
        assert answer["text"][name] == value if error is None else error["param"].startswith(f"text.{name}")


async def test_everything_that_can_be_included_is_there_or_refused(http, backend):
    accepted = set()
    for name in typing.get_args(ResponseIncludable):
        error, _, _ = await seen(http, backend, include=[name])
        if error is None:
            accepted.add(name)
        else:
            assert error["param"] == "include" and repr(name) in error["message"]
    assert accepted == {"message.output_text.logprobs", "reasoning.encrypted_content"}


async def test_every_field_of_a_function_is_told_or_refused(make_app, backend, http):
    told: dict[str, Any] = {
        "allowed_callers": ["programmatic"],
        "async": True,
        "defer_loading": True,
        "description": 5,
        "name": 5,
        "output_schema": {"type": "object"},
        "parameters": 5,
        "strict": 5,
        "type": "another",
    }
    assert set(typing.get_type_hints(FunctionToolParam)) == set(told)
    for name, value in told.items():
        error, _, _ = await seen(http, backend, tools=[FUNCTION | {name: value}])
        assert f"tools[0].{name}" in error["message"]


async def test_every_type_of_item_is_read_or_refused_by_its_place(http, backend):
    types = set()
    for form in typing.get_args(response_input_item_param.ResponseInputItemParam):
        hint = typing.get_type_hints(form).get("type")
        types |= {value for value in _literals(hint) if value is not None}
    assert {"message", "function_call", "function_call_output", "reasoning", "item_reference"} < types
    for kind in types - {"message", "function_call", "function_call_output", "reasoning"}:
        error, _, _ = await seen(http, backend, input=[{"role": "user", "content": "hi"}, {"type": kind, "id": "x"}])
        assert error["param"] == "input" and "input[1]" in error["message"]
        assert kind in error["message"] or "not stored" in error["message"]


def _literals(hint: Any) -> set[Any]:
    """The values of all literals inside a type."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return set(inner)
    return {value for one in inner for value in _literals(one)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "\ud800"),
        ("metadata", {"a": "x\udfff"}),
        ("metadata", {"\udc00": "a"}),
        ("safety_identifier", "\ud800"),
        ("prompt_cache_key", "\ud800"),
        ("tools", [FUNCTION | {"description": "\ud800"}]),
        ("tools", [FUNCTION | {"parameters": {"properties": {"\ud800": {}}}}]),
        ("text", {"format": {"type": "json_schema", "name": "a", "schema": {"const": ["\ud800"]}}}),
    ],
)
async def test_half_a_surrogate_pair_in_what_would_come_back_is_refused(http, name, value, stream):
    raw = json.dumps({"model": MODEL, "input": "hi", "stream": stream, name: value})
    response = await http.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
