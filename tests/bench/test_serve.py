"""The load generator against a small server of OpenAI's shape, run in this process."""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgray.bench.serve import _has_text, add_flags, first_model, make_prompts, render, run, summarise
from sgray.errors import ConfigError

TOKEN_S = 0.02


class OpenAIServer(ThreadingHTTPServer):
    """Streams `max_tokens` events, 20 ms apart; every prompt counts half cached. `fault` spoils every third answer."""

    daemon_threads = True

    def __init__(self, fault: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.arrivals: list[float] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is part of the test."""


class Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self._start(200, "application/json")
        self.wfile.write(json.dumps({"data": [{"id": "the-model"}]}).encode())

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers["authorization"])
            server.arrivals.append(time.perf_counter())
            number = len(server.bodies)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            self._answer(body, server.fault if number % 3 == 0 else None)
        finally:
            with server.lock:
                server.in_flight -= 1

    def _answer(self, body: dict[str, Any], fault: str | None) -> None:
        self._start(503 if fault == "status" else 200, "text/event-stream")
        if fault == "status":
            return
        chat = self.path == "/v1/chat/completions"
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"]):
            time.sleep(TOKEN_S)
            self._event({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}], "usage": None})
        if fault == "cut":
            return
        if fault == "error":
            self._event({"error": {"message": "broken"}})
        length = len(str(body.get("messages", [{}])[0].get("content", "")).split()) if chat else len(body["prompt"])
        usage = {"prompt_tokens": length, "completion_tokens": body["max_tokens"]}
        details = {"prompt_tokens_details": {"cached_tokens": length // 2}}
        self._event({"choices": [], "usage": {**usage, **details}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _start(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[OpenAIServer]:
    with OpenAIServer(getattr(request, "param", None)) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def arguments(server: OpenAIServer, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(["--url", server.url, *argv])


def measure(server: OpenAIServer, tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    status = run(arguments(server, "--json", str(tmp_path / "out.json"), *argv))
    return status, json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_a_closed_loop_measures_what_the_server_did(
    server: OpenAIServer, tmp_path: Path, route: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--num-requests", "12", "--concurrency", "4", "--input-len", "30", "--output-len", "5"]
    status, figures = measure(server, tmp_path, *argv, *(["--chat"] if route == "chat" else []))
    assert (status, figures["requests"], figures["errors"]) == (0, 12, {})
    assert (figures["input_tokens"], figures["output_tokens"]) == (360, 60)
    assert server.most_in_flight == 4
    assert figures["cached_share_percent"] == {"mean": 50.0, "p50": 50.0, "p90": 50.0, "p99": 50.0}
    for name in ("ttft_ms", "itl_ms", "tpot_ms"):
        assert figures[name]["p50"] == pytest.approx(1000 * TOKEN_S, rel=0.6)
    assert figures["output_tokens_per_s"] == pytest.approx(60 / figures["seconds"])
    assert server.bodies[0]["model"] == "the-model"
    assert "12 requests" in capsys.readouterr().out


def test_a_server_with_keys_is_sent_one_with_every_call(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("sk-file\n")
    monkeypatch.setenv("SGRAY_API_KEY", "sk-variable")
    small = ["--num-requests", "1", "--input-len", "3", "--output-len", "1"]
    for argv in (["--key-file", str(tmp_path / "key")], ["--api-key", "sk-given"], []):
        assert measure(server, tmp_path, *small, *argv)[0] == 0
    assert server.keys == [f"Bearer sk-{name}" for name in ("file", "given", "variable") for _ in range(2)]
    monkeypatch.delenv("SGRAY_API_KEY")
    measure(server, tmp_path, *small)
    assert server.keys[6:] == [None, None]


def test_requests_ask_for_a_fixed_greedy_answer_with_usage(server: OpenAIServer, tmp_path: Path) -> None:
    measure(server, tmp_path, "--num-requests", "1", "--output-len", "2")
    body = server.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (2, 0, True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_an_open_loop_sends_without_waiting_for_answers(server: OpenAIServer, tmp_path: Path) -> None:
    argv = ["--num-requests", "30", "--rate", "100", "--output-len", "20", "--input-len", "4"]
    status, figures = measure(server, tmp_path, *argv)
    assert (status, figures["errors"]) == (0, {})
    assert server.most_in_flight > 16  # an answer takes 0.4 s, the 30 requests are sent in about 0.3 s
    gaps = [right - left for left, right in zip(server.arrivals, server.arrivals[1:], strict=False)]
    assert max(gaps) > 2 * sum(gaps) / len(gaps)  # Poisson, not evenly spaced


@pytest.mark.parametrize(
    ("server", "told"),
    [("status", "HTTP 503"), ("cut", "stream cut"), ("error", "error event")],
    indirect=["server"],
)
def test_failures_are_counted_by_kind_and_make_the_status_one(server: OpenAIServer, tmp_path: Path, told: str) -> None:
    status, figures = measure(server, tmp_path, "--num-requests", "9", "--output-len", "2", "--input-len", "4")
    assert (status, figures["errors"], figures["output_tokens"]) == (1, {told: 3}, 12)
    assert f"3 x {told}" in render(figures)


def test_an_event_counts_from_its_first_text_or_tokens() -> None:
    def brings(choice: dict[str, Any]) -> bool:
        return _has_text(f"data: {json.dumps({'choices': [choice]})}\n".encode())

    full = [{"text": "x"}, {"delta": {"content": "x"}}, {"text": "", "token_ids": [0]}]
    empty = [
        {"text": ""},
        {"delta": {"role": "assistant", "content": ""}},
        {"text": "", "token_ids": []},
        {"delta": {}},
    ]
    assert [brings(choice) for choice in full + empty] == [True] * 3 + [False] * 4


def test_groups_share_their_prefix(server: OpenAIServer) -> None:
    asked = arguments(server, "--groups", "3", "--group-size", "5", "--prefix-len", "40", "--input-len", "6")
    prompts = make_prompts(asked, random.Random(0))
    assert len(prompts) == 15
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {46}


def test_no_server_is_an_explained_error() -> None:
    with pytest.raises(ConfigError, match=r"no OpenAI-style server answers at http://127\.0\.0\.1:9"):
        first_model("http://127.0.0.1:9")


def test_no_outcome_at_all_can_still_be_shown() -> None:
    assert "0 requests" in render(summarise([], 1.0))
