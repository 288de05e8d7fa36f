"""The description of the API, held beside what the application does."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from sgray.config import Config
from sgray.serve.openai.api_page import event_data
from sgray.serve.openai.app import ROUTES, create_app
from sgray.serve.openai.openapi import EVENT_STREAM

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "hi"}]
ANTHROPIC_TOOL = {"name": "add", "input_schema": {"type": "object"}}
LOGPROBS_FIELD = "message.output_text.logprobs"
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
CALLS = [
    (CHAT, {"stop": ["zz"], "user": "u", "metadata": {"a": "b"}}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}}),
    (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "temperature": None}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "store": False}),
    (TEXT, {"prompt": ["a", "b"], "n": 2, "logit_bias": {"28": 3.5}}),
    (TEXT, {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 2, "stop": "zz", "suffix": ""}),
    (NATIVE, {"sampling_params": {"max_new_tokens": 3, "stop": "zz"}, "rid": "a"}),
    (NATIVE, {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}], **LOGPROBS}),
    (NATIVE, {"text": ..., "input_ids": [5, 6], "return_logprob": True, "lora_path": ""}),
]


@pytest.fixture
async def described(http) -> dict[str, Any]:
    return (await http.get("/openapi.json")).json()


def check(described: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    """Raises where the value is not what the description says; references are into the description."""
    jsonschema.Draft202012Validator({**schema, "components": described["components"]}).validate(value)


def content_of(described: dict[str, Any], path: str, kind: str) -> dict[str, Any]:
    methods = described["paths"][path]
    return methods["post" if "post" in methods else "get"]["responses"]["200"]["content"][kind]


def body_of(described: dict[str, Any], path: str) -> dict[str, Any]:
    return described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


@pytest.mark.parametrize(("path", "fields"), CALLS)
async def test_good_bodies_answers_and_chunks_are_as_described(api, described, path, fields):
    plain = {name: value for name, value in fields.items() if name != "stream_options"}
    check(described, body_of(described, path), api.body(path, **fields))
    check(described, content_of(described, path, "application/json")["schema"], await api.answer(path, **plain))
    chunks = await api.events(path, **fields)
    assert chunks
    for chunk in chunks:
        check(described, event_data(content_of(described, path, EVENT_STREAM)), chunk)


async def test_answers_with_tools_and_reasoning_are_as_described(make_app, tokenizer, backend):
    app = make_app(tool_call_parser="qwen25", reasoning_parser="qwen3")
    backend.script = tokenizer.encode('<think>so</think>yes<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')
    backend.script.append(2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        described = (await http.get("/openapi.json")).json()
        body = {"model": Config().model_name, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
        check(described, body_of(described, CHAT), body)
        answer = (await http.post(CHAT, json=body)).json()
        assert answer["choices"][0]["message"].keys() >= {"tool_calls", "reasoning_content"}
        check(described, content_of(described, CHAT, "application/json")["schema"], answer)
        lines = (await http.post(CHAT, json=body | {"stream": True})).text.split("\n\n")
        for line in lines[:-2]:
            chunk = json.loads(line.removeprefix("data: "))
            check(described, event_data(content_of(described, CHAT, EVENT_STREAM)), chunk)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses",
            {"input": "hi", "tools": [{**TOOL["function"], "type": "function"}], "include": [LOGPROBS_FIELD]},
        ),
        (
            "/v1/messages",
            {"messages": HI, "max_tokens": 9, "thinking": {"type": "adaptive"}, "tools": [ANTHROPIC_TOOL]},
        ),
    ],
)
@pytest.mark.parametrize(
    "script", ['<think>so</think>yes<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "no"]
)
async def test_forms_of_other_apis_are_as_described(make_app, tokenizer, backend, path, body, script):
    app, body = make_app(tool_call_parser="qwen25", reasoning_parser="qwen3"), {"model": Config().model_name, **body}
    backend.script = [*tokenizer.encode(script), 2]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        described = (await http.get("/openapi.json")).json()
        check(described, body_of(described, path), body)
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        check(described, content_of(described, path, "application/json")["schema"], answer.json())
        schema = content_of(described, path, EVENT_STREAM)["schema"]
        blocks = (await http.post(path, json=body | {"stream": True})).text.removesuffix("\n\n").split("\n\n")
        for block in blocks:
            event = dict(line.split(": ", 1) for line in block.split("\n"))
            check(described, schema, event)
            check(described, event_data({"schema": schema}), json.loads(event["data"]))
        error = await http.post(path, json=body | {"model": "x"})
        about = described["paths"][path]["post"]["responses"][str(error.status_code)]["$ref"]
        shape = described["components"]["responses"][about.rpartition("/")[2]]["content"]["application/json"]["schema"]
        check(described, shape, error.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"model": Config().model_name, "messages": HI}),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}),
        ("/tokenize", {"prompt": ["a", "b c"], "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [[5], [6, 7]]}),
        ("/v1/models", None),
        (f"/v1/models/{Config().model_name}", None),
        ("/model_info", None),
        ("/server_info", None),
        ("/overview", None),
        ("/health_generate", None),
        ("/live", None),
    ],
)
async def test_other_answers_are_as_described(http, described, path, body):
    response = await (http.get(path) if body is None else http.post(path, json=body))
    assert response.status_code == 200, response.text
    template = path if path in described["paths"] else "/v1/models/{name}"
    if body is not None:
        check(described, body_of(described, path), body)
    check(described, content_of(described, template, "application/json")["schema"], response.json())


@pytest.mark.parametrize("fields", [{"temperature": 3}, {"unheard": 1}, {"messages": []}, {"suffix": "x"}, {"n": "1"}])
async def test_what_the_schema_refuses_is_refused(api, described, fields):
    with pytest.raises(jsonschema.ValidationError):
        check(described, body_of(described, CHAT), api.body(CHAT, **fields))
    error = await api.refused(CHAT, **fields)
    check(described, {"$ref": "#/components/schemas/ErrorAnswer"}, {"error": error})


async def test_keys_are_needed_where_the_description_says_so(tokenizer, backend, tmp_path):
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("caller\n")
    admin.write_text("boss\n")
    config = Config.parse({"api": {"api_keys_file": str(keys), "admin_keys_file": str(admin)}})
    transport = httpx.ASGITransport(create_app(config, tokenizer, backend))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        caller, boss = {"authorization": "Bearer caller"}, {"x-api-key": "boss"}
        assert (await http.get("/openapi.json")).status_code == 401
        described = (await http.get("/openapi.json", headers=caller)).json()
        for entry in ROUTES:
            for method in entry.methods:
                about = described["paths"][entry.path.replace(":path", "")][method.lower()]
                path, kinds = entry.path.replace("{name:path}", "x"), [set(one) for one in about["security"]]
                closed = (await http.request(method, path)).status_code == 401
                operators = (await http.request(method, path, headers=caller)).status_code == 403
                assert closed == bool(kinds)
                assert operators == ({"adminBearer"} in kinds)
                assert (await http.request(method, path, headers=boss)).status_code not in (401, 403)
