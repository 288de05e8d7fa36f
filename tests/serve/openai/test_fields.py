"""Every field of a body is honoured or refused by its name."""

from __future__ import annotations

import json
import re
import time

import openai
import pytest

from sgray.protocol import MAX_END_IDS, MAX_LOGIT_BIASES
from sgray.serve.openai.schemas import UNSUPPORTED

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT])


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_a_field_that_cannot_be_honoured_is_refused_unless_it_asks_for_nothing(api, name):
    error = await api.refused(CHAT, **{name: {"some": "thing"}})
    assert error["param"] == name
    for harmless in (*UNSUPPORTED[name][0], None):
        assert await api.answer(CHAT, **{name: harmless})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": {"role": "user", "content": "hi"}}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": "5x"}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"tools": {}}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"stream_options": {"include_usage": "yes"}, "stream": True}, "stream_options.include_usage"),
        ({"stream_options": {"include_use": True}, "stream": True}, "stream_options.include_use"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        ({"stream_options": [], "stream": True}, "stream_options"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"model": ...}, "model"),
        ({"logprobs": 1}, "logprobs"),
        ({"user": 5}, "user"),
        ({"metadata": "x"}, "metadata"),
        ({"seed": "1"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"temprature": 1}, "temprature"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
async def test_pub_112_a_wrong_value_is_refused_by_the_fields_name(api, fields, param):
    found = [await api.post(CHAT, **fields)] if "stream" in fields else [None]
    error = found[0].json()["error"] if found[0] is not None else await api.refused(CHAT, **fields)
    assert error["param"].startswith(param)
    assert error["type"] == "invalid_request_error"
    assert not re.search("pydantic|validation|Input should", error["message"])


async def test_an_unknown_field_brings_the_nearest_known_one(api):
    assert "'temperature'" in (await api.refused(CHAT, temprature=1))["message"]
    assert "'include_usage'" in (await api.post(CHAT, stream=True, stream_options={"include_use": True})).text


@BOTH
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0, 2),
        ("top_p", 0, 1),
        ("frequency_penalty", -2, 2),
        ("presence_penalty", -2, 2),
        ("min_p", 0, 1),
        ("repetition_penalty", 0.01, 2),
    ],
)
async def test_pub_113_numbers_have_a_range_and_are_finite(api, path, name, low, high):
    for good in (low, high):
        assert await api.answer(path, **{name: good})
    for bad in (low - 0.1, high + 0.1, float("nan"), float("inf"), float("-inf"), 10**400, True, "1", [1]):
        assert (await api.refused(path, **{name: bad}))["param"] == name
    raw = json.dumps(api.body(path, **{name: "1e999"})).replace('"1e999"', "1e999")
    response = await api.http.post(path, content=raw)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert (await api.post(path)).status_code == 200


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_pub_113_nan_is_refused_wherever_it_stands(api, value):
    assert (await api.refused(CHAT, logit_bias={"5": value}))["param"] == "logit_bias"
    assert await api.refused(CHAT, metadata={"a": value})
    assert await api.refused(CHAT, messages=[{"role": "user", "content": value}])
    assert await api.refused(TEXT, prompt=[value])


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"type": "json_schema", "schema": {"type": "object"}}, "json_schema.schema"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "xml"}, "xml"),
        ("json", "object"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": None}}, "schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "name"),
        ({"type": "json_schema", "json_schema": []}, "json_schema"),
        ({}, "type"),
        ({"type": ["text"]}, "type"),
        ({"type": "text", "schema": {}}, "schema"),
        ({"type": "json_object", "schema": {}}, "schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}, "#/not"),
    ],
)
@BOTH
async def test_pub_114_a_response_format_is_checked_and_never_ignored(api, path, value, word):
    error = await api.refused(path, response_format=value)
    assert error["param"].startswith("response_format")
    assert word in error["message"]


@BOTH
async def test_pub_114_plain_text_is_a_response_format(api, path):
    assert await api.answer(path, response_format={"type": "text"})


@BOTH
@pytest.mark.parametrize("n", [0, -1, 1.5, "2", 5000000, 129, True, 10**400])
async def test_pub_061_a_wrong_n_is_refused_at_once(api, backend, path, n):
    start = time.monotonic()
    assert (await api.refused(path, n=n))["param"] == "n"
    assert time.monotonic() - start < 1
    assert not backend.requests


