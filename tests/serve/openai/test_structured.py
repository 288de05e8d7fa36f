"""Structured answers of the real engine with the default model, all in this process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI

from sgray.config import Config
from sgray.engine.engine import Engine
from sgray.serve.openai.app import create_app
from tests.serve.openai.test_engine import LoopBackend

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def backend(model_dir) -> Iterator[LoopBackend]:
    values = {
        "model": {"model_path": str(model_dir), "device": "cpu", "dtype": "float32"},
        "memory": {"max_total_tokens": 2048},
    }
    backend = LoopBackend(Engine.load(Config.parse(values)))
    backend.loop.start()
    yield backend
    backend.loop.stop()


@pytest.fixture
def app(tokenizer, backend):
    return create_app(Config.parse({"api": {"tool_call_parser": "hermes"}}), tokenizer, backend)


def closed(**properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def response_format(schema) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


async def content(api, **fields) -> str:
    """The text of an answer, which is the same streamed; it must have come to its end."""
    whole, streamed = await api.texts(CHAT, **(GREEDY | fields))
    assert whole == streamed
    reason, _, text = whole.partition(":")
    assert reason == "stop", whole
    return text


SCHEMAS = {
    "pub_001": closed(v={"type": "integer", "maximum": 9, "minimum": 0}, next={"enum": [None]}),
    "pub_002": closed(low={"type": "integer"}, high={"$ref": "#/properties/low"}),
    "pub_005": {"enum": ["auto", False, 0, None, 1.5, [1], {"k": "v"}]},
    "pub_008": {"type": "string", "maxLength": 3},
    "pub_009": {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5},
    "pub_010": closed(s={"type": "string", "pattern": "\\d{3}", "maxLength": 12}),
    "pub_011": closed(m={"type": "string", "pattern": "^[^;]{1,20}$"}),
    "pub_012": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "pub_015": closed(t={"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 2, "maxItems": 2}),
    "pub_016": closed(score={"type": "integer"})
    | {"patternProperties": {"^x_": {"type": "boolean"}}, "maxProperties": 2},
    "pub_020": closed(s={"type": "string", "pattern": "^done\\!$"}),
}


@pytest.mark.parametrize("name", SCHEMAS)
async def test_an_answer_meets_its_schema(api, name):
    schema = SCHEMAS[name]
    text = await content(api, **response_format(schema), max_tokens=64)
    assert list(Draft202012Validator(schema).iter_errors(json.loads(text))) == []


async def test_pub_020_a_poem_is_refused_by_a_pattern(api):
    messages = [{"role": "user", "content": "Write a poem."}]
    assert json.loads(await content(api, **response_format(SCHEMAS["pub_020"]), messages=messages, max_tokens=40)) == {
        "s": "done!"
    }


async def test_pub_021_blanks_come_to_an_end(api):
    fields = response_format(closed(a={"type": "integer"})) | {"logit_bias": {"216": 100}}
    assert isinstance(json.loads(await content(api, **fields, max_tokens=64))["a"], int)


async def test_pub_022_a_minimum_of_tokens_adds_nothing_to_a_finished_value(api):
    assert await content(api, **response_format({"type": "boolean"}), min_tokens=32, max_tokens=64) in ("true", "false")


async def test_pub_024_thousands_of_values_hold_nobody_up(api):
    schema = {"enum": [f"item-{index:04d}-xxxxxxxxxxxxxxxxxxxx" for index in range(3000)]}
    first = asyncio.ensure_future(content(api, **response_format(schema), max_tokens=64))
    assert (await api.answer(CHAT, max_tokens=2))["usage"]["completion_tokens"] == 2
    assert json.loads(await first) in schema["enum"]
    assert json.loads(await content(api, **response_format(schema), max_tokens=64)) in schema["enum"]


async def test_pub_026_an_empty_regex_ends_at_once(api):
    assert await content(api, regex="", max_tokens=16) == ""


@pytest.mark.parametrize("seed", range(4))
async def test_pub_029_parts_of_characters_are_forced(api, seed):
    pattern = '\\["(苹果|橙子|葡萄|🦤)"\\]'
    text = await content(api, regex=pattern, temperature=float(seed > 0), seed=seed, max_tokens=40)
    assert re.fullmatch(pattern, text)


async def test_pub_030_a_hard_pattern_ends_and_stalls_nobody(api):
    for pattern in ("(x+x+)+y", "(a|b|ab)*c{1,900}"):
        hard = asyncio.ensure_future(api.post(CHAT, regex=pattern, max_tokens=8))
        assert (await api.post(CHAT, max_tokens=2)).status_code == 200
        assert (await hard).status_code in (200, 400)
    assert (await api.post(CHAT, regex="((a{1,99}){1,99}){1,99}")).status_code == 400


async def test_pub_031_and_pub_032_grammars_of_clients(api):
    grammar = 'root ::= list\nlist ::= list "," item | item\nitem ::= "x"'
    assert re.fullmatch("x(,x)*", (await api.texts(CHAT, **GREEDY, ebnf=grammar, max_tokens=9))[0].partition(":")[2])
    grammar = 'root ::= "[" item ("," item){1,3} "]"\nitem ::= "\\"" [^"\\\\\\x7F\\x00-\\x1F]{1,5} "\\""'
    assert 2 <= len(json.loads(await content(api, ebnf=grammar, max_tokens=60))) <= 4


async def test_a_constraint_goes_with_n_logprobs_and_stop(api):
    fields = response_format(closed(a={"type": "boolean"})) | {"temperature": 1.5, "max_tokens": 40}
    answer = await api.answer(CHAT, **fields, n=3, logprobs=True, top_logprobs=2)
    for choice in answer["choices"]:
        assert isinstance(json.loads(choice["message"]["content"])["a"], bool)
        assert choice["logprobs"]["content"]
    whole, streamed = await api.texts(CHAT, **GREEDY, regex="aaabbb", stop=["b"], max_tokens=9)
    assert whole == streamed == "stop:aaa"


async def test_other_forms_of_calls(api):
    texts = (await api.answer(TEXT, guided_choice=["ja", "nein"], max_tokens=5, **GREEDY))["choices"]
    assert texts[0]["text"] in ("ja", "nein")
    answers = await api.answer(
        NATIVE, text=["One", "Two"], sampling_params=[{"regex": "[0-9]{2}"}, {"ebnf": 'root ::= "ab"'}]
    )
    assert re.fullmatch("[0-9]{2}", answers[0]["text"]) and answers[1]["text"] == "ab"


def tool(schema, name: str = "get_time") -> dict:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TIME = closed(tz={"type": "string", "enum": ["UTC", "CET"]})


async def test_pub_083_a_demanded_call_is_made(api):
    fields = {"tools": [tool(TIME)], "tool_choice": "required", "max_tokens": 64} | GREEDY
    choice = (await api.answer(CHAT, **fields))["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    calls = choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        assert call["function"]["name"] == "get_time"
        assert json.loads(call["function"]["arguments"])["tz"] in ("UTC", "CET")
    events = await api.events(CHAT, **fields)
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "tool_calls"


async def test_pub_082_the_client_assembles_the_same_calls_from_a_stream(api, client: AsyncOpenAI):
    tools = [tool(TIME), tool(closed(n={"type": "integer", "minimum": 0, "maximum": 9}), "count")]
    fields = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What time is it?"}],
        "tools": tools,
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 96,
    }
    whole = (await client.chat.completions.create(**fields)).choices[0].message.tool_calls
    names, arguments, ids = {}, {}, {}
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if delta.index not in names:
                assert delta.id and delta.type == "function" and delta.function.name
                names[delta.index], ids[delta.index], arguments[delta.index] = delta.function.name, delta.id, ""
            else:
                assert delta.id is None and delta.function.name is None
            arguments[delta.index] += delta.function.arguments or ""
    assert list(names) == list(range(len(whole))) and len(set(ids.values())) == len(ids)
    assert [(call.function.name, call.function.arguments) for call in whole] == [
        (names[index], arguments[index]) for index in names
    ]


async def test_pub_084_a_call_that_is_cut_off_is_no_call(api):
    fields = {"tools": [tool(closed(s={"type": "string"}))], "tool_choice": "required", "max_tokens": 6} | GREEDY
    assert (await api.answer(CHAT, **fields))["choices"][0]["finish_reason"] == "length"
    events = await api.events(CHAT, **fields)
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "length"


async def test_pub_085_references_of_a_tool_are_its_own(api):
    items = {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 3}
    schema = closed(v=items) | {"$defs": {"x": {"enum": [1, 2]}}}
    fields = {"tools": [tool(schema)], "max_tokens": 64} | GREEDY
    message = (await api.answer(CHAT, **fields, tool_choice="required"))["choices"][0]["message"]
    for call in message["tool_calls"]:
        assert Draft202012Validator(schema).is_valid(json.loads(call["function"]["arguments"]))
    message = (await api.answer(CHAT, **fields | {"max_tokens": 8}, tool_choice="none"))["choices"][0]["message"]
    assert message["content"] and "tool_calls" not in message
