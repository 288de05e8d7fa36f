"""Routes, errors of HTTP itself, request ids, health."""

from __future__ import annotations

import json

import openai
import pytest

from sgray.errors import OverloadedError, QueueFullError

pytestmark = pytest.mark.anyio

POSTS = ["/v1/chat/completions", "/v1/completions", "/generate"]
OPENAI = POSTS[:2]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "raw",
    [b'{"model": ', b"", b"  ", b"[]", b'"x"', b"null", b"1", b'{"a":"\xff"}', b"[" * 100_000, b"9" * 5000],
)
async def test_pub_110_a_body_that_is_no_json_object_is_a_400_in_openai_shape(api, path, raw):
    response = await api.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
async def test_pub_110_a_good_body_of_another_content_type_is_refused(api, content_type):
    raw = json.dumps(api.body("/v1/chat/completions"))
    response = await api.http.post("/v1/chat/completions", content=raw, headers={"content-type": content_type})
    assert response.status_code == 400
    assert "Content-Type" in response.text or "harset" in response.text


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
async def test_json_by_another_spelling_is_accepted(api, content_type):
    raw = json.dumps(api.body("/v1/chat/completions"))
    response = await api.http.post("/v1/chat/completions", content=raw, headers={"content-type": content_type})
    assert response.status_code == 200


async def test_a_body_without_a_content_type_is_taken_as_json(api):
    raw = json.dumps(api.body("/v1/completions"))
    assert (await api.http.post("/v1/completions", content=raw)).status_code == 200


@pytest.mark.parametrize("path", OPENAI)
async def test_pub_111_an_unknown_model_is_a_404_also_when_streaming(api, client, path):
    error = await api.refused(path, 404, model="does-not-exist")
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "model_not_found", "model")
    assert "does-not-exist" in error["message"]
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="does-not-exist", prompt="x")


async def test_pub_111_an_unknown_model_is_not_among_the_models(api, client):
    response = await api.http.get("/v1/models/does-not-exist")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("does-not-exist")


async def test_the_served_model_is_listed_and_found(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["smollm2-135m-instruct"]
    assert (await client.models.retrieve(models.data[0].id)).object == "model"


async def test_an_unknown_route_is_a_404_in_openai_shape(api):
    for path in ("/v1/nothing", "/page", "/v1/models/", "/v2/chat/completions"):
        response = await api.http.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_wrong_method_is_a_405_that_names_the_right_one(api):
    wrong = [
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/completions"),
        ("POST", "/health"),
    ]
    for method, path in wrong:
        response = await api.http.request(method, path)
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"
        assert response.headers["allow"]


async def test_a_body_above_the_limit_is_a_413(make_app, api):
    import httpx

    http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(max_body_bytes=2048)), base_url="http://test")

    async def in_parts():
        for _ in range(100):
            yield b" " * 100

    for content in (b" " * 3000, in_parts()):  # with a declared length, and in chunks without one
        response = await http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "2048" in response.json()["error"]["message"]
    assert (await http.post("/v1/completions", json=api.body("/v1/completions"))).status_code == 200


async def test_the_request_id_of_the_client_comes_back_if_it_is_sane(api):
    for path in ("/health", "/nothing", "/v1/completions"):
        response = await api.http.request("GET", path, headers={"x-request-id": "abc-123"})
        assert response.headers["x-request-id"] == "abc-123"
    for bad in ("x" * 129, "a b", ""):
        response = await api.http.get("/health", headers={"x-request-id": bad})
        assert response.headers["x-request-id"] not in (bad, "")


async def test_each_answer_has_its_own_request_id(api):
    responses = [await api.post("/v1/completions", stream=stream) for stream in (False, True, False)]
    ids = {response.headers["x-request-id"] for response in responses}
    assert len(ids) == 3


async def test_health_follows_the_backend_and_live_does_not(api, backend):
    assert [(await api.http.get(path)).status_code for path in ("/health", "/ready", "/live")] == [200, 200, 200]
    backend.is_ready = False
    assert [(await api.http.get(path)).status_code for path in ("/health", "/ready", "/live")] == [503, 503, 200]


async def test_an_overloaded_backend_is_a_503_with_retry_after(api, backend):
    backend.fail_after, backend.failure = 0, OverloadedError("queues are full")
    for path in POSTS:
        for stream in (False, True):
            response = await api.post(path, stream=stream)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "overloaded"


async def test_a_full_queue_is_a_429_that_says_when_to_come_again(api, backend):
    backend.fail_after, backend.failure = 0, QueueFullError("full", retry_after_s=7)
    for path in POSTS:
        for stream in (False, True):
            response = await api.post(path, stream=stream)
            assert (response.status_code, response.headers["retry-after"]) == (429, "7")
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "queue_full")


async def test_a_fault_of_the_program_is_a_500_without_its_inner_words(api, backend, caplog):
    backend.fail_after, backend.failure = 0, ZeroDivisionError("secret")
    for stream in (False, True):
        response = await api.post("/v1/completions", stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
    assert "secret" in caplog.text
