"""Two engines, and answers that go on at the other one when theirs is killed, stopped or sent away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from sgray.config import DEFAULT_MODEL

Deploy = Callable[..., Any]
Json = dict[str, Any]

SILENCE_S = 9.0  # more than a link bears

LINE = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 20}},
    "required": ["names"],
    "additionalProperties": False,
}
ROW = {"type": "json_schema", "json_schema": {"name": "row", "schema": LINE, "strict": True}}
PICK = {"type": "function", "function": {"name": "pick", "parameters": LINE}}


def calls() -> dict[str, tuple[str, Json]]:
    """One call of each kind, with answers of some fifty tokens."""

    def chat(text: str, **more: Any) -> tuple[str, Json]:
        messages = [{"role": "user", "content": text}]
        return "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 48} | more

    def text(prompt: str, **more: Any) -> tuple[str, Json]:
        return "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 48} | more

    return {
        "greedy": chat("Tell me a long story about a river.", ignore_eos=True),
        "seeded": text("The sea is", temperature=1, top_k=20, seed=11, ignore_eos=True),
        "penalised": text("One, two,", frequency_penalty=0.8, presence_penalty=0.3, ignore_eos=True),
        "scored": text("The best of all", logprobs=2, max_tokens=32, ignore_eos=True),
        "json": chat("Name twenty towns in JSON.", response_format=ROW),
        "several": text("My friend", n=2, temperature=1, top_k=20, seed=5, ignore_eos=True, max_tokens=32),
        "tool": chat("Pick twenty names.", tools=[PICK], tool_choice="required"),
        "cut": chat("Count: 1, 2, 3 and so on.", stop=["zebra"], min_tokens=40),
    }


CALLS = calls()


@dataclass
class Told:
    """What a caller was told, put together."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    usage: Json = field(default_factory=dict)
    num_events: int = 0

    def take(self, event: Json) -> None:
        assert "error" not in event, event
        self.num_events += 1
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta") or {}
            called = "".join(call["function"].get("arguments") or "" for call in delta.get("tool_calls") or [])
            piece = choice.get("text") or delta.get("content") or called
            self.texts[index] = self.texts.get(index, "") + piece
            if choice["finish_reason"]:
                assert index not in self.reasons
                self.reasons[index] = choice["finish_reason"]
            self.scores += (choice.get("logprobs") or {}).get("token_logprobs") or []

    def same_as(self, other: Told) -> bool:
        counts = [(one.usage["prompt_tokens"], one.usage["completion_tokens"]) for one in (self, other)]
        return (self.texts, self.reasons, counts[0]) == (
            other.texts,
            other.reasons,
            counts[1],
        ) and self.scores == pytest.approx(other.scores, abs=1e-3)


class Caller:
    """Streams calls and keeps what it was told."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url = url
        self.client = client
        self.told: dict[str, Told] = {}

    async def stream(self, name: str, call: tuple[str, Json]) -> Told:
        path, body = call
        told = self.told[name] = Told()
        body = {"model": DEFAULT_MODEL, "stream": True, "stream_options": {"include_usage": True}} | body
        async with self.client.stream("POST", self.url + path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    told.take(json.loads(line.removeprefix("data: ")))
        return told

    async def all(self, wanted: dict[str, tuple[str, Json]]) -> dict[str, Told]:
        told = await asyncio.gather(*(self.stream(name, call) for name, call in wanted.items()))
        return dict(zip(wanted, told, strict=True))

    async def have_begun(self, num_calls: int, num_events: int = 6) -> None:
        while len(self.told) < num_calls or min(one.num_events for one in self.told.values()) < num_events:
            await asyncio.sleep(0.02)


def replica_pids() -> list[int]:
    """The engine replicas' processes; all are children of this one, by way of Ray's own."""
    return [
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:sgray:LLMReplica" in " ".join(process.cmdline())
    ]


@pytest.fixture(scope="module")
def service(deploy: Deploy) -> Any:
    return deploy({"min_replicas": 2, "max_replicas": 2})


@pytest.fixture(scope="module")
def undisturbed(service: Any) -> dict[str, Told]:
    """What the calls are told when nothing happens."""

    async def run() -> dict[str, Told]:
        async with httpx.AsyncClient(timeout=120) as client:
            return await Caller(service.url, client).all(CALLS)

    return asyncio.run(run())


def disturbed(service: Any, disturb: Callable[[], None]) -> dict[str, Told]:
    """What they are told when something happens in their middle, after which a new call is answered as well."""

    async def run() -> dict[str, Told]:
        async with httpx.AsyncClient(timeout=120) as client:
            caller = Caller(service.url, client)
            running = asyncio.ensure_future(caller.all(CALLS))
            begun = asyncio.ensure_future(caller.have_begun(len(CALLS)))
            await asyncio.wait({running, begun}, return_when="FIRST_COMPLETED")
            assert not running.done(), "they were too short to be disturbed"
            await asyncio.to_thread(disturb)
            new = {"model": DEFAULT_MODEL, "prompt": "And a new call:", "max_tokens": 4}
            answer = await client.post(f"{service.url}/v1/completions", json=new)
            assert answer.status_code == 200, answer.text
            return await running

    return asyncio.run(run())


def assert_same(told: dict[str, Told], undisturbed: dict[str, Told]) -> None:
    others = {name: (told[name], one) for name, one in undisturbed.items() if not told[name].same_as(one)}
    assert not others


def busy_pids(service: Any) -> list[int]:
    """Both replicas' processes; both have something to do."""
    running = service.figures()["sgray:num_running_reqs"]
    assert min(running.values()) > 0, running
    pids = replica_pids()
    assert len(pids) == 2
    return pids


