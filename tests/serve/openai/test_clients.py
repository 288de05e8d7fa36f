"""Sessions of the clients that people use, unchanged: OpenAI's own and LangChain's."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from starlette.applications import Starlette

from sgray.config import Config
from sgray.errors import OverloadedError
from sgray.serve.openai.app import create_app
from sgray.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
MODEL = "smollm2-135m-instruct"
END = 2
HI = [{"role": "user", "content": "hi"}]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
# Shows the model everything that a round of calls consists of.
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments.city }}</call>"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}<assistant>"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def app(model_dir, backend, tmp_path) -> Starlette:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    config = Config.parse({"api": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}})
    return create_app(config, Tokenizer.load(model_dir, chat_template=str(tmp_path / "template.jinja")), backend)


@pytest.fixture
def says(backend, tokenizer) -> Callable[[str], None]:
    """Makes the model write a text and end."""

    def script(text: str) -> None:
        backend.script = [*tokenizer.encode(text), END]

    return script


@pytest.fixture
def langchain(http: httpx.AsyncClient) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url="http://test/v1", api_key="none", http_async_client=http, max_retries=0, temperature=0
    )


def prompt_of(backend, tokenizer) -> str:
    """What the model was shown last."""
    return tokenizer.decode(backend.requests[-1].tokens, skip_special_tokens=False)


async def test_openais_client_lists_models(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in models] == [(MODEL, "model", "sgray")]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_openais_client_chats_whole_and_streamed(client: AsyncOpenAI, says) -> None:
    says("<think>\nOne and one.\n</think>\n\nTwo.")
    fields = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 1, "n": 2}
    whole = await client.chat.completions.create(**fields)
    assert [choice.message.content for choice in whole.choices] == ["Two."] * 2
    assert whole.choices[0].message.model_extra == {"reasoning_content": "One and one."}
    assert whole.choices[0].finish_reason == "stop" and whole.usage is not None
    assert whole.usage.completion_tokens == 2 * len(whole.choices[0].logprobs.content)
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.25
    async with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Two."] * 2
    assert final.usage == whole.usage
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= {event.type for event in events}
    entries = [[entry.token for entry in choice.logprobs.content] for choice in (*final.choices, *whole.choices)]
    assert entries[0] == entries[1] == entries[2] == entries[3]


async def test_openais_client_calls_a_tool_and_hands_in_its_result(client, says, backend, tokenizer) -> None:
    says(f"Let me see.\n{OSLO}")
    fields = {"model": MODEL, "tools": [WEATHER], "tool_choice": "auto"}
    whole = await client.chat.completions.create(messages=HI, **fields)
    async with client.chat.completions.stream(messages=HI, **fields) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    for choice in (whole.choices[0], final.choices[0]):
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.index) for event in done] == [("weather", 0)]
    says("It rains.")
    call = whole.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*HI, whole.choices[0].message, result]
    answer = await client.chat.completions.create(messages=messages, **fields)
    assert answer.choices[0].message.content == "It rains."
    shown = prompt_of(backend, tokenizer)
    assert f"<call>{call.id}:weather:Oslo</call>" in shown and f"<tool>rain{call.id}" in shown


async def test_openais_client_completes_text_with_echo_and_log_probabilities(client: AsyncOpenAI) -> None:
    fields = {"model": MODEL, "prompt": ["Hello world", "Hello"], "max_tokens": 3, "echo": True, "logprobs": 1}
    whole = await client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == ["Hello world, a world", "Hello, a world"]
    assert whole.choices[0].logprobs.token_logprobs[:2] == [None, -0.25]
    texts = ["", ""]
    async for chunk in await client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


async def test_openais_client_raises_the_error_that_belongs_to_what_is_wrong(client, make_app, backend, tmp_path):
    bad = {"model": MODEL, "messages": HI, "temperature": -1}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**bad, stream=stream)
        assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    (tmp_path / "keys").write_text("sk-1\n")
    closed = httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(api_keys_file=str(tmp_path / "keys"))), base_url="http://test"
    )
    for key, wanted in (("sk-1", None), ("sk-2", openai.AuthenticationError)):
        caller = AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=closed, max_retries=0)
        if wanted is None:
            assert (await caller.models.list()).data
        else:
            with pytest.raises(wanted):
                await caller.models.list()
    backend.fail_after, backend.failure = 0, OverloadedError("all replicas are busy")
    with pytest.raises(openai.InternalServerError) as busy:
        await client.chat.completions.create(model=MODEL, messages=HI)
    assert busy.value.status_code == 503


async def test_langchain_invokes_and_streams(langchain: ChatOpenAI, says, backend, tokenizer) -> None:
    says("Two, and no more.")
    messages = [SystemMessage("Be short."), HumanMessage("One and one?")]
    whole = await langchain.ainvoke(messages)
    assert whole.content == "Two, and no more."
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    assert "<system>Be short.<user>One and one?<assistant>" in prompt_of(backend, tokenizer)
    chunks = [chunk async for chunk in langchain.astream(messages, stream_usage=True)]
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert (total.content, total.usage_metadata["output_tokens"]) == (
        whole.content,
        whole.usage_metadata["output_tokens"],
    )
    assert len([chunk for chunk in chunks if chunk.content]) > 3
    answers = await langchain.abatch([[HumanMessage(str(index))] for index in range(4)])
    assert [answer.content for answer in answers] == [whole.content] * 4


async def test_langchain_takes_a_call_round_by_a_tool_message(langchain: ChatOpenAI, says, backend, tokenizer) -> None:
    @tool
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        return f"rain in {city}"

    says(OSLO)
    model = langchain.bind_tools([weather])
    question = HumanMessage("How is the weather in Oslo?")
    asked = await model.ainvoke([question])
    assert isinstance(asked, AIMessage) and not asked.invalid_tool_calls
    chunks = [chunk async for chunk in model.astream([question])]
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    for message in (asked, total):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", {"city": "Oslo"})]
    assert "<tool>weather</tool>" in prompt_of(backend, tokenizer)
    result = await weather.ainvoke(asked.tool_calls[0])
    assert isinstance(result, ToolMessage)
    says("Take an umbrella.")
    assert (await model.ainvoke([question, asked, result])).content == "Take an umbrella."
    identity = asked.tool_calls[0]["id"]
    shown = prompt_of(backend, tokenizer)
    assert f"<call>{identity}:weather:Oslo</call>" in shown and f"<tool>rain in Oslo{identity}" in shown


async def test_langchain_gets_log_probabilities_and_raises_the_clients_errors(langchain: ChatOpenAI, says) -> None:
    says("Two.")
    found = await langchain.bind(logprobs=True, top_logprobs=1).ainvoke("One and one?")
    assert found.response_metadata["logprobs"]["content"][0]["logprob"] == -0.25
    with pytest.raises(openai.BadRequestError, match="top_p"):
        await langchain.bind(top_p=7).ainvoke("x")
