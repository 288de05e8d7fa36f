"""The Responses API: items in, items out, streamed and whole, as OpenAI's client reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.applications import Starlette

from sgray.config import Config
from sgray.errors import EngineError
from sgray.protocol import Finish
from sgray.serve.openai.app import create_app
from sgray.serve.openai.service import OpenAIService
from sgray.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"
MODEL = "smollm2-135m-instruct"
END = 2
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
THOUGHT = "<think>\nOne moment.\n</think>\n\n"
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROME = OSLO.replace("Oslo", "Rome")
EVENT = TypeAdapter(ResponseStreamEvent)
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }}:"
    "{{ c.function.arguments.city }}</call>{% endfor %}{{ m.tool_call_id }}{% endfor %}<assistant>"
)


@pytest.fixture
def app(make_app: Callable[..., Starlette]) -> Starlette:
    return make_app(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
def says(backend, tokenizer) -> Callable[[str], None]:
    """Makes the model write a text and end."""

    def script(text: str) -> None:
        backend.script = [*tokenizer.encode(text), END]

    return script


@pytest.fixture
def templated(model_dir, tmp_path, backend) -> AsyncOpenAI:
    """The client on an app with a template that shows everything it gets."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    config = Config.parse({"api": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}})
    http = httpx.AsyncClient(
        transport=httpx.ASGITransport(create_app(config, Tokenizer.load(model_dir, str(path)), backend))
    )
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    raw = json.dumps({"model": MODEL, "input": "hi", **fields})
    return await http.post(PATH, content=raw, headers={"content-type": "application/json"})


