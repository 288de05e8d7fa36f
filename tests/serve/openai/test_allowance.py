"""What one key may use: calls in work, tokens a minute, what is given back, and what its answers say is left."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from sgray.config import Config
from sgray.errors import EngineError, OverloadedError, RateLimitError
from sgray.serve.openai.allowance import EXPECTED_ANSWER, Account, Limited
from sgray.serve.openai.app import CALL_ROUTES, create_app

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
PROMPT = 2  # tokens of the test's prompt
LIMITED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/v1/score"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Caller:
    """Calls of one key."""

    def __init__(self, app: Starlette, key: str = "one") -> None:
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        self.headers = {"authorization": f"Bearer {key}"}

    async def post(self, path: str = PATH, **fields: Any) -> httpx.Response:
        body = {"model": "smollm2-135m-instruct", "prompt": "Hello world", "max_tokens": 4} | fields
        return await self.http.post(path, json=body, headers=self.headers)

    async def left(self) -> int:
        """What the bucket holds, as a call tells that cannot be and so uses nothing."""
        response = await self.post(max_tokens=-1)
        assert response.status_code == 400
        return int(response.headers["x-ratelimit-remaining-tokens"])

    @asynccontextmanager
    async def running(self, backend: Any, **fields: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
        """A call that is in the engine; left, if it still runs, at the end."""
        before = len(backend.requests)
        task = asyncio.create_task(self.post(**fields))
        while len(backend.requests) == before:
            assert not task.done(), task.result().text
            await asyncio.sleep(0.001)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time by which buckets fill, which stands still unless a test moves it."""
    clock = Clock()
    monkeypatch.setattr(Limited.__init__, "__kwdefaults__", {"now": clock})
    return clock


@pytest.fixture
def make_limited(tokenizer, backend, clock, tmp_path: Path) -> Callable[..., Starlette]:
    """The app with the keys "one" and "two" and an operator's, and some limits."""
    (tmp_path / "api").write_text("one\ntwo\n")
    (tmp_path / "admin").write_text("operator\n")
    files = {"api_keys_file": str(tmp_path / "api"), "admin_keys_file": str(tmp_path / "admin")}

    def make(*, serve: dict[str, Any] | None = None, **api: Any) -> Starlette:
        return create_app(Config.parse({"api": files | api, "serve": serve or {}}), tokenizer, backend)

    return make


async def test_a_call_too_many_is_a_429_and_the_next_one_is_good(make_limited, backend):
    app = make_limited(max_requests_per_key=1)
    one, two, operator = Caller(app), Caller(app, "two"), Caller(app, "operator")
    backend.pause_s = 0.02
    async with one.running(backend) as first:
        for path in sorted(LIMITED):  # before the body is looked at
            refused = await one.post(path)
            assert refused.status_code == 429, path
        for other in (two, operator):
            assert (await other.post()).status_code == 200
        assert (await first).status_code == 200
    assert (await one.post()).status_code == 200
    error = (await _refused(one, backend)).json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("requests", "rate_limit_exceeded", None)
    assert "may have 1 at a time" in error["message"]


async def _refused(caller: Caller, backend: Any, **fields: Any) -> httpx.Response:
    async with caller.running(backend):
        response = await caller.post(**fields)
    assert response.status_code == 429
    return response


async def test_a_refusal_says_when_to_try_again_and_its_shape_is_the_apis(make_limited, backend):
    app = make_limited(max_requests_per_key=1)
    backend.pause_s = 0.05
    refused = await _refused(Caller(app), backend, path="/v1/messages")
    assert refused.json()["error"]["type"] == "rate_limit_error" and refused.headers["retry-after"] == "1"
    headers = {name: value for name, value in refused.headers.items() if name.startswith("x-ratelimit")}
    assert headers == {
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1s",
    }


