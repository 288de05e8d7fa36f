"""A span for each call of the model over HTTP: what was asked, how it ended and how long that took, never its texts.

Attributes have the names of OpenTelemetry's conventions for HTTP and for generative models; latencies, of which those
say little, have vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgray.serve.openai.allowance import GENERATION
from sgray.serve.openai.generation import Generation
from sgray.serve.openai.http import CLIENT_CLOSED, REQUEST_ID, TRACE_HEADERS
from sgray.serve.tracing import CallTraces

if TYPE_CHECKING:
    from sgray.serve.spans import Value

_COMPLETIONS = ("/v1/completions", "/generate", "/v1/score")


class Traced:
    """Traces the calls of the routes that `paths` names."""

    def __init__(self, app: ASGIApp, traces: CallTraces, model_name: str, paths: Collection[str]) -> None:
        self._app = app
        self._traces = traces
        self._model_name = model_name
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path not in self._paths or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_CLOSED
        headers = scope[TRACE_HEADERS] = self._traces.begin(f"POST {path}", scope["headers"])

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            generation: Generation | None = scope.get(GENERATION)
            about = self._of_http(scope, path, status) | _of_call(generation, began)
            self._traces.end(headers, about, _error(generation, status))

    def _of_http(self, scope: Scope, path: str, status: int) -> dict[str, Value]:
        return {
            "http.request.method": "POST",
            "http.route": path,
            "http.response.status_code": status,
            "gen_ai.operation.name": "text_completion" if path in _COMPLETIONS else "chat",
            "gen_ai.provider.name": "sgray",
            "gen_ai.request.model": self._model_name,
            "sgray.request_id": scope[REQUEST_ID],
        }


def _of_call(generation: Generation | None, began: float) -> dict[str, Value]:
    """What only calls that passed the checks have. `gen_ai.request` attributes are those of the first prompt."""
    if generation is None:
        return {}
    call, usage, sampling = generation.call, generation.usage(), generation.call.sampling[0]
    found: dict[str, Value] = {
        "gen_ai.response.id": call.id,
        "gen_ai.request.choice.count": call.n,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.latency.e2e": time.monotonic() - began,
        "sgray.outcome": generation.outcome,
    }
    if reasons := [choice.finish_reason for choice in generation.choices if choice.finish_reason is not None]:
        found["gen_ai.response.finish_reasons"] = reasons
    if generation.first_token is not None:
        found["gen_ai.latency.time_to_first_token"] = generation.first_token - began
    return found


def _error(generation: Generation | None, status: int) -> str | None:
    """What the server is to blame for: a status, or a stream that broke off after a good one."""
    if status >= 500:
        return str(status)
    return "stream_failed" if status < 400 and generation is not None and generation.outcome == "failed" else None
