"""Random damage to good calls of the APIs that are chat calls in another form: no body is a 500."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

MODEL = "smollm2-135m-instruct"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CACHE = {"type": "ephemeral"}
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "x"}], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "none", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "stream_options": {"include_obfuscation": False},
    "max_output_tokens": 4,
    "stream": True,
}
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "system": [{"type": "text", "text": "Be short.", "cache_control": CACHE}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "citations": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "y"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"city": "Oslo"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": True}]},
        {"role": "assistant", "content": "The"},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA, "cache_control": CACHE, "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "high", "format": None},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "max_tokens": 2000,
    "stream": True,
}
COUNT = {name: MESSAGE[name] for name in ("model", "system", "messages", "tools", "thinking")}
ROUTES = {"/v1/responses": RESPONSE, "/v1/messages": MESSAGE, "/v1/messages/count_tokens": COUNT}
KINDS = "text image input_text function function_call message tool_use tool_result thinking json_schema allowed_tools"
WORDS = st.sampled_from(
    [*KINDS.split(), "user", "assistant", "system", "any", "tool", "none", "required", "", "\ud800"]
)
VALUES = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 10**30, 1.5, float("nan"), float("inf")])
    | WORDS
    | st.lists(WORDS | st.builds(dict), max_size=2)
    | st.dictionaries(st.sampled_from(["type", "text", "name", "content", "role", "x"]), WORDS, max_size=3)
)


@pytest.fixture
def app(make_app: Callable[..., Starlette]) -> Starlette:
    return make_app(tool_call_parser="hermes", reasoning_parser="qwen3")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, one in inner for place in [(*path, name), *places(one, (*path, name))]]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, Any]:
    """A route, and its good call with up to three things inside it replaced, added or removed."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    body = copy.deepcopy(ROUTES[path])
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places(body) or [("x",)]))
        parent: Any = body
        for name in way:
            parent = parent[name]
        how = draw(st.sampled_from(["replace", "add", "remove"]))
        if how == "remove":
            del parent[last]
        elif how == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "type", "name", "content", "text", "id"]))] = draw(VALUES)
        else:
            parent[last] = draw(VALUES)
    return path, body


def test_no_damage_to_a_call_is_a_500_and_none_stops_the_next(app, backend):
    async def send(path: str, body: Any) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    def check(path: str, body: Any) -> int:
        response = asyncio.run(send(path, body))
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            assert response.json()["error"]["message"]
        assert "\nevent: error" not in response.text
        return response.status_code

    for path, good in ROUTES.items():
        assert check(path, good) == 200
    statuses = []

    @settings(max_examples=200)
    @given(damaged())
    def check_damaged(call: tuple[str, Any]) -> None:
        statuses.append(check(*call))

    check_damaged()
    assert {200, 400} <= set(statuses)
    assert not backend.running
