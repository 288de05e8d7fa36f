"""Chat completions: the answer's form, whole and streamed."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"


async def test_the_openai_client_reads_a_whole_answer(client, backend):
    answer = await client.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert answer.choices[0].message.content == ", a world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens == len(backend.requests[0].tokens) == 31
    assert answer.usage.total_tokens == 34


async def test_the_openai_client_reads_a_stream(client):
    stream = await client.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ", a world"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_pub_058_the_form_of_a_stream(api):
    events = await api.events(PATH)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all(event["choices"][0]["delta"].get("content") for event in events[1:-1])
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])


async def test_pub_056_n_choices_in_a_stream_with_usage(api, backend):
    backend.cached_tokens = 16
    events = await api.events(PATH, n=3, max_tokens=12, temperature=1, stream_options={"include_usage": True})
    choices = [choice for event in events for choice in event["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1, 2}
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 31,
        "completion_tokens": 36,
        "total_tokens": 67,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    for index in range(3):
        text = "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)
        assert text == ", a world" * 4


@pytest.mark.parametrize("options", [..., {}, {"include_usage": False}, {"include_usage": None}, None])
async def test_pub_057_no_usage_unless_asked_for(api, options):
    assert all("usage" not in event for event in await api.events(PATH, stream_options=options))


async def test_pub_057_usage_is_null_until_the_last_chunk(api):
    events = await api.events(PATH, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}])
async def test_pub_057_stream_options_belong_to_streams(api, options):
    response = await api.post(PATH, stream=False, stream_options=options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


async def test_pub_053_logprobs_without_alternatives(api):
    choice = (await api.answer(PATH, logprobs=True))["choices"][0]
    assert len(choice["logprobs"]["content"]) == 4
    assert all(entry["top_logprobs"] == [] for entry in choice["logprobs"]["content"])


async def test_pub_053_top_logprobs_need_logprobs(api):
    assert (await api.refused(PATH, top_logprobs=2))["param"] == "top_logprobs"


@pytest.mark.parametrize("value", [21, -1, 1000000, 2.5, True, "3", 10**400])
async def test_pub_054_top_logprobs_out_of_range(api, value):
    assert (await api.refused(PATH, logprobs=True, top_logprobs=value))["param"] == "top_logprobs"
    assert (await api.post(PATH)).status_code == 200


@pytest.mark.parametrize("width", [1, 4])
async def test_pub_051_streamed_logprobs_equal_whole_ones(api, backend, width):
    backend.width = width
    backend.script = [28, 10813, 178, 239, 230, 905]  # parts of characters, whose text comes late
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 30, "stop": ["never"]}
    whole = (await api.answer(PATH, **fields))["choices"][0]
    streamed = [choice for event in await api.events(PATH, **fields) for choice in event["choices"]]
    entries = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    assert len(entries) == 30
    assert all(entry["token"] in [other["token"] for other in entry["top_logprobs"]] for entry in entries)


async def test_the_end_tokens_logprobs_come_with_the_finish_of_a_stream(api, backend):
    backend.script = [28, 253, 2]
    whole = (await api.answer(PATH, logprobs=True, max_tokens=9))["choices"][0]
    streamed = [choice for event in await api.events(PATH, logprobs=True, max_tokens=9) for choice in event["choices"]]
    entries = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [",", " a", "<|im_end|>"]
    assert entries == whole["logprobs"]["content"]


async def test_pub_052_impossible_alternatives_are_left_out(api):
    choice = (await api.answer(PATH, logprobs=True, top_logprobs=10))["choices"][0]
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])


async def test_pub_055_bytes_join_to_the_content_though_tokens_are_parts_of_characters(api, backend):
    backend.script = [178, 239, 230, 905, 2]
    choice = (await api.answer(PATH, logprobs=True, max_tokens=9))["choices"][0]
    entries = choice["logprobs"]["content"]
    joined = bytes(byte for entry in entries for byte in entry["bytes"]).decode()
    assert joined == choice["message"]["content"] == "界 world"
    assert len(entries) == 5  # one a token, the end token too


async def test_pub_069_text_parts_reach_the_prompt(api, backend):
    answers = [
        await api.answer(PATH, messages=[{"role": "user", "content": content}])
        for content in ("Hi", [{"type": "text", "text": "Hi"}])
    ]
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [31, 31]
    assert backend.requests[0].tokens == backend.requests[1].tokens


@pytest.mark.parametrize("has_content", [True, False])
async def test_pub_070_an_assistant_message_with_tool_calls_needs_no_content(api, has_content):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":2}'}}
    assistant = {"role": "assistant", "tool_calls": [call]} | ({"content": None} if has_content else {})
    messages = [
        {"role": "user", "content": "2+2?"},
        assistant,
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "user", "content": "so?"},
    ]
    assert (await api.answer(PATH, messages=messages))["choices"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "wizard", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "colour": "red"}],
        [{"role": 5, "content": "x"}],
        [{"role": "assistant"}],
        [{"role": "assistant", "tool_calls": [5]}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "x"}}]}],
        [{"role": "tool", "content": "4"}],
        ["hi"],
        {"role": "user", "content": "hi"},
        "hi",
        ...,
        None,
    ],
)
async def test_pub_071_wrong_messages_name_messages(api, messages):
    assert (await api.refused(PATH, messages=messages))["param"] == "messages"


async def test_pub_071_an_assistant_message_alone_is_answered(api):
    assert await api.answer(PATH, messages=[{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize("text", ["OK!", "OK!\n", "OK! "])
async def test_pub_072_the_final_message_goes_on(api, backend, tokenizer, text):
    messages = [{"role": "user", "content": "Tell a joke"}, {"role": "assistant", "content": text}]
    await api.answer(PATH, messages=messages, continue_final_message=True, add_generation_prompt=False)
    await api.answer(PATH, messages=messages, continue_final_message=True)
    assert backend.requests[0].tokens == backend.requests[1].tokens
    assert tokenizer.decode(backend.requests[0].tokens, skip_special_tokens=False).endswith(f"assistant\n{text}")


async def test_a_final_message_goes_on_only_if_it_is_the_assistants(api):
    assert (await api.refused(PATH, continue_final_message=True))["param"] == "continue_final_message"
    messages = [{"role": "assistant", "content": "x"}]
    error = await api.refused(PATH, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


async def test_pub_076_an_image_is_refused_not_dropped(api):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = await api.refused(PATH, messages=[{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}])
    assert "image" in error["message"]


async def test_a_developer_message_is_a_system_message(api, backend):
    for role in ("system", "developer"):
        await api.answer(PATH, messages=[{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert backend.requests[0].tokens == backend.requests[1].tokens


async def test_a_message_that_the_client_got_from_us_can_be_sent_back(client, api):
    answer = await client.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    message = answer.choices[0].message.model_dump()
    messages = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "and?"}]
    assert await api.answer(PATH, messages=messages)
