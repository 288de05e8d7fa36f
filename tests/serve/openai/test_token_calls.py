"""Texts to ids and back over HTTP."""

from __future__ import annotations

import json

import httpx
import pytest

from sgray.config import Config
from sgray.serve.openai.app import create_app
from sgray.text.token_ids import TokenIds

pytestmark = pytest.mark.anyio
TO_IDS = pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
TO_TEXT = pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
MESSAGES = [{"role": "user", "content": "hi"}]


async def answer(api, path, **body):
    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@TO_IDS
async def test_a_text_becomes_ids_with_their_count_and_the_models_length(api, path):
    told = await answer(api, path, prompt="Hello world")
    assert told == {"tokens": [19556, 905], "count": 2, "max_model_len": 8192}
    assert await answer(api, path, prompt="Hello world", model="smollm2-135m-instruct", add_special_tokens=False)
    told = await answer(api, path, prompt="Hello world", return_token_strs=True)
    assert told["token_strs"] == ["Hello", " world"]


@TO_IDS
async def test_several_texts_become_lists(api, path):
    told = await answer(api, path, prompt=["Hello world", "", "x" * 20_000], return_token_strs=True)
    assert (told["tokens"][:2], told["count"][:2]) == ([[19556, 905], []], [2, 0])
    assert told["count"][2] == len(told["tokens"][2]) > 1000
    assert "".join(told["token_strs"][2]) == "x" * 20_000


@TO_IDS
async def test_messages_become_exactly_the_ids_of_a_chat_call(api, backend, path):
    for fields in (
        {},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "A"}], "continue_final_message": True},
    ):
        told = await answer(api, path, **({"messages": MESSAGES} | fields))
        await api.answer("/v1/chat/completions", **fields)
        assert told["tokens"] == backend.requests[-1].tokens
        assert told["count"] == len(told["tokens"])
    asked = await answer(api, path, messages=MESSAGES)
    bare = await answer(api, path, messages=MESSAGES, add_generation_prompt=False)
    assert asked["tokens"][: bare["count"]] == bare["tokens"]
    assert bare["count"] < asked["count"]


@TO_TEXT
async def test_ids_become_text_under_both_names(api, path):
    told = await answer(api, path, tokens=[19556, 2, 905])
    assert told == {"text": "Hello world", "prompt": "Hello world"}
    told = await answer(api, path, tokens=[19556, 2, 905], skip_special_tokens=False)
    assert told["text"] == "Hello<|im_end|> world"
    assert (await answer(api, path, tokens=[[19556, 905], []]))["text"] == ["Hello world", ""]
    assert (await answer(api, path, tokens=[]))["text"] == ""


async def test_text_survives_the_way_to_ids_and_back(api):
    for text in ("a", "  two  spaces\n", "naïve 界🦤", "<|im_end|>"):
        tokens = (await answer(api, "/tokenize", prompt=text))["tokens"]
        assert (await answer(api, "/detokenize", tokens=tokens, skip_special_tokens=False))["text"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": ["a", 5]}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 257}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "tokens": [1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": [1], "skip_special_tokens": "no"}, "skip_special_tokens"),
    ],
)
async def test_pub_068_what_is_no_text_and_no_id_is_refused_by_its_name(api, path, body, param):
    response = await api.http.post(path, content=json.dumps(body))
    assert response.status_code == 400
    assert response.json()["error"]["param"].partition("[")[0].partition(".")[0] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_is_a_404(api, path):
    response = await api.http.post(path, json={"prompt" if path == "/tokenize" else "tokens": [], "model": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_without_a_tokenizer_there_is_no_text(backend):
    app = create_app(Config.parse({}), TokenIds(), backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/tokenize", {"messages": MESSAGES})):
            assert "skip_tokenizer_init" in (await http.post(path, json=body)).json()["error"]["message"]
        response = await http.post("/detokenize", json={"tokens": [1]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
