"""Every field that the installed OpenAI client can send is honoured or refused by its name; none is lost in silence.

Honoured means that the engine's request or the answer differs from that of a call without the field. Fields that ask
for nothing of the answer are listed, each with the words that say so in the schema. What fields there are is read from
the client's own types, so that a new release of it fails here until somebody has decided.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params

from sgray.serve.openai.schemas import ChatBody, CompletionBody

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# A value that asks for something, and what must stand beside it.
SHARED: dict[str, tuple[Any, dict[str, Any]]] = {
    "frequency_penalty": (0.5, {}),
    "logit_bias": ({"9": 5}, {}),
    "max_tokens": (2, {}),
    "model": ("another", {}),
    "n": (2, {}),
    "presence_penalty": (0.5, {}),
    "seed": (7, {}),
    "stop": (["world"], {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "temperature": (0.25, {}),
    "top_p": (0.5, {}),
    "user": ("somebody", {}),
}
CHAT_FIELDS = SHARED | {
    "audio": ({"voice": "alloy", "format": "wav"}, {}),
    "function_call": ("auto", {}),
    "functions": ([FUNCTION], {}),
    "logprobs": (True, {}),
    "max_completion_tokens": (2, {"max_tokens": None}),
    "messages": ([{"role": "user", "content": "another"}], {}),
    "metadata": ({"a": "b"}, {}),
    "modalities": (["text", "audio"], {}),
    "moderation": ({"model": "m"}, {}),
    "parallel_tool_calls": (False, {}),
    "prediction": ({"type": "content", "content": "x"}, {}),
    "prompt_cache_key": ("k", {}),
    "prompt_cache_options": ({"a": "b"}, {}),
    "prompt_cache_retention": ("24h", {}),
    "reasoning_effort": ("high", {}),
    "response_format": ({"type": "json_object"}, {}),
    "safety_identifier": ("s", {}),
    "service_tier": ("flex", {}),
    "store": (True, {}),
    "tool_choice": ("required", {}),
    "tools": ([TOOL], {}),
    "top_logprobs": (2, {"logprobs": True}),
    "verbosity": ("low", {}),
    "web_search_options": ({}, {}),
}
TEXT_FIELDS = SHARED | {
    "best_of": (2, {}),
    "echo": (True, {}),
    "logprobs": (2, {}),
    "prompt": ("another", {}),
    "suffix": ("end", {}),
}
LABELS = {"metadata", "prompt_cache_key", "safety_identifier", "user"}
NEEDS_CALLS = {"parallel_tool_calls"}  # changes an answer only where the model makes several calls: a test of its own


def fields_of(params: Any) -> set[str]:
    """All fields of both forms, streamed or not, of a route's parameters."""
    forms = (params.CompletionCreateParamsNonStreaming, params.CompletionCreateParamsStreaming)
    return {name for form in forms for name in typing.get_type_hints(form)}