@pytest.mark.parametrize("failure", [EngineError("broke"), OverloadedError("full")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_call_gives_its_place_and_its_tokens_back(make_limited, backend, failure, stream):
    app = make_limited(max_requests_per_key=1, max_tokens_per_minute_per_key=60)
    caller = Caller(app)
    backend.fail_after, backend.failure = 0, failure
    for _ in range(5):
        assert (await caller.post(stream=stream, max_tokens=50)).status_code == failure.status
    assert await caller.left() == 60


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_pays_for_what_was_made_and_no_more(make_limited, backend, stream):
    app = make_limited(max_requests_per_key=1, max_tokens_per_minute_per_key=6000)
    caller = Caller(app)
    backend.pause_s = 0.01
    async with caller.running(backend, stream=stream, max_tokens=500):
        while backend.num_drawn < 3:
            await asyncio.sleep(0.001)
        assert (await caller.post()).status_code == 429
    while backend.running:
        await asyncio.sleep(0.001)
    used = 6000 - await caller.left()
    assert PROMPT < used <= PROMPT + backend.num_drawn + 1 < 50
    assert (await caller.post()).status_code == 200


async def test_a_client_that_leaves_before_the_first_token_pays_nothing(make_limited, backend):
    caller = Caller(make_limited(max_tokens_per_minute_per_key=600))
    backend.pause_s = 30.0
    async with caller.running(backend, max_tokens=500):
        assert await caller.left() == 600 - 500 - PROMPT
    assert await caller.left() == 600


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_pays_for_what_it_used_not_for_what_it_may(make_limited, backend, stream):
    caller = Caller(make_limited(max_tokens_per_minute_per_key=600))
    backend.script = [28, 253, 2]  # the third ends it
    response = await caller.post(stream=stream, max_tokens=200)
    assert response.headers["x-ratelimit-limit-tokens"] == "600"
    told = int(response.headers["x-ratelimit-remaining-tokens"])
    assert told == 600 - PROMPT - 200  # what it may have, until it ends
    assert await caller.left() == 600 - PROMPT - 3


async def test_choices_share_a_prompt_and_pay_each_for_their_own(make_limited, backend):
    caller = Caller(make_limited(max_tokens_per_minute_per_key=600))
    assert (await caller.post(n=3, max_tokens=5)).status_code == 200
    assert await caller.left() == 600 - PROMPT - 15


@pytest.mark.parametrize(
    ("path", "body", "used"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, None),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "max_tokens": ...}, None),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, None),
        (
            "/generate",
            {"text": "Hello world", "sampling_params": {"max_new_tokens": 4}, "model": ..., "max_tokens": ...},
            6,
        ),
        ("/v1/score", {"query": "Hello", "items": [" world"], "label_token_ids": [100, 200], "max_tokens": ...}, 6),
    ],
)
async def test_every_limited_route_counts(make_limited, path, body, used):
    caller = Caller(make_limited(max_tokens_per_minute_per_key=60_000))
    fields = {"model": "smollm2-135m-instruct", "max_tokens": 4} | body
    raw = {name: value for name, value in fields.items() if value is not ...}
    response = await caller.http.post(path, json=raw, headers=caller.headers)
    assert response.status_code == 200, response.text
    usage = response.json().get("usage", {})
    told = sum(usage.get(name, 0) for name in ("input_tokens", "output_tokens")) or usage.get("total_tokens")
    spent = 60_000 - await caller.left()
    assert spent == (told if used is None else used) > 4


async def test_routes_that_compute_nothing_are_not_limited(make_limited, backend):
    assert {entry.path for entry in CALL_ROUTES if entry.is_limited} == LIMITED
    caller = Caller(make_limited(max_requests_per_key=1, max_tokens_per_minute_per_key=10))
    backend.pause_s = 0.05
    async with caller.running(backend):
        for path in ("/v1/models", "/metrics", "/server_info"):
            response = await caller.http.get(path, headers=caller.headers)
            assert response.status_code == 200
            assert not any(name.startswith("x-ratelimit") for name in response.headers)


async def test_an_empty_bucket_fills_again(make_limited, clock):
    caller = Caller(make_limited(max_tokens_per_minute_per_key=60))
    assert (await caller.post(max_tokens=50)).status_code == 200
    refused = await caller.post(max_tokens=20)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, str(PROMPT + 20 - 8))
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded") and "has 8 left" in error["message"]
    assert refused.headers["x-ratelimit-reset-tokens"] == "52s"
    clock.now += PROMPT + 20 - 8
    assert (await caller.post(max_tokens=20)).status_code == 200


def _limited(app: Starlette) -> Limited:
    """The layer itself; there once a call came."""
    layer: Any = app.middleware_stack
    while not isinstance(layer, Limited):
        layer = getattr(layer, "_app", None) or layer.app
    return layer


