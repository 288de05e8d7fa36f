"""Without a tokenizer ids come in and ids go out; whatever needs text is refused by its name."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette

from sgray.config import Config
from sgray.serve.openai.app import create_app
from sgray.text.token_ids import TokenIds

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NATIVE = "/generate"
IDS = [28, 253, 905, 28]  # the scripted answer


@pytest.fixture
def app(backend) -> Starlette:
    return create_app(Config(), TokenIds(), backend)


async def test_a_completion_brings_ids_and_an_empty_text(api, backend):
    answer = await api.answer(COMPLETIONS, prompt=[5, 6, 7])
    assert backend.requests[0].tokens == [5, 6, 7]
    assert answer["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "token_ids": IDS}
    ]
    assert answer["usage"]["completion_tokens"] == 4


async def test_every_step_of_a_stream_brings_its_ids(api):
    events = await api.events(COMPLETIONS, prompt=[5, 6, 7])
    assert [event["choices"][0]["token_ids"] for event in events] == [[token] for token in IDS]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]


async def test_the_end_token_ends_and_is_among_the_ids(api, backend):
    backend.script = [28, 2]
    choice = (await api.answer(COMPLETIONS, prompt=[5]))["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([28, 2], "stop")


async def test_several_prompts_keep_their_ids_apart(api):
    choices = (await api.answer(COMPLETIONS, prompt=[[5], [6]], n=2))["choices"]
    assert [(choice["index"], choice["token_ids"]) for choice in choices] == [(index, IDS) for index in range(4)]


async def test_logprobs_name_tokens_by_id(api):
    logprobs = (await api.answer(COMPLETIONS, prompt=[5], logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in IDS]
    assert len(logprobs["token_logprobs"]) == 4


async def test_the_native_form_brings_output_ids(api):
    native = await api.answer(NATIVE, text=..., input_ids=[5, 6])
    assert (native["text"], native["output_ids"], native["meta_info"]["completion_tokens"]) == ("", IDS, 4)
    chunks = await api.events(NATIVE, text=..., input_ids=[5, 6])
    assert [chunk["output_ids"] for chunk in chunks] == [IDS[: count + 1] for count in range(4)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "Hello"}, "prompt"),
        (COMPLETIONS, {"prompt": ["Hello", "world"]}, "prompt"),
        (COMPLETIONS, {"prompt": [5], "stop": "x"}, "stop"),
        (COMPLETIONS, {"prompt": [5], "echo": True}, "echo"),
        (CHAT, {}, "messages"),
        (NATIVE, {"text": "Hello"}, "text"),
        (NATIVE, {"text": ..., "input_ids": [5], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop"),
    ],
)
async def test_what_needs_text_is_refused_by_its_name(api, backend, path, fields, param):
    error = await api.refused(path, **fields)
    assert error["param"] == param
    assert "send token ids" in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/responses", {"input": "hi"}, "'input'"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, "'messages'"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}, "'messages'"),
    ],
)
async def test_other_forms_of_chat_need_text_too(http: httpx.AsyncClient, backend, path, fields, place):
    response = await http.post(path, json={"model": backend.info.model_name} | fields)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert place in message and "send token ids" in message
    assert backend.requests == []


async def test_models_and_metrics_are_served_as_ever(http: httpx.AsyncClient):
    assert (await http.get("/v1/models")).status_code == 200
    assert (await http.get("/metrics")).status_code == 200
