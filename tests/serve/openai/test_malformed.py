"""Ten thousand wrong requests from a seed, to the whole application over a real engine."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from loop_backend import LoopBackend, idle
from malformed import JSON_TYPE, Got, Malformed, Sent, send
from starlette.applications import Starlette

from sgray.config import Config
from sgray.serve.anthropic.answer_shapes import AnthropicError
from sgray.serve.anthropic.errors import is_anthropic
from sgray.serve.openai.answer_shapes import ErrorAnswer
from sgray.serve.openai.app import ROUTES, create_app
from sgray.serve.openai.openapi import document

pytestmark = pytest.mark.anyio
MODEL = Config().model_name
COUNT = 10_000
AT_ONCE = 32
PATIENCE_S = 120
KEY = (b"x-api-key", b"caller")
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "?"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
FLAT_TOOL = {**TOOL["function"], "type": "function"}
CUSTOM_TOOL = {"name": "f", "input_schema": {"type": "object"}}
BODIES: dict[str, Any] = {
    "/v1/responses": {"model": MODEL, "input": MESSAGES, "max_output_tokens": 2, "tools": [FLAT_TOOL], "stream": True},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "tools": [CUSTOM_TOOL]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES, "system": "be"},
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "tools": [TOOL], "stop": ["x"]},
    "/v1/completions": {"model": MODEL, "prompt": ["Hello", "a b"], "max_tokens": 2, "stream": True, "logprobs": 1},
    "/generate": {"text": "Hello", "sampling_params": {"max_new_tokens": 2, "stop": "x"}, "return_logprob": True},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [[5, 6], [7]]},
    "/v1/score": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
    "/abort_request": {"rid": "nobody"},
    "/end_programs": {"program_ids": ["nobody", "other"]},
}


@pytest.fixture
def make_closed(tokenizer, tmp_path) -> Callable[[LoopBackend], Starlette]:
    """The application with everything switched on, and a key, so that no caller is the operator."""
    (tmp_path / "keys").write_text("caller\n")
    api = {"api_keys_file": str(tmp_path / "keys"), "tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    return lambda backend: create_app(Config.parse({"api": api}), tokenizer, backend)


def fields_of(described: dict[str, Any], path: str) -> list[str]:
    reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return list(described["components"]["schemas"][reference.rpartition("/")[2]]["properties"])


def faults(sent: Sent, got: Got) -> list[str]:
    """What is wrong with an answer to a wrong request."""
    if sent.is_cut:
        return [] if got.status == 499 else [f"{got.status} to a client that left"]
    if got.status >= 500:
        return [f"{got.status} {got.body[:300]!r}"]
    if got.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        return [f"a stream with {got.body[-300:]!r}"] if re.search(rb'"(server|api)_error"', got.body) else []
    if got.status < 400:
        return []
    body = json.loads(got.body)
    shape = AnthropicError if is_anthropic(sent.path) else ErrorAnswer
    is_good = (
        got.headers[b"content-type"] == b"application/json"
        and shape.model_validate(body, strict=True)
        and 0 < len(body["error"]["message"]) < 2000
    )
    return [] if is_good else [f"{got.status} in another shape: {got.body[:300]!r}"]


async def seconds(app: Any, **fields: Any) -> float:
    """How long a good request takes."""
    raw = json.dumps({"model": MODEL, "prompt": "Hello world", "max_tokens": 2, "temperature": 0, **fields}).encode()
    begin = time.perf_counter()
    got = await send(app, Sent(path="/v1/completions", headers=[JSON_TYPE, KEY], parts=[raw]))
    assert got.status == 200, got.body
    return time.perf_counter() - begin


async def test_ten_thousand_malformed_requests_leave_no_trace(make_closed, start_tiny):
    described = document(ROUTES)
    others = [entry.path for entry in ROUTES if entry.path not in BODIES]
    drawn = Malformed(0, BODIES, {path: fields_of(described, path) for path in BODIES}, others).draw(COUNT)
    tiny_backend = start_tiny()
    closed_app = make_closed(tiny_backend)
    await seconds(closed_app, regex="ok")  # what compiles grammars starts with the first of them
    found: list[str] = []
    statuses: Counter[tuple[str, int]] = Counter()

    async def worker() -> None:
        for sent in drawn:
            sent.headers.append(KEY)
            try:
                got = await asyncio.wait_for(send(closed_app, sent), PATIENCE_S)
                statuses[sent.kind, got.status] += 1
                wrong = faults(sent, got)
            except Exception as error:
                wrong = [repr(error)]
            found.extend(f"{fault} <- {sent}" for fault in wrong)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    assert found == []
    assert sum(statuses.values()) == COUNT
    refused = sum(count for (_, status), count in statuses.items() if status >= 400)
    assert refused > COUNT // 2
    load = await idle(tiny_backend)
    tiny_backend.engine.check()
    assert load.free_pages + load.cached_pages == load.total_pages
    fresh_app = make_closed(start_tiny())
    ratios = [await seconds(closed_app) / await seconds(fresh_app) for _ in range(41)]
    assert statistics.median(ratios) < 1.5, "as fast as one that has served nothing, in turn with it"
