"""Tool calls in chat: what the model writes becomes calls in OpenAI's form, the same streamed and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from starlette.applications import Starlette

from sgray.config import Config
from sgray.serve.openai.app import create_app
from sgray.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
MODEL = "smollm2-135m-instruct"
END = 2


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


TOOLS = [tool("weather", city={"type": "string"}), tool("ping")]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments.city }}</call>{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}<assistant>"
)


@pytest.fixture
def app(make_app: Callable[..., Starlette]) -> Starlette:
    return make_app(tool_call_parser="hermes")


@pytest.fixture
def says(backend, tokenizer) -> Callable[[str], dict[str, Any]]:
    """Makes the model write a text and end; returns the fields of a call with tools."""

    def script(text: str) -> dict[str, Any]:
        backend.script = [*tokenizer.encode(text), END]
        return {"tools": TOOLS, "max_tokens": 200}

    return script


def assembled(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of the chunks of one choice, in the form of a whole choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reason = None
    for choice in [choice for event in events for choice in event["choices"] if choice["index"] == index]:
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", []):
            if part["index"] == len(message["calls"]):
                assert part["type"] == "function" and part["id"]
                message["calls"].append([part["function"]["name"], part["function"]["arguments"]])
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                assert part["index"] == len(message["calls"]) - 1
                message["calls"][-1][1] += part["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message | {"reason": reason}


def as_assembled(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])],
        "reason": choice["finish_reason"],
    }


async def both(api, **fields: Any) -> dict[str, Any]:
    """The whole answer's choice, which the stream adds up to."""
    choice = (await api.answer(PATH, **fields))["choices"][0]
    assert assembled(await api.events(PATH, **fields)) == as_assembled(choice)
    return choice


@pytest.mark.parametrize("width", [1, 3, 200])
async def test_a_call_is_read_whole_and_streamed(api, backend, says, width):
    backend.width = width
    choice = await both(api, **says(OSLO))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Oslo"}'})
    assert call["id"].startswith("call_")


async def test_pub_080_text_around_calls_is_content(api, says):
    choice = await both(api, **says(f"Let me look.{OSLO} Done."))
    assert choice["message"]["content"] == "Let me look. Done."
    assert len(choice["message"]["tool_calls"]) == 1


async def test_pub_082_the_openai_client_assembles_a_streamed_call(client: AsyncOpenAI, says):
    fields = says(f"{OSLO}\n{PING}")
    async with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=fields["tools"], max_tokens=200
    ) as stream:
        deltas = [call async for event in stream if event.type == "chunk" for call in _calls_of(event.chunk)]
        streamed = (await stream.get_final_completion()).choices[0]
    whole = (
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=fields["tools"], max_tokens=200
        )
    ).choices[0]
    for choice in (streamed, whole):
        assert choice.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            ("weather", '{"city": "Oslo"}'),
            ("ping", "{}"),
        ]
        assert len({call.id for call in choice.message.tool_calls}) == 2
    for index in (0, 1):
        first, *rest = [call for call in deltas if call.index == index]
        assert first.id and first.type == "function" and first.function.name
        assert rest and all(call.id is call.type is call.function.name is None for call in rest)
    assert [call.index for call in deltas] == sorted(call.index for call in deltas)


def _calls_of(chunk) -> list:
    return [call for choice in chunk.choices for call in choice.delta.tool_calls or []]


async def test_pub_077_a_call_without_arguments_has_an_empty_object(api, says):
    choice = await both(api, **says(PING))
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("text", ["See <tool", "a < b", "See <tool_c"])
async def test_pub_081_held_text_comes_out_at_every_kind_of_end(api, backend, tokenizer, says, text):
    for end in ({}, {"max_tokens": len(tokenizer.encode(text))}, {"stop": ["END"]}):
        fields = says(f"{text}END") if "stop" in end else says(text)
        choice = await both(api, **fields | end)
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == ("length" if "max_tokens" in end else "stop")


async def test_pub_084_a_call_that_is_cut_off_is_never_announced_as_made(api, tokenizer, says):
    for length in range(1, len(tokenizer.encode(OSLO))):
        choice = await both(api, **says(OSLO) | {"max_tokens": length})
        assert choice["finish_reason"] == "length"
    choice = await both(api, **says(OSLO.replace("Oslo", "Os\nlo")))  # a line end inside a JSON string
    assert choice["finish_reason"] == "stop"


async def test_pub_083_no_calls_are_never_a_reason_to_have_ended(api, says):
    choice = await both(api, **says("No tool for that."))
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "No tool for that."
    assert "tool_calls" not in choice["message"]


async def test_pub_085_with_tool_choice_none_a_call_is_text(api, says):
    choice = await both(api, **says(OSLO) | {"tool_choice": "none"})
    assert choice["message"]["content"] == OSLO
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


