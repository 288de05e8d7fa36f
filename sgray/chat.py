"""A chat in the terminal: reads lines, prints answers as they come. Who answers is a function."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from sgray.errors import SgrayError

Message = dict[str, str]
Speaker = Callable[[list[Message]], Iterator[str]]

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends, Ctrl-C stops an answer."


class ServerAnswerError(SgrayError):
    """The server could not be asked, or answered with an error."""


def converse(speaker: Speaker, start: list[Message]) -> int:
    """Talks until the user ends it; returns the exit status."""
    interactive = sys.stdin.isatty()
    if interactive:
        print(HELP)
    messages = list(start)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/reset":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _print_answer(speaker, messages)})


def remote_speaker(
    url: str,
    *,
    model: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    key: str | None = None,
) -> Speaker:
    """A server's /v1/chat/completions as a speaker; `model` None takes the first that the server lists."""
    base = url.rstrip("/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    chosen = model or str(_ask(f"{base}/v1/models", headers)["data"][0]["id"])
    fixed = {"model": chosen, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stream": True}
    if seed is not None:
        fixed["seed"] = seed

    def speak(messages: list[Message]) -> Iterator[str]:
        body = json.dumps(fixed | {"messages": messages}).encode()
        request = urllib.request.Request(  # noqa: S310 (the user's own URL)
            f"{base}/v1/chat/completions", body, {"content-type": "application/json"} | headers
        )
        with _open(request) as answer:
            for line in answer:
                yield from _text_of(line)

    return speak


def _print_answer(speaker: Speaker, messages: list[Message]) -> str:
    pieces: list[str] = []
    answer = speaker(messages)
    try:
        for piece in answer:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        close = getattr(answer, "close", None)
        if close is not None:
            close()
    except SgrayError as error:
        print(f"[{error.message}]", end="")
    print()
    return "".join(pieces)


def _text_of(line: bytes) -> Iterator[str]:
    """The text in one line of a server-sent event stream."""
    if not line.startswith(b"data: {"):
        return
    event: dict[str, Any] = json.loads(line[6:])
    if "error" in event:
        raise ServerAnswerError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text


def _ask(url: str, headers: dict[str, str]) -> Any:
    with _open(urllib.request.Request(url, headers=headers)) as answer:  # noqa: S310
        return json.load(answer)


def _open(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request)  # noqa: S310
    except urllib.error.HTTPError as error:
        raise ServerAnswerError(f"{request.full_url} answered {error.code}: {_message(error.read())}") from None
    except urllib.error.URLError as error:
        raise ServerAnswerError(f"cannot reach {request.full_url}: {error.reason}") from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
