"""Reasoning in chat: told apart from the answer, the same streamed and whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette

from sgray.config import Config
from sgray.serve.openai.app import create_app
from sgray.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
MODEL = "smollm2-135m-instruct"
END = 2
THOUGHT = "<think>\nOne and\n\none.\n</think>\n\nTwo."
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '</s>' if not loop.last or m.role != 'assistant' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '' }}"
    "{{ '<think>\n' if enable_thinking }}{% endif %}"
)


@pytest.fixture
def app(make_app: Callable[..., Starlette]) -> Starlette:
    return make_app(reasoning_parser="qwen3", tool_call_parser="hermes")


@pytest.fixture
def says(backend, tokenizer) -> Callable[[str], dict[str, Any]]:
    """Makes the model write a text and end."""

    def script(text: str) -> dict[str, Any]:
        backend.script = [*tokenizer.encode(text), END]
        return {"max_tokens": 200}

    return script


async def parts(api, **fields: Any) -> tuple[str | None, str, str]:
    """Reasoning, content and finish reason of the whole answer; the stream has the same, reasoning first."""
    choice = (await api.answer(PATH, **fields))["choices"][0]
    message = choice["message"]
    choices = [choice for event in await api.events(PATH, **fields) for choice in event["choices"]]
    reasoning = "".join(one["delta"].get("reasoning_content", "") for one in choices)
    content = "".join(one["delta"].get("content", "") for one in choices)
    assert (reasoning or None, content) == (message.get("reasoning_content"), message["content"])
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    kinds = [next(iter(one["delta"])) for one in choices[1:-1]]
    assert kinds == sorted(kinds, reverse=True)
    return message.get("reasoning_content"), message["content"], choice["finish_reason"]


@pytest.mark.parametrize("width", [1, 3, 200])
async def test_pub_086_reasoning_and_content_are_told_apart(api, backend, says, width):
    backend.width = width
    assert await parts(api, **says(THOUGHT)) == ("One and\n\none.", "Two.", "stop")


async def test_pub_087_an_answer_without_reasoning_is_content(api, says):
    assert await parts(api, **says("<my-tag>x</b>")) == (None, "<my-tag>x</b>", "stop")


async def test_pub_088_half_a_thought_is_no_answer(api, says, tokenizer):
    text = "<think>step one, step tw"
    assert await parts(api, **says(text) | {"max_tokens": len(tokenizer.encode(text))}) == (text[7:], "", "length")


async def test_pub_089_the_deltas_of_a_stream(api, says):
    deltas = [choice["delta"] for event in await api.events(PATH, **says(THOUGHT)) for choice in event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert all(value for delta in deltas[1:] for value in delta.values())
    assert deltas[-1] == {}


async def test_the_openai_client_reads_reasoning(client: AsyncOpenAI, says):
    says(THOUGHT)
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "1+1?"}], max_tokens=200
    )
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("One and\n\none.", "Two.")


async def test_reasoning_can_stay_in_the_content(api, says):
    assert await parts(api, **says(THOUGHT) | {"separate_reasoning": False}) == (None, THOUGHT, "stop")


async def test_reasoning_can_be_sent_in_one_piece(api, says):
    fields = says(THOUGHT) | {"stream_reasoning": False}
    assert await parts(api, **fields) == ("One and\n\none.", "Two.", "stop")
    deltas = [choice["delta"] for event in await api.events(PATH, **fields) for choice in event["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["One and\n\none."]
    unclosed = says("<think>never done") | {"stream_reasoning": False}
    assert await parts(api, **unclosed) == ("never done", "", "stop")


@pytest.mark.parametrize("separate", [True, False])
async def test_a_call_that_is_only_thought_of_is_not_made(api, says, separate):
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "ping"}}]
    fields = says(f"<think>Maybe {call}?</think>{call}") | {"tools": tools, "separate_reasoning": separate}
    choice = (await api.answer(PATH, **fields))["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"].get("reasoning_content") == (f"Maybe {call}?" if separate else None)
    assert choice["message"]["content"] == (None if separate else f"<think>Maybe {call}?</think>")


async def test_without_a_parser_reasoning_is_content_and_cannot_be_asked_apart(make_app, says):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://test") as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "1+1?"}]} | says(THOUGHT)
        for fields in ({}, {"separate_reasoning": False}, {"stream_reasoning": False}):
            message = (await http.post(PATH, json=body | fields)).json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": THOUGHT, "refusal": None}
        error = (await http.post(PATH, json=body | {"separate_reasoning": True})).json()["error"]
        assert error["param"] == "separate_reasoning"
        assert "api.reasoning_parser" in error["message"]


@pytest.fixture
def templated(model_dir, tmp_path, backend) -> Callable[[str], httpx.AsyncClient]:
    """The app with a template that opens the reasoning, or opens and closes it, as it is told."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)

    def make(parser: str) -> httpx.AsyncClient:
        config = Config.parse({"api": {"reasoning_parser": parser}})
        app = create_app(config, Tokenizer.load(model_dir, str(path)), backend)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    return make


@pytest.mark.parametrize(
    ("parser", "kwargs", "reasoning", "content"),
    [
        ("qwen3", {}, None, "a</think>b"),
        ("qwen3", {"enable_thinking": True}, "a", "b"),
        ("qwen3", {"enable_thinking": False}, None, "a</think>b"),
        ("deepseek-r1", {}, "a", "b"),
        ("deepseek-r1", {"enable_thinking": False}, None, "a</think>b"),
    ],
)
async def test_the_prompt_decides_where_reasoning_begins(templated, says, parser, kwargs, reasoning, content):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": kwargs}
    async with templated(parser) as http:
        response = await http.post(PATH, json=body | says("a</think>b"))
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [("<think>one", "a", "b"), ("<think>one</think>two", None, "a</think>b"), ("two", None, "a</think>b")],
)
async def test_a_message_that_goes_on_in_its_reasoning_goes_on_in_its_reasoning(
    templated, says, said, reasoning, content
):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True}
    async with templated("qwen3") as http:
        message = (await http.post(PATH, json=body | says("a</think>b"))).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)


HARMONY = (
    "<|channel|>analysis<|message|>Ask for the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)


@pytest.mark.parametrize("width", [1, 4, 200])
@pytest.mark.parametrize("api_fields", [{"tool_call_parser": "gpt-oss"}, {"reasoning_parser": "gpt-oss"}])
async def test_gpt_oss_answers_on_channels(make_app, backend, says, api, width, api_fields):
    api.http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(**api_fields)), base_url="http://test")
    backend.width = width
    weather = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    has_tools = "tool_call_parser" in api_fields
    fields = says(HARMONY) | ({"tools": [weather]} if has_tools else {})
    choice = (await api.answer(PATH, **fields))["choices"][0]
    deltas = [choice["delta"] for event in await api.events(PATH, **fields) for choice in event["choices"]]
    message = choice["message"]
    assert message["reasoning_content"] == "Ask for the weather."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    if has_tools:
        assert message["content"] == "One moment." and choice["finish_reason"] == "tool_calls"
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    else:
        call = HARMONY[HARMONY.rindex("<|channel|>") :]
        assert message["content"] == f"One moment.<|start|>assistant{call}", "a call without tools is text"
        assert choice["finish_reason"] == "stop"
    backend.script = [1, 28, END]
    assert (await api.answer(PATH, max_tokens=9))["choices"][0]["message"]["content"] == "<|im_start|>,"
