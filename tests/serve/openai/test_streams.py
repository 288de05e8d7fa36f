"""Streams and waits on a raw ASGI connection: failures midway, clients that leave, slow readers, time limits."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
from starlette.applications import Starlette

from sgray.errors import EngineError, ReplicaLostError
from sgray.protocol import ErrorInfo, Finish

pytestmark = pytest.mark.anyio
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


class Connection:
    """One HTTP request on the app, whose client can stop reading and can leave."""

    def __init__(self, app: Starlette, path: str, body: dict) -> None:
        raw = json.dumps(body).encode()
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
        }
        self._incoming: asyncio.Queue = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self.sent: list[dict] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.stop_after = 0
        self.task = asyncio.ensure_future(app(self.scope, self._incoming.get, self._send))

    async def _send(self, message: dict) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        if len(self.sent) == self.stop_after:
            self.may_send.clear()

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, num_messages: int) -> None:
        while len(self.sent) < num_messages:
            await asyncio.sleep(0.001)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


@pytest.mark.parametrize(
    "failure", [EngineError("broke"), Finish("error", error=ErrorInfo(500, "server_error", "broke"))]
)
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_pub_115_a_failure_before_the_first_token_is_a_status(api, backend, path, failure):
    backend.fail_after, backend.failure = 0, failure
    for stream in (False, True):
        response = await api.post(path, stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "broke"


FAILURES = [
    ReplicaLostError("the replica died"),
    Finish("error", error=ErrorInfo(500, "server_error", "the replica died", code="replica_lost")),
    ZeroDivisionError("secret"),
]


@pytest.mark.parametrize(
    ("path", "failure"),
    [(path, failure) for path in (CHAT, TEXT, NATIVE) for failure in FAILURES]
    + [(path, Finish("abort")) for path in (CHAT, TEXT)],  # the native form has a finish reason of its own for that
)
async def test_pub_115_a_failure_midway_is_the_streams_last_event(api, backend, path, failure):
    backend.fail_after, backend.failure = 3, failure
    response = await api.post(path, stream=True)
    assert response.status_code == 200
    lines = response.text.split("\n\n")
    last = json.loads(lines[-2].removeprefix("data: "))
    assert lines[-1] == ""
    assert set(last) == {"error"}
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text
    assert "secret" not in response.text
    assert (await api.post(path)).status_code == (503 if failure is FAILURES[0] else 500)


async def test_pub_115_the_openai_client_raises_on_a_failure_midway(client, backend):
    backend.fail_after, backend.failure = 3, ReplicaLostError("the replica died")
    stream = await client.chat.completions.create(
        model="smollm2-135m-instruct", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="the replica died"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("n", [1, 3])
async def test_one_failed_choice_ends_the_call_and_aborts_the_others(api, backend, n):
    backend.fail_after, backend.failure = 3, EngineError("broke")
    response = await api.post(CHAT, n=n, max_tokens=1000)
    assert response.status_code == 500
    assert not backend.running


async def test_a_stream_that_breaks_off_without_a_reason_is_an_error(api, backend):
    backend.script, backend.width = [], 1
    backend.failure = None
    backend._deltas = lambda request: _nothing()  # type: ignore[method-assign]
    assert (await api.post(CHAT)).status_code == 500


async def _nothing():
    return
    yield


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("n", [1, 3])
async def test_pub_090_a_client_that_leaves_a_stream_aborts_it(app, api, backend, path, n, caplog):
    backend.pause_s = 0.001
    limit = {"n": n, "max_tokens": 4000, "ignore_eos": True}
    if path == NATIVE:
        limit = {"sampling_params": {"n": n, "max_new_tokens": 4000}}
    connection = Connection(app, path, api.body(path, stream=True, **limit))
    await connection.until(4)
    assert len(backend.running) == n
    connection.leave()
    await asyncio.wait_for(connection.task, 1)
    assert not backend.running
    assert len(backend.aborted) == n
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("n", [1, 3])
async def test_pub_091_a_client_that_leaves_before_a_whole_answer_aborts_it(app, api, backend, path, n):
    backend.pause_s = 0.001
    limit = {"n": n, "max_tokens": 4000}
    if path == NATIVE:
        limit = {"sampling_params": {"n": n, "max_new_tokens": 4000}}
    connection = Connection(app, path, api.body(path, **limit))
    await asyncio.sleep(0.05)
    assert len(backend.running) == n
    connection.leave()
    await asyncio.wait_for(connection.task, 1)
    assert not backend.running
    assert len(backend.aborted) == n


async def test_a_client_that_leaves_before_the_first_token_aborts(app, api, backend):
    backend.pause_s = 60
    connection = Connection(app, CHAT, api.body(CHAT, stream=True))
    await asyncio.sleep(0.02)
    assert len(backend.running) == 1
    connection.leave()
    await asyncio.wait_for(connection.task, 1)
    assert not backend.running
    assert connection.status == 499


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_server_task_aborts_too(app, api, backend, stream):
    backend.pause_s = 0.001
    connection = Connection(app, CHAT, api.body(CHAT, stream=stream, max_tokens=4000, n=2))
    await asyncio.sleep(0.05)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert not backend.running


@pytest.mark.parametrize("timeout_s", [None, 60])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["cancel", "leave"])
async def test_a_call_that_ends_at_any_moment_leaves_nothing_behind(make_app, api, backend, timeout_s, n, stream, way):
    app = make_app(request_timeout_s=timeout_s)
    for num_turns in range(80):
        connection = Connection(app, CHAT, api.body(CHAT, stream=stream, n=n, max_tokens=4000))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if way == "cancel":
            connection.task.cancel()
        else:
            connection.leave()
        await asyncio.wait_for(asyncio.gather(connection.task, return_exceptions=True), 5)
        assert not backend.running, num_turns
    assert backend.num_drawn < 80 * 100 * n


async def test_a_client_that_leaves_while_it_sends_its_body_is_no_fault(app, api, caplog):
    connection = Connection(app, CHAT, api.body(CHAT))
    connection._incoming.get_nowait()
    connection._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    connection.leave()
    await asyncio.wait_for(connection.task, 1)
    assert connection.status == 499
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("n", [1, 4])
async def test_a_slow_reader_holds_the_backend_back(app, api, backend, n):
    connection = Connection(app, CHAT, api.body(CHAT, stream=True, n=n, max_tokens=4000))
    connection.stop_after = 6
    await connection.until(6)
    await asyncio.sleep(0.05)
    drawn = backend.num_drawn
    await asyncio.sleep(0.05)
    assert backend.num_drawn == drawn < 100
    connection.may_send.set()
    await asyncio.wait_for(connection.task, 20)
    assert connection.body.endswith(b"data: [DONE]\n\n")
    assert backend.num_drawn == 4000 * n


@pytest.mark.parametrize("n", [1, 2])
async def test_pub_131_a_time_limit_is_a_408_or_the_streams_last_event(make_app, api, backend, n):
    backend.pause_s = 0.01
    http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(request_timeout_s=0.2)), base_url="http://test")
    start = time.monotonic()
    whole = await http.post(CHAT, json=api.body(CHAT, max_tokens=4000, n=n))
    assert whole.status_code == 408
    assert whole.json()["error"]["code"] == "request_timeout"
    stream = await http.post(CHAT, json=api.body(CHAT, max_tokens=4000, n=n, stream=True))
    assert stream.status_code == 200
    assert json.loads(stream.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert "[DONE]" not in stream.text
    assert time.monotonic() - start < 2
    assert not backend.running
    assert len(backend.aborted) == 2 * n


async def test_pub_131_a_call_within_its_time_limit_is_complete(make_app, api):
    http = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(request_timeout_s=30)), base_url="http://test")
    assert (await http.post(CHAT, json=api.body(CHAT))).status_code == 200
    assert (await http.post(CHAT, json=api.body(CHAT, stream=True))).text.endswith("[DONE]\n\n")


async def test_pub_061_others_are_served_while_a_large_body_is_refused(api, backend):
    refused, served = await asyncio.gather(api.post(TEXT, prompt=[5] * 200_000), api.post(TEXT))
    assert (refused.status_code, served.status_code) == (400, 200)


async def test_events_arrive_one_by_one_over_a_socket(app, api, backend):
    """A real server and a real socket: the first event is read while the answer is still being made."""
    import uvicorn

    backend.pause_s = 0.01
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off"))
    task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    body = api.body(CHAT, stream=True, max_tokens=4000)
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
        http.stream("POST", CHAT, json=body) as response,
    ):
        async for line in response.aiter_lines():
            assert line.startswith("data: ")
            break
        assert len(backend.running) == 1
    for _ in range(200):
        if not backend.running:
            break
        await asyncio.sleep(0.01)
    assert not backend.running
    server.should_exit = True
    await task
