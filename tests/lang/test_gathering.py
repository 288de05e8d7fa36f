"""Calls that are made together travel together, and nobody notices but the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

import sgray as sgl
from sgray.errors import InvalidRequestError
from sgray.lang import gathering
from sgray.lang.endpoint import HttpTransport
from sgray.lang.gathering import GatheringTransport
from sgray.lang.http import HttpClient


class Server:
    """Answers each prompt with itself; `bad` prompts are refused, alone and with all that came with them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.aborted: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    async def call(self, name: str, body: Mapping[str, Any]) -> Any:
        self.calls.append((name, body))
        if name == "tokenize":
            given = body["prompt"]
            return {"tokens": [len(one) for one in given] if isinstance(given, list) else len(given)}
        given = body["text"]
        answers = [answer async for answer in self._answers(given if isinstance(given, list) else [given])]
        return answers if isinstance(given, list) else answers[0]

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.calls.append(("stream", body))
        async for answer in self._answers(body["text"]):
            yield {**answer, "meta_info": {"finish_reason": None}}
            yield answer

    async def _answers(self, prompts: list[str]) -> AsyncIterator[dict[str, Any]]:
        if "bad" in prompts:
            raise InvalidRequestError("bad it is", param="text")
        for index, prompt in enumerate(prompts):
            if prompt in self.gates:
                await self.gates[prompt].wait()
            yield {"text": prompt.upper(), "index": index, "meta_info": {"finish_reason": {"type": "stop"}}}

    async def abort(self, name: str) -> None:
        self.aborted.append(name)


def run(test: Callable[[Server, GatheringTransport], Awaitable[None]]) -> None:
    server = Server()
    asyncio.run(test(server, GatheringTransport(server)))


def ask(transport: GatheringTransport, text: Any, **body: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(transport.call("generate", {"text": text, **body}))


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def texts(answer: Any) -> Any:
    return [one["text"] for one in answer] if isinstance(answer, list) else answer["text"]


def test_what_comes_alone_is_sent_as_it_is_and_what_comes_behind_it_as_one_list() -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        asked = [ask(transport, "a"), ask(transport, ["b", "c"]), ask(transport, "d", sampling_params={"top_k": 3})]
        assert [texts(await one) for one in asked] == ["A", ["B", "C"], "D"]
        assert [name for name, _ in server.calls] == ["generate", "stream"]
        body = server.calls[1][1]
        assert body["text"] == ["b", "c", "d"] and body["stream"] is True
        assert [one.get("top_k") for one in body["sampling_params"]] == [None, None, 3]
        assert len(set(body["rid"])) == 3
        await asyncio.sleep(2 * gathering.WINDOW_S)
        assert texts(await ask(transport, "e")) == "E" and server.calls[-1] == ("generate", {"text": "e"})

    run(test)


def test_each_answer_comes_as_soon_as_it_is_there() -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        server.gates["slow"] = asyncio.Event()
        _, quick, slow = ask(transport, "first"), ask(transport, "quick"), ask(transport, "slow")
        assert texts(await quick) == "QUICK" and not slow.done()
        server.gates["slow"].set()
        assert texts(await slow) == "SLOW"

    run(test)


def test_who_fails_in_company_fails_alone_and_the_others_do_not() -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        asked = [ask(transport, text) for text in ("a", "b", "bad", "c")]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [texts(found[index]) for index in (0, 1, 3)] == ["A", "B", "C"]
        assert isinstance(found[2], InvalidRequestError)

    run(test)


def test_who_leaves_is_stopped_by_name_and_the_last_one_ends_the_call() -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        server.gates |= {"b": asyncio.Event(), "c": asyncio.Event()}
        first, second, third = (ask(transport, text) for text in "abc")
        await first
        await until(lambda: len(server.calls) == 2)
        second.cancel()
        await until(lambda: server.aborted)
        ((_, body),) = [call for call in server.calls if call[0] == "stream"]
        assert server.aborted == [body["rid"][0].rpartition("_")[0]]
        third.cancel()
        await until(lambda: not transport._generations._tasks)
        assert len(server.aborted) == 1

    run(test)


def test_who_leaves_before_the_departure_is_never_sent() -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        first, second, third = (ask(transport, text) for text in "abc")
        await asyncio.sleep(0)
        second.cancel()
        assert texts(await third) == "C" and texts(await first) == "A"
        assert [body["text"] for _, body in server.calls] == ["a", "c"] and not server.aborted

    run(test)


def test_what_cannot_be_said_in_one_list_is_said_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        monkeypatch.setattr(gathering, "MAX_PROMPTS", 2)
        kinds = [{}, {}, {}, {"priority": 5}, {"priority": 5}, {"rid": "own"}, {"sampling_params": {"n": 2}}]
        asked = [ask(transport, str(number), **kind) for number, kind in enumerate([{}, *kinds])]
        assert [texts(await one) for one in asked] == [str(number) for number in range(8)]
        sent = [body["text"] for name, body in server.calls]
        assert sorted(map(str, sent)) == sorted(map(str, ["0", ["1", "2"], "3", ["4", "5"], "6", "7"]))

    run(test)


def test_tokenisations_travel_together_too() -> None:
    async def test(server: Server, transport: GatheringTransport) -> None:
        given = ["a", ["bb", "ccc"], "dddd"]
        asked = [asyncio.ensure_future(transport.call("tokenize", {"prompt": one})) for one in given]
        assert [(await one)["tokens"] for one in asked] == [1, [2, 3], 4]
        assert [body["prompt"] for _, body in server.calls] == ["a", ["bb", "ccc", "dddd"]]

    run(test)


def test_branches_over_http_are_few_calls_with_the_same_results(engine: sgl.Engine, url: str) -> None:
    @sgl.function
    def branched(s):
        s += "Here is a list of the colours of the rainbow: red,"
        forks = s.fork(8)
        for number, fork in enumerate(forks):
            fork += " orange," * number + sgl.gen("a", max_tokens=3 + number % 3)
            fork += sgl.select("b", [" blue", " green", " as we all know"])
        forks.join()

    calls = []

    class Counting(HttpTransport):
        async def call(self, name, body):
            calls.append(name)
            return await super().call(name, body)

        def stream(self, body):
            calls.append("stream")
            return super().stream(body)

    endpoint = sgl.RuntimeEndpoint(url)
    client = HttpClient(url, endpoint.loop)
    endpoint.backend.transport = GatheringTransport(Counting(client))
    try:
        here, there = (branched.run(temperature=0, backend=backend) for backend in (engine, endpoint))
    finally:
        endpoint.close()
    assert (here["a"], here["b"]) == (there["a"], there["b"])
    assert len(calls) < 24, "8 branches make 24 calls one by one"
