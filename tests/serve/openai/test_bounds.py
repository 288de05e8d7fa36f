"""Every limit of the border: what is at it passes, what is one beyond gets a 4xx that names the limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sgray.config import ApiConfig
from sgray.protocol import MAX_END_IDS, MAX_LOGIT_BIASES
from sgray.serve.openai.bounds import MAX_HEADER_BYTES, MAX_URL_BYTES
from sgray.serve.openai.schemas import MAX_TOP_LOGPROBS

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
SIGNS = 4  # a header line's colon, space and end


def over(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def padded(http: httpx.AsyncClient, num_bytes: int) -> dict[str, str]:
    """A header that brings all headers of a call to this many bytes."""
    given = httpx.Headers({**http.headers, "host": "test", "x-padding": ""}).raw
    return {"x-padding": "x" * (num_bytes - sum(len(name) + len(value) + SIGNS for name, value in given))}


async def test_headers_have_a_limit_together(make_app):
    http, limit = over(make_app()), MAX_HEADER_BYTES
    assert (await http.get("/v1/models", headers=padded(http, limit))).status_code == 200
    response = await http.get("/v1/models", headers=padded(http, limit + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
    assert str(limit) in response.json()["error"]["message"]
    assert response.headers["x-request-id"]


async def test_a_url_has_a_limit(make_app):
    http, limit = over(make_app()), MAX_URL_BYTES
    rest = limit - len("/v1/models")
    for url in (f"/v1/models?{'q' * rest}", f"/v1/models/{'m' * (rest - 1)}"):
        assert (await http.get(url)).status_code in (200, 404)
        response = await http.get(url + "x")
        assert (response.status_code, response.json()["error"]["code"]) == (414, "url_too_long")
        assert str(limit) in response.json()["error"]["message"]


async def test_a_body_has_a_limit(make_app, api):
    http = over(make_app(max_body_bytes=1024))
    raw = json.dumps(api.body(TEXT)).encode()
    assert (await http.post(TEXT, content=raw + b" " * (1024 - len(raw)))).status_code == 200
    response = await http.post(TEXT, content=raw + b" " * (1025 - len(raw)))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("limit", [8, ApiConfig().max_json_depth])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":', "}")])
async def test_a_body_is_nested_in_so_many_levels_at_most(make_app, api, limit, opened, closed):
    http = over(make_app(max_json_depth=limit))

    async def answer(depth: int) -> httpx.Response:
        nested = opened * (depth - 1) + "1" + closed * (depth - 1)  # the body itself is a level
        raw = json.dumps(api.body(TEXT, prompt="PROMPT")).replace('"PROMPT"', nested)
        return await http.post(TEXT, content=raw)

    for depth, is_deep in ((limit, False), (limit + 1, True), (900, True), (100_000, True)):
        error = (await answer(depth)).json()["error"]
        assert ("levels" in error["message"]) == is_deep, depth
        assert error["type"] == "invalid_request_error"
        assert not is_deep or str(limit) in error["message"]


async def test_a_text_full_of_brackets_is_not_deep(api):
    assert await api.answer(TEXT, prompt="[" * 200 + "{" * 200)
    assert await api.answer(TEXT, prompt=[[28]] * 100)


@pytest.mark.parametrize(
    ("leaf", "limit", "path", "field", "fields"),
    [
        ("max_messages", 3, CHAT, "messages", lambda n: {"messages": [{"role": "user", "content": "x"}] * n}),
        (
            "max_content_parts",
            None,
            CHAT,
            "messages",
            lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * n}]},
        ),
        ("max_stop", None, CHAT, "stop", lambda n: {"stop": ["q"] * n}),
        ("max_stop", None, TEXT, "stop", lambda n: {"stop": ["q"] * n}),
        ("max_stop_chars", None, TEXT, "stop", lambda n: {"stop": "q" * n}),
        ("max_stop_chars", 5, CHAT, "stop", lambda n: {"stop": ["a", "é" * n]}),
        ("max_stop_chars", 5, NATIVE, "sampling_params.stop", lambda n: {"sampling_params": {"stop": "q" * n}}),
        ("max_n", None, CHAT, "n", lambda n: {"n": n, "max_tokens": 1}),
        ("max_n", 2, TEXT, "n", lambda n: {"n": n, "best_of": n}),
        ("max_n", 2, NATIVE, "sampling_params.n", lambda n: {"sampling_params": {"n": n, "max_new_tokens": 1}}),
        ("max_batch", 3, TEXT, "prompt", lambda n: {"prompt": ["x"] * n}),
        ("max_batch", None, TEXT, "prompt", lambda n: {"prompt": ["x"] * n, "max_tokens": 1}),
    ],
)
async def test_a_leaf_is_the_limit(
    make_app, api, leaf: str, limit: int | None, path: str, field: str, fields: Callable[[int], dict[str, Any]]
):
    most = getattr(ApiConfig(), leaf) if limit is None else limit
    http = over(make_app(**({} if limit is None else {leaf: limit})))
    assert (response := await http.post(path, json=api.body(path, **fields(most)))).status_code == 200, response.text
    response = await http.post(path, json=api.body(path, **fields(most + 1)))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert str(most) in error["message"]


@pytest.mark.parametrize(
    ("most", "path", "fields"),
    [
        (MAX_LOGIT_BIASES, CHAT, lambda n: {"logit_bias": {str(token): 1 for token in range(n)}}),
        (MAX_END_IDS - 1, TEXT, lambda n: {"stop_token_ids": list(range(n))}),  # the model itself has one end id
        (MAX_TOP_LOGPROBS, TEXT, lambda n: {"logprobs": n}),
        (MAX_TOP_LOGPROBS, CHAT, lambda n: {"logprobs": True, "top_logprobs": n}),
        (256, CHAT, lambda n: {"cache_salt": "s" * n}),
    ],
)
async def test_what_one_sequence_may_ask_for_is_what_the_engine_has_room_for(api, most, path, fields):
    assert await api.answer(path, **fields(most))
    error = await api.refused(path, **fields(most + 1))
    assert error["param"] == list(fields(1))[-1]
    assert str(most) in error["message"]


async def test_a_stop_token_given_often_counts_once(api, backend):
    await api.answer(TEXT, stop_token_ids=[9] * 500)
    assert backend.requests[0].sampling.stop_token_ids == (9,)


async def test_prompts_times_choices_have_a_limit_of_their_own(make_app, api):
    http = over(make_app(max_n=4, max_batch=6))
    for prompts, n, status in ((3, 2, 200), (2, 3, 200), (6, 1, 200), (2, 4, 400), (6, 2, 400)):
        response = await http.post(TEXT, json=api.body(TEXT, prompt=["x"] * prompts, n=n, max_tokens=1))
        assert response.status_code == status
    assert response.json()["error"]["param"] == "n"


async def test_more_messages_than_by_default_are_refused_before_they_are_rendered(api):
    most = ApiConfig().max_messages
    for count, code in ((most, "context_length_exceeded"), (most + 1, "invalid_value")):
        assert (await api.refused(CHAT, messages=[{"role": "user", "content": ""}] * count))["code"] == code