async def refused(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await post(http, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def events(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type, numbered, and valid by the client's own types."""
    response = await post(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    found = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        assert found[-1]["sequence_number"] == number
        EVENT.validate_python(found[-1])
    return found


def without_ids(value: Any) -> Any:
    """The value without what differs from run to run."""
    if isinstance(value, dict):
        gone = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(one) for name, one in value.items() if name not in gone}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def assembled(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the deltas of a stream add up to. Each event must fit those before it."""
    items: dict[int, dict[str, Any]] = {}
    closed: set[int] = set()
    for event in found:
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(items) and all(before in closed for before in range(index))
            items[index] = {"text": "", "logprobs": [], **event["item"]}
        elif kind.endswith(".delta"):
            assert index not in closed and event["item_id"] == items[index]["id"] and event["delta"] != ""
            items[index]["text"] += event["delta"]
            items[index]["logprobs"] += event.get("logprobs", [])
        elif kind.endswith("text.done") or kind == "function_call_arguments.done":
            assert event.get("text", event.get("arguments")) == items[index]["text"]
            assert event.get("logprobs", []) == items[index]["logprobs"]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[index]["id"]
            item = event["item"]
            said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert said == items[index]["text"]
            closed.add(index)
            items[index] = item
    assert closed == set(items)
    return list(items.values())


async def both(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The whole response, which the stream's last event equals and its deltas add up to."""
    response = await post(http, **fields)
    assert response.status_code == 200, response.text
    whole = response.json()
    Response.model_validate(whole)
    found = await events(http, **fields)
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == f"response.{whole['status']}"
    assert without_ids(found[-1]["response"]) == without_ids(whole)
    assert assembled(found) == found[-1]["response"]["output"]
    return whole


def texts(whole: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in whole["output"]
    ]


@pytest.mark.parametrize("width", [1, 3, 200])
async def test_thoughts_texts_and_calls_are_items_in_their_order(http, backend, says, width):
    backend.width, backend.cached_tokens = width, 3
    says(f"{THOUGHT}Let me look.{OSLO}\n{ROME}")
    whole = await both(http, tools=[WEATHER])
    assert texts(whole) == [
        ("reasoning", "One moment."),
        ("message", "Let me look."),
        ("function_call", '{"city": "Oslo"}'),
        ("function_call", '{"city": "Rome"}'),
    ]
    assert {item["status"] for item in whole["output"]} == {whole["status"]} == {"completed"}
    usage = whole["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


async def test_an_answer_that_meets_its_limit_is_incomplete(http, says):
    says("One two three four five.")
    whole = await both(http, max_output_tokens=3)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["max_output_tokens"] == 3 and whole["completed_at"] is None


async def test_half_a_thought_is_all_there_is(http, says):
    says(THOUGHT)
    whole = await both(http, max_output_tokens=5)
    assert [(item["type"], item["status"]) for item in whole["output"]] == [("reasoning", "incomplete")]


async def test_an_answer_of_nothing_is_an_empty_message(http, says):
    says("")
    assert texts(await both(http)) == [("message", "")]


async def test_pub_084_a_call_that_is_cut_off_is_never_announced_as_made(http, tokenizer, says):
    says(OSLO)
    for length in range(1, len(tokenizer.encode(OSLO)) - 1):
        whole = await both(http, tools=[WEATHER], max_output_tokens=length)
        assert whole["status"] == "incomplete"
        assert whole["output"][-1]["status"] == "incomplete"
        assert all(item.get("arguments", "") == '{"city": "Oslo"}' for item in whole["output"][:-1])
    says(OSLO.replace("Oslo", "Os\nlo"))  # a line end inside a JSON string
    whole = await both(http, tools=[WEATHER])
    assert whole["output"][0]["status"] == "incomplete"


async def test_without_parallel_calls_the_first_alone_is_returned(http, says):
    says(f"{ROME}\n{OSLO}")
    whole = await both(http, tools=[WEATHER], parallel_tool_calls=False)
    assert texts(whole) == [("function_call", '{"city": "Rome"}')]


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
async def test_logprobs_are_those_of_the_text(http, says, tokenizer, fields):
    says("One two.")
    logprobs = (await both(http, **fields))["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == "One two."
    assert all(len(entry["top_logprobs"]) == fields.get("top_logprobs", 0) for entry in logprobs)
    says(f"{THOUGHT}One two.{OSLO}")
    whole = await both(http, **fields, tools=[WEATHER])
    assert "".join(entry["token"] for entry in whole["output"][1]["content"][0]["logprobs"]) == "One two.<"


async def test_what_was_asked_comes_back(http, says):
    says("Yes.")
    asked: dict[str, Any] = {
        "instructions": "Be short.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "tool_choice": "none",
        "tools": [WEATHER],
        "text": {"format": {"type": "text"}},
        "user": "u",
        "prompt_cache_key": "k",
        "max_tool_calls": 2,
        "reasoning": {"effort": None, "summary": "auto"},
    }
    whole = await both(http, **asked)
    told = {name: whole[name] for name in asked} | {"text": {"format": whole["text"]["format"]}}
    assert told == asked
    assert whole["store"] is False and whole["previous_response_id"] is None


async def test_instructions_are_the_system_message_and_a_string_is_the_users(templated, backend, tokenizer):
    await templated.responses.create(model=MODEL, input="Hi.", instructions="Be short.", max_output_tokens=2)
    assert _prompt(backend, tokenizer) == "<system>Be short.<user>Hi.<assistant>"


async def test_a_conversation_with_tools_goes_round_as_it_came(templated, backend, tokenizer, says):
    says(f"{THOUGHT}I look.{OSLO}\n{ROME}")
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    for is_streamed in (False, True):
        items = items[:1]
        if is_streamed:
            async with templated.responses.stream(model=MODEL, input=items, tools=[WEATHER]) as stream:
                answer: Any = await stream.get_final_response()
        else:
            answer = await templated.responses.create(model=MODEL, input=items, tools=[WEATHER])
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        items += answer.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        await templated.responses.create(model=MODEL, input=items, tools=[WEATHER], max_output_tokens=2)
        one, other = (call.call_id for call in calls)
        assert _prompt(backend, tokenizer) == (
            f"<tool>weather</tool><user>Weather?<assistant>(One moment.)I look.<call {one}>weather:Oslo</call>"
            f"<call {other}>weather:Rome</call><tool>rain{one}<tool>rain{other}<assistant>"
        )


async def test_turns_of_the_assistant_are_told_apart(templated, backend, tokenizer):
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": text}]}

    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    items: list[Any] = [
        {"role": "developer", "content": "Be short."},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two.", "annotations": []}]},
        thought("Hm."),
        thought("Well."),
        call,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Three."}]},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        thought("So."),
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": "Rain."},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
    ]
    await templated.responses.create(model=MODEL, input=items, max_output_tokens=2)
    assert _prompt(backend, tokenizer) == (
        "<system>Be short.<assistant>One.<assistant>Two.<assistant>(Hm.\nWell.)Three.<call c1>weather:Oslo</call>"
        "<tool>rainc1<assistant>(So.)Rain.<assistant><assistant>"
    )


def _prompt(backend, tokenizer) -> str:
    return tokenizer.decode(backend.requests[-1].tokens, skip_special_tokens=False)


ITEMS = [{"role": "user", "content": "hi"}]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (5, "input"),
        ([], "input"),
        ([5], "input[0]"),
        ([{}], "input[0].type"),
        ([*ITEMS, {"type": "web_search_call", "id": "x"}], "input[1].type"),
        ([{"type": "item_reference", "id": "x"}], "not stored"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": ["user"], "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": []}], "input[0].content"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "x", "colour": 1}]}], "content[0].colour"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}], "no images"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "no files"),
        ([{"role": "user", "content": "x", "name": "n"}], "input[0].name"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0].call_id"),
        ([CALL, {"type": "function_call_output", "call_id": "c"}], "input[1].output"),
        ([CALL, {"type": "function_call_output", "output": "x"}], "input[1].call_id"),
        ([CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}], "no images"),
        ([CALL | {"arguments": {}}], "input[0].arguments"),
        ([CALL | {"name": None}], "input[0].name"),
        ([CALL | {"namespace": "n"}], "input[0].namespace"),
        ([CALL | {"async": True}], "input[0].async"),
        ([CALL | {"caller": {"type": "program", "caller_id": "p"}}], "input[0].caller"),
        ([{"type": "reasoning", "summary": 5}], "input[0].summary"),
        ([{"type": "reasoning", "summary": [{"type": "text", "text": "x"}]}], "input[0].summary[0]"),
        (None, "input"),
    ],
)
async def test_wrong_input_is_refused_by_its_place(http, backend, given, place):
    error = await refused(http, input=given)
    assert error["param"] == "input" and error["type"] == "invalid_request_error"
    assert place in error["message"]
    assert not backend.requests


async def test_limits_of_chat_hold(make_app):
    transport = httpx.ASGITransport(make_app(max_messages=2, max_content_parts=2))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await refused(http, input=ITEMS * 3))["param"] == "input"
        part = {"type": "input_text", "text": "x"}
        error = await refused(http, input=[{"role": "user", "content": [part] * 3}])
        assert error["param"] == "input" and "at most 2" in error["message"]
    too_long = await refused(http := httpx.AsyncClient(transport=transport, base_url="http://test"), input="x " * 9000)
    assert (too_long["param"], too_long["code"]) == ("input", "context_length_exceeded")
    assert (await post(http, model="other")).status_code == 404


@pytest.mark.parametrize(
    "kind", ["web_search", "file_search", "mcp", "code_interpreter", "custom", "local_shell", None]
)
async def test_other_tools_than_functions_are_refused_by_name(http, kind):
    error = await refused(http, tools=[WEATHER, {"type": kind, "name": "x"}])
    assert error["param"] == "tools" and "tools[1].type" in error["message"]
    assert kind is None or repr(kind) in error["message"]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [WEATHER | {"name": "a b"}]}, "'tools[0].name'"),
        ({"tools": [WEATHER | {"parameters": "x"}]}, "'tools[0].parameters'"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "'tools[0].defer_loading'"),
        ({"tools": [WEATHER | {"colour": 1}]}, "tools[0].colour"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}, "tools": [WEATHER]}, "'tool_choice.type'"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "'tool_choice.name'"),
        ({"text": {"format": {"type": "xml"}}}, "'text.format.type'"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "'text.format.name'"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "'text.format.schema'"),
        ({"text": {"verbosity": "loud"}}, "'text.verbosity'"),
        ({"text": {"colour": 1}}, "text.colour"),
        ({"reasoning": {"effort": "loud"}}, "'reasoning.effort'"),
        ({"reasoning": {"summary": "concise"}}, "'reasoning.summary'"),
        ({"include": ["file_search_call.results"]}, "'include[0]'"),
        ({"max_output_tokens": 9000}, "maximum context length"),
        ({"n": 2}, "'n'"),
        ({"metadata": {"a": "\ud800"}}, "'metadata'"),
        ({"metadata": {"\ud800": "a"}}, "'metadata'"),
        ({"user": "\ud800"}, "'user'"),
        ({"tools": [WEATHER | {"parameters": {"a": "\ud800"}}]}, "'tools'"),
        ({"text": {"format": {"type": "\ud800"}}}, "'text'"),
        ({"instructions": "\ud800"}, "'instructions'"),
        ({"stream_options": {"include_obfuscation": False}}, "'stream_options'"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_place_is_named_in_the_words_of_this_api(http, fields, place):
    error = await refused(http, **fields)
    assert place in error["message"]
    field = error["param"].partition(".")[0].partition("[")[0]
    assert field == ("input" if "max_output_tokens" in fields else next(iter(fields)))


async def test_a_failure_in_a_stream_is_an_error_and_a_failed_response(http, backend, says):
    says("One two three four.")
    for failure in (EngineError("the step failed"), Finish("abort"), ZeroDivisionError("x")):
        backend.fail_after, backend.failure = 2, failure
        found = await events(http)
        assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
        response = found[-1]["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert response["id"] == found[0]["response"]["id"]
        assert response["output"][0]["content"][0]["text"] == "One two"
        assert (await post(http)).status_code == 500
    backend.fail_after = 0
    assert (await post(http, stream=True)).status_code == 500


async def test_the_openai_clients_errors(client: AsyncOpenAI, backend):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id" and "whole conversation" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="x")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    assert not backend.requests


async def test_a_call_by_function_gives_the_same(tokenizer, backend, says):
    says("Yes.")
    service = OpenAIService(Config(), tokenizer, backend)
    body = {"model": MODEL, "input": "hi"}
    whole: Any = await service.responses(body)
    chunks: Any = await service.responses(body | {"stream": True})
    last = [chunk async for chunk in chunks][-1]
    assert without_ids(last["response"]) == without_ids(whole)


PARTS = [OSLO, "<tool_call>", "</tool_call>", '{"name": "weather", "arguments": {', "<think>", "</think>", "Hi. ", "\n"]


async def test_a_stream_always_adds_up_to_the_whole_response(http, backend, says):
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
        await both(http, tools=[WEATHER], max_output_tokens=limit, top_logprobs=1)
