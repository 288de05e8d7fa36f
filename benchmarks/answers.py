"""Calls whose undisturbed answer is known, and how an answer is read so that two of them can be compared.

An answer is all that a caller learns of it: text, tokens and end of each choice. Knows nothing of who disturbs what.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

Json = dict[str, Any]
DECLARED = (429, 503)  # what a caller may be told in the place of an answer


@dataclass(frozen=True)
class Call:
    """A call that is sent again and again."""

    name: str
    path: str
    body: Json


class Refused(Exception):
    """The call was answered by a status that is not 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def whole(client: httpx.AsyncClient, call: Call) -> str:
    """The answer in one piece. Raises Refused."""
    response = await client.post(call.path, json=call.body)
    if response.status_code != 200:
        raise Refused(response.status_code, response.text)
    choices = response.json()["choices"]
    told = {choice["index"]: [_text(choice), _tokens(choice), choice["finish_reason"]] for choice in choices}
    return json.dumps(told, sort_keys=True)


async def streamed(client: httpx.AsyncClient, call: Call, heard: Callable[[int], None] = lambda number: None) -> str:
    """The answer as a stream, the same as it is whole. Raises Refused, and RuntimeError where the stream is broken.

    `heard` is called with the number of events so far; what it raises ends the call.
    """
    told: dict[int, list[Any]] = {}
    num_events, is_done = 0, False
    async with client.stream("POST", call.path, json={"stream": True} | call.body) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, (await response.aread()).decode())
        async for line in response.aiter_lines():
            is_done = is_done or line == "data: [DONE]"
            if line.startswith("data: {"):
                _take(told, json.loads(line.removeprefix("data: ")))
                num_events += 1
                heard(num_events)
    if not is_done:
        raise RuntimeError("the stream ended without [DONE]")
    return json.dumps(told, sort_keys=True)


def _take(told: dict[int, list[Any]], event: Json) -> None:
    if "error" in event:
        raise RuntimeError(json.dumps(event["error"]))
    for choice in event["choices"]:
        text, tokens, end = told.get(choice["index"], ["", "", None])
        if end is not None:
            raise RuntimeError("a choice went on after its end")
        told[choice["index"]] = [text + _text(choice), tokens + _tokens(choice), choice["finish_reason"]]


def _text(choice: Json) -> str:
    text: str = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
    return text


def _tokens(choice: Json) -> str:
    """The tokens that come with logprobs."""
    return "|".join(["", *(choice.get("logprobs") or {}).get("tokens", [])])