async def test_a_prompt_beyond_a_minutes_tokens_is_refused_without_a_time(make_limited):
    caller = Caller(make_limited(max_tokens_per_minute_per_key=4))
    refused = await caller.post(prompt="one two three four five six")
    assert refused.status_code == 429 and "retry-after" not in refused.headers
    assert "shorten the prompt" in refused.json()["error"]["message"]
    assert (await caller.post(max_tokens=100)).status_code == 200  # with a full bucket alone


async def test_openais_client_sees_a_rate_limit_and_tries_again(make_limited, backend):
    app = make_limited(max_requests_per_key=1)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    one = openai.AsyncOpenAI(base_url="http://test/v1", api_key="one", http_client=http, max_retries=0)
    backend.pause_s = 0.1
    async with Caller(app).running(backend):
        with pytest.raises(openai.RateLimitError) as caught:
            await one.completions.create(model="smollm2-135m-instruct", prompt="hi", max_tokens=2)
    assert caught.value.code == "rate_limit_exceeded"
    patient = one.with_options(max_retries=3)
    async with Caller(app).running(backend):
        answer = await patient.completions.create(model="smollm2-135m-instruct", prompt="hi", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"


async def test_without_keys_nobody_is_limited(make_app, backend):
    app = make_app(max_requests_per_key=1, max_tokens_per_minute_per_key=1)
    backend.pause_s = 0.02
    async with Caller(app).running(backend):
        response = await Caller(app).post()
    assert response.status_code == 200 and "x-ratelimit-limit-requests" not in response.headers


async def test_without_limits_nothing_is_told(make_limited):
    response = await Caller(make_limited()).post()
    assert response.status_code == 200 and not any(name.startswith("x-ratelimit") for name in response.headers)


@pytest.mark.parametrize(("num_ingresses", "share"), [("auto", 10), (3, 3), (4, 2), (40, 1)])
async def test_each_ingress_grants_its_share(make_limited, num_ingresses, share):
    serve = {"num_ingress_replicas": num_ingresses}
    app = make_limited(serve=serve, max_requests_per_key=10, max_tokens_per_minute_per_key=10)
    headers = (await Caller(app).post(max_tokens=1)).headers
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == (str(share), str(share))


async def test_a_key_leaves_no_trace_but_its_digest_and_idle_accounts_are_dropped(make_limited, clock):
    app = make_limited(max_tokens_per_minute_per_key=60)
    for key in ("one", "two"):
        assert (await Caller(app, key).post()).status_code == 200
    limited = _limited(app)
    assert len(limited._accounts) == 2 and all(re.fullmatch("[0-9a-f]{64}", name) for name in limited._accounts)
    clock.now += 60
    await Caller(app, "operator").post()
    assert len(limited._accounts) == 1


async def test_long_answers_are_paid_for_by_the_calls_after_them(clock):
    account = Account(None, 2000, clock)
    account.enter()
    taken = account.take(100, EXPECTED_ANSWER)
    assert taken == 100 + EXPECTED_ANSWER
    account.leave(taken, 5000)
    with pytest.raises(RateLimitError) as caught:
        account.enter()
    assert caught.value.retry_after_s == 91  # 3001 tokens at 2000 a minute
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert account.headers()["x-ratelimit-reset-tokens"] == "2m30s"
    clock.now += 1e6
    assert account.is_fresh and account.headers()["x-ratelimit-remaining-tokens"] == "2000"


@pytest.mark.parametrize(("milliseconds", "text"), [(0, "0s"), (20, "20ms"), (1500, "1.5s"), (119_995, "2m0s")])
async def test_times_are_written_as_openai_does(clock, milliseconds, text):
    account = Account(None, 60_000, clock)
    account.enter()
    account.leave(0, milliseconds)  # a token a millisecond comes back
    assert account.headers()["x-ratelimit-reset-tokens"] == text


async def test_nothing_is_lost_among_many_callers(make_limited, backend):
    app = make_limited(max_requests_per_key=3, max_tokens_per_minute_per_key=10**9)
    backend.pause_s = 0.001
    caller = Caller(app)
    answers = await asyncio.gather(*(caller.post(stream=index % 2 == 0, n=1 + index % 3) for index in range(60)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 3
    assert all(json.loads(answer.text)["error"] for answer in answers if answer.status_code == 429)
    used = sum(PROMPT + 4 * (1 + index % 3) for index, status in enumerate(statuses) if status == 200)
    assert 10**9 - used <= await caller.left() <= 10**9
    account = next(iter(_limited(app)._accounts.values()))
    assert account._num_in_work == 0