async def seen(api: Any, backend: Any, path: str, **fields: Any) -> tuple[Any, Any, Any]:
    """The error, or what the engine was asked and what was answered, without ids and times."""
    backend.requests.clear()
    response = await api.post(path, **fields)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        return response.json()["error"], None, None
    asked = [dataclasses.replace(request, id="") for request in backend.requests]
    if response.headers["content-type"] != "application/json":
        events = [line for line in response.text.split("\n\n") if line]
        return None, asked, len(events)
    answer = response.json()
    return None, asked, {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(("params", "table"), [(chat_params, CHAT_FIELDS), (text_params, TEXT_FIELDS)])
async def test_the_tables_have_every_field_of_the_client_and_no_other(params, table):
    assert fields_of(params) == set(table)


@pytest.mark.parametrize(
    ("path", "name", "value", "beside"),
    [(CHAT, name, *given) for name, given in CHAT_FIELDS.items() if name not in NEEDS_CALLS]
    + [(TEXT, name, *given) for name, given in TEXT_FIELDS.items()],
)
async def test_a_field_changes_the_call_or_is_refused_by_its_name_with_a_reason(
    api, backend, path, name, value, beside
):
    before = await seen(api, backend, path, **beside)
    assert before[0] is None
    error, asked, answer = await seen(api, backend, path, **beside, **{name: value})
    if error is not None:
        assert error["param"].partition(".")[0] == name
        assert name in error["message"] and len(error["message"]) > len(name) + 20
    elif name in LABELS:
        assert (asked, answer) == before[1:]
        body = ChatBody if path == CHAT else CompletionBody
        assert body.model_fields[name].description.startswith("Ignored")
    else:
        assert (asked, answer) != before[1:], f"{name} is lost"


async def test_parallel_tool_calls_decide_how_many_calls_are_returned(api, make_app, tokenizer, backend):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    backend.script = [*tokenizer.encode(call * 2), *backend.info.end_ids]
    transport = httpx.ASGITransport(make_app(tool_call_parser="hermes"))
    api = type(api)(httpx.AsyncClient(transport=transport, base_url="http://test"))
    for is_parallel, num_calls in ((True, 2), (False, 1)):
        answer = await api.answer(CHAT, tools=[TOOL], max_tokens=200, parallel_tool_calls=is_parallel)
        assert len(answer["choices"][0]["message"]["tool_calls"]) == num_calls


async def test_every_field_of_stream_options_changes_the_stream_or_is_refused(api, backend):
    fields = typing.get_type_hints(ChatCompletionStreamOptionsParam)
    assert fields
    for path in (CHAT, TEXT):
        before = await seen(api, backend, path, stream=True)
        for name in fields:
            error, asked, answer = await seen(api, backend, path, stream=True, stream_options={name: True})
            if error is not None:
                assert error["param"] == f"stream_options.{name}" and name in error["message"]
            else:
                assert (asked, answer) != before[1:], f"{name} is lost"


MESSAGES: dict[str, dict[str, Any]] = {
    "developer": {"role": "developer", "content": "Be short.", "name": "d"},
    "system": {"role": "system", "content": "Be short.", "name": "s"},
    "user": {"role": "user", "content": "Hello.", "name": "u"},
    "assistant": {
        "role": "assistant",
        "content": "Hi.",
        "name": "a",
        "refusal": "No.",
        "tool_calls": [CALL],
        "audio": {"id": "a"},
        "function_call": {"name": "f", "arguments": "{}"},
    },
    "tool": {"role": "tool", "content": "4", "tool_call_id": "call-1"},
    "function": {"role": "function", "content": "4", "name": "f"},
}


async def test_the_messages_have_every_field_of_the_client():
    for kind in typing.get_args(ChatCompletionMessageParam):
        hints = typing.get_type_hints(kind)
        (role,) = typing.get_args(hints["role"])
        assert set(MESSAGES[role]) == set(hints), role


@pytest.mark.parametrize("role", sorted(MESSAGES))
async def test_every_field_of_a_message_reaches_the_template_or_is_refused_by_its_place(
    api, tokenizer, monkeypatch, role
):
    rendered: list[Any] = []
    apply = type(tokenizer).apply_chat_template

    def watched(self, messages, **options):
        rendered.append(messages[-1])
        return apply(self, messages, **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", watched)
    start = {"role": role, "content": "x"} | ({"tool_call_id": "call-0"} if role == "tool" else {})
    for name, value in MESSAGES[role].items():
        if name == "role":
            continue
        message = start | {name: value} | ({"content": None} if name == "refusal" else {})
        response = await api.post(CHAT, messages=[{"role": "user", "content": "hi"}, message])
        if response.status_code == 200:
            found = "'call-1'" if name == "tool_calls" else repr(value)  # a call's arguments are parsed on the way
            assert found in repr(rendered[-1]), (role, name)
            continue
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert name in error["message"] or (role == "function" and "'function' is not one of" in error["message"])
