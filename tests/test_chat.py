from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sgray.chat import Message, ServerAnswerError, converse, remote_speaker


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the user will type; then comes the end of the input."""
    lines: list[str] = []

    def read(_prompt: str = "") -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    return lines


class Echo:
    """Answers with what it heard last, in two pieces, and remembers every conversation it was shown."""

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []

    def __call__(self, messages: list[Message]) -> Iterator[str]:
        self.heard.append(list(messages))
        yield "you said "
        yield messages[-1]["content"]


def test_a_conversation_grows_by_question_and_answer(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    typed += ["one", "", "two"]
    speaker = Echo()
    assert converse(speaker, [{"role": "system", "content": "s"}]) == 0
    assert capsys.readouterr().out == "you said one\nyou said two\n"
    assert [message["content"] for message in speaker.heard[1]] == ["s", "one", "you said one", "two"]


def test_reset_keeps_only_the_start(typed: list[str]) -> None:
    typed += ["one", "/reset", "two", "/quit", "never"]
    speaker = Echo()
    assert converse(speaker, [{"role": "system", "content": "s"}]) == 0
    assert [message["content"] for message in speaker.heard[1]] == ["s", "two"]
    assert typed == ["never"]


def test_an_interrupted_answer_is_kept_as_far_as_it_came(typed: list[str]) -> None:
    closed: list[bool] = []
    heard: list[list[Message]] = []

    def speaker(messages: list[Message]) -> Iterator[str]:
        heard.append(list(messages))
        try:
            yield "half"
            if len(heard) == 1:
                raise KeyboardInterrupt
        finally:
            closed.append(True)

    typed += ["one", "two"]
    assert converse(speaker, []) == 0
    assert heard[1][1] == {"role": "assistant", "content": "half"}
    assert closed == [True, True]


class Api(BaseHTTPRequestHandler):
    bodies: list[dict[str, Any]]
    events: list[bytes]
    status = 200
    keys: list[str | None]

    def do_GET(self) -> None:
        self.keys.append(self.headers["authorization"])
        self._send(200, json.dumps({"data": [{"id": "first"}]}).encode())

    def do_POST(self) -> None:
        self.keys.append(self.headers["authorization"])
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._send(self.status, b"".join(self.events))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def api() -> Iterator[tuple[str, type[Api]]]:
    handler = type("Handler", (Api,), {"bodies": [], "events": [], "keys": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def ask(url: str, model: str | None = None, seed: int | None = None, key: str | None = None) -> list[str]:
    speaker = remote_speaker(url, model=model, max_tokens=5, temperature=0.5, top_p=0.9, seed=seed, key=key)
    return list(speaker([{"role": "user", "content": "hi"}]))


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def test_a_server_is_asked_with_the_given_sampling_and_its_text_is_read(api: tuple[str, type[Api]]) -> None:
    url, handler = api
    texts = ["", "Gr", "üß", None]
    handler.events = [event({"choices": [{"delta": {"content": text}}]}) for text in texts]
    handler.events += [event({"choices": [], "usage": {}}), b": a comment\n\n", b"data: [DONE]\n\n"]
    assert ask(url, seed=3) == ["Gr", "üß"]
    body = handler.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("first", 5, 0.5, 0.9)
    assert (body["seed"], body["stream"]) == (3, True)


def test_a_named_model_is_asked_for(api: tuple[str, type[Api]]) -> None:
    url, handler = api
    assert ask(url + "/", model="second") == []
    assert handler.bodies[0]["model"] == "second"
    assert "seed" not in handler.bodies[0]


def test_a_server_with_keys_is_sent_one_with_every_call(api: tuple[str, type[Api]]) -> None:
    url, handler = api
    ask(url, key="sk-1")
    ask(url)
    assert handler.keys == ["Bearer sk-1", "Bearer sk-1", None, None]


def test_an_error_answer_is_told_with_the_servers_words(api: tuple[str, type[Api]]) -> None:
    url, handler = api
    handler.status, handler.events = 400, [b'{"error": {"message": "too long"}}']
    with pytest.raises(ServerAnswerError, match="answered 400: too long"):
        ask(url)


def test_an_error_in_the_stream_is_told(api: tuple[str, type[Api]]) -> None:
    url, handler = api
    handler.events = [event({"error": {"message": "replica lost"}})]
    with pytest.raises(ServerAnswerError, match="replica lost"):
        ask(url)


def test_an_unreachable_server_is_told() -> None:
    with pytest.raises(ServerAnswerError, match=r"cannot reach http://127\.0\.0\.1:9/"):
        ask("http://127.0.0.1:9", model="m")


def test_a_conversation_survives_an_error(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def speaker(messages: list[Message]) -> Iterator[str]:
        if len(messages) == 1:
            raise ServerAnswerError("busy")
        yield "ok"

    typed += ["one", "two"]
    assert converse(speaker, []) == 0
    assert capsys.readouterr().out == "[busy]\nok\n"
