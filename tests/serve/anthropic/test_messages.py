"""Anthropic's Messages API: blocks in, blocks out, streamed and whole, as Anthropic's client reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sgray.config import Config
from sgray.serve.openai.app import create_app
from sgray.serve.openai.service import OpenAIService
from sgray.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/messages"
MODEL = "smollm2-135m-instruct"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
THOUGHT = "<think>\nOne moment.\n</think>\n\n"
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROME = OSLO.replace("Oslo", "Rome")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TEMPLATE = (
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }}:"
    "{{ c.function.arguments.city }}</call>{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(model_dir, tmp_path, backend, on) -> anthropic.AsyncAnthropic:
    """The client on an app with a template that shows everything it gets."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    config = Config.parse({"api": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}})
    return on(create_app(config, Tokenizer.load(model_dir, str(path)), backend))


async def post(http: httpx.AsyncClient, path: str = PATH, **fields: Any) -> httpx.Response:
    raw = json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 200, **fields})
    return await http.post(path, content=raw, headers={"content-type": "application/json"})


async def refused(http: httpx.AsyncClient, **fields: Any) -> str:
    response = await post(http, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type and valid by the client's own types."""
    response = await post(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] not in ("ping", "error"):
            EVENT.validate_python(found[-1])
    return found


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def assembled(found: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The message that a stream adds up to, and the JSON of its calls. Each event must fit those before it."""
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    message = found[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    inputs: list[str] = []
    is_open = False
    for event in found[2:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert is_open is (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            inputs.append("")
        assert event["index"] == len(message["content"]) - 1
        if kind == "delta":
            delta = dict(event["delta"])
            name = delta.pop("type").removesuffix("_delta").replace("input_json", "partial_json")
            assert list(delta) == [name] and delta[name] != ""
            if name == "partial_json":
                inputs[-1] += delta[name]
            else:
                message["content"][-1][name] += delta[name]
    assert not is_open
    message |= {name: found[-2]["delta"][name] for name in ("stop_reason", "stop_sequence")}
    message["usage"] |= found[-2]["usage"]
    return message, inputs


async def both(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The whole message, which the stream adds up to."""
    response = await post(http, **fields)
    assert response.status_code == 200, response.text
    whole = response.json()
    Message.model_validate(whole)
    message, inputs = assembled(await events(http, **fields))
    for block, streamed, text in zip(whole["content"], message["content"], inputs, strict=True):
        if block["type"] == "tool_use" and whole["stop_reason"] == "tool_use":
            assert json.loads(text) == block["input"]
        if block["type"] == "tool_use":
            streamed["input"] = block["input"]
    assert without_ids(message) == without_ids(whole)
    return whole


def texts(whole: dict[str, Any]) -> list[tuple[str, Any]]:
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[names[block["type"]]]) for block in whole["content"]]


@pytest.mark.parametrize("width", [1, 3, 200])
async def test_thoughts_texts_and_calls_are_blocks_in_their_order(http, backend, says, width):
    backend.width, backend.cached_tokens = width, 3
    says(f"{THOUGHT}Let me look.{OSLO}\n{ROME}")
    whole = await both(http, tools=[WEATHER])
    assert texts(whole) == [
        ("thinking", "One moment."),
        ("text", "Let me look."),
        ("tool_use", {"city": "Oslo"}),
        ("tool_use", {"city": "Rome"}),
    ]
    assert whole["stop_reason"] == "tool_use"
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] + 3 == len(backend.requests[0].tokens)
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("One two.", {}, "end_turn", None),
        ("One two three.", {"max_tokens": 2}, "max_tokens", None),
        ("One two three.", {"stop_sequences": ["x", " three"]}, "stop_sequence", " three"),
        ("One two.", {"stop_sequences": ["x"]}, "end_turn", None),
        (PATH, {"tools": [WEATHER]}, "end_turn", None),
        (OSLO, {"tools": [WEATHER]}, "tool_use", None),
        (OSLO, {"tools": [WEATHER], "max_tokens": 20}, "max_tokens", None),
        (OSLO.replace("Oslo", "Os\nlo"), {"tools": [WEATHER]}, "end_turn", None),  # a line end inside a JSON string
        (THOUGHT, {"max_tokens": 4}, "max_tokens", None),
        ("", {}, "end_turn", None),
    ],
)
async def test_why_a_message_ended(http, says, text, fields, reason, sequence):
    says(text)
    whole = await both(http, **fields)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert " three" not in json.dumps(whole["content"])
    assert whole["content"]


