"""Whether this process traces calls, and what the ingress tells of where their requests go.

Knows the configuration and the extra that traces need, not OpenTelemetry, which is imported where a collector is named.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from sgray.config import Config
from sgray.errors import ConfigError, SgrayError
from sgray.protocol import Request

if TYPE_CHECKING:
    from sgray.serve.spans import CallSpan, Headers, Spans, Value


def check_tracing(config: Config) -> None:
    """Raises ConfigError where traces are wanted and the packages for them are not there."""
    if config.serve.otlp_traces_endpoint is None:
        return
    try:
        importlib.import_module("sgray.serve.spans")
    except ImportError as error:
        raise ConfigError(
            f"serve.otlp_traces_endpoint: traces need packages that are not installed here ({error}); "
            "pip install 'sgray[otel]' on every node, or leave the setting out"
        ) from None


def spans_of(config: Config, role: Literal["ingress", "replica"]) -> Spans | None:
    """Where this process leaves its spans; None if calls are not traced. Raises ConfigError as `check_tracing`."""
    endpoint = config.serve.otlp_traces_endpoint
    if endpoint is None:
        return None
    check_tracing(config)
    from sgray.serve.spans import Spans

    host, pid = socket.gethostname(), str(os.getpid())
    service = {"service.name": "sgray", "service.instance.id": f"{role}-{host}-{pid}", "sgray.role": role}
    return Spans(traces_url(endpoint), config.model_name, service)


def traces_url(endpoint: str) -> str:
    """The address that spans are sent to: the path that collectors have, where none is given."""
    parts = urlsplit(endpoint)
    return parts._replace(path="/v1/traces").geturl() if parts.path in ("", "/") else endpoint


class CallTraces:
    """The spans of an ingress's calls, while they go on. For its event loop."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._open: dict[str, CallSpan] = {}  # by traceparent

    def begin(self, name: str, headers: Headers) -> dict[str, str]:
        """A call comes; the trace context that its requests take with them, empty where it is not kept."""
        span = self._spans.begin(name, headers)
        if span.trace_headers:
            self._open[span.trace_headers["traceparent"]] = span
        return span.trace_headers

    def end(self, trace_headers: dict[str, str], attributes: dict[str, Value], error: str | None) -> None:
        """The call with this context is over."""
        if trace_headers:
            self._open.pop(trace_headers["traceparent"]).end(attributes, error)

    def placed(self, request: Request, replica: str, predicted_cached: int) -> None:
        """A request of a call goes to a replica, maybe not for the first time."""
        self._event(request, "placed", replica, {"sgray.num_predicted_cached_tokens": predicted_cached})

    def came_back(self, request: Request, replica: str, error: SgrayError) -> None:
        """A replica did not take it, or lost it."""
        self._event(request, "came_back", replica, {"error.type": error.code or error.type})

    def _event(self, request: Request, name: str, replica: str, attributes: dict[str, Value]) -> None:
        span = self._open.get(request.trace_headers.get("traceparent", ""))
        if span is not None:
            about: dict[str, Value] = {
                "gen_ai.request.id": request.id,
                "sgray.replica": replica,
                "sgray.num_continued_tokens": request.num_generated,
            }
            span.event(name, about | attributes)