@BOTH
async def test_pub_060_the_seed_reaches_every_choice(api, backend, path):
    await api.answer(path, seed=5, n=3)
    assert sorted(request.sampling.seed for request in backend.requests) == [5, 6, 7]
    backend.requests.clear()
    await api.answer(path, n=2)
    assert [request.sampling.seed for request in backend.requests] == [None, None]
    backend.requests.clear()
    await api.answer(path, seed=2**63 - 1, n=2)
    await api.answer(path, seed=-(2**63))
    assert all(0 <= request.sampling.seed < 2**63 for request in backend.requests)


@BOTH
@pytest.mark.parametrize(
    ("given", "top_k"), [(0, 0), (-1, 0), (1, 1), (49151, 49151), (49152, 0), (9999999, 0), (10**400, 0)]
)
async def test_pub_109_top_k_without_limit(api, backend, path, given, top_k):
    await api.answer(path, top_k=given)
    assert backend.requests[0].sampling.top_k == top_k


async def test_a_nucleus_of_nothing_is_the_best_token(api, backend):
    await api.answer(CHAT, top_p=0, top_k=50)
    assert (backend.requests[0].sampling.top_k, backend.requests[0].sampling.top_p) == (1, 1.0)


async def test_every_sampling_field_reaches_the_engine(api, backend):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {"5": -3, "6": 4.5},
        "stop_token_ids": [9],
        "min_tokens": 1,
        "seed": 3,
    }
    for path in (CHAT, TEXT):
        await api.answer(path, **fields, ignore_eos=True, cache_salt="me", priority=-4, max_tokens=6)
        request = backend.requests[-1]
        sampling = request.sampling
        assert {name: getattr(sampling, name) for name in fields if hasattr(sampling, name)} == {
            name: value for name, value in fields.items() if name != "min_tokens"
        } | {"logit_bias": {5: -3.0, 6: 4.5}, "stop_token_ids": (9,)}
        assert (sampling.min_new_tokens, sampling.max_new_tokens, sampling.ignore_eos) == (1, 6, True)
        assert (request.salt, request.priority) == ("me", -4)


async def test_defaults_are_the_references(api, backend):
    await api.answer(CHAT)
    sampling = backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, -1)


@pytest.mark.parametrize(
    "value",
    [
        {"49152": 1},
        {"-1": 1},
        {"a": 1},
        {"1.5": 1},
        {"": 1},
        {"٣": 1},
        {"9" * 5000: 1},
        {"5": 101},
        {"5": -101},
        {"5": "1"},
        {"5": True},
        {"5": None},
        {"5": 10**400},
        {str(token): 1 for token in range(MAX_LOGIT_BIASES + 1)},
        [5],
        "5",
    ],
)
@BOTH
async def test_a_wrong_logit_bias_is_refused(api, path, value):
    assert (await api.refused(path, logit_bias=value))["param"] == "logit_bias"


@pytest.mark.parametrize("value", [[49152], [-1], ["a"], [True], [1.5], 5, list(range(MAX_END_IDS))])
async def test_wrong_stop_tokens_are_refused(api, value):
    assert (await api.refused(CHAT, stop_token_ids=value))["param"] == "stop_token_ids"


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_salt", "x" * 257), ("cache_salt", "\ud800"), ("cache_salt", 5), ("priority", 2**31), ("priority", 1.5)],
)
async def test_wrong_salts_and_priorities_are_refused(api, name, value):
    assert (await api.refused(CHAT, **{name: value}))["param"] == name


async def test_fields_that_change_nothing_are_accepted(api, backend):
    for fields in (
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "auto"},
        {"parallel_tool_calls": True},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "k"},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"modalities": ["text"]},
        {"stop": []},
        {"stop": None},
        {"seed": None, "n": None, "temperature": None, "stream": None, "tools": None},
    ):
        assert await api.answer(CHAT, **fields)
    assert len({str(request.sampling) for request in backend.requests}) == 1


async def test_the_openai_client_sees_a_bad_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="smollm2-135m-instruct", prompt="x", temperature=3)
    assert caught.value.param == "temperature"


async def test_extra_body_of_the_openai_client_reaches_the_engine(client, backend):
    extra = {"top_k": 3, "ignore_eos": True}
    await client.completions.create(model="smollm2-135m-instruct", prompt="x", extra_body=extra)
    assert backend.requests[0].sampling.top_k == 3


async def test_a_message_with_odd_names_can_be_written(api):
    response = await api.http.post(CHAT, content=b'{"model": "\\ud800", "messages": [{"role":"user","content":"x"}]}')
    assert response.status_code == 404
    response = await api.http.post(CHAT, content=b'{"\\ud800": 1}')
    assert response.status_code == 400