async def test_more_tokens_than_the_context_leaves_are_no_error_and_end_with_a_reason_of_their_own(http, backend, says):
    says("One two.")
    whole = await both(http, max_tokens=32_000)
    assert whole["stop_reason"] == "end_turn"
    asked = backend.requests[0]
    assert asked.sampling.max_new_tokens == backend.info.context_length - len(asked.tokens)
    backend.script = [28]
    left = {"messages": [{"role": "user", "content": "x " * 8100}], "max_tokens": 1000}
    assert (await both(http, **left))["stop_reason"] == "model_context_window_exceeded"
    too_long = await refused(http, messages=[{"role": "user", "content": "x " * 9000}])
    assert "maximum context length" in too_long


async def test_without_parallel_calls_the_first_alone_is_returned(http, says):
    says(f"{ROME}\n{OSLO}")
    whole = await both(http, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert texts(whole) == [("tool_use", {"city": "Rome"})]


async def test_sampling_fields_reach_the_engine(http, backend):
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 5, "seed": 3}
    assert (await post(http, **fields, cache_salt="me", priority=2)).status_code == 200
    (request,) = backend.requests
    sampling = request.sampling
    asked = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, sampling.seed)
    assert asked == (0.5, 0.9, 7, 5, 3)
    assert (request.salt, request.priority) == ("me", 2)


async def test_a_session_with_tools_runs_on_the_official_client(templated, backend, tokenizer, says):
    says(f"{THOUGHT}I look.{OSLO}\n{ROME}")
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    for is_streamed in (False, True):
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        asked: Any = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER], "system": system, "messages": messages}
        if is_streamed:
            async with templated.messages.stream(**asked) as stream:
                said = "".join([text async for text in stream.text_stream])
                answer: Any = await stream.get_final_message()
            assert said == "I look."
        else:
            answer = await templated.messages.create(**asked)
        assert answer.stop_reason == "tool_use"
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
        one, other = (call.id for call in calls)
        results = [
            {"type": "tool_result", "tool_use_id": one, "content": "rain"},
            {
                "type": "tool_result",
                "tool_use_id": other,
                "content": [{"type": "text", "text": "no"}],
                "is_error": True,
            },
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        last = await templated.messages.create(**asked)
        assert last.usage.output_tokens > 0
        prompt = (
            f"<tool>weather</tool><system>Be short.<user>Weather?<assistant>(One moment.)I look."
            f"<call {one}>weather:Oslo</call><call {other}>weather:Rome</call><tool>rain{one}<tool>Error: no{other}"
            "<user>And?<assistant>"
        )
        assert _prompt(backend, tokenizer) == prompt
        count = await templated.messages.count_tokens(model=MODEL, messages=messages, tools=[WEATHER], system=system)
        assert count.input_tokens == len(backend.requests[-1].tokens) == last.usage.input_tokens


async def test_messages_of_one_role_are_one_turn(templated, backend, tokenizer):
    def text(content: str) -> dict[str, str]:
        return {"type": "text", "text": content}

    messages: list[Any] = [
        {"role": "user", "content": "One."},
        {"role": "user", "content": [text("Two."), text("Three.")]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("Four.")]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, text("Five.")]},
        {"role": "system", "content": "Six."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": []},
    ]
    await templated.messages.create(model=MODEL, max_tokens=2, messages=messages)
    assert _prompt(backend, tokenizer) == (
        "<user>One.\nTwo.\nThree.<assistant>(Hm.)Four.\nFive.<system>Six.<user><assistant>"
    )


async def test_a_last_message_of_the_assistant_is_gone_on_with(templated, backend, tokenizer, says):
    says(" Paris.")
    messages: list[Any] = [USER, {"role": "assistant", "content": "The city is"}]
    answer = await templated.messages.create(model=MODEL, max_tokens=20, messages=messages)
    assert _prompt(backend, tokenizer) == "<user>hi<assistant>The city is"
    assert answer.content[0].text == " Paris."