async def test_calls_are_read_only_where_tools_are_given(api, says):
    choice = await both(api, **says(OSLO) | {"tools": []})
    assert choice["message"]["content"] == OSLO


async def test_without_parallel_calls_the_first_alone_is_returned(api, says):
    choice = await both(api, **says(f"{PING}\n{OSLO}") | {"parallel_tool_calls": False})
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["ping"]
    assert choice["finish_reason"] == "tool_calls"


async def test_every_choice_has_its_own_calls(api, says):
    fields = says(OSLO) | {"n": 3, "temperature": 1}
    answers = (await api.answer(PATH, **fields))["choices"]
    events = await api.events(PATH, **fields)
    for index in range(3):
        assert assembled(events, index) == as_assembled(answers[index])
        assert len(answers[index]["message"]["tool_calls"]) == 1
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in answers}) == 3


async def test_pub_051_logprobs_of_held_text_are_not_lost(api, tokenizer, says):
    fields = says(f"Look.{OSLO}") | {"logprobs": True}
    whole = (await api.answer(PATH, **fields))["choices"][0]
    choices = [choice for event in await api.events(PATH, **fields) for choice in event["choices"]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert len(entries) == len(tokenizer.encode(f"Look.{OSLO}")) + 1


async def test_tools_are_refused_where_the_server_knows_no_parser(make_app):
    app = make_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 2}
        response = await http.post(PATH, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        assert "api.tool_call_parser" in response.json()["error"]["message"]
        assert "hermes" in response.json()["error"]["message"]
        assert (await http.post(PATH, json=body | {"tool_choice": "none"})).status_code == 200


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([5], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a\ud800"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x" * 129}}], "tools[0].function.name"),
        ([*TOOLS, TOOLS[0]], "tools[2].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0].function.description"),
        ([{"type": "function", "function": {"name": "f", "strict": "yes"}}], "tools[0].function.strict"),
        ([{"type": "function", "function": {"name": "f", "params": {}}}], "tools[0].function.params"),
        ([{"type": "function", "function": {"name": "f"}, "strict": True}], "tools[0].strict"),
        ([tool(f"f{index}") for index in range(129)], "tools"),
    ],
)
async def test_wrong_tools_are_refused_by_their_place(api, backend, tools, place):
    error = await api.refused(PATH, tools=tools)
    assert error["param"] == "tools"
    assert place in error["message"]
    assert not backend.requests


@pytest.fixture
def templated(model_dir, tmp_path, backend) -> httpx.AsyncClient:
    """The app with a template that knows tools and calls."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    app = create_app(
        Config.parse({"api": {"tool_call_parser": "hermes"}}), Tokenizer.load(model_dir, str(path)), backend
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_tools_calls_and_results_reach_the_template(templated, backend, tokenizer, says):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | says(OSLO)
    async with templated as http:
        message = (await http.post(PATH, json=body)).json()["choices"][0]["message"]
        assert _prompt(backend, tokenizer) == "<tool>weather</tool><tool>ping</tool><user>hi<assistant>"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        again = body | {"messages": [*body["messages"], message, result]}
        assert (await http.post(PATH, json=again)).status_code == 200
        assert _prompt(backend, tokenizer).endswith(
            f"<user>hi<assistant><call>weather:Oslo</call><tool>rain{result['tool_call_id']}<assistant>"
        )
        assert (await http.post(PATH, json=body | {"tool_choice": "none"})).status_code == 200
        assert _prompt(backend, tokenizer) == "<user>hi<assistant>"


def _prompt(backend, tokenizer) -> str:
    return tokenizer.decode(backend.requests[-1].tokens, skip_special_tokens=False)


async def test_marks_that_are_special_tokens_are_not_left_out(make_app, backend, tokenizer):
    """The default model's `<|im_start|>` is special; with a parser whose marks are special all such tokens are text."""
    backend.script = [*tokenizer.encode("a"), *tokenizer.encode("<|im_start|>"), END]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 9}
    contents = {}
    for name in ("hermes", "llama3"):
        transport = httpx.ASGITransport(make_app(tool_call_parser=name))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            contents[name] = (await http.post(PATH, json=body)).json()["choices"][0]["message"]["content"]
    assert contents == {"hermes": "a", "llama3": "a<|im_start|>"}


PARTS = [
    OSLO,
    PING,
    "<tool_call>",
    "</tool_call>",
    '{"name": "weather", "arguments": {',
    '"city": 1',
    "}",
    "Hi. ",
    "\n",
]


async def test_a_stream_always_adds_up_to_the_whole_answer(api, backend, says):
    texts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join)
    drawn: list[tuple[str, int, int]] = []

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(texts, st.integers(1, 9), st.integers(1, 80))
    def draw(text: str, width: int, limit: int) -> None:
        drawn.append((text, width, limit))

    draw()
    for text, width, limit in drawn:
        backend.width = width
        await both(api, **says(text) | {"max_tokens": limit})