def test_pub_126_answers_go_on_elsewhere_when_their_replica_is_killed(
    service: Any, undisturbed: dict[str, Told]
) -> None:
    told = disturbed(service, lambda: os.kill(busy_pids(service)[0], signal.SIGKILL))
    assert_same(told, undisturbed)
    service.until(lambda: len(replica_pids()) == 2, "the dead replica is replaced", 90)
    service.until(lambda: len(service.figures()["sgray:num_running_reqs"]) == 2, "the new replica is linked", 30)
    service.assert_idle()


def test_answers_go_on_elsewhere_when_their_replica_falls_silent_and_it_may_come_back(
    service: Any, undisturbed: dict[str, Told]
) -> None:
    stopped: list[int] = []
    is_over = threading.Event()

    def pause() -> None:
        os.kill(stopped[0], signal.SIGSTOP)
        is_over.wait(SILENCE_S)
        os.kill(stopped[0], signal.SIGCONT)

    pausing = threading.Thread(target=pause)

    def stop() -> None:
        stopped.append(busy_pids(service)[1])
        pausing.start()

    try:
        told = disturbed(service, stop)
    finally:
        is_over.set()
        pausing.join()
    assert_same(told, undisturbed)
    service.until(lambda: len(service.figures()["sgray:num_running_reqs"]) == 2, "it is linked again", 30)
    service.assert_idle()
    assert stopped[0] in replica_pids(), "a pause is no reason to replace it"


def test_pub_128_streams_end_and_calls_are_answered_while_another_configuration_takes_over(
    service: Any, undisturbed: dict[str, Told], deploy: Deploy
) -> None:
    statuses: list[int] = []
    is_over = threading.Event()

    def keep_calling() -> None:
        body = {"model": DEFAULT_MODEL, "prompt": "And a new call:", "max_tokens": 2}
        with httpx.Client(timeout=60) as client:
            while not is_over.wait(0.2):
                statuses.append(client.post(f"{service.url}/v1/completions", json=body).status_code)

    caller = threading.Thread(target=keep_calling)

    def redeploy() -> None:
        caller.start()
        one = {"min_replicas": 1, "max_replicas": 1}
        deploy(one, {"max_running_requests": 1, "max_queued_requests": 1}, in_place=True)

    try:
        told = disturbed(service, redeploy)
    finally:
        is_over.set()
        caller.join()
    assert_same(told, undisturbed)
    assert len(statuses) > 1 and set(statuses) <= {200}, statuses


@pytest.fixture
def narrow(deploy: Deploy) -> Any:
    """One replica that runs one request and lets one wait."""
    return deploy({"min_replicas": 1, "max_replicas": 1}, {"max_running_requests": 1, "max_queued_requests": 1})


@pytest.mark.parametrize("stream", [False, True])
def test_pub_129_what_is_too_much_is_refused_before_anything_is_answered(narrow: Any, stream: bool) -> None:
    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = narrow.body("Tell me a story.", max_tokens=16, ignore_eos=True, stream=stream)
            return await asyncio.gather(
                *(client.post(f"{narrow.url}/v1/chat/completions", json=body) for _ in range(5))
            )

    answers = asyncio.run(run())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        else:
            assert '"error"' not in answer.text
            assert '"finish_reason":"length"' in answer.text.replace(" ", "")
    whole = narrow.openai(max_retries=8).chat.completions.create(**narrow.body("Again.", max_tokens=2))
    assert whole.choices[0].finish_reason == "length"
    narrow.assert_idle()


def test_pub_130_clients_that_leave_at_any_time_leave_nothing_behind(narrow: Any) -> None:
    address = ("127.0.0.1", httpx.URL(narrow.url).port)
    body = json.dumps(narrow.body("Tell me a long story.", max_tokens=1000, ignore_eos=True, stream=True)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()

    async def leave(sent: bytes, *, reads: bool) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        await writer.drain()
        if reads:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()

    async def run() -> None:
        for _ in range(10):
            half = head + body[: len(body) // 2]
            await asyncio.gather(*(leave(half, reads=False) for _ in range(10)))  # in the middle of its own body
        for _ in range(50):
            await asyncio.gather(*(leave(head + body, reads=False) for _ in range(2)))  # at work or in the queue
        for _ in range(50):
            await leave_in_midstream(narrow, leave, head + body)

    asyncio.run(run())
    narrow.assert_idle()
    answer = httpx.post(f"{narrow.url}/v1/chat/completions", json=narrow.body("Hi", max_tokens=2), timeout=10)
    assert answer.status_code == 200


async def leave_in_midstream(service: Any, leave: Callable[..., Any], call: bytes) -> None:
    """Leave once the answer has begun; whoever was there before may still be on its way out of the queue."""
    for _ in range(50):
        try:
            await leave(call, reads=True)
        except asyncio.IncompleteReadError:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError("those who left still keep others out")