def _prompt(backend, tokenizer) -> str:
    return tokenizer.decode(backend.requests[-1].tokens, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("thinking", "mark"),
    [
        (None, ""),
        ({"type": "adaptive"}, ""),
        ({"type": "enabled", "budget_tokens": 1024}, "[True]"),
        ({"type": "disabled"}, "[False]"),
    ],
)
async def test_thinking_is_told_to_the_template(templated, backend, tokenizer, thinking, mark):
    fields = {} if thinking is None else {"thinking": thinking}
    await templated.messages.create(model=MODEL, max_tokens=2000, messages=[USER], **fields)
    assert _prompt(backend, tokenizer) == f"{mark}<user>hi<assistant>"


async def test_thoughts_can_be_left_out(http, says):
    says(f"{THOUGHT}Yes.")
    whole = await both(http, thinking={"type": "adaptive", "display": "omitted"})
    assert texts(whole) == [("thinking", ""), ("text", "Yes.")]
    assert whole["content"][0]["signature"]


@pytest.mark.parametrize(
    ("parser", "thinking", "word"),
    [
        (None, {"type": "enabled", "budget_tokens": 1024}, "api.reasoning_parser"),
        ("deepseek-r1", {"type": "disabled"}, "always thinks"),
        ("qwen3", {"type": "between_tools"}, "not supported"),
        ("qwen3", {"type": "enabled"}, "thinking.budget_tokens"),
        ("qwen3", {"type": "enabled", "budget_tokens": 1023}, "thinking.budget_tokens"),
        ("qwen3", {"type": "enabled", "budget_tokens": 2000}, "less than max_tokens"),
        ("qwen3", {"type": "adaptive", "budget_tokens": 1024}, "thinking.budget_tokens"),
        ("qwen3", {"type": "much"}, "thinking.type"),
        ("qwen3", {"type": "adaptive", "display": "loud"}, "thinking.display"),
        ("qwen3", {"type": "adaptive", "effort": "high"}, "thinking.effort"),
        (None, {"type": "disabled"}, None),
        (None, {"type": "adaptive"}, None),
        ("deepseek-r1", {"type": "enabled", "budget_tokens": 1024}, None),
        ("kimi", {"type": "disabled"}, None),
    ],
)
async def test_thinking_that_a_server_cannot_do_is_refused_with_the_reason(make_app, parser, thinking, word):
    transport = httpx.ASGITransport(make_app(reasoning_parser=parser))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        if word is None:
            assert (await post(http, thinking=thinking, max_tokens=2000)).status_code == 200
        else:
            assert word in await refused(http, thinking=thinking, max_tokens=2000)


async def test_a_call_by_function_gives_the_same(tokenizer, backend, says):
    says("Yes.")
    service = OpenAIService(Config(), tokenizer, backend)
    body = {"model": MODEL, "messages": [USER], "max_tokens": 9}
    whole: Any = await service.messages(body)
    chunks: Any = await service.messages(body | {"stream": True})
    message, _ = assembled([chunk async for chunk in chunks])
    assert without_ids(message) == without_ids(whole)


PARTS = [OSLO, "<tool_call>", "</tool_call>", '{"name": "weather", "arguments": {', "<think>", "</think>", "Hi. ", "\n"]


async def test_a_stream_always_adds_up_to_the_whole_message(http, backend, says):
    strategy = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join)
    drawn: list[tuple[str, int, int]] = []

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(strategy, st.integers(1, 9), st.integers(1, 80))
    def draw(text: str, width: int, limit: int) -> None:
        drawn.append((text, width, limit))

    draw()
    for text, width, limit in drawn:
        backend.width = width
        says(text)
        await both(http, tools=[WEATHER], max_tokens=limit)


async def test_the_clients_own_sum_of_a_call_that_broke_off_is_the_whole_answers(client, says, tokenizer):
    says(OSLO)
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER]}
    for limit in range(12, len(tokenizer.encode(OSLO))):
        async with client.messages.stream(**asked, max_tokens=limit) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**asked, max_tokens=limit)
        for one, other in zip(streamed.content, whole.content, strict=True):
            assert getattr(one, "input", None) == getattr(other, "input", None)


@pytest.mark.parametrize("says_what", ["", "Hello."])
async def test_pings_and_starts_come_before_any_text(http, says: Callable[[str], None], says_what):
    says(says_what)
    found = await events(http)
    assert found[0]["message"]["usage"]["input_tokens"] > 0
    assert found[0]["message"]["usage"]["output_tokens"] == 0
