"""What goes wrong on Anthropic's routes is told in Anthropic's shape, and raises its client's own errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from sgray.errors import EngineError, OverloadedError, QueueFullError, RequestTimeoutError
from sgray.protocol import Finish

pytestmark = pytest.mark.anyio
MODEL = "smollm2-135m-instruct"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
KEY = "sk-caller"


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"extra_body": {"temperature": 2}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"system": "x" * 3000}, anthropic.APIStatusError, "request_too_large"),
        ({"extra_headers": {"x-big": "x" * 20_000}}, anthropic.APIStatusError, "invalid_request_error"),
    ],
)
async def test_a_refusal_raises_the_clients_error_with_the_calls_id(make_app, on, backend, fields, error, kind):
    client = on(make_app(max_body_bytes=2000))
    with pytest.raises(error) as caught:
        await client.messages.create(**(BODY | fields))
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.body["request_id"] == caught.value.request_id
    assert not backend.requests


async def test_an_answer_has_the_calls_id(client):
    answer = await client.messages.create(**BODY, extra_headers={"x-request-id": "trace-7"})
    assert answer._request_id == "trace-7"


async def test_keys_open_in_either_header_and_a_wrong_one_is_an_authentication_error(make_app, on, tmp_path):
    (tmp_path / "keys").write_text(KEY)
    app = make_app(api_keys_file=str(tmp_path / "keys"))
    for options in ({"api_key": KEY}, {"api_key": None, "auth_token": KEY}):
        client = on(app, **options)
        assert (await client.messages.create(**BODY)).role == "assistant"
        assert (await client.messages.count_tokens(model=MODEL, messages=BODY["messages"])).input_tokens
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await on(app, api_key="wrong").messages.create(**BODY)
    assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("failure", "error", "kind"),
    [
        (OverloadedError("full"), "OverloadedError", "overloaded_error"),
        (QueueFullError("full"), "OverloadedError", "overloaded_error"),
        (EngineError("the step failed"), "InternalServerError", "api_error"),
        (RequestTimeoutError("too long"), "RequestTimeoutError", "timeout_error"),
        (ZeroDivisionError("x"), "InternalServerError", "api_error"),
        (Finish("abort"), "InternalServerError", "api_error"),
    ],
)
async def test_a_failure_has_its_type_before_and_in_a_stream(client, http, backend, failure, error, kind):
    backend.failure, backend.fail_after = failure, 0
    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**BODY, stream=stream)
        assert type(caught.value).__name__ == error
        assert caught.value.body["error"]["type"] == kind
    if error == "OverloadedError":
        assert int(caught.value.response.headers["retry-after"]) > 0
    backend.fail_after = 2
    found = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for event in await client.messages.create(**BODY, stream=True):
            found.append(event.type)
    assert found[0] == "message_start" and "message_stop" not in found
    assert caught.value.body["error"]["type"] == kind
    text = (await http.post("/v1/messages", json=BODY | {"stream": True})).text
    name, data = text.removesuffix("\n\n").rsplit("\n\n", 1)[1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["request_id"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/messages", 405), ("GET", "/v1/messages/batches", 404), ("POST", "/v1/messages/x", 404)],
)
async def test_the_routers_own_refusals_have_the_shape_too(http, method, path, status):
    response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.headers["request-id"]


async def test_other_routes_keep_openais_shape(http):
    response = await http.post("/v1/messagesx", json=BODY)
    assert set(response.json()) == {"error"} and "request-id" not in response.headers


async def test_headers_and_the_query_of_newer_clients_are_accepted(http, client):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2025-01-01"}
    assert (await http.post("/v1/messages?beta=true", json=BODY, headers=headers)).status_code == 200
    assert (await client.beta.messages.create(**BODY, betas=["x-2025-01-01"])).role == "assistant"


async def test_under_a_prefix_the_shape_is_the_same(make_app):
    transport = httpx.ASGITransport(make_app(), root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/llm/v1/messages", json=BODY | {"n": 1})).json()["type"] == "error"


async def test_calls_are_counted_by_their_routes(http):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert (await http.post(path, json={"model": MODEL})).status_code == 400
    text = (await http.get("/metrics")).text
    assert 'sgray:http_responses_total{route="/v1/messages",status="400"} 1.0' in text
    assert 'sgray:http_responses_total{route="/v1/messages/count_tokens",status="400"} 1.0' in text
